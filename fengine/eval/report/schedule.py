"""`trace.json` as a timeline for a page: steps, what each request did in them, and who held which pages. No torch.

A segment of a request is [kind, first step, last step, first token, tokens]; a hold is [page, pages, first step, step
behind the last, request, prefix hit]. Times are microseconds from the session's first event. Requests are told by their
place in a session's `requests`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fengine.eval.runs.trace import events

DECODE, PREFILL = 0, 1
STEP_KINDS = {"decode": 0, "prefill": 1, "mixed": 2}
MAX_STEPS, MAX_SPANS, MAX_POOL = 20_000, 5_000, 10_000_000
STEP_BYTES, SEGMENT_BYTES, HOLD_BYTES, SPAN_BYTES = 60, 22, 26, 90  # about, in a page
_ROW = re.compile(r"(\d+)@(\d+)\+(\d+)")
_PAGES = re.compile(r"(\d+):(\d+):(\d+):([\d,-]*)")
PHASES = ("queue", "prefill", "decode")


@dataclass
class TraceSession:
    """One process of a run."""

    number: int
    steps: dict[str, list[int]] = field(
        default_factory=lambda: {k: [] for k in ("n", "t", "d", "k", "tok", "row", "run", "wait", "held", "idle")}
    )
    pool: int = 0  # pages that there are
    requests: list[dict[str, Any]] = field(default_factory=list)  # seg, pre (steps at which it was preempted), row, id
    holds: list[list[int]] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)  # of requests: row, id, line, and [start, took] by phase
    dropped: int = 0  # steps that are not here
    origin: float | None = None
    places: dict[int, int] = field(default_factory=dict)  # the trace's number of a request -> its place
    open: dict[int, list[int]] = field(default_factory=dict)  # place -> places of its holds that go on

    def as_dict(self) -> dict[str, Any]:
        told = {"number": self.number, "steps": self.steps, "pool": self.pool, "requests": self.requests}
        return told | {"holds": self.holds, "spans": self.spans, "dropped": self.dropped}


def timeline(path: Path, budget: int) -> tuple[list[dict[str, Any]], list[str]]:
    """The sessions of a trace, in all of about `budget` bytes, and notes about what is not there."""
    reader = _Reader(budget)
    try:
        reader.read(events(path))
    except FileNotFoundError:
        return [], ["there is no trace.json: the run had trace=off"]
    except OSError as error:
        return [], [f"trace.json cannot be read: {error.strerror or error}"]
    sessions = [session for session in reader.sessions.values() if session.steps["n"] or session.spans]
    steps, dropped = sum(len(s.steps["n"]) for s in sessions), sum(s.dropped for s in sessions)
    notes = []
    if reader.damaged:
        notes.append(f"trace.json is damaged: {reader.damaged:,} of its events are left out")
    if dropped:
        notes.append(
            f"the first {steps:,} of {steps + dropped:,} steps are drawn; trace.json has all (ui.perfetto.dev)"
        )
    if not sessions and not reader.damaged:
        notes.append("trace.json has no event that can be drawn")
    elif not steps:
        notes.append("the trace tells of requests only; a run with trace=steps also shows steps and pages")
    return [session.as_dict() for session in sessions], notes


class _Reader:
    """Takes events as they come. Modified by every method."""

    def __init__(self, budget: int) -> None:
        self.left, self.damaged, self.full = budget, 0, False
        self.sessions: dict[int, TraceSession] = {}

    def read(self, found: Iterable[dict[str, Any] | None]) -> None:
        for event in found:
            try:
                if event is None:
                    raise ValueError
                kind = event.get("cat") if event.get("ph") == "X" else None
                if kind in ("step", "request"):
                    session = self.sessions.setdefault(int(event["pid"]), TraceSession(int(event["pid"])))
                    (self.step if kind == "step" else self.span)(session, event, event["args"])
            except (ValueError, KeyError, TypeError, OverflowError, AttributeError):
                self.damaged += 1
        for session in self.sessions.values():
            for place in list(session.open):
                _release(session, place, len(session.steps["n"]))

    def step(self, session: TraceSession, event: dict[str, Any], args: dict[str, Any]) -> None:
        steps = session.steps
        if self.full or len(steps["n"]) >= MAX_STEPS:
            self.full = True
            session.dropped += 1
            return
        start, took = float(event["ts"]), float(event["dur"])
        values = [int(args[key]) for key in ("step", "tokens", "running", "waiting", "held", "cached", "pool")]
        rows = [(int(n), int(first), int(count)) for n, first, count in _ROW.findall(args["rows"])]
        decodes = set(map(int, args["decode"].split()))
        released, preempted = (list(map(int, args[key].split())) for key in ("released", "preempted"))
        new = [
            (int(n), int(first), int(hits), _expanded(runs, values[-1]))
            for n, first, hits, runs in _PAGES.findall(args["pages"])
        ]
        kind, now = STEP_KINDS[event["name"]], len(steps["n"])  # all that can be wrong has been read
        session.origin = start if session.origin is None else session.origin
        numbers = (values[0], round(start - session.origin), round(took), kind, values[1], len(rows), *values[2:6])
        for name, value in zip(steps, numbers, strict=True):
            steps[name].append(value)
        session.pool = max(session.pool, values[6])
        before = len(session.holds)
        self._pages(session, now, released, preempted, new)
        segments = sum(_segment(session, now, row, row[0] in decodes) for row in rows)
        self.left -= STEP_BYTES + SEGMENT_BYTES * segments + HOLD_BYTES * (len(session.holds) - before)
        self.full = self.left < 0

    def _pages(
        self,
        session: TraceSession,
        now: int,
        released: list[int],
        preempted: list[int],
        new: list[tuple[int, int, int, Any]],
    ) -> None:
        for number in released:
            if number in session.places:
                _release(session, session.places[number], now)
        for number in preempted:
            session.requests[_place(session, number)]["pre"].append(now)
        for number, first, hits, pages in new:
            place = _place(session, number)
            if first == 0:
                _release(session, place, now)
            for hit, some in ((1, pages[:hits]), (0, pages[hits:])):
                for page, count in _runs(some):
                    session.open.setdefault(place, []).append(len(session.holds))
                    session.holds.append([page, count, now, now + 1, place, hit])

    def span(self, session: TraceSession, event: dict[str, Any], args: dict[str, Any]) -> None:
        name, start, took = event["name"], float(event["ts"]), float(event["dur"])
        row, row_id, line = int(args["row"]), str(args["id"])[:200], int(event["tid"])
        if name not in PHASES:
            raise ValueError(name)
        number = args.get("request")
        if number in session.places:
            session.requests[session.places[number]].update(row=row, id=row_id)
        if self.left < SPAN_BYTES or len(session.spans) >= MAX_SPANS:
            return
        session.origin = start if session.origin is None else session.origin
        last = session.spans[-1] if session.spans else None
        if last is None or last["row"] != row or last["line"] != line or name in last:
            last = {"row": row, "id": row_id, "line": line}
            session.spans.append(last)
            self.left -= SPAN_BYTES
        last[name] = [round(start - session.origin), round(took)]


def _place(session: TraceSession, number: int) -> int:
    """Modifies: session, if the request is new."""
    if number not in session.places:
        session.places[number] = len(session.requests)
        session.requests.append({"n": number, "seg": [], "pre": []})
    return session.places[number]


def _segment(session: TraceSession, now: int, row: tuple[int, int, int], decodes: bool) -> bool:
    """Whether the request got a new segment, rather than a longer one."""
    number, start, count = row
    request = session.requests[_place(session, number)]
    segments = request["seg"]
    if (
        decodes
        and segments
        and segments[-1][0] == DECODE
        and segments[-1][2] >= now - 2
        and now - 1 not in request["pre"]
    ):
        segments[-1][2] = now
        segments[-1][4] += count
        return False
    segments.append([DECODE if decodes else PREFILL, now, now, start, count])
    return True


def _release(session: TraceSession, place: int, now: int) -> None:
    for hold in session.open.pop(place, ()):
        session.holds[hold][3] = max(now, session.holds[hold][2] + 1)


def _expanded(runs: str, pool: int) -> list[int]:
    """ "17-19,40" → 17, 18, 19, 40. Pure. Errors: ValueError for pages that a pool of this size has not."""
    pages: list[int] = []
    for run in filter(None, runs.split(",")):
        a, _, b = run.partition("-")
        if int(b or a) > min(pool, MAX_POOL):
            raise ValueError(run)
        pages.extend(range(int(a), int(b or a) + 1))
    return pages


def _runs(pages: list[int]) -> list[tuple[int, int]]:
    """(first, count) of runs of neighbours, in their order. Pure."""
    found: list[tuple[int, int]] = []
    for page in pages:
        if found and sum(found[-1]) == page:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((page, 1))
    return found
