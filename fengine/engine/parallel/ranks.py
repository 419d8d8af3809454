"""Ranks: processes that hold one model together (tensor parallelism), and compute each step with one another.

    rank 0 (this process)   scheduler -> SchedulerOutput -> its part of the step -> draw -> text
    other ranks             SchedulerOutput, as a line of JSON -> their part of the step; the draws come from rank 0

Only rank 0 knows requests, texts and grammars. A rank (`follower.py`) answers each step with a checksum of what it
computed from; one that differs, dies, or gives no sign of life ends the engine with one error."""

import threading
import uuid
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fengine.config import EngineConfig
from fengine.core.owned import Folder, finalize
from fengine.core.plain import to_plain
from fengine.core.request import Request
from fengine.core.scheduler_output import SchedulerOutput, StepOutput, Watcher
from fengine.engine.engine_core import EngineCore
from fengine.engine.parallel.child import NOTHING, SILENCE, Child
from fengine.engine.stepper import Runner
from fengine.engine.weights.incoming import Origin
from fengine.errors import EngineDeadError
from fengine.models.kv_state import KVState, Params
from fengine.ops import peers
from fengine.ops.columns import Group
from fengine.worker.images import ImageInputs
from fengine.worker.process_group import checksum, device_of_rank, group_of, process_group, release, swap
from fengine.worker.safetensors_file import leave_tensors
from fengine.worker.step import Result
from fengine.worker.step_input import StepInput

ENDED = "; the engine has ended, create a new one"


