"""`trace.json`: a run for Perfetto (ui.perfetto.dev) or chrome://tracing, and for `fengine report`. No torch.

Format: the JSON array of Chrome's Trace Event Format, one event a line; the closing bracket is missing where the
process was killed, which the format allows. Times are microseconds since the Unix epoch. The process id is the number
of the session. A trace is for looking at: it is not synced, and when it cannot be written it ends. A run that goes on
appends to it.

`trace=requests`: a request is up to three spans (queue, prefill, decode) on the first line that was free, so there are
as many lines as requests ran at once; beside them are gauges of the engine.

`trace=steps`: besides, on thread 0, one span for each step of the scheduler, named by its kind, from its launch (or the
landing of the one before, if that is later) to its landing. Requests are numbered as they come; a row's spans have the
number of its request. The span's arguments are numbers and short texts:

    rows       "3@128+64 5@40+1"      request 3 computed 64 tokens from token 128 on, request 5 one
    decode     "5"                    of these, the requests that fed what they had drawn
    pages      "3:0:2:17-18,40"       request 3 has new pages from page 0 of its table on, the pages 17, 18, 40 of the
                                      pool; the first 2 are prefix hits
    drafted    "3:7"                  of the tokens of request 3 the last 7 were guesses
    shrunk     "3:5"                  request 3 gave all but its first 5 pages back: wrong guesses had held them
    released   "4"                    requests that gave their pages back before these were handed out
    preempted  "4"                    of these, the ones that will be computed again"""

import errno
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, BinaryIO

from fengine.core.step_trace import StepRecord
from fengine.eval.cli.view import Progress

END = b"\n]\n"
MAX_BYTES = 192 << 20  # a longer run keeps its first part
MAX_LINE = 16 << 20  # no line of ours is longer
PHASES = (
    ("queue", "request_received_ts", "forward_entry_time"),
    ("prefill", "forward_entry_time", "prefill_finished_time"),
    ("decode", "prefill_finished_time", "request_finished_ts"),
)

SPAN = (
    '{"ph":"X","cat":"request","name":"%s","pid":%d,"tid":%d,"ts":%.1f,"dur":%.1f,'
    '"args":{%s"row":%d,"id":%s,"prompt_tokens":%d,"completion_tokens":%d}}'
)
STEP = (
    '{"ph":"X","cat":"step","name":"%s","pid":%d,"tid":0,"ts":%.1f,"dur":%.1f,"args":{"step":%d,"tokens":%d,'
    '"rows":"%s","decode":"%s","drafted":"%s","pages":"%s","shrunk":"%s","released":"%s","preempted":"%s",'
    '"running":%d,"waiting":%d,"held":%d,"cached":%d,"pool":%d}}'
)


