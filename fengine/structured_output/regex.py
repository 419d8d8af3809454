"""Regular expressions in Python's syntax -> the same written out, with no class, flag or dialect left. No torch.

What no automaton can do (back-references, look-around, …) and anchors other than at the ends are refused by name. What
an output matches here `re.fullmatch` matches, too, with or without re.ASCII.
"""

import re
from typing import Any

from fengine.errors import GrammarError, InvalidRequestError
from fengine.structured_output import characters
from fengine.structured_output.characters import Ranges
from fengine.tokenizer.regex_parts import one_character, parse, parser

MAX_REPEAT = 100_000
MAX_NESTED = 500_000  # repetitions inside repetitions, multiplied
_ASCII, _UNICODE, _IGNORECASE, _DOTALL = map(int, (re.ASCII, re.UNICODE, re.IGNORECASE, re.DOTALL))  # sums are dear
_BEGINNINGS, _ENDS = {"AT_BEGINNING", "AT_BEGINNING_STRING"}, {"AT_END", "AT_END_STRING"}


def explicit(pattern: str, what: str, *, searched: bool = False) -> str:
    """`pattern` for a whole text, written out. `searched`: for a place in a text, so ^ and $ at its ends stay.

    `what` names it in errors. Errors: GrammarError. Pure.
    """
    try:
        tree = parse(pattern)
        return _Writer(f"{what} {pattern!r:.200}", searched).sequence(tree, tree.state.flags, True, True)
    except GrammarError:
        raise
    except (re.error, OverflowError, RecursionError, InvalidRequestError) as error:
        raise GrammarError(f"{what} {pattern!r:.200} is not a usable regular expression: {error!s:.500}") from None


class _Writer:
    def __init__(self, whole: str, searched: bool) -> None:
        self.whole, self.searched, self.times = whole, searched, 1

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
            outer, self.times = self.times, self.times * max(1, low if high == parser.MAXREPEAT else high)
            written = self.repeat(low, high, self.sequence(items, flags, False, False))
            self.times = outer
            return written
        if kind == "BRANCH":
            return f"(?:{'|'.join(self.sequence(items, flags, first, last) for items in value[1])})"
        if kind == "AT":
            return self.anchor(str(value), first, last)
        ranges = self.one(kind, value, flags)
        if not ranges:
            raise GrammarError(f"{self.whole} holds a class that no character is in")
        return characters.written(ranges)

    def repeat(self, low: int, high: int, inner: str) -> str:
        unbounded = high == parser.MAXREPEAT
        if (most := low if unbounded else high) > MAX_REPEAT:
            raise GrammarError(f"{self.whole} repeats {most} times, more than {MAX_REPEAT}; repeat less")
        if self.times > MAX_NESTED:
            raise GrammarError(f"{self.whole} repeats {self.times} times in all, more than {MAX_NESTED}; repeat less")
        return f"(?:{inner}){{{low},{'' if unbounded else high}}}"

    def anchor(self, name: str, first: bool, last: bool) -> str:
        if not (name in _BEGINNINGS and first) and not (name in _ENDS and last):
            raise GrammarError(f"{self.whole} has an anchor inside; only ^ at its beginning and $ at its end can be")
        return ("^" if name in _BEGINNINGS else "$") if self.searched else ""

    def one(self, kind: str, value: Any, flags: int) -> Ranges:
        """The characters that an item for one character stands for. Errors: InvalidRequestError for any other item."""
        if kind == "LITERAL" and not flags & _IGNORECASE:  # nearly always
            return characters.without_surrogates(((value, value),))
        if not flags & _IGNORECASE and kind in ("IN", "ANY", "NOT_LITERAL"):
            return self.plain(kind, value, flags)
        readings = [one_character(self.whole, kind, value, f) for f in (flags & ~_ASCII, flags & ~_UNICODE | _ASCII)]
        ranges = self.plain(kind, value, flags)
        return characters.common(*(characters.folded(ranges, test) for test in readings))

    def plain(self, kind: str, value: Any, flags: int) -> Ranges:
        """`one` but for case. Pure."""
        if kind == "ANY":
            return characters.complement(() if flags & _DOTALL else characters.of(characters.LINE_ENDS))
        if kind in ("LITERAL", "NOT_LITERAL"):
            ranges = characters.without_surrogates(((value, value),))
            return ranges if kind == "LITERAL" else characters.complement(ranges)
        items = [(str(name), what) for name, what in value]
        negated = ("NEGATE", None) in items
        sets = [self.member(name, what, negated) for name, what in items if name != "NEGATE"]
        ranges = characters.without_surrogates(characters.union(*sets))
        return characters.complement(ranges) if negated else ranges

    def member(self, name: str, what: Any, negated: bool) -> Ranges:
        if name == "CATEGORY":
            return characters.category(str(what).removeprefix("CATEGORY_"), most=negated)
        return (what,) if name == "RANGE" else ((what, what),)
