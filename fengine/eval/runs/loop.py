"""Sends a task's rows through an engine that is batching all the while, and journals them as they finish. No torch.

A bounded window of rows is in flight, so memory does not grow with the input. A row's record holds only what belongs to
its requests, and its seeds derive from the run's seed and the row's id, so it does not matter when it is computed, in
which batch, or by which process of a run that was interrupted."""

import asyncio
import re
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from fengine.errors import InputFileError, StorageError
from fengine.eval.cli.engines import responder
from fengine.eval.cli.view import STREAMED_ROWS, Progress, QuietView, Shown, count, duration
from fengine.eval.runs.answering import FATAL, Asker, answer_row
from fengine.eval.runs.config import EvalConfig, parse_shard
from fengine.eval.runs.index import OK, ROW_HEAD, RowIndex, RowTable, row_key
from fengine.eval.runs.journal import Journal, framed
from fengine.eval.runs.output import InOrder, answer_request, prompt_of
from fengine.eval.runs.record import error_record, line_of
from fengine.eval.runs.trace import Trace
from fengine.eval.tasks.scoring import primary
from fengine.eval.tasks.task import BadRow, Row, Task, rows_of
from fengine.eval.tasks.task_config import Format

INTERRUPTED = "interrupted"
WINDOW = 4  # rows in flight for each row that can run at once: some are long, and the others go on
TICK_SECONDS = 0.125
TOGETHER = 1 << 20  # bytes of records from which on a write of several rows takes no further one
ALIKE = 20  # rows that fail for one reason, before any is good, end the run
RATE_SECONDS, MIN_SECONDS = 2.0, 0.25  # over which the live rates are taken; shorter spans give none
MAX_LATENCIES = 100_000
MIN_ROWS = 8  # from which on it is told how long the rest takes


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
    exported: bool = False  # a file will have all rows


class _Done(NamedTuple):
    index: int
    row: Row | BadRow
    record: dict[str, Any]
    line: bytes  # the record, as it is written
    metas: list[dict[str, Any]]
    started: float
    seconds: float


