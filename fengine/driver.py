"""Bridge 2: the loop. One thread owns the scheduler and the KV state; a second one turns tokens into text.

Everything from outside enters through one queue of closures, so no lock guards scheduler or state. With overlap
step n+1 is scheduled and launched before the result of step n is read (depth 1); without, each is read at once.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from fengine.batching import RowTables, Staged
from fengine.errors import EngineClosedError, EngineDeadError, FengineError, InvalidRequestError, NumericsError
from fengine.host.scheduler import Plan, Scheduler
from fengine.request import Finish, Request
from fengine.runner import Flight
from fengine.state import KVHandle, KVState
from fengine.text.detokenizer import Detokenizer


class Runner(Protocol):
    """What the driver needs of a device."""

    def launch(self, kv: KVState, staged: Staged) -> tuple[KVState, Flight]: ...


@dataclass(slots=True, eq=False)
class Ticket:
    """A request as its caller sees it. Written by the text thread, read by the caller after `notify`.

    `live` tickets (streamed, or with stop strings) are detokenized step by step, the others once at the end.
    """

    request: Request
    detokenizer: Detokenizer | None
    live: bool
    notify: Callable[["Ticket"], None]
    seen: tuple[str, int] = ("", 0)  # text, and number of output tokens, that the caller may see; replaced as one
    finish: Finish | None = None
    error: FengineError | None = None
    submitted: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    finished: float | None = None

    @property
    def done(self) -> bool:
        return self.finish is not None or self.error is not None

    @property
    def num_tokens(self) -> int:
        return self.seen[1]


@dataclass(slots=True)
class News:
    """One step's tokens for the text thread: live tickets with the number of output tokens known, and the finished."""

    live: list[tuple[Ticket, int]]
    finished: list[Ticket]


