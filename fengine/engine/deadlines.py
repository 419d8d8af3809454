"""Requests that wait or run for longer than the engine allows end."""

from fengine.core.scheduler_output import SchedulerOutput, Watcher
from fengine.engine.output_processor import OutputProcessor
from fengine.engine.request_state import RequestState
from fengine.errors import TimedOutError


class Deadlines(Watcher):
    """Looks behind every step that is launched. Modifies: the requests."""

    def __init__(self, requests: OutputProcessor, waiting: float | None, running: float | None) -> None:
        """Seconds; None: any."""
        self.requests, self.waiting, self.running = requests, waiting, running

    def launched(self, output: SchedulerOutput) -> None:
        now = self.requests.now()
        late = [state for state in self.requests.states.values() if self._is_late(state, now)]
        if late:
            self.requests.abort([], late)

    def _is_late(self, state: RequestState, now: float) -> bool:
        """Modifies: the state, by the reason."""
        did, since, most = "run", state.started, self.running
        if since is None:
            did, since, most = "waited", state.submitted, self.waiting
        if most is None or now - since <= most:
            return False
        told = f"scheduler.{'waiting' if did == 'waited' else 'running'}_timeout is {most:g} seconds"
        state.fault = TimedOutError(f"the request has {did} for {now - since:.3g} seconds, and {told}: try again later")
        return True
