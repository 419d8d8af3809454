"""Sends a task's rows through an engine that is batching all the while, and journals them as they finish. No torch.

A bounded window of rows is in flight, so memory does not grow with the input. A row's record holds only what belongs to
its requests, and its seeds derive from the run's seed and the row's id, so it does not matter when it is computed, in
which batch, or by which process of a run that was interrupted.
"""

import asyncio
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fengine.errors import InputFileError, StorageError
from fengine.eval.cli.engines import responder
from fengine.eval.cli.view import STREAMED_ROWS, QuietView, Shown
from fengine.eval.runs.answering import FATAL, Asker, answer_row
from fengine.eval.runs.batch import answer_request
from fengine.eval.runs.config import EvalConfig, parse_shard
from fengine.eval.runs.index import OK, ROW_HEAD, RowIndex, RowTable, row_key
from fengine.eval.runs.journal import Journal, framed
from fengine.eval.runs.meter import Meter
from fengine.eval.runs.output import Export, InOrder, prompt_of
from fengine.eval.runs.record import error_record, line_of
from fengine.eval.runs.trace import Trace
from fengine.eval.tasks.task import BadRow, Row, Task, rows_of
from fengine.eval.tasks.task_config import Format

INTERRUPTED = "interrupted"
WINDOW = 4  # rows in flight for each row that can run at once: some are long, and the others go on
TICK_SECONDS = 0.125
TOGETHER = 1 << 20  # bytes of records from which on a write of several rows takes no further one
ALIKE = 20  # rows that fail for one reason, before any is good, end the run


@dataclass
class Job:
    """What is open while rows are computed. `session` is the number of this process among those of the run."""

    config: EvalConfig
    task: Task
    rows: RowIndex
    table: RowTable
    journal: Journal
    trace: Trace
    session: int
    export: Export | None = None


@dataclass
class Outcome:
    """How it ended: "" is to the end, else why not. `terminated`: interrupted by SIGTERM."""

    ended: str = ""
    terminated: bool = False
    figures: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class _Done:
    index: int
    row: Row | BadRow
    record: dict[str, Any]
    line: bytes  # the record, as it is written
    metas: list[dict[str, Any]] = field(default_factory=list)
    started: float = 0.0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return "error" not in self.record


async def run(job: Job, engine: Any, view: QuietView, reused: bool = False) -> Outcome:
    """Computes what the table lacks. Interrupted, it journals what has finished, and says so.

    Errors: EngineDeadError, EngineClosedError, StorageError; InputFileError if the input is not what was indexed.
    """
    loop = _Loop(job, engine, view)
    try:
        await loop.run()
    finally:
        loop.in_order.close()
    loop.outcome.figures, loop.outcome.seconds = loop.meter.lines(reused), loop.meter.seconds
    return loop.outcome


