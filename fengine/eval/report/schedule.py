"""`trace.json` as a timeline for a page: steps, what each request did in them, and who held which pages. No torch.

A segment of a request is [kind, first step, last step, first token, tokens]; a hold is [page, pages, first step, step
behind the last, request, prefix hit]. Times are microseconds from the session's first event. Requests are told by their
place in a session's `requests`."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fengine.eval.runs.trace import events

DECODE, PREFILL = 0, 1
STEP_KINDS = {"decode": 0, "prefill": 1, "mixed": 2}
MAX_STEPS, MAX_SPANS, MAX_POOL = 20_000, 5_000, 10_000_000
STEP_BYTES, SEGMENT_BYTES, HOLD_BYTES, SPAN_BYTES = 64, 22, 26, 90  # about, in a page
_ROW = re.compile(r"(\d+)@(\d+)\+(\d+)")
_DRAFTED = re.compile(r"(\d+):(\d+)")
_PAGES = re.compile(r"(\d+):(\d+):(\d+):([\d,-]*)")
PHASES = ("queue", "prefill", "decode")
# What is told of each step; at last, of its tokens those that were guesses, and of these those that were drawn.
COLUMNS = ("n", "t", "d", "k", "tok", "row", "run", "wait", "held", "idle", "guess", "right")
Run = tuple[int, int]  # pages that are neighbours: the first, and how many


@dataclass
class TraceSession:
    """One process of a run."""

    number: int
    steps: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    pool: int = 0  # pages that there are
    requests: list[dict[str, Any]] = field(default_factory=list)  # seg, pre (steps at which it was preempted), row, id
    holds: list[list[int]] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)  # of requests: row, id, line, and [start, took] by phase
    dropped: int = 0  # steps that are not here
    origin: float | None = None
    places: dict[int, int] = field(default_factory=dict)  # the trace's number of a request -> its place
    tried: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # by number: of guesses step, count, start
    open: dict[int, list[int]] = field(default_factory=dict)  # place -> places of its holds that go on

    def as_dict(self) -> dict[str, Any]:
        told = ("number", "steps", "pool", "requests", "holds", "spans", "dropped")
        return {name: getattr(self, name) for name in told}

    def since(self, start: float) -> int:
        """Microseconds from the first event. Modifies: origin, by the first."""
        self.origin = start if self.origin is None else self.origin
        return round(start - self.origin)

    def place(self, number: int) -> int:
        """Of a request. Modifies: places and requests, if it is new."""
        if number not in self.places:
            self.places[number] = len(self.requests)
            self.requests.append({"n": number, "seg": [], "pre": []})
        return self.places[number]

    def guessed(self, number: int, count: int, start: int) -> None:
        """A request has `count` guesses in the last step, behind token `start`."""
        self.steps["guess"][-1] += count
        self.tried[number] = len(self.steps["n"]) - 1, count, start

    def settle(self, number: int, start: int) -> None:
        """Its next token stands at `start`, which tells how many of its last guesses were right."""
        step, count, before = self.tried.pop(number, (0, 0, 0))
        self.steps["right"][step] += max(0, min(count, start - before - 1))

    def release(self, place: int, now: int) -> None:
        for hold in self.open.pop(place, ()):
            self.holds[hold][3] = max(now, self.holds[hold][2] + 1)

    def segment(self, now: int, row: Sequence[int], decodes: bool) -> bool:
        """Whether the request got a new segment, rather than a longer one."""
        number, start, count = row
        request = self.requests[self.place(number)]
        last: list[int] = request["seg"][-1] if request["seg"] else [PREFILL, 0, 0]
        if decodes and last[0] == DECODE and last[2] >= now - 2 and now - 1 not in request["pre"]:
            last[2] = now
            last[4] += count
            return False
        request["seg"].append([DECODE if decodes else PREFILL, now, now, start, count])
        return True


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
    first = f"the first {steps:,} of {steps + dropped:,} steps are drawn; trace.json has all (ui.perfetto.dev)"
    notes = {
        f"trace.json is damaged: {reader.damaged:,} of its events are left out": reader.damaged,
        first: dropped,
        "trace.json has no event that can be drawn": not sessions and not reader.damaged,
        "the trace tells of requests only; a run with trace=steps also shows steps and pages":
            not steps and (sessions or reader.damaged),
    }  # fmt: skip
    return [session.as_dict() for session in sessions], [note for note, holds in notes.items() if holds]


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
                session.release(place, len(session.steps["n"]))

    def step(self, session: TraceSession, event: dict[str, Any], args: dict[str, Any]) -> None:
        steps = session.steps
        if self.full or len(steps["n"]) >= MAX_STEPS:
            self.full = True
            session.dropped += 1
            return
        start, took = float(event["ts"]), float(event["dur"])
        values = [int(args[key]) for key in ("step", "tokens", "running", "waiting", "held", "cached", "pool")]
        rows = [tuple(map(int, row)) for row in _ROW.findall(args["rows"])]
        lists = (list(map(int, args[key].split())) for key in ("decode", "released", "preempted"))
        decodes, released, preempted = lists
        drafted = {int(number): int(count) for number, count in _DRAFTED.findall(args.get("drafted", ""))}
        new = [(*map(int, some[:3]), _runs(some[3], values[-1])) for some in _PAGES.findall(args["pages"])]
        kind, now, before = STEP_KINDS[event["name"]], len(steps["n"]), len(session.holds)
        # all that can be wrong has been read
        numbers = (values[0], session.since(start), round(took), kind, values[1], len(rows), *values[2:6])
        for name, value in zip(steps, (*numbers, 0, 0), strict=True):
            steps[name].append(value)
        for number, begin, _ in rows:
            session.settle(number, begin)
            if number in drafted:
                session.guessed(number, drafted[number], begin)
        session.pool = max(session.pool, values[6])
        for number in released:
            session.release(session.places.get(number, -1), now)
        for number in preempted:
            session.requests[session.place(number)]["pre"].append(now)
        for number, first, hits, runs in new:
            self._hold(session, now, session.place(number), first, hits, runs)
        segments = sum(session.segment(now, row, row[0] in decodes) for row in rows)
        self.left -= STEP_BYTES + SEGMENT_BYTES * segments + HOLD_BYTES * (len(session.holds) - before)
        self.full = self.left < 0

    def _hold(self, session: TraceSession, now: int, place: int, first: int, hits: int, runs: list[Run]) -> None:
        """New pages of a request, from page `first` of its table on, of which the first `hits` are prefix hits."""
        if first == 0:
            session.release(place, now)
        for page, count in runs:
            hit = min(hits, count)
            hits -= hit
            for start, some, of in ((page, hit, 1), (page + hit, count - hit, 0)):
                if some:
                    session.open.setdefault(place, []).append(len(session.holds))
                    session.holds.append([start, some, now, now + 1, place, of])

    def span(self, session: TraceSession, event: dict[str, Any], args: dict[str, Any]) -> None:
        name, start, took = event["name"], float(event["ts"]), float(event["dur"])
        row, row_id, line = int(args["row"]), str(args["id"])[:200], int(event["tid"])
        if name not in PHASES:
            raise ValueError(name)
        number = args.get("request")
        if number in session.tried:  # the last token is drawn, not computed
            session.settle(number, int(args["prompt_tokens"]) + int(args["completion_tokens"]) - 1)
        if number in session.places:
            session.requests[session.places[number]].update(row=row, id=row_id)
        if self.left < SPAN_BYTES or len(session.spans) >= MAX_SPANS:
            return
        begun, last = session.since(start), session.spans[-1] if session.spans else None
        if last is None or last["row"] != row or last["line"] != line or name in last:
            last = {"row": row, "id": row_id, "line": line}
            session.spans.append(last)
            self.left -= SPAN_BYTES
        last[name] = [begun, round(took)]


def _runs(text: str, pool: int) -> list[Run]:
    """ "17-19,40" → (17, 3), (40, 1). Pure. Errors: ValueError for pages that a pool of this size has not."""
    found = []
    for run in filter(None, text.split(",")):
        a, _, b = run.partition("-")
        if int(b or a) > min(pool, MAX_POOL) or int(b or a) < int(a):
            raise ValueError(run)
        found.append((int(a), int(b or a) - int(a) + 1))
    return found
