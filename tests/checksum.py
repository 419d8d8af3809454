"""The checksum model: an integer "language model" with the real `forward` signature.

It writes a function of (token, position) into its pages, and the next token is a function of everything that the
row's pages hold up to that position. Any wrong page, slot, length, eviction, preemption or feed changes the answer. Its
oracle is `expected`, which needs no pages at all.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from books import check_scheduler
from loops import in_loop
from torch import Tensor

from fengine import models
from fengine.api.engine import Engine
from fengine.api.features import FEATURES
from fengine.config import CacheConfig, CompileConfig, EngineConfig, Policy, SchedulerConfig, SpeculationConfig
from fengine.core.request import Request
from fengine.engine.build import assemble
from fengine.engine.engine_core import EngineCore
from fengine.engine.load import Loaded
from fengine.engine.parts import Parts
from fengine.models import Model
from fengine.models.kv_state import KVState, Params, Tensors
from fengine.models.layers import places
from fengine.models.spec import LayerKind, ModelSpec, RopeSpec

VOCAB = 97
PRIME = 65521  # values stay exact in float32
SPEC = ModelSpec(
    architecture="ChecksumForTest",
    vocab_size=VOCAB,
    hidden_size=1,
    mlp_size=1,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=1,
    rms_eps=1e-6,
    rope=RopeSpec(theta=10000.0),
    max_position=256,
    tie_embeddings=False,
)


def mark(token: int, position: int) -> int:
    return (token * 131 + position * 17 + 1) % PRIME


def digest(marks: list[int]) -> int:
    value = 7
    for m in marks:
        value = (value * 31 + m) % PRIME
    return value


def expected(
    prompt: list[int], count: int, stop: frozenset[int] = frozenset(), windows: tuple[int, ...] = (0,)
) -> list[int]:
    """The tokens that the model must draw after `prompt`, greedily. `windows`: of its layers; 0: it sees all."""
    ids = list(prompt)
    for _ in range(count):
        marks = [mark(t, p) for p, t in enumerate(ids)]
        ids.append(digest([m for window in windows for m in marks[-window:]]) % VOCAB)
        if ids[-1] in stop:
            break
    return ids[len(prompt) :]


def forward(params: Params, spec: ModelSpec, kv: KVState, batch: Tensors) -> tuple[KVState, Tensor]:
    """As `models.llama.forward`; hidden_TD holds each token's digest. Poisons the null page."""
    size, windows, tables = kv.page_size, [spec.kind(layer).window for layer in range(spec.num_layers)], []
    for pages_PSGK, window in zip(kv.k_PSGK, windows, strict=True):
        flat, (slot_T, table_RN) = pages_PSGK.view(-1), places({"kind": LayerKind(window)}, batch)
        marks = list(map(mark, batch["token_T"].tolist(), batch["pos_T"].tolist()))
        flat[slot_T.long()] = torch.tensor(marks, dtype=flat.dtype)
        flat[:size] = -1.0
        tables.append((flat.int().tolist(), table_RN.tolist(), window))
    hidden_TD = torch.zeros(batch["token_T"].shape[0], 1)
    starts, lengths = batch["q_start_B"].tolist(), batch["kv_len_R"].tolist()
    for row, length in enumerate(lengths):
        for j in range(starts[row], starts[row + 1]):
            end = length - (starts[row + 1] - 1 - j)
            hidden_TD[j] = digest([
                flat[table[row][p // size] * size + p % size]
                for flat, table, window in tables for p in range(max(end - window, 0) if window else 0, end)
            ])  # fmt: skip
    params["calls"].append(batch["token_T"].shape[0])
    return kv, hidden_TD


def unembed(params: Params, spec: ModelSpec, hidden_RD: Tensor) -> Tensor:
    token_R = hidden_RD[:, 0].long() % VOCAB
    return torch.zeros(token_R.shape[0], VOCAB).scatter_(1, token_R[:, None], 20.0)


def checksum_parts(*, page_size: int = 4, pool: int = 256, rows: int = 4, tokens: int = 16, policy: str = "fcfs",
                   overlap: bool = False, prefix_cache: bool = True, context: int = 256, seed: int = 0,
                   eos: frozenset[int] = frozenset(), forward: Any = forward,
                   speculation: SpeculationConfig | None = None, windows: tuple[int, ...] = (0,)
                   ) -> Parts:  # fmt: skip
    """An engine's parts over the checksum model, uncompiled, without a tokenizer. `windows`: of its layers."""
    config = EngineConfig(
        cache=CacheConfig(page_size=page_size, max_total_tokens=pool, prefix_cache=prefix_cache),
        scheduler=SchedulerConfig(rows, tokens, Policy[policy], overlap),
        compile=CompileConfig(enabled=False),
        speculation=replace(speculation or SpeculationConfig(), num_draft_tokens=8, step_tokens=tokens),
        random_seed=seed,
    )
    config = replace(config, model=replace(config.model, device="cpu", skip_tokenizer_init=True))
    params: Params = {"final_norm_D": torch.ones(1), "calls": []}
    spec = replace(SPEC, num_layers=len(windows), kinds=tuple(map(LayerKind, windows)))
    loaded = Loaded(spec, params, context, eos, Path("."))
    parts = assemble(config, loaded, FEATURES, started=time.perf_counter())
    check_after_every_step(parts.core)
    return parts


def check_after_every_step(core: EngineCore) -> None:
    """Page identity after each update; a violation kills the loop, so every waiting call fails."""
    update = core.stepper.scheduler.update

    def checked(*arguments: Any) -> list[Request]:
        finished = update(*arguments)
        check_scheduler(core.stepper.scheduler)
        return finished

    core.stepper.scheduler.update = checked  # type: ignore[method-assign]


def check_books(core: EngineCore) -> None:
    """Pages, rows and queues balance, and the core keeps nothing of requests that have ended."""
    check_scheduler(core.stepper.scheduler)
    assert core.requests.states.keys() == core.stepper.scheduler._requests.keys()
    assert core.requests.live.keys() | core.requests.unstarted.keys() <= core.requests.states.keys()


@contextmanager
def checksum_engine(forward: Any = forward, **options: Any) -> Iterator[Engine]:
    """An Engine over the checksum model; checks the books at the end."""
    before = models.MODELS
    models.MODELS = {SPEC.architecture: Model(lambda _: SPEC, forward, unembed, lambda _: [])}
    try:
        with Engine.from_parts(checksum_parts(**options)) as engine:
            yield engine
            in_loop(engine._parts.core, lambda: check_books(engine._parts.core))
    finally:
        models.MODELS = before
