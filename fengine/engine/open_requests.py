"""`OpenRequests`: the requests that are open, from submission until their callers have been told of the end."""

from collections.abc import Sequence
from contextlib import suppress

from fengine.core.request import Request
from fengine.core.scheduler import Scheduler
from fengine.engine.output_processor import OutputProcessor, RequestState, RequestTimes, StepTokens
from fengine.errors import FengineError, InvalidRequestError


class OpenRequests:
    """`enter` is for any thread, under the inbox's lock; the rest is for the loop, or for who comes after its end.

    Modifies: itself, the scheduler, the states; it feeds the text thread.
    """

    def __init__(self, scheduler: Scheduler, text: OutputProcessor) -> None:
        self.scheduler, self.text = scheduler, text
        self.states: dict[str, RequestState] = {}  # of requests that have not finished, by rid
        self.untold: set[RequestState] = set()  # those whose callers have not been told of the end
        self.live: dict[str, RequestState] = {}  # those that are told of each step
        self.times = RequestTimes(scheduler, text.system.now)

    def enter(self, states: Sequence[RequestState]) -> None:
        """Takes their rids. Errors: InvalidRequestError for one that is in use."""
        taken = sorted(state.request.rid for state in states if state.request.rid in self.states)
        if taken:
            raise InvalidRequestError(f"rid {taken[0]!r} is in use by a request that has not finished; choose another")
        self.states.update((state.request.rid, state) for state in states)
        self.untold.update(states)

    def admit(self, state: RequestState, version: str, refusal: FengineError | None) -> None:
        """Queues a request that has entered, or has its caller told why not."""
        request = state.request
        if self.states.get(request.rid) is not state:
            return
        self.times.enter(state)
        if state.live:
            self.live[request.rid] = state
        request.versions = ((version, 0),)
        try:
            if refusal is not None:
                raise refusal
            self.scheduler.add(request)
        except FengineError as error:  # `submit` has checked, but the scheduler has the last word
            state.error = error
            self.text.steps.put(StepTokens([], [self.forget(request)]))

    def abort(self, rids: Sequence[str] | None, meant: Sequence[RequestState] | None) -> None:
        """Ends the requests with these rids (None: all that have come), or only those that are `meant`."""
        chosen = list(self.states) if rids is None else rids
        finished = []
        for state in meant or [self.states[rid] for rid in chosen if rid in self.states]:
            rid = state.request.rid
            if self.states.get(rid) is state and self.scheduler.abort(rid) is not None:  # else it has not come yet
                finished.append(self.forget(state.request))
        if finished:
            self.text.steps.put(StepTokens([], finished))

    def landed(self, finished: Sequence[Request]) -> None:
        """Tells the text thread of the tokens that a step has brought."""
        now = self.times.now()
        live = [
            (state, state.request.num_output)
            for state in self.live.values()
            if state.quiet_until <= now and state.request.num_output > state.num_tokens
        ]
        if live or finished:
            self.text.steps.put(StepTokens(live, [self.forget(request) for request in finished]))

    def forget(self, request: Request) -> RequestState:
        """It has finished: only its caller is still to be told."""
        self.times.forget(request.rid)
        self.live.pop(request.rid, None)
        return self.states.pop(request.rid)

    def end(self, error: FengineError) -> None:
        """Ends all, and has the text thread tell them."""
        for state in list(self.states.values()):
            with suppress(FengineError):  # the scheduler may be what failed
                self.scheduler.abort(state.request.rid)
            state.fail(error)
            self.text.steps.put(StepTokens([], [self.forget(state.request)]))

    def fail(self, error: FengineError) -> None:
        """Ends and tells all that have not been told, without the text thread."""
        for state in list(self.untold):
            state.fail(error)
            with suppress(Exception):
                state.tell()
            self.untold.discard(state)
