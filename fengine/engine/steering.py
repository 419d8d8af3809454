"""Commands that steer the loop: pause and resume it, empty the prefix cache, watch its steps."""

from collections.abc import Callable, Mapping
from typing import Any

from fengine.core.step_trace import StepRecord, StepTrace
from fengine.engine.stepper import Stepper


class Steering:
    """In the loop's thread. Modifies: itself, the stepper, the requests through `abort`."""

    def __init__(self, stepper: Stepper, abort: Callable[[None, None], None]) -> None:
        """`abort`: ends all requests that have come so far."""
        self.stepper, self.abort = stepper, abort
        self.traces: dict[str, StepTrace] = {}  # by the key of who asked

    def handlers(self) -> Mapping[str, Callable[..., Any]]:
        """By the commands' names; see `engine/inbox.py`."""
        return {
            "pause": self._pause,
            "resume": self._resume,
            "flush_cache": self._flush,
            "watch_steps": self._watch,
            "unwatch_steps": self._unwatch,
        }

    def _pause(self, mode: str) -> None:
        self.stepper.paused = True
        self.stepper.drain()
        if mode == "abort":
            self.abort(None, None)
            self.stepper.rest()
        elif mode == "retract":
            self.stepper.scheduler.retract()

    def _resume(self) -> None:
        self.stepper.paused = False

    def _flush(self) -> bool:
        counters = self.stepper.scheduler.counters()
        held = self.stepper.paused and not counters["running"]  # those that wait hold no pages
        if counters["running"] + counters["waiting"] and not held:
            return False
        self.stepper.flush_cache()
        return True

    def _watch(self, tell: Callable[[StepRecord], None], key: str) -> None:
        self.traces[key] = StepTrace(self.stepper.scheduler, tell)
        self.stepper.watch(self.traces[key])

    def _unwatch(self, key: str) -> Exception | None:
        trace = self.traces.pop(key)
        self.stepper.unwatch(trace)
        return trace.fault