class Ranks(Watcher):
    """The other ranks, as rank 0 sees them: it starts them, tells them of every step, watches and ends them; and the
    runner of its own part of them."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts the processes, which begin to load. Errors: ConfigError."""
        self.size = config.parallel.tp_size
        device = config.model.device or "cpu"
        devices = [device_of_rank(device, rank, self.size) for rank in range(self.size)]
        self.device = devices[0]
        self._held = ExitStack()
        self.folder = Folder("fengine-ranks-")
        name, sockets = f"fengine-{uuid.uuid4().hex}", peers.mesh(self.size)
        self.group = group_of(name, 0, self.folder.name, sockets[0], self.device)
        finalize(self, peers.close, sockets[0])  # whoever exchanges names the ranks
        self.fault: EngineDeadError | None = None
        self._step = 0  # that is being launched
        self._core: EngineCore | None = None
        self._runner: Any = None
        self.params: Params = {}
        self._sent = 0  # messages to each rank
        self._sums: dict[int, dict[int, int]] = {}  # of each step, by rank
        self._news = threading.Condition()
        self._loaded: dict[int, Any] = {}  # of ranks that have their weights, where these were read
        self._ranks: dict[int, Child] = {}
        with ExitStack() as broken:
            broken.callback(self.close)
            for rank in range(1, self.size):
                model = replace(config.model, device=devices[rank], skip_tokenizer_init=True)
                named = [name, rank, self.folder.name, sockets[rank]]
                start = {"config": to_plain(replace(config, model=model), NOTHING), "group": named, "folder": named[2]}
                hear, ended = partial(self._hear, rank), partial(self._ended, rank)
                self._ranks[rank] = Child(start, torch.get_num_threads() // self.size, hear, ended, sockets[rank])
                peers.close(sockets[rank])
            self.folder.make()
            broken.pop_all()

    def _ended(self, rank: int, how: str) -> None:
        self._fail(f"rank {rank} of {self.size} {how}")

    def _hear(self, rank: int, told: dict[str, Any]) -> None:
        with self._news:
            if "error" in told:
                self._fail(f"rank {rank} of {self.size} failed: {told['error']}")
            if "sum" in told:
                self._sums.setdefault(told["step"], {})[rank] = told["sum"]
            if "loaded" in told:
                self._loaded[rank] = told.get("read")
            self._news.notify_all()

    def _fail(self, reason: str) -> None:
        """One reason; then no rank goes on, and rank 0 does not wait for one."""
        with self._news:
            self.fault = self.fault or EngineDeadError(f"{reason}{ENDED}")
            if self._core is not None:
                self._core.inbox.close(self.fault)
            self._news.notify_all()
        self._kill()
        release(self.group, self.device)  # rank 0 may wait for words of the dead

    def _kill(self) -> None:
        for child in list(self._ranks.values()):
            child.kill()

    @property
    def pids(self) -> list[int]:
        """Of the other ranks."""
        return [child.process.pid for child in self._ranks.values()]

    def join(self, dock: int = 0, origin: Origin | None = None) -> Group:
        """Joins the group, with so many bytes of a dock, when every rank has its weights. `origin`: of rank 0's.
        Errors: EngineDeadError if a rank has failed, or has read other files."""
        with self._news:
            self._news.wait_for(lambda: self.fault or len(self._loaded) == self.size - 1)
            if self.fault is None and any(read != told_of(origin) for read in self._loaded.values()):
                self._fail("the checkpoint's files changed while the ranks read them")
        if self.fault is not None:
            self.close()
            raise EngineDeadError(str(self.fault))
        for child in self._ranks.values():
            child.send("join")
        self._held.enter_context(process_group(self.group, self.device, dock))
        return self.group

    def attach(self, core: EngineCore) -> None:
        self._core = core
        core.stepper.watch(self)

    def over(self, runner: Runner, images: ImageInputs | None) -> "Ranks":
        """Themselves, who run this rank's part by `runner`, and write `images` for all."""
        if images is not None:
            images.write = self.named()(images.write)
        self._runner, self.params = runner, runner.params
        return self

    # -- commands, between two steps -----------------------------------------------------------------------------------

    def tell(self, command: str, **arguments: Any) -> None:
        """Has the other ranks execute a command of this name."""
        self._send({"command": command, "arguments": arguments})

    def _send(self, value: Any) -> None:
        for child in self._ranks.values():
            child.send([self._sent, value])
        self._sent += 1

    @contextmanager
    def told(self, command: str, **arguments: Any) -> Iterator[None]:
        """As `tell`, of one in which all exchange. Errors: EngineDeadError if a rank has ended."""
        self.tell(command, **arguments)
        with self.named():
            yield

    def update(self, tensors: dict[str, Tensor], origin: Origin | None) -> None:
        """Has the other ranks write checked tensors, from a file. Errors: StorageError, EngineDeadError."""
        path = Path(self.folder.name) / "update.safetensors"
        leave_tensors(tensors, path)
        with self.told("update_weights", path=str(path), origin=origin and str(origin.directory)):
            swap(torch.zeros(1), self.group)  # everybody has read it
        path.unlink()

    # -- a step --------------------------------------------------------------------------------------------------------

    def scheduled(self, output: SchedulerOutput) -> None:
        """Tells the ranks. The edits of logits are rank 0's alone."""
        self._step = output.step
        new = [_as_plain(row) for row in output.new_rows]
        encodes = [
            encode._replace(image=replace(encode.image, key=cast(Any, ""), arrays={})) for encode in output.encodes
        ]
        self._send(to_plain(replace(output, new_rows=new, encodes=encodes), NOTHING))

    def launch(self, kv: KVState, step: StepInput) -> tuple[KVState, Result]:
        """As `Runner.launch`; the result compares the ranks' checksums of steps before. Errors: EngineDeadError."""
        number, digest = self._step, checksum(step)
        with self.named():
            kv, result = self._runner.launch(kv, step)

        def checked() -> StepOutput:
            with self.named():
                out = result()
            self._compare(number, zlib.crc32(np.array(out.tokens, np.int32).tobytes(), digest))
            return out

        return kv, checked

    def _compare(self, number: int, digest: int) -> None:
        with self._news:
            self._sums.setdefault(number, {})[0] = digest
            ready = [step for step, sums in self._sums.items() if len(sums) == self.size]
            for step in ready:
                sums = self._sums.pop(step)
                if len(set(sums.values())) > 1:
                    self._fail(f"step {step} was not the same on all ranks (checksums {sums})")
        if self.fault is not None:
            raise EngineDeadError(str(self.fault))

    @contextmanager
    def named(self) -> Iterator[None]:
        """An exchange that breaks off is told by the rank that broke it."""
        try:
            yield
        except RuntimeError as error:
            with self._news:
                self._news.wait_for(lambda: self.fault is not None, SILENCE + 2)
            if self.fault is None:
                raise
            raise EngineDeadError(str(self.fault)) from error

    def close(self) -> None:
        """Ends every rank, then the group: whoever holds graphs of its exchanges has dropped them. Idempotent."""
        self._kill()  # they hold nothing that is worth a farewell
        for child in self._ranks.values():
            child.close()
        self._held.close()
        self._runner, self.params = None, {}
        self.folder.cleanup()


def told_of(origin: Origin | None) -> Any:
    """As another process tells of it. Pure."""
    return origin and [str(origin.directory), [list(file) for file in origin.stamp]]


def _as_plain(row: Request) -> Request:
    rope = row.rope and row.rope._replace(positions_3P=row.rope.positions_3P.tolist())
    return replace(row, rope=rope, params=replace(row.params, processor=None, grammar=None, custom_params=None))
