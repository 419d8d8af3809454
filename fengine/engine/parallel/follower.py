"""One of the other ranks of an engine: its part of every step and of every command that rank 0 tells of."""

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file

from fengine.core.plain import from_plain
from fengine.core.scheduler_output import SchedulerOutput
from fengine.engine.memory import DeviceMemory
from fengine.engine.parallel.child import NOTHING, Link
from fengine.engine.stepper import Runner
from fengine.engine.weights.incoming import Origin
from fengine.engine.weights.live import LiveWeights
from fengine.errors import InvariantError
from fengine.models.kv_state import KVState
from fengine.ops.columns import Group
from fengine.worker.input_batch import InputBatch
from fengine.worker.process_group import checksum, swap
from fengine.worker.step import Result


class Follower:
    """Modifies: itself, its parameters and KV state."""

    def __init__(
        self, link: Link, runner: Runner, input_batch: InputBatch, kv: KVState, weights: LiveWeights,
        new_kv: Callable[[], KVState], group: Group,
    ) -> None:  # fmt: skip
        self.link, self.runner, self.input_batch, self.weights, self.group = link, runner, input_batch, weights, group
        self.kv: KVState | None = kv
        self.heard = 0  # messages of rank 0
        self.memory = DeviceMemory(runner, weights, new_kv, input_batch.page_size, self._swap_kv)
        self.commands: dict[str, Callable[..., object]] = {
            "update_weights": self._update, "read_weights": weights.read, "release_memory": self.memory.release,
            "resume_memory": self._resume,
        }  # fmt: skip

    def run(self) -> None:
        """Until the process ends."""
        pending: tuple[int, int, Result] | None = None  # the step whose result is not read yet
        while True:
            told = self._next() if pending is None or not self.link.told.empty() else None
            launched = None
            if told is not None and "command" not in told:
                output = from_plain(SchedulerOutput, told, NOTHING)
                step = self.input_batch.stage(output)
                step.stages, step.top, step.hidden_H = (), None, None  # rank 0's alone
                self.kv, result = self.runner.launch(cast(KVState, self.kv), step)
                launched = output.step, checksum(step), result
            if pending is not None:
                number, digest, result = pending
                sampled = np.array(result().tokens, np.int32)
                self.link.say(step=number, sum=zlib.crc32(sampled.tobytes(), digest))
            pending = launched
            if told is not None and "command" in told:
                self.commands[told["command"]](**told["arguments"])

    def _next(self) -> dict[str, Any]:
        """Errors: InvariantError for a message that is not the next."""
        number, told = self.link.told.get()
        if number != self.heard:
            raise InvariantError(f"message {number} of rank 0 came where {self.heard} was due")
        self.heard += 1
        return told

    def _swap_kv(self, change: Callable[[KVState | None], KVState | None]) -> None:
        self.kv = change(self.kv)

    def _update(self, path: str, origin: str | None) -> None:
        changes = self.weights.check(load_file(path).items(), set())
        swap(torch.zeros(1), self.group)  # everybody has read it
        self.weights.write(changes, None if origin is None else Origin.of(Path(origin)))

    def _resume(self, tags: Sequence[str], capture: bool) -> None:
        for tag in tags:
            self.memory.resume(tag)
        if capture:
            self.memory.capture()
