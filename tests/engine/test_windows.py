"""Pages of windowed layers go back while requests run, and no bit tells: tiny models and the checksum model."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from books import check_scheduler
from checksum import VOCAB, checksum_engine, expected
from tiny_checkpoints import write

from fengine import Engine
from fengine.config import Algorithm, SpeculationConfig
from fengine.core.window_pages import WindowPages
from fengine.engine import workers
from fengine.models.kv_state import KVState
from fengine.worker.kv_pool import CACHED, fitting

FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 24},
    "gemma3": {"sliding_window": 20, "num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2
               + ["full_attention"]},
}  # fmt: skip


@contextmanager
def poisoned(path: Path, windows: bool, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[Engine]:
    """Before each step whatever lies in window pages that nobody has becomes NaN. Not `windows`: nothing goes back."""
    with monkeypatch.context() as patch:
        if not windows:
            patch.setattr(workers, "windows_of", lambda *arguments: None)
            patch.setattr("fengine.worker.kv_pool.windows_of", lambda *arguments: None)
        with Engine(model_path=str(path), skip_tokenizer_init=True, device="cpu", page_size=8, **options) as engine:
            stepper = engine._parts.core.stepper
            pool, launch = stepper.scheduler.pool, stepper.runner.launch
            assert isinstance(pool, WindowPages) == windows

            def launched(kv: KVState, step: Any) -> Any:
                if isinstance(pool, WindowPages):
                    check_scheduler(stepper.scheduler)
                    layers = range(len(kv.k_PSGK)) if pool.windows.alone else kv.window_layers
                    for layer in layers:
                        kv.k_PSGK[layer][pool._unused] = kv.v_PSGK[layer][pool._unused] = torch.nan
                return launch(kv, step)

            patch.setattr(stepper.runner, "launch", launched)
            yield engine


def answers(engine: Engine, prompts: list[list[int]], new: int = 30) -> list[Any]:
    params = [{"temperature": i % 2 * 0.8, "max_new_tokens": new, "ignore_eos": True, "sampling_seed": i}
              for i in range(len(prompts))]  # fmt: skip
    outs = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
    return [[out["output_ids"], out["meta_info"]["output_token_logprobs"]] for out in outs]


def test_as_many_pages_as_fit_beside_the_share_of_windows() -> None:
    for memory, whole, own, need in product((10_000, 99_991), (48, 96), (16, 40), (0, 5, 60)):
        pages = fitting(memory, whole, own, need)
        held = min(pages, need + pages // CACHED)
        assert pages * (whole - own) + held * own <= memory
        more = pages + 1
        assert more * (whole - own) + min(more, need + more / CACHED) * own > memory


@pytest.mark.parametrize("family", FAMILIES)
def test_bits_where_pages_go_back(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows far longer than windows, over a pool that has no room for all of them; cold, over a cache, and preempted."""
    path = write(tmp_path / family, family, max_position_embeddings=1024, **FAMILIES[family])
    draw = random.Random(1)
    stem = [draw.randrange(3, 120) for _ in range(260)]
    prompts = [
        stem[:n] + [draw.randrange(3, 120) for _ in range(m)] for n, m in ((260, 9), (260, 40), (130, 200), (8, 3))
    ]
    with poisoned(path, False, monkeypatch, max_running_requests=1, disable_radix_cache=True) as engine:
        alone = [answers(engine, [prompt]) for prompt in prompts]
        want = answers(engine, prompts)
    assert [one[0][0] for one in alone][0] == want[0][0]
    small = {"max_total_tokens": 900, "chunked_prefill_size": 64, "max_running_requests": 4}
    with poisoned(path, True, monkeypatch, **small) as engine:
        assert answers(engine, prompts) == want == answers(engine, prompts)
        stats = engine.get_server_info()
    if family == "mistral":  # four rows of 300 tokens, over pages of 900
        assert stats["max_total_num_tokens"] > 900
    tight = {"max_total_tokens": 488 if family == "gemma3" else 240, "max_running_requests": 4}
    with poisoned(path, True, monkeypatch, speculative_algorithm="NGRAM", **tight) as engine:
        assert answers(engine, prompts) == want
        engine.release_memory_occupation(tags=["kv_cache"])
        engine.resume_memory_occupation(tags=["kv_cache"])
        assert answers(engine, prompts) == want


@pytest.mark.parametrize("windows", [(8,), (0, 8), (8, 0, 5)])
@pytest.mark.parametrize("guess", [False, True])
def test_the_checksum_model_through_windows(windows: tuple[int, ...], guess: bool) -> None:
    """Shared prefixes, too few pages, sessions' way of going on, drafts: every token is a function of what it sees."""
    draw = random.Random(len(windows))
    stems = [[draw.randrange(VOCAB) for _ in range(170)] for _ in range(2)]
    prompts = [
        stems[i % 2][: draw.choice([20, 100, 170])] + [draw.randrange(VOCAB) for _ in range(i)] for i in range(8)
    ]
    options: dict[str, Any] = {"speculation": SpeculationConfig(Algorithm.ngram)} if guess else {"overlap": True}
    with checksum_engine(windows=windows, rows=3, tokens=40, pool=300, page_size=4, **options) as engine:
        assert isinstance(engine._parts.core.stepper.scheduler.pool, WindowPages)
        for _ in range(2):
            outs = engine.generate(input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": 24})
            for prompt, out in zip(prompts, outs, strict=True):
                assert out["output_ids"] == expected(prompt, 24, windows=windows)
            longer = [prompt + out["output_ids"] + [5] for prompt, out in zip(prompts, outs, strict=True)]
            outs = engine.generate(input_ids=longer, sampling_params={"temperature": 0, "max_new_tokens": 6})
            assert [out["output_ids"] for out in outs] == [expected(p, 6, windows=windows) for p in longer]
        assert sum(out["meta_info"]["cached_tokens"] > 0 for out in outs) > 0
