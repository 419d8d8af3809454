"""Regular expressions in Python's syntax -> the same written out, with no class, flag or dialect left. No torch.

What no automaton can do (back-references, look-around, …) and anchors other than at the ends are refused by name. What
an output matches here `re.fullmatch` matches, too, with or without re.ASCII.

Character classes have two readings: `\\d`, `\\w`, `\\s` and `.` mean more in Python (Unicode) than in ASCII, and other
things in JavaScript. What is allowed here is what all readings allow, so whoever checks an output finds it right."""

import re
from functools import cache
from typing import Any

from fengine.errors import GrammarError, InvalidRequestError
from fengine.tokenizer.stop_regex import one_character, parse, parser

MAX_REPEAT = 100_000
MAX_NESTED = 500_000  # repetitions inside repetitions, multiplied
_ASCII, _UNICODE, _IGNORECASE, _DOTALL = map(int, (re.ASCII, re.UNICODE, re.IGNORECASE, re.DOTALL))  # sums are dear
_BEGINNINGS, _ENDS = {"AT_BEGINNING", "AT_BEGINNING_STRING"}, {"AT_END", "AT_END_STRING"}
Ranges = tuple[tuple[int, int], ...]  # of code points: inclusive, in order, apart from one another
LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)  # no text that can be encoded holds them
PLANES = 0x40000  # further up there is no letter, digit or space
_NARROW = {"DIGIT": "0123456789", "SPACE": " \t\n\r\f\v",
           "WORD": "0123456789_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"}  # fmt: skip


def explicit(pattern: str, what: str, *, searched: bool = False, widest: bool = False) -> str:
    """`pattern` for a whole text, written out. `searched`: for a place in a text, so ^ and $ at its ends stay.
    `widest`: all that any reading allows, for what must not be missed. `what` names it in errors. Errors: GrammarError.
    Pure."""
    try:
        tree = parse(pattern)
        return _Writer(f"{what} {pattern!r:.200}", searched, widest).sequence(tree, tree.state.flags, True, True)
    except GrammarError:
        raise
    except (re.error, OverflowError, RecursionError, InvalidRequestError) as error:
        raise GrammarError(f"{what} {pattern!r:.200} is not a usable regular expression: {error!s:.500}") from None


class _Writer:
    def __init__(self, whole: str, searched: bool, widest: bool) -> None:
        self.whole, self.searched, self.widest, self.times = whole, searched, widest, 1

    def sequence(self, items: Any, flags: int, first: bool, last: bool) -> str:
        """`first`, `last`: nothing that reads a character stands in front of it, or behind it."""
        items = [(str(kind), value) for kind, value in items]
        reading = [i for i, (kind, _) in enumerate(items) if kind != "AT"]
        begins, ends = (reading[0], reading[-1]) if reading else (len(items), 0)
        return "".join(
            self.piece(kind, value, flags, first and i <= begins, last and i >= ends)
            for i, (kind, value) in enumerate(items)
        )

    def piece(self, kind: str, value: Any, flags: int, first: bool, last: bool) -> str:
        if kind == "SUBPATTERN":
            _, more, less, items = value
            return f"(?:{self.sequence(items, (flags | more) & ~less, first, last)})"
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):  # lazy or not, the same texts match
            low, high, items = value
            return self.repeat(low, high, items, flags)
        if kind == "BRANCH":
            return f"(?:{'|'.join(self.sequence(items, flags, first, last) for items in value[1])})"
        if kind == "AT":
            begins = str(value) in _BEGINNINGS
            if not (begins and first) and not (str(value) in _ENDS and last):
                raise GrammarError(
                    f"{self.whole} has an anchor inside; only ^ at its beginning and $ at its end can be"
                )
            end = "\\n?$" if self.widest and str(value) == "AT_END" else "$"  # as in Python
            return ("^" if begins else end) if self.searched else ""
        ranges = self.one(kind, value, flags)
        if not ranges:
            raise GrammarError(f"{self.whole} holds a class that no character is in")
        return written(ranges)

    def repeat(self, low: int, high: int, items: Any, flags: int) -> str:
        unbounded, outer = high == parser.MAXREPEAT, self.times
        most = low if unbounded else high
        self.times *= max(1, most)
        inner = self.sequence(items, flags, False, False)
        if most > MAX_REPEAT:
            raise GrammarError(f"{self.whole} repeats {most} times, more than {MAX_REPEAT}; repeat less")
        if self.times > MAX_NESTED:
            raise GrammarError(f"{self.whole} repeats {self.times} times in all, more than {MAX_NESTED}; repeat less")
        self.times = outer
        return f"(?:{inner}){{{low},{'' if unbounded else high}}}"

    def one(self, kind: str, value: Any, flags: int) -> Ranges:
        """The characters that an item for one character stands for. Errors: InvalidRequestError for any other item."""
        known = kind in ("LITERAL", "NOT_LITERAL", "IN", "ANY")
        if known and not flags & _IGNORECASE:  # nearly always
            return plain(kind, value, flags, self.widest)
        tests = [one_character(self.whole, kind, value, f) for f in (flags & ~_ASCII, flags & ~_UNICODE | _ASCII)]
        caseless = common(plain(kind, value, flags, self.widest), complement(of(_cased())))
        sets = (union(caseless, of("".join(test.findall(_cased())))) for test in tests)
        return (union if self.widest else common)(*sets)