class Trace(AbstractContextManager["Trace"]):
    """Writes events as they come, from any thread. Modified by every method; nothing raises for the disk's sake."""

    def __init__(self, path: Path | None, session: int, *, steps: bool = False) -> None:
        """`path` None: no trace. `session` numbers the processes of a run, each its own group of lines."""
        self.session, self.steps = session, steps
        self.problem: str | None = None  # why it ended before its time
        self._file: BinaryIO | None = None
        if path is not None:
            try:
                self._file = _reopen(path)
            except OSError as error:
                self._fail(error)
        self._room = MAX_BYTES - (0 if self._file is None else self._file.tell())
        self._lock = threading.Lock()
        self._ends: list[float] = []  # of each line's last request
        self._numbers: dict[str, int] = {}  # by rid, of requests that may still be told of
        self._over: dict[str, str] = {}  # by rid, which of "row" and "pages" has ended before the other
        self._count = 0  # requests numbered
        self._landed = 0.0  # when the last step did
        self._shown: dict[str, dict[str, int]] = {}  # the last values of each counter
        self._epoch = time.time() - time.perf_counter()
        self._meta("process_name", f"fengine eval, session {session}")
        if steps:
            self._meta("thread_name", "steps of the scheduler")

    def row(self, index: int, row_id: str, metas: Sequence[Mapping[str, Any]]) -> None:
        if self._file is None:
            return
        told = json.dumps(row_id)
        for meta in metas:
            number = self._numbers.get(rid := meta.get("id", ""))
            if number is not None:  # with overlap a step may yet be told that it had a part in
                self._end(rid, "row")
            times = [(name, meta.get(a), meta.get(b)) for name, a, b in PHASES]
            spans = [(name, a, b) for name, a, b in times if a is not None and b is not None]
            if not spans:
                continue
            line, tokens = self._line(spans[0][1], spans[-1][2]), (meta["prompt_tokens"], meta["completion_tokens"])
            which = "" if number is None else f'"request":{number},'
            for name, a, b in spans:
                times_us = a * 1e6, max(b - a, 0.0) * 1e6
                self._put(SPAN % (name, self.session, line, *times_us, which, index, told, *tokens))

    def gauges(self, progress: Progress, now: float) -> None:
        """The engine at this moment (`time.time`)."""
        rates = {"in": round(progress.in_rate, 1), "out": round(progress.out_rate, 1)}
        self._counter("tokens a second", now * 1e6, rates)
        if not self.steps:  # these tell it better
            self._counter("requests", now * 1e6, {"running": progress.running, "waiting": progress.waiting})
            self._counter("pages", now * 1e6, {"used": progress.pages_used})

    def step(self, record: StepRecord) -> None:
        """One step of the scheduler. For `Engine.steps_told`."""
        if self._file is None:
            return
        for rid in record.rids:
            if rid not in self._numbers:
                self._numbers[rid] = self._count = self._count + 1
        start = max(record.launched, self._landed)
        self._landed = record.landed
        begun, took, tokens = (self._epoch + start) * 1e6, (record.landed - start) * 1e6, sum(record.counts)
        gauges = (record.running, record.waiting, record.held, record.cached, record.pages)
        self._put(STEP % (record.kind, self.session, begun, took, record.step, tokens, *self._texts(record), *gauges))
        for rid in record.released:
            self._end(rid, "pages")
        for new in record.new_pages:  # preempted, and back again
            if self._over.get(new.rid) == "pages":
                del self._over[new.rid]
        decoded = sum(c for c, d in zip(record.counts, record.decodes, strict=True) if d)
        for name, values in (
            ("requests", {"running": record.running, "waiting": record.waiting}),
            ("pages", {"held": record.held, "cached": record.cached}),
            ("tokens of a step", {"prefill": tokens - decoded, "decode": decoded}),
        ):
            if self._shown.get(name) != values:
                self._shown[name] = values
                self._counter(name, begun, values)

    def close(self) -> None:
        """Ends the array. Idempotent."""
        with self._lock:
            last = {"ph": "M", "name": "process_sort_index", "pid": self.session, "args": {"sort_index": self.session}}
            file, self._file = self._file, None
            if file is None:
                return
            try:
                with file:
                    file.write(json.dumps(last).encode() + END)
            except OSError as error:
                self._fail(error)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fail(self, error: OSError) -> None:
        self._file, self.problem = None, f"trace.json cannot be written, and ends: {error.strerror or error}"

    def _texts(self, record: StepRecord) -> tuple[str, ...]:
        """rows, decode, drafted, pages, shrunk, released, preempted, as the file's head has them."""
        number, some = self._numbers, record.drafted
        rows = list(zip(record.rids, record.starts, record.counts, record.decodes, strict=True))
        found = (
            [f"{number[rid]}@{start}+{count}" for rid, start, count, _ in rows],
            [str(number[rid]) for rid, _, _, decodes in rows if decodes],
            [f"{number[rid]}:{n}" for rid, n in zip(record.rids, some, strict=False) if n],
            [f"{number[n.rid]}:{n.first}:{n.hits}:{runs_text(n.pages)}" for n in record.new_pages if n.rid in number],
            [f"{number[rid]}:{kept}" for rid, kept in record.shrunk if rid in number],
            [str(number[rid]) for rid in record.released if rid in number],
            [str(number[rid]) for rid in record.preempted if rid in number],
        )
        return tuple(map(" ".join, found))

    def _end(self, rid: str, what: str) -> None:
        """Forgets a request's number when its row has come, and it is told that its pages were given back."""
        if self._over.setdefault(rid, what) != what:
            del self._over[rid]
            self._numbers.pop(rid, None)

    def _line(self, start: float, end: float) -> int:
        """The first line that is free from `start` on."""
        for line, busy in enumerate(self._ends):
            if busy <= start:
                self._ends[line] = end
                return line + 1
        self._ends.append(end)
        return len(self._ends)

    def _counter(self, name: str, at: float, values: dict[str, Any]) -> None:
        """`at` in microseconds."""
        self._put(json.dumps({"ph": "C", "name": name, "pid": self.session, "ts": round(at, 1), "args": values}))

    def _meta(self, kind: str, name: str) -> None:
        self._put(json.dumps({"ph": "M", "name": kind, "pid": self.session, "tid": 0, "args": {"name": name}}))

    def _put(self, event: str) -> None:
        line = event.encode() + b",\n"
        with self._lock:
            if self._file is None or self._room < len(line):
                self._room = 0  # what came first is kept, without gaps
                return
            try:
                self._file.write(line)
                self._room -= len(line)
            except OSError as error:
                self._fail(error)


def runs_text(pages: Sequence[int]) -> str:
    """Page numbers, "17-19,40" for 17, 18, 19, 40: in their order, runs of neighbours joined. Pure."""
    runs: list[list[int]] = []
    for page in pages:
        if runs and runs[-1][1] + 1 == page:
            runs[-1][1] = page
        else:
            runs.append([page, page])
    return ",".join([str(a) if a == b else f"{a}-{b}" for a, b in runs])


def events(path: Path) -> Iterator[dict[str, Any] | None]:
    """The events of a trace in the order of the file, one in memory at a time; None for a line that is none. A last
    line that was torn off is left out. Errors: OSError."""
    if path.exists() and not path.is_file():  # a named pipe would be waited for
        raise OSError(errno.EINVAL, "it is no file")
    with path.open("rb", buffering=1 << 20) as file:
        while line := file.readline(MAX_LINE):
            text = line.strip().rstrip(b",")
            if text in (b"", b"[", b"]"):
                continue
            event = None
            with suppress(ValueError, RecursionError):
                event = json.loads(text)
            if isinstance(event, dict) or line.endswith(b"\n"):
                yield event if isinstance(event, dict) else None


def _reopen(path: Path) -> BinaryIO:
    """The file, ready for one more event: cut behind its last whole one. Errors: OSError."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no file")
    file = path.open("r+b" if path.exists() else "w+b")
    try:
        ended = going = -1
        if os.fstat(file.fileno()).st_size:
            with mmap(file.fileno(), 0, access=ACCESS_READ) as whole:
                ended, going = whole.rfind(END), whole.rfind(b",\n")
        file.seek(going + len(b",\n") if going > ended else max(ended, 0))
        file.truncate()
        file.write(b"" if going > ended else b",\n" if ended >= 0 else b"[\n")
    except OSError:
        file.close()
        raise
    return file