class Driver:
    """Runs steps while there is work. Thread-safe: submit, abort, call, close."""

    def __init__(self, scheduler: Scheduler, tables: RowTables, runner: Runner, kv: KVState, *, overlap: bool) -> None:
        self.scheduler, self.tables, self.runner, self.overlap = scheduler, tables, runner, overlap
        self.kv = KVHandle(kv)
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.news: queue.SimpleQueue[News | None] = queue.SimpleQueue()
        self.tickets: dict[str, Ticket] = {}
        self.unstarted: dict[str, Ticket] = {}  # waiting for their first token, which is timed
        self.live: dict[str, Ticket] = {}
        self.flight: tuple[Plan, Flight] | None = None
        self.steps = 0
        self.output_tokens = 0
        self.dead: EngineDeadError | None = None
        self.closed = False
        # Orders submissions against close and death. Reentrant: the garbage collector may drop a stream at any moment,
        # also in a thread that holds this lock, and a dropped stream aborts its requests.
        self.door = threading.RLock()
        self.entering: set[str] = set()  # rids handed over that the loop has not seen yet
        self.threads = [
            threading.Thread(target=self._run, name="fengine-steps", daemon=True),
            threading.Thread(target=self._text, name="fengine-text", daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    # -- doors, any thread --------------------------------------------------------------------------------------------

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Hands validated requests over, all or none.

        Errors: EngineClosedError, EngineDeadError, InvalidRequestError for a rid that is in use.
        """
        rids = {ticket.request.rid for ticket in tickets}

        def admit() -> None:
            for ticket in tickets:
                self._admit(ticket)
            self.entering.difference_update(rids)

        with self.door:
            taken = sorted(rids & (self.tickets.keys() | self.entering))
            if taken:
                raise InvalidRequestError(
                    f"rid {taken[0]!r} is in use by a request that has not finished; choose another"
                )
            self.entering.update(rids)
            try:
                self._put(admit)
            except FengineError:
                self.entering.difference_update(rids)
                raise

    def abort(self, tickets: Sequence[Ticket]) -> None:
        """Ends requests early, in whatever state they are; those already finished or unknown are left alone."""

        def drop() -> None:
            finished = []
            for ticket in tickets:
                if self.tickets.get(ticket.request.rid) is ticket:
                    self.scheduler.abort(ticket.request.rid)
                    finished.append(self._forget(ticket.request))
            if finished:
                self.news.put(News([], finished))

        try:
            self._put(drop)
        except (EngineClosedError, EngineDeadError):
            return  # everything has ended already

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs `function` in the loop's thread, between two steps, and returns its result or raises its error."""
        reply: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                reply.put((function(), None))
            except Exception as error:  # it belongs to the caller
                reply.put((None, error))

        self._put(run)
        while True:
            try:
                value, error = reply.get(timeout=1.0)
            except queue.Empty:
                if not self.threads[0].is_alive():
                    raise self.dead or EngineClosedError("the engine was shut down during the call") from None
                continue
            if error is not None:
                raise error
            return value

    def close(self) -> None:
        """Stops both threads; every unfinished request ends with EngineClosedError. Idempotent.

        When it returns, the device's memory is free. Only one of the two threads itself, which the garbage collector
        may make call this, cannot wait: they then end by themselves.
        """
        with self.door:
            first, self.closed = not self.closed, True
        if first:
            self.inbox.put(lambda: None)  # wakes the loop
        if threading.current_thread() not in self.threads:
            for thread in self.threads:
                thread.join()

    def _put(self, closure: Callable[[], None]) -> None:
        with self.door:
            if self.dead is not None:
                raise EngineDeadError(str(self.dead)) from self.dead.__cause__
            if self.closed:
                raise EngineClosedError("the engine was shut down; create a new Engine")
            self.inbox.put(closure)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self.closed:
                self._drain(block=self.flight is None and not self.scheduler.has_work)
                self._turn()
            self._settle(EngineClosedError("the engine was shut down while the request was running"))
        except Exception as error:
            dead = EngineDeadError(f"the engine's loop failed: {type(error).__name__}: {error}")
            dead.__cause__ = error
            with self.door:
                self.dead = dead
            self._settle(dead)
        finally:
            del self.kv, self.runner, self.flight  # weights, pages and graphs
            self.news.put(None)

    def _drain(self, block: bool) -> None:
        """Runs what came in. Waits for something only when there is nothing else to do."""
        if block:
            self.inbox.get()()
        while not self.inbox.empty():
            self.inbox.get()()

    def _admit(self, ticket: Ticket) -> None:
        rid = ticket.request.rid
        self.tickets[rid] = self.unstarted[rid] = ticket
        if ticket.live:
            self.live[rid] = ticket
        try:
            self.scheduler.add(ticket.request)
        except FengineError as error:  # the door has checked, but the scheduler has the last word
            ticket.error = error
            self.news.put(News([], [self._forget(ticket.request)]))

    def _turn(self) -> None:
        """Launches the next step, then reads the one before (with overlap) or the same one (without)."""
        plan = self.scheduler.schedule()
        launched = None
        if plan is not None:
            kv, flight = self.runner.launch(self.kv.take(), self.tables.stage(plan))
            self.kv = KVHandle(kv)
            self.steps += 1
            launched = (plan, flight)
        if not self.overlap:
            self.flight = launched
        if self.flight is not None:
            self._land(*self.flight)
        self.flight = launched if self.overlap else None

    def _land(self, plan: Plan, flight: Flight) -> None:
        """Reads a step's result, updates the scheduler, and tells the text thread."""
        tokens, logprobs = flight.result()
        finished = self.scheduler.update(plan, tokens, logprobs)
        self.output_tokens += sum(plan.samples)
        if self.unstarted:
            self._time_first_tokens(plan)
        live = [(t, t.request.num_output) for t in self.live.values() if t.request.num_output > t.num_tokens]
        if live or finished:
            self.news.put(News(live, [self._forget(request) for request in finished]))

    def _time_first_tokens(self, plan: Plan) -> None:
        now = time.perf_counter()
        for request, sampled in zip(plan.requests, plan.samples, strict=True):
            if sampled and request.rid in self.unstarted:
                self.unstarted.pop(request.rid).first_token = now

    def _forget(self, request: Request) -> Ticket:
        ticket = self.tickets.pop(request.rid)
        self.unstarted.pop(request.rid, None)
        self.live.pop(request.rid, None)
        return ticket

    def _settle(self, error: FengineError) -> None:
        """Ends every request that is still open, including those that wait in the inbox."""
        while not self.inbox.empty():
            try:
                self.inbox.get()()
            except Exception:
                continue  # its caller learns of the end by the thread's death
        for ticket in list(self.tickets.values()):
            with suppress(FengineError):  # the scheduler may be what failed
                self.scheduler.abort(ticket.request.rid)
            ticket.error = error
            self.news.put(News([], [self._forget(ticket.request)]))

    # -- text ----------------------------------------------------------------------------------------------------------

    def _text(self) -> None:
        while (news := self.news.get()) is not None:
            for ticket, known in news.live:
                if not ticket.done:
                    self._push(ticket, known)
            for ticket in news.finished:
                if ticket.finish is None:
                    self._finish(ticket)

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
            ticket.notify(ticket)

    def _stop(self, ticket: Ticket, finish: Finish) -> None:
        ticket.finished = time.perf_counter()
        ticket.finish = finish  # last: the caller may look at any moment
        self.abort([ticket])
        ticket.notify(ticket)

    def _finish(self, ticket: Ticket) -> None:
        """The last word on a request that the scheduler, or its caller, has ended."""
        request = ticket.request
        ticket.finished = time.perf_counter()
        if ticket.error is None and request.finish is not None:
            if request.finish.kind == "abort" and request.finish.message is not None:
                ticket.error = NumericsError(f"request {request.rid!r}: {request.finish.message}")
            else:
                self._last_text(ticket, request.finish)
        ticket.notify(ticket)

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
            ticket.notify(ticket)


def ends_in_stop_token(request: Request) -> bool:
    """A stop token stays in output_ids, but its text is left out."""
    return request.num_output > 0 and request.token_ids[-1] in request.stop_ids
