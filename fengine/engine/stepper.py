"""`Stepper`: runs steps, and is the one owner of scheduler, KV state and runner. For the loop's thread alone. With
overlap step n+1 is scheduled and launched before the result of step n is read (depth 1); without, each is read at
once."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from fengine.core.scheduler import Scheduler
from fengine.core.scheduler_output import SchedulerOutput, Watcher
from fengine.engine.output_processor import OutputProcessor
from fengine.engine.readout import record
from fengine.errors import InvariantError
from fengine.models.kv_state import KVHandle, KVState, Params
from fengine.worker.input_batch import InputBatch
from fengine.worker.pooling import apply_head
from fengine.worker.step import Result
from fengine.worker.step_input import StepInput


class Runner(Protocol):
    """What a step needs of a device."""

    params: Params

    def launch(self, kv: KVState, step: StepInput) -> tuple[KVState, Result]: ...


class Stepper:
    """Modifies: itself, the scheduler, the KV state, the requests."""

    def __init__(
        self, scheduler: Scheduler, input_batch: InputBatch, runner: Runner, kv: KVState, requests: OutputProcessor,
        overlap: bool,
    ) -> None:  # fmt: skip
        self.scheduler, self.input_batch, self.runner, self.overlap = scheduler, input_batch, runner, overlap
        self.kv = KVHandle(kv)
        self.requests = requests
        self.watchers: tuple[Watcher, ...] = ()  # told of every step
        self.pending: tuple[SchedulerOutput, Result] | None = None  # the step whose result is not read yet
        self.steps = self.output_tokens = 0
        self.paused = False  # no step is scheduled
        self.in_step = False  # a step is being launched or read, or that has failed

    @property
    def idle(self) -> bool:
        """Whether nothing can be done before a command comes."""
        return self.pending is None and (self.paused or not self.scheduler.has_work)

    def step(self) -> None:
        """Launches the next step, then reads the one before (with overlap) or the same one (without)."""
        output = None if self.paused else self.scheduler.schedule()
        launched = None if output is None else (output, self._launch(output))
        if not self.overlap:
            self.pending = launched
        if self.pending is not None:
            self._land(*self.pending)
        self.pending = launched if self.overlap else None

    def _launch(self, output: SchedulerOutput) -> Result:
        self.requests.scheduled(output)
        for watcher in self.watchers:
            watcher.scheduled(output)
        self.in_step = True
        kv, result = self.runner.launch(self.kv.take(), self.input_batch.stage(output))
        self.in_step = False
        self.kv = KVHandle(kv)
        self.steps += 1
        for watcher in self.watchers:
            watcher.launched(output)
        return result

    def _land(self, output: SchedulerOutput, result: Result) -> None:
        """Reads a step's result, updates the scheduler, and tells the text thread."""
        self.in_step = True
        found, faults = result(), None
        if found.more:
            head = partial(apply_head, self.runner.params)
            faults = record(self.requests.states, output, found, head)
        for watcher in self.watchers:
            watcher.landed(output)
        finished = self.scheduler.update(output, found.tokens, found.logprobs, faults)
        self.output_tokens += sum(output.samples)
        self.requests.landed(finished)
        self.rest()
        self.in_step = False

    def rest(self) -> None:
        """An idle engine keeps nothing of the requests that it had."""
        if not self.scheduler.has_work:
            self.input_batch.release(self.scheduler.released())

    # -- between two steps ---------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Reads the step in flight, so that every drawn token is known."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            self._land(*pending)

    def forget_weights(self) -> int:
        """What the old weights computed is forgotten: the KV of running requests, which are computed again, and the
        prefix cache. Returns how many ran."""
        self.drain()
        retracted = self.scheduler.retract()
        for state in self.requests.states.values():
            state.forget_prompt()
        self.scheduler.flush_cache()
        return retracted

    def swap_kv(self, change: Callable[[KVState | None], KVState | None]) -> None:
        """Replaces the KV state by what `change` makes of it; None: there is none. Errors: InvariantError if a step is
        in flight; what `change` raises, and nothing is replaced."""
        if self.pending is not None:
            raise InvariantError("the KV state was replaced while a step was in flight")
        before = self.kv.take() if self.kv.alive else None
        after = before
        try:
            after = change(before)
        finally:
            self.kv = KVHandle(after) if after is not None else self.kv

    def watch(self, watcher: Watcher) -> None:
        self.watchers = (*self.watchers, watcher)

    def unwatch(self, watcher: Watcher) -> None:
        self.watchers = tuple(other for other in self.watchers if other is not watcher)

    def end(self) -> None:
        """Drops weights, adapters, drafts, pages and graphs. Nothing can be run any more."""
        self.scheduler.speculation = None
        del self.kv, self.runner, self.input_batch, self.pending
