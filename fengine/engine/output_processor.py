"""`RequestState`: a request as its caller sees it; `OutputProcessor`: the thread that turns tokens into text."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

from fengine.core.record import Record
from fengine.core.request import Finish, Request
from fengine.core.scheduler import Scheduler
from fengine.core.scheduler_output import SchedulerOutput
from fengine.engine.threads import REAL, Threads
from fengine.errors import EngineDeadError, FengineError, NumericsError


class Detokenizer(Protocol):
    """Ids to text, a few at a time; finds what ends a request in its text."""

    @property
    def matched(self) -> str | None:
        """The stop string or pattern that was found."""
        ...

    @property
    def matched_tokens(self) -> int | None:
        """With how many output tokens."""
        ...

    def push(self, token_ids: list[int], *, trim_last: bool = False) -> str: ...

    def finish(self) -> str: ...


@dataclass(slots=True, eq=False)
class RequestState:
    """Written by the loop and the text thread, read by the caller after `notify`.

    `live` ones (streamed, or with stops in their text) are detokenized step by step, the others once at the end.
    """

    request: Request
    detokenizer: Detokenizer | None
    live: bool
    notify: Callable[["RequestState"], None]
    now: Callable[[], float] = time.perf_counter  # the clock of its moments
    quiet_until: float = 0.0  # nobody wants to know of its tokens before, unless it has ended
    seen: tuple[str, int] = ("", 0)  # text, and number of output tokens, that the caller may see; replaced as one
    finish: Finish | None = None
    error: FengineError | None = None
    received: float = field(default_factory=time.time)  # the moment of `submitted`; the others are of `now`
    submitted: float = field(default_factory=time.perf_counter)
    started: float | None = None  # its first step was scheduled
    first_token: float | None = None
    finished: float | None = None
    abandoned: bool = False  # its caller has gone away, so it is being aborted

    @property
    def done(self) -> bool:
        return self.finish is not None or self.error is not None

    @property
    def num_tokens(self) -> int:
        return self.seen[1]

    @property
    def record(self) -> Record | None:
        return self.request.record

    @property
    def stops_in_text(self) -> bool:
        """Whether its text may end it."""
        return bool(self.request.params.stop or self.request.params.stop_regex)

    @property
    def own_fault(self) -> bool:
        """Whether what it brought along (a logit processor) failed."""
        return self.record is not None and self.record.error is not None

    def fail(self, error: FengineError) -> None:
        """Ends it, unless it has ended. Modifies: itself."""
        if not self.done:
            self.finished = self.now()
            self.error = error

    def tell(self) -> None:
        """Notifies the caller. Errors: whatever that raises: nobody can be told any more."""
        done = self.done
        try:
            self.notify(self)
        finally:
            if done:  # the last time. The call that is told holds its states: a circle, if they held it on
                self.notify = _nobody


def _nobody(state: RequestState) -> None:
    """Is told what nobody waits for any more."""


@dataclass(slots=True)
class StepTokens:
    """What one step brought for the text thread: live states with their known output tokens, and the finished."""

    live: list[tuple[RequestState, int]]
    finished: list[RequestState]


class RequestTimes:
    """A watcher of steps that notes when requests have their first step and their first token."""

    def __init__(self, scheduler: Scheduler, now: Callable[[], float]) -> None:
        self.scheduler, self.now = scheduler, now
        self.unscheduled: dict[str, RequestState] = {}  # waiting for their first step
        self.unstarted: dict[str, RequestState] = {}  # waiting for their first token

    def enter(self, state: RequestState) -> None:
        self.unstarted[state.request.rid] = self.unscheduled[state.request.rid] = state

    def forget(self, rid: str) -> None:
        self.unscheduled.pop(rid, None)
        self.unstarted.pop(rid, None)

    def scheduled(self, output: SchedulerOutput) -> None:
        if self.unscheduled:
            now = self.now()
            for new in output.new_rows:
                if new.rid in self.unscheduled:
                    self.unscheduled.pop(new.rid).started = now

    def launched(self, output: SchedulerOutput) -> None:
        """Nothing to note."""

    def landed(self, output: SchedulerOutput) -> None:
        if self.unstarted:
            now = self.now()
            requests = self.scheduler.requests_of(output)
            for request, sampled in zip(requests, output.samples, strict=True):
                if sampled and request.rid in self.unstarted:
                    self.unstarted.pop(request.rid).first_token = now


class OutputProcessor:
    """Detokenizes what the loop puts into `steps`.

    Stop strings and patterns are found here and end a request through `abort`, which is thread-safe; tokens drawn
    meanwhile are not shown. Whatever fails in here, a reader's event loop that is gone included, belongs to one
    request: that one ends, the thread goes on.
    """

    def __init__(
        self, abort: Callable[[Sequence[RequestState]], None], ended: Callable[[RequestState], None],
        system: Threads = REAL,
    ) -> None:  # fmt: skip
        """`ended` learns of each request whose caller has been told of its end."""
        self.abort, self.ended, self.system = abort, ended, system
        self.steps: SimpleQueue[StepTokens | None] = system.queue()

    def run(self) -> None:
        """The thread's body: until None comes."""
        while (step := self.steps.get()) is not None:
            for state, known in step.live:
                if not state.done:
                    self._push(state, known)
            for state in step.finished:
                if state.finish is None:
                    self._finish(state)
            step = state = None  # an idle engine keeps nothing of the requests that it had

    def _push(self, state: RequestState, known: int) -> None:
        """Detokenizes what is new of a live state; a stop string ends the request here."""
        request, start = state.request, state.request.prompt_len
        if request.finish is not None:
            known = min(known, request.num_output)
        detokenizer = state.detokenizer
        if detokenizer is None:
            state.seen = ("", known)
        else:
            try:
                text, had = state.seen
                fresh = request.token_ids[start + had : start + known]
                trim = known == request.num_output and ends_in_stop_token(request)
                text += detokenizer.push(fresh, trim_last=trim)
                matched = detokenizer.matched_tokens  # fewer than known, if more tokens came with those that matched
                state.seen = (text, known if matched is None else matched)
                if matched is not None:
                    self._stop(state, Finish("stop", matched=detokenizer.matched))
                    return
            except Exception as error:
                self._fail(state, error)
                return
        if request.finish is None:
            self._tell(state)

    def _tell(self, state: RequestState) -> None:
        done = state.done
        try:
            state.tell()
        except Exception:  # nobody can be told any more
            self.abort([state])
        if done:
            self.ended(state)

    def _stop(self, state: RequestState, finish: Finish) -> None:
        state.finished = state.now()
        state.finish = finish  # last: the caller may look at any moment
        self.abort([state])
        self._tell(state)

    def _finish(self, state: RequestState) -> None:
        """The last word on a request that the scheduler, or its caller, has ended."""
        request = state.request
        state.finished = state.now()
        if state.error is None and request.finish is not None:
            if state.record is not None and state.record.error is not None:
                state.error = state.record.error
            elif request.finish.kind == "abort" and request.finish.message is not None:
                state.error = NumericsError(f"request {request.rid!r}: {request.finish.message}")
            else:
                self._last_text(state, request.finish)
        self._tell(state)

    def _last_text(self, state: RequestState, finish: Finish) -> None:
        request, detokenizer = state.request, state.detokenizer
        text, had = state.seen
        known = request.num_output
        if detokenizer is not None:
            fresh = request.token_ids[request.prompt_len + had :]
            try:
                text += detokenizer.push(fresh, trim_last=ends_in_stop_token(request))
                text += detokenizer.finish()
            except Exception as error:
                self._fail(state, error, notify=False)
                return
            if detokenizer.matched_tokens is not None:
                known, finish = detokenizer.matched_tokens, Finish("stop", matched=detokenizer.matched)
        state.seen = (text, known)
        state.finish = finish

    def _fail(self, state: RequestState, error: Exception, notify: bool = True) -> None:
        """A detokenizer that fails ends its own request only."""
        failed = EngineDeadError(f"request {state.request.rid!r}: detokenizing failed: {error}")
        failed.__cause__ = error
        state.error = failed
        self.abort([state])
        if notify:
            self._tell(state)


def ends_in_stop_token(request: Request) -> bool:
    """A stop token stays in output_ids, but its text is left out."""
    return request.num_output > 0 and request.token_ids[-1] in request.stop_ids
