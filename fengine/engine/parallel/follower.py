"""One of the other ranks of an engine: its part of every step and of every command that rank 0 tells of."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from fengine.core.plain import Handles, from_plain
from fengine.core.scheduler_output import SchedulerOutput
from fengine.engine.load import Loaded
from fengine.engine.memory import Memory
from fengine.engine.parallel.child import Link
from fengine.engine.stepper import Runner
from fengine.engine.weights.incoming import Origin
from fengine.engine.weights.live import LiveWeights
from fengine.models.kv_state import KVState
from fengine.ops.columns import Group
from fengine.worker.input_batch import InputBatch
from fengine.worker.process_group import checksum, swap
from fengine.worker.step import Result

NOTHING = Handles({}, lambda kind, text: None, lambda name, number: cast(Any, None))


class FollowerCore:
    """What weights and memory need of an `EngineCore`, where there are no requests. It is its own stepper."""

    def __init__(self, kv: KVState) -> None:
        self.kv: KVState | None = kv
        self.stepper = self
        self.handlers: dict[str, Callable[..., Any]] = {}
        self.refusals: dict[str, str] = {}

    def refuse(self, reasons: dict[str, str], *, idle: bool = False) -> None:
        self.refusals.update(reasons)

    def allow(self, cause: str) -> None:
        self.refusals.pop(cause, None)

    def refusal(self, cause: str) -> str | None:
        return self.refusals.get(cause)

    def stats(self) -> dict[str, Any]:
        return {"refusals": dict(self.refusals)}

    def label_weights(self, version: str) -> None: ...

    def abort_rids(self, rids: set[str] | None) -> None: ...

    def drain(self) -> None: ...

    def flush_cache(self) -> None: ...

    def forget_weights(self) -> int:
        return 0

    def swap_kv(self, change: Callable[[KVState | None], KVState | None]) -> None:
        self.kv = change(self.kv)


class FollowerRanks:
    """As `RankCommands`: rank 0 tells, and nobody else."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def swap(self, part: Tensor) -> Tensor:
        return swap(part, self.group)

    def tell(self, name: str, **arguments: Any) -> None: ...

    def update(self, tensors: dict[str, Tensor], origin: Origin | None, version: str | None) -> None: ...


class Follower:
    """Modifies: itself, its parameters and KV state."""

    def __init__(
        self, link: Link, loaded: Loaded, runner: Runner, input_batch: InputBatch, kv: KVState,
        new_kv: Callable[[], KVState], group: Group,
    ) -> None:  # fmt: skip
        self.link, self.runner, self.input_batch = link, runner, input_batch
        self.core = core = FollowerCore(kv)
        self.ranks = FollowerRanks(group)
        self.weights = LiveWeights(
            loaded.params, loaded.spec, cast(Any, core), loaded.model_dir, loaded.from_disk, self.ranks
        )
        memory = Memory(cast(Any, core), runner, self.weights, new_kv, input_batch.page_size)
        core.handlers |= {"keep_weights": memory.keep_weights, "update_weights": self._update}

    def run(self) -> None:
        """Until the process ends."""
        pending: tuple[int, int, Result] | None = None  # the step whose result is not read yet
        while True:
            told = self.link.told.get()
            if "command" in told:
                if pending is not None:
                    self._land(*pending)
                    pending = None
                self.core.handlers[told["command"]](**told["arguments"])
                continue
            output = from_plain(SchedulerOutput, told, NOTHING)
            step = self.input_batch.stage(output)
            step.stages, step.top, step.hidden_H = (), None, None  # rank 0's alone
            self.core.kv, result = self.runner.launch(cast(KVState, self.core.kv), step)
            if pending is not None:
                self._land(*pending)
            pending = output.step, checksum(step), result
            if self.link.told.empty():
                self._land(*pending)
                pending = None

    def _land(self, number: int, digest: int, result: Result) -> None:
        self.link.say(step=number, sum=zlib.crc32(np.array(result().tokens, np.int32).tobytes(), digest))

    def _update(self, path: str, origin: str | None, version: str | None) -> None:
        changes = self.weights.check(load_file(path).items(), set())
        self.ranks.swap(torch.zeros(1))
        found = None if origin is None else Origin.of(Path(origin))
        self.weights.update((changes, found), [change.name for change in changes], version)
