"""The parts of an engine where it is several replicas: METHODS are asked of all, and their answers are joined."""

import json
import os
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from fengine.config import EngineConfig
from fengine.engine.load import Loaded
from fengine.engine.parallel.routing import BLOCK
from fengine.engine.parts import Parts
from fengine.engine.weights.incoming import tensors_of, unfit
from fengine.engine.weights.save import checked
from fengine.engine.weights.updates import UpdateResult
from fengine.engine.workers import Features
from fengine.errors import InvalidRequestError, UnsupportedFeatureError
from fengine.worker.safetensors_file import leave_tensors

GROUPS = "a group for weights (update_weights_from_distributed)", "update_weights_from_tensor, or dp_size=1"
NAMES = {  # as a caller knows what is not built, and what to do instead
    "updates.groups": GROUPS, "updates.update_from_distributed": GROUPS,
    "profile.start": ("start_profile", "dp_size=1"),
    "profile.stop": ("stop_profile", "dp_size=1"),
    "core.watch_steps": ("telling of steps (steps_told, and a trace of them)", "dp_size=1"),
}  # fmt: skip
METHODS = {  # of parts of an engine, asked of every replica
    "weights": ("nbytes", "source"),
    "updates": ("update_from_disk", "begin", "end", "read"),
    "memory": ("release", "resume", "keep_weights"),
    "profile": (),
}


def joined(values: Sequence[Any]) -> Any:
    """One answer of those of all replicas: counters are added, flags hold if all do. Pure."""
    first = values[0] if values else None
    if isinstance(first, dict):
        return {key: _added([value[key] for value in values]) for key in first}
    if isinstance(first, bool):
        return all(values)
    if isinstance(first, list) and len(first) == 2 and isinstance(first[0], bool):
        return UpdateResult(*next((value for value in values if not value[0]), first))
    return first


def _added(values: Sequence[Any]) -> Any:
    if isinstance(values[0], bool):
        return any(values)
    if isinstance(values[0], (int, float)):
        return sum(values)
    return {name: why for value in values for name, why in value.items()} if isinstance(values[0], dict) else values[0]


def not_built(what: str, size: int) -> UnsupportedFeatureError:
    """Of a method of a part. Pure."""
    name, instead = NAMES.get(what, (what, "dp_size=1"))
    return UnsupportedFeatureError(f"{name} with parallel.dp_size={size} is not built; use {instead}")


def plain_command(command: list[Any]) -> list[Any]:
    """As it comes to another process. Pure. Errors: InvalidRequestError for what cannot."""

    def told(value: Any) -> str:
        if isinstance(value, Path):
            return str(value)
        raise InvalidRequestError(f"{value!r:.80} is no text, number, list or dict: nothing else is sent to replicas.")

    return json.loads(json.dumps(command, default=told))


class Remote:
    """A part of the replicas' engines: METHODS are asked of all."""

    def __init__(self, core: Any, part: str) -> None:
        self._core, self._part = core, part
        self.places = {
            name: SimpleNamespace(shape=shape, leaf=SimpleNamespace(dtype=kind))
            for name, shape, kind in (core.replicas[0].facts or {})["weights"]
        }

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in METHODS[self._part]:
            raise not_built(f"{self._part}.{name}", self._core.size)
        return partial(self._core.ask, self._part, name)

    def close(self) -> None:
        """With its replicas."""


class RemoteUpdates(Remote):
    """As `WeightUpdates`, of all replicas."""

    def _refuse_restart(self, what: str) -> None:
        if self._core.config.parallel.dp_restart:
            raise UnsupportedFeatureError(
                f"{what} with parallel.dp_restart=True are not built: a replica that is started again would not have "
                "them; use dp_restart=False, or update_weights_from_disk"
            )

    def begin(self, selector: Any) -> UpdateResult:
        """From here to `end`, updates are collected."""
        self._refuse_restart("collected updates")
        return self._core.ask(self._part, "begin", selector)

    def update_from_tensor(
        self, named_tensors: Any, load_format: Any, *, version: str | None = None, abort: bool = False
    ) -> UpdateResult:
        """Through a file, from which each replica reads them; what it cannot hold is refused there by its name."""
        self._refuse_restart("tensors")
        given = tensors_of(named_tensors, load_format)
        path = Path(self._core.folder.name) / f"{uuid.uuid4().hex}.safetensors"
        told = [(name, unfit(x)) for name, x in given]
        leave_tensors({str(i): x for i, (_, x) in enumerate(given) if told[i][1] is None}, path)
        try:
            answer = self._core.ask("files", "update", str(path), told, version, abort)
        except Exception:  # after an interruption replicas may still have to read it: it goes with the engine's folder
            path.unlink(missing_ok=True)
            raise
        path.unlink(missing_ok=True)  # an engine that is closed meanwhile removes its folder
        return answer

    def save(self, model_dir: Path, overrides: str, path: Any, pattern: Any, max_size: Any) -> None:
        """By one replica: all have the same."""
        folder, most = checked(path, pattern, max_size)
        self._core.ask_one(self._part, "save", str(model_dir), overrides, os.path.abspath(folder), pattern, most)


def parts_of(core: Any, config: EngineConfig, loaded: Loaded, features: Features, started: float) -> Parts:
    """An engine of replicas, behind their `core`. `loaded`: their model without weights."""
    facts, share = [each.facts or {} for each in core.replicas], partial(core.ask, "adapters")
    for each in core.replicas:
        each.blocks = facts[0]["pool_tokens"] // BLOCK + 1
    return Parts(
        config=config, spec=loaded.spec, tokenizer=loaded.tokenizer, context_length=loaded.context_length,
        pool_tokens=min(each["pool_tokens"] for each in facts), eos_ids=loaded.eos_ids, core=cast(Any, core),
        model_dir=loaded.model_dir, start_seconds=time.perf_counter() - started,
        compile_seconds=max(each["compile_seconds"] for each in facts), compiles_at_start=0,
        kv_dtype=getattr(torch, facts[0]["kv_dtype"]), kv_bytes=facts[0]["kv_bytes"], pooling=loaded.pooling,
        ranks=core, phases={**loaded.seconds, **facts[0]["phases"]},
        adapters=features.shared(config.lora, share, core.folder.name) if config.lora.on else None,
        images=features.images(config, loaded.model_dir, loaded.spec, loaded.tokenizer),
        **{part: cast(Any, (RemoteUpdates if part == "updates" else Remote)(core, part)) for part in METHODS},
    )  # fmt: skip