class Loop:
    """One process's part of a run. `ended` says how: "" is to the end, else why not; `terminated`: by SIGTERM."""

    def __init__(self, job: Job, engine: Any, view: QuietView) -> None:
        self.job, self.view = job, view
        self.ended, self.terminated = "", False
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
        self.flight: set[asyncio.Task[None]] = set()
        self.finished: deque[_Done] = deque()
        self.in_order = InOrder(job.table, job.journal.path, job.config.show, view, job.exported)
        self.wake = asyncio.Event()
        self.fatal: BaseException | None = None
        self.before = job.rows.rows - job.table.left
        self.reasons: set[str] = set()  # of failures of the first ALIKE rows

    async def run(self) -> None:
        """Computes what the table lacks. Interrupted, it journals what has finished, and says so. Errors:
        EngineDeadError, EngineClosedError, StorageError; InputFileError if the input is not what was indexed."""
        feed = asyncio.create_task(self._feed())
        with self.view.job(), self._terminating(feed), self.in_order:
            ticker = asyncio.create_task(self._tick())
            try:
                await feed
            except asyncio.CancelledError:  # Ctrl-C or SIGTERM
                self.ended = INTERRUPTED
            finally:
                ticker.cancel()
                for task in self.flight:
                    task.cancel()
                await asyncio.gather(ticker, *self.flight, return_exceptions=True)
                self._drain()

    async def _feed(self) -> None:
        """Keeps the window full, until all rows are there or the run is over."""
        rows, index = self.job.rows, -1
        for index, row in enumerate(rows_of(self.job.task, parse_shard(self.job.config.run.shard))):
            if index >= rows.rows or row_key(row) != rows.keys[index]:
                raise _changed(index)
            if self.job.table.known[index] == OK:
                continue
            task = asyncio.create_task(self._one(index, row))
            self.flight.add(task)
            task.add_done_callback(self._landed)
            if not await self._room(self.window):
                return
        if index + 1 != rows.rows:
            raise _changed(index + 1)
        await self._room(1)

    async def _room(self, window: int) -> bool:
        """Journals what has finished, and waits until fewer than `window` rows are in flight. False: it is over."""
        meter, limit = self.meter, self.job.config.max_errors
        while True:
            self.wake.clear()
            self._drain()
            if self.fatal is not None:
                raise self.fatal
            if limit is not None and meter.failed > limit:
                self.ended = f"stopped by max_errors={limit}"
            elif len(self.reasons) == 1 and meter.failed == meter.rows >= ALIKE:
                self.ended = f"stopped, since the first {ALIKE} rows failed alike ({min(self.reasons)})"
            if self.ended or len(self.flight) < window:
                return not self.ended
            await self.wake.wait()

    def _landed(self, task: asyncio.Task[None]) -> None:
        """A row is in flight no more: only then does who waits for room look again."""
        self.flight.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.fatal = self.fatal or task.exception()
        self.wake.set()

    async def _one(self, index: int, row: Row | BadRow) -> None:
        """Asks and scores one row; whatever fails that is the row's own becomes its record."""
        started, clock, metas = time.time(), time.perf_counter(), []
        try:
            if isinstance(row, BadRow):
                line = line_of(record := error_record(row))
            else:
                seen = None
                if self.stride and index % self.stride == 0:
                    seen = partial(self._watch, index, prompt_of(row.data) or f"row {row.id}")
                record, line = await self.answer(row, metas, seen)
        except FATAL as error:
            self.fatal = self.fatal or error
            return
        except Exception as error:  # the engine's word on this row, or a fault of the task's own code with it
            line = line_of(record := error_record(row, error))
        finally:
            self.growing.pop(index, None)
        self.finished.append(_Done(index, row, record, line, metas, started, time.perf_counter() - clock))

    def _watch(self, index: int, prompt: str, text: str) -> None:
        """Takes a row's text while it grows."""
        self.growing[index] = Shown(index + 1, prompt, text)

    def _drain(self) -> None:
        """Journals the rows that have finished, together; then counts and shows them. Errors: StorageError."""
        while self.finished:
            done, size = [], 0
            while self.finished and size < TOGETHER:
                done.append(self.finished.popleft())
                size += len(done[-1].line)
            for one, offset in zip(done, self.keep(done), strict=True):
                self.job.table.put(one.index, "error" not in one.record, offset)
                self.job.trace.row(one.index, one.row.id, one.metas)
                if (error := one.record.get("error")) is not None and self.meter.rows < ALIKE:
                    reason = re.sub(r"""^row (['"]).*?\1: """, "", error["message"])
                    self.reasons.add(f"{error['type']}: {reason}")
                self.meter.count(one.metas, error is not None, one.record.get("scores", {}))
                self.in_order.put(one.index)
            self.in_order.advance()

    def keep(self, done: list[_Done]) -> list[int]:
        """Journals rows by one write and returns their offsets. Errors: StorageError."""
        lines, keys, session = [], self.job.rows.keys, self.job.session
        for one in done:
            tokens = [sum([meta[name] for meta in one.metas]) for name in ("prompt_tokens", "completion_tokens")]
            ok = "error" not in one.record
            head = ROW_HEAD % (one.index, ok, keys[one.index], session, one.started, one.seconds, *tokens)
            lines.append(framed(head, one.line))
        return self.job.journal.extend(lines)

    async def _tick(self) -> None:
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

    @contextmanager
    def _terminating(self, feed: asyncio.Task[None]) -> Iterator[None]:
        """Inside, SIGTERM ends the run as Ctrl-C does, and one that is ending goes on. Nothing is done off the main
        thread."""
        loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def end() -> None:
            self.terminated |= feed.cancel()

        loop.add_signal_handler(signal.SIGTERM, end)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, before)


