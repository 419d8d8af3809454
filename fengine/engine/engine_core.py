"""Bridge 2: the loop. One thread owns the scheduler and the KV state; a second one (`tickets.py`) makes text.

Everything from outside enters through one queue of closures, so no lock guards scheduler or state. With overlap
step n+1 is scheduled and launched before the result of step n is read (depth 1); without, each is read at once.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from fengine.core.request import Request
from fengine.core.retract import retract
from fengine.core.scheduler import Scheduler
from fengine.core.scheduler_output import SchedulerOutput, Watcher
from fengine.core.step_output import record
from fengine.engine.output_processor import FirstTimes, News, TextLoop, Ticket
from fengine.errors import EngineClosedError, EngineDeadError, FengineError, InvalidRequestError, MemoryReleasedError
from fengine.models.kv_state import KVHandle, KVState, Params
from fengine.worker.input_batch import InputBatch, StepInput
from fengine.worker.step import Result, apply_head


class Runner(Protocol):
    """What the driver needs of a device."""

    params: Params

    def launch(self, kv: KVState, step: StepInput) -> tuple[KVState, Result]: ...


class Driver:
    """Runs steps while there is work. Thread-safe: submit, abort, call, close."""

    def __init__(self, scheduler: Scheduler, tables: InputBatch, runner: Runner, kv: KVState, *, overlap: bool) -> None:
        self.scheduler, self.tables, self.runner, self.overlap = scheduler, tables, runner, overlap
        self.kv = KVHandle(kv)
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.text = TextLoop(self.abort)
        self.tickets: dict[str, Ticket] = {}
        self.times = FirstTimes(scheduler)
        self.watchers: list[Watcher] = [self.times]  # told of every step, in the loop's thread
        self.live: dict[str, Ticket] = {}
        self.flight: tuple[SchedulerOutput, Result] | None = None
        self.steps = 0
        self.output_tokens = 0
        self.weight_version = "default"  # the label of the weights that steps run with
        self.refusals: dict[str, str] = {}  # why no request can run now, by cause: memory that is released
        self.dead: EngineDeadError | None = None
        self.closed = False
        self.paused = False  # no step is planned
        # Orders submissions against close and death. Reentrant: the garbage collector may drop a stream at any moment,
        # also in a thread that holds this lock, and a dropped stream aborts its requests.
        self.door = threading.RLock()
        self.entering: set[str] = set()  # rids handed over that the loop has not seen yet
        self.threads = [
            threading.Thread(target=self._run, name="fengine-steps", daemon=True),
            threading.Thread(target=self.text.run, name="fengine-text", daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    # -- doors, any thread --------------------------------------------------------------------------------------------

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Hands validated requests over, all or none.

        Errors: EngineClosedError, EngineDeadError, MemoryReleasedError, InvalidRequestError for a rid that is in use.
        """
        rids = {ticket.request.rid for ticket in tickets}

        def admit() -> None:
            self.tickets.update((ticket.request.rid, ticket) for ticket in tickets)  # should the loop die, all are told
            for ticket in tickets:
                self._admit(ticket)
            self.entering.difference_update(rids)

        with self.door:
            self._refuse()
            # `entering` first: what the loop takes over meanwhile is in `tickets` before it leaves that set
            taken = sorted(rid for rid in rids if rid in self.entering or rid in self.tickets)
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

        try:
            self._put(lambda: self._drop(tickets))
        except (EngineClosedError, EngineDeadError):
            return  # everything has ended already

    def abort_rids(self, rids: set[str] | None) -> None:
        """Ends the requests with exactly these rids (None: all) that have come so far. Returns at once."""

        def drop() -> None:
            self._drop([t for rid, t in self.tickets.items() if rids is None or rid in rids])

        self._put(drop)

    def pause(self, mode: str) -> None:
        """Plans no step from here on. "abort" ends all requests, "retract" sends those that run back to the queue,
        "in_place" leaves them. When it returns no step is in flight."""

        def stop() -> None:
            self.paused = True
            self.quiesce()
            if mode == "abort":
                self._drop(list(self.tickets.values()))
            elif mode == "retract":
                retract(self.scheduler)

        self.call(stop)

    def resume(self) -> None:
        """Plans steps again."""

        def go_on() -> None:
            self.paused = False

        self.call(go_on)

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs `function` in the loop's thread, between two steps, and returns its result or raises its error."""
        if threading.current_thread() is self.threads[0]:  # the garbage collector may run a finalizer there
            return function()
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
                self._drain(block=self.flight is None and (self.paused or not self.scheduler.has_work))
                self._turn()
            self._settle(EngineClosedError("the engine was shut down while the request was running"))
        except Exception as error:
            dead = EngineDeadError(f"the engine's loop failed: {type(error).__name__}: {error}")
            dead.__cause__ = error
            with self.door:
                self.dead = dead
            self._settle(dead)
        finally:
            del self.kv, self.runner, self.tables, self.flight  # weights, adapters, pages and graphs
            self.text.news.put(None)

    def _drain(self, block: bool) -> None:
        """Runs what came in. Waits for something only when there is nothing else to do."""
        if block:
            self.inbox.get()()
        while not self.inbox.empty():
            self.inbox.get()()

    def _admit(self, ticket: Ticket) -> None:
        self.times.enter(ticket)
        if ticket.live:
            self.live[ticket.request.rid] = ticket
        ticket.request.versions = ((self.weight_version, 0),)
        try:
            self._refuse()
            self.scheduler.add(ticket.request)
        except FengineError as error:  # the door has checked, but the scheduler has the last word
            ticket.error = error
            self.text.news.put(News([], [self._forget(ticket.request)]))

    def _drop(self, tickets: Sequence[Ticket]) -> None:
        finished = []
        for ticket in tickets:
            if self.tickets.get(ticket.request.rid) is ticket:
                self.scheduler.abort(ticket.request.rid)
                finished.append(self._forget(ticket.request))
        if finished:
            self.text.news.put(News([], finished))

    def _refuse(self) -> None:
        for reason in self.refusals.values():
            raise MemoryReleasedError(reason)

    def quiesce(self) -> None:
        """Reads the step in flight, so that every drawn token is known. For functions that run in `call`."""
        if self.flight is not None:
            flight, self.flight = self.flight, None
            self._land(*flight)

    def _turn(self) -> None:
        """Launches the next step, then reads the one before (with overlap) or the same one (without)."""
        output = None if self.paused else self.scheduler.schedule()
        launched = None
        if output is not None:
            for watcher in self.watchers:
                watcher.scheduled(output)
            kv, flight = self.runner.launch(self.kv.take(), self.tables.stage(output))
            self.kv = KVHandle(kv)
            self.steps += 1
            launched = (output, flight)
        if not self.overlap:
            self.flight = launched
        if self.flight is not None:
            self._land(*self.flight)
        self.flight = launched if self.overlap else None

    def _land(self, output: SchedulerOutput, flight: Result) -> None:
        """Reads a step's result, updates the scheduler, and tells the text thread."""
        found, faults = flight(), None
        if found.more:
            head = partial(apply_head, self.runner.params)
            faults = record(self.scheduler.requests_of(output), output.samples, found, head)
        for watcher in self.watchers:
            watcher.landed(output)
        finished = self.scheduler.update(output, found.tokens, found.logprobs, faults)
        self.output_tokens += sum(output.samples)
        now = time.perf_counter()
        live = [
            (t, t.request.num_output)
            for t in self.live.values()
            if t.quiet_until <= now and t.request.num_output > t.num_tokens
        ]
        if live or finished:
            self.text.news.put(News(live, [self._forget(request) for request in finished]))

    def _forget(self, request: Request) -> Ticket:
        ticket = self.tickets.pop(request.rid)
        self.times.forget(request.rid)
        self.live.pop(request.rid, None)
        if not self.tickets:  # an idle engine keeps nothing of the requests that it had
            self.tables.release(self.scheduler.released())
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
            self.text.news.put(News([], [self._forget(ticket.request)]))
