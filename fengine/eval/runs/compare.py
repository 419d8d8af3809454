"""Where two runs of the same rows differ: a value, from two streams of records. Pure; no torch. A record is a line of
`outputs.jsonl`. Tokens are compared position by position up to the first that differs, logprobs only as far as the
tokens before them and their own are equal, for behind it they are of other texts."""

import struct
from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fengine.eval.cli.view import one_line
from fengine.eval.runs.record import Record, common
from fengine.eval.tasks.statistics import Delta, paired
from fengine.eval.tasks.task import Scores

ASKED = ("prompt", "pixels_sha256", "sampling_seed", "kind")  # fields of an answer that say what was asked
TOLD = ("text", "finish_reason", "top_logprobs")  # and those that follow from its tokens
EDGES = (0.0, *(float(f"1e{decade}") for decade in range(-8, 2)))  # of the histogram; its last bin is open
TEXT = 60  # characters of a text from where two differ


@dataclass(frozen=True)
class Side:
    """One run's token at a divergence: None behind the end of its answer. `bits` is the logprob's, in hex."""

    token: int | None = None
    logprob: float | None = None
    bits: str | None = None
    text: str = ""  # from the first character on in which the two texts differ


@dataclass(frozen=True)
class Divergence:
    """The first place of one row where tokens differ, or logprobs at equal tokens. Both count from 0; `sample` is the
    number of the answer: of a sample, or of a choice."""

    id: str
    sample: int
    token: int
    a: Side
    b: Side