def _changed(index: int) -> InputFileError:
    return InputFileError(
        f"the input has changed while the run was reading it, at row {index + 1:,}; put it back and run the same "
        "command again, or choose another out=DIR for the new input"
    )


class Meter:
    """Rows and tokens, and the engine's own counters since it was made. Modified by `count`, once for every row."""

    def __init__(self, stats: Callable[[], dict[str, Any]]) -> None:
        self.stats, self.before, self.started = stats, stats(), time.perf_counter()
        self.rows = self.failed = 0
        self.tokens = dict.fromkeys(("prompt_tokens", "completion_tokens", "cached_tokens"), 0)
        self.latencies: deque[float] = deque(maxlen=MAX_LATENCIES)
        self.moments: deque[tuple[float, int, int]] = deque()
        self.score = ("", 0, 0.0)  # the name of what says right or wrong, of how many rows, their sum

    def count(self, metas: list[dict[str, Any]], failed: bool, scores: dict[str, Any]) -> None:
        """One row, by the `meta_info` of its requests and its scores."""
        self.rows += 1
        self.failed += failed
        if (name := primary(scores)) is not None:
            self.score = (name, self.score[1] + 1, self.score[2] + scores[name])
        for meta in () if failed else metas:
            for name in self.tokens:
                self.tokens[name] += meta[name]
            self.latencies += [meta["first_token_latency"]] if "first_token_latency" in meta else []

    def progress(self, before: int, total: int | None, growing: tuple[Shown, ...]) -> Progress:
        """This moment; `before` rows were there when it began."""
        stats, now, seconds = self.stats(), time.perf_counter(), self.seconds
        computed = stats["computed_tokens"] - stats["output_tokens"]  # of prompts, but for a row's first token
        self.moments.append((now, computed, stats["output_tokens"]))
        while now - self.moments[0][0] > RATE_SECONDS:
            self.moments.popleft()
        then, tokens_in, tokens_out = self.moments[0]
        span = max(now - then, MIN_SECONDS)
        rates = {"in_rate": max(0, computed - tokens_in) / span}
        rates["out_rate"] = (stats["output_tokens"] - tokens_out) / span
        enough = total is not None and self.rows >= MIN_ROWS and seconds >= RATE_SECONDS
        remaining = seconds * ((total or 0) - before - self.rows) / self.rows if enough else None
        gauges = {name: stats[name] for name in ("running", "waiting", "pages_used", "pages_total")}
        name, scored, score = self.score
        told = f"{name} {score / scored:.3f}" if scored else ""
        return Progress(self.rows + before, total, self.failed, seconds=seconds, growing=growing, remaining=remaining,
                        score=told, **rates, **gauges)  # fmt: skip

    def lines(self, reused: bool) -> list[tuple[str, str]]:
        """(label, figures) of what was computed, for readers."""
        stats, before = self.stats(), self.before
        read, drawn, cached = self.tokens.values()
        rates = [number / self.seconds if self.seconds else 0.0 for number in (read, drawn)]
        compiles = stats["compiles"] - before["compiles"]
        engine = f"start {duration(stats['start_seconds'])}, of it compile {duration(stats['compile_seconds'])}"
        if reused:
            engine = "reused, nothing loaded or compiled" + (f" ({compiles} compiles!)" if compiles else "")
        steps, again = (count(stats[name] - before[name], name[:-1]) for name in ("steps", "preemptions"))
        return [
            ("tokens", f"{read:,} in ({cached:,} from the prefix cache), {drawn:,} out"),
            ("speed", f"{rates[0]:,.0f} tok/s in, {rates[1]:,.0f} tok/s out"),
            ("first token", f"median {duration(statistics.median(self.latencies))}" if self.latencies else "-"),
            ("engine", f"{engine}; {steps}, {again}"),
        ]

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started