def plain(kind: str, value: Any, flags: int, widest: bool) -> Ranges:
    """What an item for one character stands for, but for case. Pure."""
    if kind == "ANY":  # what `.` leaves out, everywhere or here and there
        return complement(() if flags & _DOTALL else of("\n" if widest else "\n\r\u2028\u2029"))
    if kind == "LITERAL" and not SURROGATES[0] <= value <= SURROGATES[1]:
        return ((value, value),)
    items = [(str(name), what) for name, what in value] if kind == "IN" else [("LITERAL", value)]
    negated, sets = kind == "NOT_LITERAL", list[Ranges]()
    for name, what in items:
        if name == "CATEGORY":
            sets.append(category(str(what).removeprefix("CATEGORY_"), most=(("NEGATE", None) in items) != widest))
        elif name == "NEGATE":
            negated = True
        else:
            sets.append((what,) if name == "RANGE" else ((what, what),))
    others = complement(union(*sets))
    return others if negated else complement(others)


def of(characters: str) -> Ranges:
    return union(*(((ord(c), ord(c)),) for c in characters))


def union(*sets: Ranges) -> Ranges:
    out: list[tuple[int, int]] = []
    for low, high in sorted(pair for ranges in sets for pair in ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(high, out[-1][1]))
        else:
            out.append((low, high))
    return tuple(out)


def complement(ranges: Ranges) -> Ranges:
    """All characters but these."""
    out, start = [], 0
    for low, high in union(ranges, (SURROGATES,)):
        if start < low:
            out.append((start, low - 1))
        start = high + 1
    return (*out, (start, LAST)) if start <= LAST else tuple(out)


def common(a: Ranges, b: Ranges) -> Ranges:
    return complement(union(complement(a), complement(b)))


def category(name: str, *, most: bool) -> Ranges:
    """What DIGIT, SPACE, WORD or NOT_… of them means in every reading; with `most`, what it means in any. Pure."""
    if name.startswith("NOT_"):
        return complement(category(name.removeprefix("NOT_"), most=not most))
    narrow = of(_NARROW[name])
    return union(narrow, _unicode(f"\\{name[0].lower()}"), of("\ufeff")) if most else narrow


@cache
def _cased() -> str:
    """Those that have cases: only they differ where case is ignored."""
    return "".join(c for c in map(chr, range(PLANES)) if c.lower() != c or c.upper() != c)


@cache
def _unicode(source: str) -> Ranges:
    """All characters that a class like `\\w` holds in Python, by asking `re`. Pure."""
    everything = "".join(map(chr, range(PLANES)))
    return tuple((ord(run[0][0]), ord(run[0][-1])) for run in re.finditer(f"{source}+", everything))


def written(ranges: Ranges) -> str:
    """A regular expression for one of these characters. Pure."""
    inside = [_escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}" for low, high in ranges]
    return inside[0] if len(ranges) == 1 and ranges[0][0] == ranges[0][1] else f"[{''.join(inside)}]"


def _escaped(code: int) -> str:
    return chr(code) if code < 128 and chr(code).isalnum() else f"\\x{{{code:x}}}"
