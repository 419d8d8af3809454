"""`EngineCore`: the loop. One thread owns scheduler, KV state and runner; one makes text, one watches the two.
Everything from outside enters through one inbox of commands, so no lock guards scheduler or state."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from fengine.core.request import Request
from fengine.core.scheduler import Scheduler
from fengine.core.step_trace import StepRecord, StepTrace
from fengine.engine.inbox import IN_STEP, Command, Inbox
from fengine.engine.output_processor import OutputProcessor
from fengine.engine.request_state import RequestState
from fengine.engine.stepper import Runner, Stepper
from fengine.engine.threads import REAL, Threads
from fengine.engine.watchdog import Watchdog
from fengine.errors import (
    EngineBusyError,
    EngineClosedError,
    EngineDeadError,
    MemoryReleasedError,
    UnsupportedFeatureError,
)
from fengine.models.kv_state import KVState
from fengine.worker.input_batch import InputBatch

BUSY = "memory is not released while requests run or wait: let them finish, or abort them first"
Handler = Callable[..., Any]  # of what is attached to a command, and its arguments; runs in the loop's thread


class EngineCore:
    """Runs steps while there is work. Thread-safe: `submit`, `abort`, `call`, `stats`, `close`. Whatever ends the loop
    or the text thread, every request that is open and every call that waits is answered."""

    def __init__(
        self, scheduler: Scheduler, input_batch: InputBatch, runner: Runner, kv: KVState, *, overlap: bool,
        system: Threads = REAL,
    ) -> None:  # fmt: skip
        self.system = system
        self.inbox = Inbox(system)
        self.requests = OutputProcessor(scheduler, self.abort, system)
        self.stepper = Stepper(scheduler, input_batch, runner, kv, self.requests, overlap)
        self.weight_version = "default"  # the label of the weights that steps run with
        self.traces: dict[str, StepTrace] = {}  # of steps, by the key of who asked
        self.refusals: dict[str, str] = {}  # why no request can run now, by cause: memory that is released
        self.handlers: dict[str, Handler] = {
            "add": self._add,
            "abort": self._abort,
            "label_weights": self.label_weights,
            "get_stats": self.stats,
            "ping": lambda: None,
            "pause": self._pause,
            "resume": self._resume,
            "flush_cache": self._flush,
            "watch_steps": self._watch,
            "unwatch_steps": self._unwatch,
        }
        self.watchdog = Watchdog(system, self.inbox, self.requests, self._run)
        self.threads = self.watchdog.threads
        self.close, self.check_threads = self.watchdog.close, self.watchdog.check
        self.watchdog.start()

    # -- any thread ----------------------------------------------------------------------------------------------------

    def submit(self, states: Sequence[RequestState]) -> None:
        """Hands validated requests over, all or none. Errors: EngineClosedError, EngineDeadError, MemoryReleasedError,
        InvalidRequestError for a rid that is in use."""
        self.inbox.check_process()  # before the lock, which another thread of the parent may have held
        with self.inbox.lock:
            self.inbox.check()
            if (refused := self._refused()) is not None:
                raise refused
            self.requests.enter(states)
            self.inbox.put("add", {"requests": [state.request for state in states]}, states)

    def abort(self, states: Sequence[RequestState]) -> None:
        """Ends requests early, in whatever state they are; those already finished or unknown are left alone."""
        with suppress(EngineClosedError, EngineDeadError):  # everything has ended already
            self.inbox.put("abort", {"rids": [state.request.rid for state in states]}, states)

    def abort_rids(self, rids: set[str] | None) -> None:
        """Ends the requests with exactly these rids (None: all) that have come so far. Returns at once."""
        self.inbox.put("abort", {"rids": None if rids is None else sorted(rids)})

    def call(self, name: str, attached: Any = None, **arguments: Any) -> Any:
        """Has a command executed between two steps, and returns its answer or raises its error. Inside a step, where
        only a logit processor can ask, commands that need a step's end are refused. Errors: EngineClosedError,
        EngineDeadError, EngineBusyError, UnsupportedFeatureError for a name that is not a command's."""
        if self.system.current() is not self.threads[0]:
            return self.inbox.call(name, arguments, attached, self.threads[0].is_alive)
        self.inbox.check()
        if self.stepper.in_step and name not in IN_STEP:
            raise EngineBusyError(
                f"{name} was asked for inside of a step, by a logit processor: the step cannot end "
                "before the processor returns; ask from another thread, and do not wait for it"
            )
        return self._execute(name, arguments, attached)

    def owns_thread(self) -> bool:
        return self.system.current() in self.threads

    def check_process(self) -> None:
        """Errors: EngineClosedError in a forked child."""
        self.inbox.check_process()

    def stats(self) -> dict[str, Any]:
        """Counters since the start and gauges of this moment, as plain numbers; what is refused, and why."""
        self.inbox.check_process()
        stepper = self.stepper
        counters = stepper.scheduler.counters()
        return counters | {
            "steps": stepper.steps,
            "output_tokens": stepper.output_tokens + counters["correct_drafts"],
            "weight_version": self.weight_version,
            "paused": stepper.paused,
            "refusals": dict(self.refusals),
        }

    def each_stats(self) -> dict[int, dict[str, Any]]:
        """Those of each replica, by its rank; here of the only one, in its loop's thread. Errors: as `call`."""
        return {0: self.call("get_stats")}

    def _run(self) -> None:
        try:
            while self.inbox.end is None:
                self._obey(block=self.stepper.idle)
                self.stepper.step()
        finally:
            self.stepper.end()

    def _obey(self, block: bool) -> None:
        """Executes what came in. Waits for something only when there is nothing else to do."""
        command = self.inbox.get(block)
        while command is not None:
            self._answer(command)
            command = None  # an idle loop keeps nothing
            command = self.inbox.get(False)

    def _answer(self, command: Command) -> None:
        name, arguments, attached, reply = command
        if reply is None:
            self._execute(name, arguments, attached)
            return
        try:
            answer = (self._execute(name, arguments, attached), None)
        except Exception as error:  # it belongs to the caller, unless the step in flight was lost
            if self.stepper.in_step:
                raise
            answer = (None, error)
        reply.put(answer)

    def _execute(self, name: str, arguments: dict[str, Any], attached: Any) -> Any:
        handler = self.handlers.get(name)
        if handler is None:
            raise UnsupportedFeatureError(f"this engine has no command {name!r}")
        return handler(*(() if attached is None else (attached,)), **arguments)

    def _refused(self) -> MemoryReleasedError | None:
        return next((MemoryReleasedError(reason) for reason in self.refusals.values()), None)

    def _add(self, states: Sequence[RequestState], requests: Sequence[Request]) -> None:
        for state in states:
            self.requests.admit(state, self.weight_version, self._refused())

    def _abort(self, meant: Sequence[RequestState] | None = None, *, rids: Sequence[str] | None) -> None:
        self.requests.abort(rids, meant)
        self.stepper.rest()

    def _pause(self, mode: str) -> None:
        self.stepper.paused = True
        self.stepper.drain()
        if mode == "abort":
            self._abort(rids=None)
        elif mode == "retract":
            self.stepper.scheduler.retract()

    def _resume(self) -> None:
        self.stepper.paused = False

    def _flush(self) -> bool:
        counters = self.stepper.scheduler.counters()
        held = self.stepper.paused and not counters["running"]  # those that wait hold no pages
        if counters["running"] + counters["waiting"] and not held:
            return False
        self.stepper.scheduler.flush_cache()
        return True

    def _watch(self, tell: Callable[[StepRecord], None], key: str) -> None:
        self.traces[key] = StepTrace(self.stepper.scheduler, tell)
        self.stepper.watch(self.traces[key])

    def _unwatch(self, key: str) -> Exception | None:
        trace = self.traces.pop(key)
        self.stepper.unwatch(trace)
        return trace.fault

    def refuse(self, reasons: dict[str, str], *, idle: bool = False) -> None:
        """Refuses requests from here on, for these reasons by cause. With `idle` only if none is open. Errors:
        EngineBusyError."""
        with self.inbox.lock:  # nobody comes in between the look and the refusal
            if idle and self.requests.states:
                raise EngineBusyError(BUSY)
            self.refusals.update(reasons)

    def allow(self, cause: str) -> None:
        with self.inbox.lock:
            self.refusals.pop(cause, None)

    def label_weights(self, version: str) -> None:
        """What is drawn from here on is of weights with this label. In the loop's thread, with no step in flight."""
        self.weight_version = version
        for state in self.requests.states.values():
            state.relabel(version)