class _Loop:
    """The state of one process's part of a run."""

    def __init__(self, job: Job, engine: Any, view: QuietView) -> None:
        self.job, self.view, self.engine = job, view, engine
        asker = Asker(engine, job.config.top_logprobs, adapter=job.config.adapter)
        self.answer = partial(answer_row, asker, job.config, job.task)
        if job.config.task.format is Format.batch:
            self.answer = partial(answer_request, responder(engine), job.config.seed)
        self.meter = Meter(engine.stats)
        at_once = engine.config.scheduler.max_running_requests
        self.window = WINDOW * at_once
        # Streaming has its price, so that only as many rows are streamed as the view shows of those that run.
        self.stride = max(1, min(at_once, job.table.left) // STREAMED_ROWS) if view.streams else 0
        self.growing: dict[int, Shown] = {}
        self.open: dict[int, Row | BadRow] = {}
        self.flight: set[asyncio.Task[None]] = set()
        self.finished: deque[_Done] = deque()
        self.in_order = InOrder(job.table, job.journal.path, job.export, job.config.show, view)
        self.wake = asyncio.Event()
        self.fatal: BaseException | None = None
        self.before = job.rows.rows - job.table.left
        self.reasons: set[str] = set()  # of failures, as long as no row was good
        self.outcome = Outcome()

    async def run(self) -> None:
        with self.view.job(), _terminating(self.outcome):
            ticker = asyncio.create_task(self.tick())
            try:
                await self.feed()
            except asyncio.CancelledError:  # Ctrl-C or SIGTERM
                self.outcome.ended = INTERRUPTED
            finally:
                ticker.cancel()
                for task in self.flight:
                    task.cancel()
                await asyncio.gather(ticker, *self.flight, return_exceptions=True)
                self.drain()
            self.in_order.end(self.open)
            self.job.journal.sync()

    async def feed(self) -> None:
        """Keeps the window full, until all rows are there or the run is over."""
        rows, index = self.job.rows, -1
        for index, row in enumerate(rows_of(self.job.task, parse_shard(self.job.config.run.shard))):
            if index >= rows.rows or row_key(row) != rows.keys[index]:
                raise _changed(index)
            if self.job.table.known[index] == OK:
                continue
            self.open[index] = row
            task = asyncio.create_task(self.one(index, row))
            self.flight.add(task)
            task.add_done_callback(self.landed)
            self.in_order.fed = index
            if not await self.room(self.window):
                return
        if index + 1 != rows.rows:
            raise _changed(index + 1)
        await self.room(1)

    async def room(self, window: int) -> bool:
        """Journals what has finished, and waits until fewer than `window` rows are in flight. False: it is over."""
        while True:
            self.wake.clear()
            self.drain()
            if self.fatal is not None:
                raise self.fatal
            limit = self.job.config.max_errors
            if limit is not None and self.meter.failed > limit:
                self.outcome.ended = f"stopped by max_errors={limit}"
                return False
            if len(self.reasons) == 1 and self.meter.failed == self.meter.rows >= ALIKE:
                self.outcome.ended = f"stopped, since the first {ALIKE} rows failed alike ({min(self.reasons)})"
                return False
            if len(self.flight) < window:
                return True
            await self.wake.wait()

    def landed(self, task: asyncio.Task[None]) -> None:
        """A row is in flight no more: only then does who waits for room look again."""
        self.flight.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.fatal = self.fatal or task.exception()
        self.wake.set()

    # -- one row -------------------------------------------------------------------------------------------------------

    async def one(self, index: int, row: Row | BadRow) -> None:
        """Asks and scores one row; whatever fails that is the row's own becomes its record."""
        started, clock, metas = time.time(), time.perf_counter(), []
        try:
            if isinstance(row, BadRow):
                line = line_of(record := error_record(row))
            else:
                seen = self.watch(index, row) if self.stride and index % self.stride == 0 else None
                record, line = await self.answer(row, metas, seen)
        except FATAL as error:
            self.fatal = self.fatal or error
            return
        except Exception as error:  # the engine's word on this row, or a fault of the task's own code with it
            line = line_of(record := error_record(row, error))
        finally:
            self.growing.pop(index, None)
        self.finished.append(_Done(index, row, record, line, metas, started, time.perf_counter() - clock))

    def watch(self, index: int, row: Row) -> Callable[[str], None]:
        """What takes a row's text while it grows."""
        prompt = prompt_of(row.data) or f"row {row.id}"

        def seen(text: str) -> None:
            self.growing[index] = Shown(index + 1, prompt, text)

        return seen

    def drain(self) -> None:
        """Journals the rows that have finished, together; then counts and shows them. Errors: StorageError."""
        while self.finished:
            done, size = [], 0
            while self.finished and size < TOGETHER:
                done.append(self.finished.popleft())
                size += len(done[-1].line)
            for one, offset in zip(done, self.keep(done), strict=True):
                self.job.table.put(one.index, one.ok, offset)
                self.job.trace.row(one.index, one.row.id, one.metas)
                self.count(one)
                self.in_order.put(one.index)
                del self.open[one.index]
            self.in_order.advance()

    def keep(self, done: list[_Done]) -> list[int]:
        """Journals rows by one write and returns their offsets. Errors: StorageError."""
        lines, keys, session = [], self.job.rows.keys, self.job.session
        for one in done:
            tokens = [sum([meta[name] for meta in one.metas]) for name in ("prompt_tokens", "completion_tokens")]
            head = ROW_HEAD % (one.index, one.ok, keys[one.index], session, one.started, one.seconds, *tokens)
            lines.append(framed(head, one.line))
        return self.job.journal.extend(lines)

    def count(self, done: _Done) -> None:
        if not done.ok:
            error = done.record["error"]
            self.reasons.add(re.sub(r"^row '[^']*': ", "", f"{error['type']}: {error['message']}"))
            self.meter.count_failure()
            return
        for meta in done.metas:
            self.meter.count(meta)
        self.meter.rows += 1 - len(done.metas)  # the meter counts requests; here it is rows

    async def tick(self) -> None:
        """Progress, gauges and overdue syncs until cancelled."""
        while True:
            progress = self.meter.progress(self.before, self.job.rows.rows, tuple(self.growing.values()))
            self.view.progress(progress)
            self.job.trace.gauges(progress, time.time())
            try:
                self.job.journal.sync_if_due()
            except StorageError as error:
                self.fatal = self.fatal or error
                self.wake.set()
            await asyncio.sleep(TICK_SECONDS)


def _changed(index: int) -> InputFileError:
    return InputFileError(
        f"the input has changed while the run was reading it, at row {index + 1:,}; put it back and run the same "
        "command again, or choose another out=DIR for the new input"
    )


class _terminating:
    """Inside, SIGTERM ends the run as Ctrl-C does, and `outcome` tells. Nothing is done off the main thread."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.on = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> None:
        if self.on:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            assert task is not None

            def end() -> None:
                self.outcome.terminated = True
                task.cancel()

            loop.add_signal_handler(signal.SIGTERM, end)

    def __exit__(self, *_: object) -> None:
        if self.on:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