@dataclass
class RowDifference:
    """Two records of one row. `other` names what else differs, in the order of the record."""

    id: str
    tokens: int = 0  # positions compared
    logprobs: int = 0  # compared
    differing_logprobs: int = 0
    differing_bits: int = 0
    first_token: Divergence | None = None
    first_logprob: Divergence | None = None
    other: tuple[str, ...] = ()
    deltas: list[float] = field(default_factory=list)  # |b - a| of the logprobs that differ
    largest: tuple[float, int, int] = (0.0, 0, 0)  # of them, with sample and token

    @property
    def same(self) -> bool:
        return self.first_token is None and self.first_logprob is None and not self.other

    @property
    def rank(self) -> int:
        """0: tokens differ, 1: bits of logprobs do, 2: neither. Pure."""
        return 0 if self.first_token else 1 if self.first_logprob else 2

    @property
    def first(self) -> Divergence | None:
        """What comes first in the row: a logprob or a token."""
        both = [found for found in (self.first_logprob, self.first_token) if found is not None]
        return min(both, key=lambda found: (found.sample, found.token)) if both else None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values. Pure."""
        firsts = {"token": self.first_token, "logprob": self.first_logprob}
        plain = {name: None if at is None else asdict(at) for name, at in firsts.items()}
        return {"id": self.id, "other": list(self.other)} | plain


def compare_row(a: Record, b: Record) -> RowDifference:
    """Pure. Errors: ValueError, TypeError or KeyError for what is no record."""
    found = RowDifference(a["id"])
    other = [name for name in ("data",) if a.get(name) != b.get(name)]
    if "error" in a or "error" in b:
        found.other = (*other, *(["error"] if a.get("error") != b.get("error") else []))
        return found
    if len(a["answers"]) != len(b["answers"]):
        other.append("number of answers")
    for sample, (mine, its) in enumerate(zip(a["answers"], b["answers"], strict=False)):
        _compare_answer(found, sample, mine, its)
        fewer = len(mine["logprobs"]) != len(its["logprobs"]) and mine["output_ids"] == its["output_ids"]
        names = [name for name in (*ASKED, *TOLD) if mine.get(name) != its.get(name)] + ["number of logprobs"] * fewer
        other += [name for name in names if name not in other]
    found.other = (*other, *(["scores"] if a["scores"] != b["scores"] else []))
    return found


def _compare_answer(found: RowDifference, sample: int, a: Record, b: Record) -> None:
    """Modifies: found."""
    ids_a, ids_b = a["output_ids"], b["output_ids"]
    equal = common(ids_a, ids_b)
    if equal < max(len(ids_a), len(ids_b)):
        found.tokens += 1
        found.first_token = found.first_token or _divergence(found.id, sample, equal, a, b)
    found.tokens += equal
    both = min(equal, len(a["logprobs"]), len(b["logprobs"]))
    mine, its = (np.array(one["logprobs"][:both], np.float64) for one in (a, b))
    found.logprobs += both
    places = np.flatnonzero(mine.view(np.uint64) != its.view(np.uint64))
    if not len(places):
        return
    x, y = mine[places], its[places]
    deltas = np.abs(y - x)
    found.differing_logprobs += len(places)
    found.differing_bits += int(flipped_bits(x, y).sum())
    found.first_logprob = found.first_logprob or _divergence(found.id, sample, int(places[0]), a, b)
    found.deltas += deltas.tolist()
    largest = int(np.argmax(deltas))
    if deltas[largest] > found.largest[0]:
        found.largest = float(deltas[largest]), sample, int(places[largest])


def _divergence(row: str, sample: int, token: int, a: Record, b: Record) -> Divergence:
    at = common(a["text"], b["text"])
    return Divergence(row, sample, token, _side(a, token, at), _side(b, token, at))


def _side(answer: Record, token: int, at: int) -> Side:
    ids, logprobs = answer["output_ids"], answer["logprobs"]
    logprob = logprobs[token] if token < len(logprobs) else None
    bits = None if logprob is None else hex_bits(logprob)
    return Side(ids[token] if token < len(ids) else None, logprob, bits, answer["text"][at : at + TEXT])


def hex_bits(value: float) -> str:
    """0x and the 8 digits of the float32 that a logprob is; 16 of the float64 where it is none. Pure."""
    try:
        short = struct.pack(">f", value)
        exact = struct.unpack(">f", short)[0] == value
    except OverflowError:
        short, exact = b"", False
    return f"0x{(short if exact else struct.pack('>d', value)).hex()}"


def flipped_bits(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """In how many bits each of two float64 [N] differs from the other, as float32 where both are such. Pure."""
    with np.errstate(all="ignore"):
        short_x, short_y = x.astype(np.float32), y.astype(np.float32)
        exact = (short_x == x) & (short_y == y)
    short = _ones(short_x.view(np.uint32) ^ short_y.view(np.uint32))
    return np.where(exact, short, _ones(x.view(np.uint64) ^ y.view(np.uint64)))


def _ones(bits: np.ndarray) -> np.ndarray:
    """Set bits of each integer [N]."""
    return np.unpackbits(bits.view(np.uint8).reshape(len(bits), bits.itemsize), axis=1).sum(1)


@dataclass
class Counts:
    """Of two sides of the same rows."""

    rows: int = 0
    tokens: int = 0
    logprobs: int = 0
    differing_rows: int = 0
    differing_tokens: int = 0  # rows whose tokens differ: those behind the first are of another text
    differing_logprobs: int = 0
    differing_bits: int = 0

    def count(self, found: RowDifference) -> None:
        """Modifies: itself."""
        self.rows += 1
        self.tokens += found.tokens
        self.logprobs += found.logprobs
        self.differing_rows += not found.same
        self.differing_tokens += found.first_token is not None
        self.differing_logprobs += found.differing_logprobs
        self.differing_bits += found.differing_bits


@dataclass
class Comparison(Counts):
    """Two runs, row by row. `rows` are those that both have."""

    only_a: int = 0
    only_b: int = 0
    only_a_ids: list[str] = field(default_factory=list)  # the first of them
    only_b_ids: list[str] = field(default_factory=list)
    largest_delta: float = 0.0
    largest_at: tuple[str, int, int] | None = None  # row id, sample, token
    histogram: list[int] = field(default_factory=lambda: [0] * len(EDGES))  # of |Δlogprob| that differ
    rows_with: dict[str, int] = field(default_factory=dict)  # what differs -> in how many rows
    firsts: list[RowDifference] = field(default_factory=list)  # rows that differ, by rank, then in input order
    metrics: dict[str, Delta] = field(default_factory=dict)  # b - a

    @property
    def same(self) -> bool:
        return not (self.differing_rows or self.only_a or self.only_b)

    def add(self, found: RowDifference, keep: int) -> None:
        """Modifies: itself."""
        self.count(found)
        if found.same:
            return
        if found.deltas:
            for place, number in enumerate(np.bincount(np.searchsorted(EDGES, found.deltas, "right") - 1)):
                self.histogram[place] += int(number)
        if found.deltas and (found.largest[0] > self.largest_delta or self.largest_at is None):
            self.largest_delta, self.largest_at = found.largest[0], (found.id, *found.largest[1:])
        named = [("tokens", found.first_token), ("logprobs", found.first_logprob)]
        for name in (*(name for name, there in named if there), *found.other):
            self.rows_with[name] = self.rows_with.get(name, 0) + 1
        if len(self.firsts) < keep or self.firsts and found.rank < self.firsts[-1].rank:
            found.deltas = []
            insort(self.firsts, found, key=lambda one: one.rank)
            del self.firsts[keep:]

    def bins(self) -> list[tuple[float, float | None, int]]:
        """|Δlogprob| from and to of every bin of the histogram, of which the last one is open, and its count. Pure."""
        return list(zip(EDGES, (*EDGES[1:], None), self.histogram, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values. Pure."""
        firsts = [found.as_dict() | {"largest_delta": found.largest[0]} for found in self.firsts]
        plain = {name: value for name, value in vars(self).items() if name not in ("firsts", "metrics", "histogram")}
        bins = [{"from": low, "to": high, "count": count} for low, high, count in self.bins()]
        metrics = {name: delta.as_dict() for name, delta in self.metrics.items()}
        return {"same": self.same, **plain, "histogram": bins, "metrics": metrics, "firsts": firsts}


