"""Tickets, and the thread that turns their tokens into text, off the loop's critical path."""

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fengine.core.request import Finish, Request
from fengine.core.scheduler import Scheduler
from fengine.core.scheduler_output import SchedulerOutput
from fengine.errors import EngineDeadError, FengineError, NumericsError
from fengine.tokenizer.detokenizer import Detokenizer


@dataclass(slots=True, eq=False)
class Ticket:
    """A request as its caller sees it. Written by the text thread, read by the caller after `notify`.

    `live` tickets (streamed, or with stops in their text) are detokenized step by step, the others once at the end.
    """

    request: Request
    detokenizer: Detokenizer | None
    live: bool
    notify: Callable[["Ticket"], None]
    quiet_until: float = 0.0  # perf_counter: nobody wants to know of its tokens before, unless it has ended
    seen: tuple[str, int] = ("", 0)  # text, and number of output tokens, that the caller may see; replaced as one
    finish: Finish | None = None
    error: FengineError | None = None
    received: float = field(default_factory=time.time)  # the moment of `submitted`; the others are of perf_counter
    submitted: float = field(default_factory=time.perf_counter)
    started: float | None = None  # its first step was planned
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
    def stops_in_text(self) -> bool:
        """Whether its text may end it."""
        return bool(self.request.params.stop or self.request.params.stop_regex)

    @property
    def own_fault(self) -> bool:
        """Whether what it brought along (a logit processor) failed."""
        return self.request.record is not None and self.request.record.error is not None


@dataclass(slots=True)
class News:
    """One step's tokens for the text thread: live tickets with the number of output tokens known, and the finished."""

    live: list[tuple[Ticket, int]]
    finished: list[Ticket]


class FirstTimes:
    """A watcher of steps that notes when tickets have their first step and their first token."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.unplanned: dict[str, Ticket] = {}  # waiting for their first step
        self.unstarted: dict[str, Ticket] = {}  # waiting for their first token

    def enter(self, ticket: Ticket) -> None:
        self.unstarted[ticket.request.rid] = self.unplanned[ticket.request.rid] = ticket

    def forget(self, rid: str) -> None:
        self.unplanned.pop(rid, None)
        self.unstarted.pop(rid, None)

    def scheduled(self, output: SchedulerOutput) -> None:
        if self.unplanned:
            now = time.perf_counter()
            for new in output.new_rows:
                if new.rid in self.unplanned:
                    self.unplanned.pop(new.rid).started = now

    def landed(self, output: SchedulerOutput) -> None:
        if self.unstarted:
            now = time.perf_counter()
            requests = self.scheduler.requests_of(output)
            for request, sampled in zip(requests, output.samples, strict=True):
                if sampled and request.rid in self.unstarted:
                    self.unstarted.pop(request.rid).first_token = now


class TextLoop:
    """Detokenizes what the driver reports in `news`.

    Stop strings and patterns are found here and end a request through `abort`, which is thread-safe; tokens drawn
    meanwhile are not shown. Whatever fails in here, a reader's event loop that is gone included, belongs to one ticket:
    that request ends, the thread goes on.
    """

    def __init__(self, abort: Callable[[Sequence[Ticket]], None]) -> None:
        self.abort = abort
        self.news: queue.SimpleQueue[News | None] = queue.SimpleQueue()

    def run(self) -> None:
        """The thread's body: until None comes."""
        while (news := self.news.get()) is not None:
            for ticket, known in news.live:
                if not ticket.done:
                    self._push(ticket, known)
            for ticket in news.finished:
                if ticket.finish is None:
                    self._finish(ticket)
            news = ticket = None  # an idle engine keeps nothing of the requests that it had

    def _push(self, ticket: Ticket, known: int) -> None:
        """Detokenizes what is new of a live ticket; a stop string ends the request here."""
        request, start = ticket.request, ticket.request.prompt_len
        if request.finish is not None:
            known = min(known, request.num_output)
        detokenizer = ticket.detokenizer
        if detokenizer is None:
            ticket.seen = ("", known)
        else:
            try:
                text, had = ticket.seen
                fresh = request.token_ids[start + had : start + known]
                trim = known == request.num_output and ends_in_stop_token(request)
                text += detokenizer.push(fresh, trim_last=trim)
                matched = detokenizer.matched_tokens  # fewer than known, if more tokens came with those that matched
                ticket.seen = (text, known if matched is None else matched)
                if matched is not None:
                    self._stop(ticket, Finish("stop", matched=detokenizer.matched))
                    return
            except Exception as error:
                self._fail(ticket, error)
                return
        if request.finish is None:
            self._tell(ticket)

    def _tell(self, ticket: Ticket) -> None:
        notify = ticket.notify
        if ticket.done:  # the last news. The call that is told holds its tickets: a circle, if they held it on
            ticket.notify = _nobody
        try:
            notify(ticket)
        except Exception:  # nobody can be told any more
            self.abort([ticket])

    def _stop(self, ticket: Ticket, finish: Finish) -> None:
        ticket.finished = time.perf_counter()
        ticket.finish = finish  # last: the caller may look at any moment
        self.abort([ticket])
        self._tell(ticket)

    def _finish(self, ticket: Ticket) -> None:
        """The last word on a request that the scheduler, or its caller, has ended."""
        request = ticket.request
        ticket.finished = time.perf_counter()
        if ticket.error is None and request.finish is not None:
            if request.record is not None and request.record.error is not None:
                ticket.error = request.record.error
            elif request.finish.kind == "abort" and request.finish.message is not None:
                ticket.error = NumericsError(f"request {request.rid!r}: {request.finish.message}")
            else:
                self._last_text(ticket, request.finish)
        self._tell(ticket)

    def _last_text(self, ticket: Ticket, finish: Finish) -> None:
        request, detokenizer = ticket.request, ticket.detokenizer
        text, had = ticket.seen
        known = request.num_output
        if detokenizer is not None:
            fresh = request.token_ids[request.prompt_len + had :]
            try:
                text += detokenizer.push(fresh, trim_last=ends_in_stop_token(request))
                text += detokenizer.finish()
            except Exception as error:
                self._fail(ticket, error, notify=False)
                return
            if detokenizer.matched_tokens is not None:
                known, finish = detokenizer.matched_tokens, Finish("stop", matched=detokenizer.matched)
        ticket.seen = (text, known)
        ticket.finish = finish

    def _fail(self, ticket: Ticket, error: Exception, notify: bool = True) -> None:
        """A detokenizer that fails ends its own request only."""
        ticket.error = EngineDeadError(f"request {ticket.request.rid!r}: detokenizing failed: {error}")
        ticket.error.__cause__ = error
        self.abort([ticket])
        if notify:
            self._tell(ticket)


def _nobody(ticket: Ticket) -> None:
    """Is told what nobody waits for any more."""


def ends_in_stop_token(request: Request) -> bool:
    """A stop token stays in output_ids, but its text is left out."""
    return request.num_output > 0 and request.token_ids[-1] in request.stop_ids
