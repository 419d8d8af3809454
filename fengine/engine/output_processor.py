"""`OutputProcessor`: the requests that are open, and the thread that turns their tokens into text and tells callers."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

from fengine.core.request import ABORTED, FinishReason, Request
from fengine.core.scheduler import Scheduler
from fengine.core.scheduler_output import SchedulerOutput
from fengine.engine.request_state import RequestOutput, RequestState
from fengine.engine.threads import REAL, Threads
from fengine.errors import EngineDeadError, FengineError, InvalidRequestError, NumericsError

Landed = tuple[list[tuple[RequestState, int]], list[RequestState]]  # live states and their known tokens; the finished


class OutputProcessor:
    """Requests are open from submission until their callers have been told of the end.

    `enter` is for any thread, under the inbox's lock; `run` is the text thread's, with all that has an underscore; the
    rest is for the loop, or for who comes after its end. Stop strings and patterns are found in the text and end a
    request through `abort`, which is thread-safe; tokens drawn meanwhile are not shown. Whatever fails over a text, a
    reader's event loop that is gone included, belongs to one request: that one ends, the thread goes on.
    Modifies: itself, the scheduler, the states."""

    def __init__(
        self, scheduler: Scheduler, abort: Callable[[Sequence[RequestState]], None], system: Threads = REAL
    ) -> None:
        self.scheduler, self.abort_later, self.now = scheduler, abort, system.now
        self.steps: SimpleQueue[Landed | None] = system.queue()
        self.states: dict[str, RequestState] = {}  # of requests that have not finished, by rid
        self.untold: dict[RequestState, None] = {}  # those whose callers have not been told of the end
        self.live: dict[str, RequestState] = {}  # those that are told of each step
        self.unstarted: dict[str, RequestState] = {}  # those that wait for their first token, in a row

    def enter(self, states: Sequence[RequestState]) -> None:
        """Takes their rids. Errors: InvalidRequestError for one that is in use."""
        taken = sorted(state.request.rid for state in states if state.request.rid in self.states)
        if taken:
            raise InvalidRequestError(
                f"Duplicate request ID: rid {taken[0]!r} is in use by a request that has not finished; choose another"
            )
        self.states.update((state.request.rid, state) for state in states)
        self.untold.update(dict.fromkeys(states))

    def rids_of(self, name: str) -> set[str]:
        """The name, and the rids of what is open of a call that was given it. For any thread."""
        return {name} | {rid for rid, state in self.states.copy().items() if state.request.call_rid == name}

    # -- in the loop's thread ------------------------------------------------------------------------------------------

    def admit(self, state: RequestState, version: str, refusal: FengineError | None) -> None:
        """Queues a request that has entered, or has its caller told why not."""
        request = state.request
        if state.live:
            self.live[request.rid] = state
        request.versions = ((version, 0),)
        try:
            if refusal is not None:
                raise refusal
            self.scheduler.add(request)
        except FengineError as error:  # `submit` has checked, but the scheduler has the last word
            state.error = error
            self.steps.put(([], [self.forget(request)]))

    def abort(self, rids: Sequence[str] | None, meant: Sequence[RequestState] | None) -> None:
        """Ends the requests with these rids (None: all that have come), or only those that are `meant`."""
        chosen = list(self.states) if rids is None else rids
        finished = []
        for state in meant or [self.states[rid] for rid in chosen if rid in self.states]:
            rid = state.request.rid
            if self.states.get(rid) is state and self.scheduler.abort(rid) is not None:  # else it has not come yet
                finished.append(self.forget(state.request))
        if finished:
            self.steps.put(([], finished))

    def scheduled(self, output: SchedulerOutput) -> None:
        """Notes which requests have their first step."""
        for new in output.new_rows:
            state = self.states.get(new.rid)
            if state is not None and state.started is None:
                state.started = self.now()
                self.unstarted[new.rid] = state

    def landed(self, finished: Sequence[Request]) -> None:
        """Tells the text thread of the tokens that a step has brought."""
        now = self.now()
        for state in [s for s in self.unstarted.values() if s.request.num_output or s.request.finish is not None]:
            del self.unstarted[state.request.rid]
            state.first_token = now
        live = [
            (state, known)
            for state in self.live.values()
            if state.quiet_until <= now and (known := state.request.num_output) > state.output.num_tokens
        ]
        if live or finished:
            self.steps.put((live, [self.forget(request) for request in finished]))

    def forget(self, request: Request) -> RequestState:
        """It has finished: only its caller is still to be told."""
        self.unstarted.pop(request.rid, None)
        self.live.pop(request.rid, None)
        return self.states.pop(request.rid)

    def end(self, error: FengineError) -> None:
        """Ends all, and has the text thread tell them."""
        for state in list(self.states.values()):
            with suppress(FengineError):  # the scheduler may be what failed
                self.scheduler.abort(state.request.rid)
            state.fail(error)
            self.steps.put(([], [self.forget(state.request)]))

    def fail(self, error: FengineError) -> None:
        """Ends and tells all that have not been told, without the text thread."""
        for state in list(self.untold):
            state.fail(error)
            with suppress(Exception):
                state.tell()
            self.untold.pop(state, None)

    # -- the text thread -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """The thread's body: until None comes."""
        while (step := self.steps.get()) is not None:
            for state, known in step[0]:
                if not state.done:
                    self._push(state, known)
            for state in step[1]:
                if state in self.untold:  # its text may have ended it before
                    self._finish(state)
            step = state = None  # an idle engine keeps nothing of the requests that it had

    def _push(self, state: RequestState, known: int) -> None:
        """Detokenizes what is new of a live state; a stop string ends the request here."""
        request = state.request
        try:
            output = self._read(state, known)
        except Exception as error:
            self._fail(state, error)
        else:
            if output.finish is not None:
                state.finished = state.now()  # before the caller may see that it has
                self.abort_later([state])
            state.output = output
            if output.finish is not None or request.finish is None:
                self._tell(state)

    def _read(self, state: RequestState, known: int, finish: FinishReason | None = None) -> RequestOutput:
        """The output with tokens up to `known`; `finish`: these are all. What ends the request in its text comes before
        that. Modifies: the detokenizer."""
        request, detokenizer, text, had = state.request, state.detokenizer, state.output.text, state.output.num_tokens
        fresh = request.token_ids[request.prompt_len + had : request.prompt_len + known]
        ends = known == request.num_output > 0 and request.token_ids[-1] in request.stop_ids
        if detokenizer is None:  # a stop token stays in output_ids, but its text is left out
            params, decode = request.params, state.decode
            fresh = fresh[:-1] if ends and not params.no_stop_trim else fresh
            return RequestOutput("" if decode is None else decode(fresh, params.skip_special_tokens), known, finish)
        text += detokenizer.push(fresh, trim_last=ends)
        text += "" if finish is None else detokenizer.finish()
        matched = detokenizer.matched_tokens  # fewer than known, if more tokens came with those that matched
        if matched is None:
            return RequestOutput(text, known, finish)
        return RequestOutput(text, matched, {"type": "stop", "matched": detokenizer.matched})

    def _tell(self, state: RequestState) -> None:
        done = state.done
        try:
            state.tell()
        except Exception as error:  # nobody can be told any more, or just now not: then the end is told, and is none
            if not done:
                self._fail(state, error, "its caller could not be told")
        if done:
            self.untold.pop(state, None)

    def _finish(self, state: RequestState) -> None:
        """The last word on a request that the scheduler, or its caller, has ended."""
        request = state.request
        state.finished = state.now()
        if state.error is None and request.finish is not None:
            if state.fault is not None:
                state.error = state.fault
            elif request.finish["type"] == "abort" and request.finish["message"] != ABORTED:
                state.error = NumericsError(f"request {request.rid!r}: {request.finish['message']}")
            else:
                try:
                    state.output = self._read(state, request.num_output, request.finish)
                except Exception as error:
                    self._fail(state, error)
        self._tell(state)

    def _fail(self, state: RequestState, error: Exception, what: str = "detokenizing failed") -> None:
        """A detokenizer or a caller that fails ends its own request only; its caller is told when it has ended."""
        failed = EngineDeadError(f"request {state.request.rid!r}: {what}: {error}")
        failed.__cause__ = error
        state.error = failed
        self.abort_later([state])