def compare(pairs: Iterable[tuple[Record | None, Record | None]], keep: int = 20) -> Comparison:
    """Two runs from pairs of records of the same id, None where a run lacks it; one pass, one pair in memory at a time.
    Of the rows that differ `keep` are kept, first those whose tokens do, of the others counts. Pure."""
    found = Comparison()

    def scores() -> Iterator[tuple[Scores, Scores]]:
        for a, b in pairs:
            if a is None or b is None:
                there, ids = (b, found.only_b_ids) if a is None else (a, found.only_a_ids)
                found.only_a += b is None
                found.only_b += a is None
                if there is not None and len(ids) < keep:
                    ids.append(there["id"])
                continue
            found.add(compare_row(a, b), keep)
            if "error" not in a and "error" not in b:
                yield a["scores"], b["scores"]

    found.metrics = paired(scores())
    return found


def row_lines(found: RowDifference, names: tuple[str, str]) -> list[str]:
    """A row's first difference in tokens, and that in a logprob where it comes before; else what differs. `names` are
    those of the two runs. Pure."""
    told = []
    for what, at in (("bits of a logprob", found.first_logprob), ("tokens", found.first_token)):
        if at is not None and (what == "tokens" or found.first is at):
            told += _told(at, what, names)
    return told or [f"row {found.id!r}: {', '.join(found.other)}"]


def _told(at: Divergence, what: str, names: tuple[str, str]) -> list[str]:
    head = f"row {at.id!r}, answer {at.sample}, token {at.token}: first difference in {what}"
    return [head, *(f"   {name}  {_side_told(side)}" for name, side in zip(names, (at.a, at.b), strict=True))]


def _side_told(side: Side) -> str:
    if side.token is None:
        return "the answer has ended"
    value = "" if side.logprob is None else f", logprob {side.logprob!r} ({side.bits})"
    return f"token {side.token}{value}" + (f"  …{one_line(side.text)!r}" if side.text else "")
