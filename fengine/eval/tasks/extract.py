"""`Extractor`: what a regular expression finds in an answer, in bounded time, whatever the pattern. No torch.

The syntax is that of Python's `re` without what no automaton can do, which is refused by name. The pattern becomes a
program of at most MAX_STATES instructions for a machine that follows all ways to match at once, ordered as `re` would
try them (R. Cox, "Regular Expression Matching: the Virtual Machine Approach"), so that one search takes at most
characters x instructions steps and finds what `re.search` finds. `re` parses, and decides single characters.
"""

import re
from typing import Any, NamedTuple

from fengine.errors import InputFileError, InvalidRequestError
from fengine.tokenizer.regex_parts import one_character, parser

MAX_PATTERN_BYTES = 1024
MAX_STATES = 1000
MAX_GROUPS = 16
MAX_STEPS = 20_000_000  # of one answer, over all its matches: some ten seconds
Marks = tuple[int | None, ...]  # start and end of the match, then of each group


class _Op(NamedTuple):
    """One instruction: read a character that `test` accepts; `save` the place; hold `at` an anchor; go `to` others,
    the preferred first; or, with all of these empty, match."""

    test: re.Pattern[str] | None = None
    save: int | None = None
    at: str | None = None
    to: tuple[int, ...] = ()


class Extractor:
    """One pattern. Immutable."""

    def __init__(self, pattern: str) -> None:
        """Errors: InvalidRequestError (no regular expression, too long or large, unsupported)."""
        self.pattern = pattern
        size = len(pattern.encode("utf-8", "surrogatepass"))
        if size > MAX_PATTERN_BYTES:
            raise InvalidRequestError(f"the pattern is {size} bytes, over the {MAX_PATTERN_BYTES}-byte limit")
        self._ops: list[_Op] = []
        try:
            self.groups = re.compile(pattern).groups
            if self.groups > MAX_GROUPS:
                raise InvalidRequestError(f"{pattern!r} has {self.groups} groups, over the limit of {MAX_GROUPS}")
            tree = parser.parse(pattern)
            self._add(_Op(save=0))
            self._chain(tree, tree.state.flags)
        except (re.error, OverflowError, RecursionError) as error:
            raise InvalidRequestError(f"{pattern!r} is not a regular expression: {error}") from None
        self._add(_Op(save=1))
        self._add(_Op())
        self._word = re.compile(r"\w", tree.state.flags & re.ASCII)

    # -- the program ---------------------------------------------------------------------------------------------------

    def _add(self, op: _Op) -> int:
        if len(self._ops) >= MAX_STATES:
            raise InvalidRequestError(f"{self.pattern!r} needs more than {MAX_STATES} instructions; repeat less")
        self._ops.append(op)
        return len(self._ops) - 1

    def _chain(self, items: Any, flags: int) -> None:
        for kind, value in items:
            self._piece(str(kind), value, flags)

    def _piece(self, kind: str, value: Any, flags: int) -> None:
        if kind == "SUBPATTERN":
            group, more, less, items = value
            if group is not None:
                self._add(_Op(save=2 * group))
            self._chain(items, (flags | more) & ~less)
            if group is not None:
                self._add(_Op(save=2 * group + 1))
        elif kind in ("MAX_REPEAT", "MIN_REPEAT"):
            low, high, items = value
            self._repeat(low, high, items, flags, lazy=kind == "MIN_REPEAT")
        elif kind == "BRANCH":
            self._branch(value[1], flags)
        elif kind == "AT":
            name = str(value).removeprefix("AT_")
            lines = flags & re.MULTILINE and name in ("BEGINNING", "END")
            self._add(_Op(at=f"{name}_LINE" if lines else name))
        else:
            self._add(_Op(test=one_character(f"{self.pattern!r}", kind, value, flags)))

    def _repeat(self, low: int, high: int, items: Any, flags: int, *, lazy: bool) -> None:
        if high > 1 and items.getwidth()[0] == 0:
            raise InvalidRequestError(f"{self.pattern!r} repeats what may be empty; let each repetition read something")
        for _ in range(low):
            self._chain(items, flags)
        forks = []
        for _ in range(1 if high == parser.MAXREPEAT else high - low):
            forks.append(self._add(_Op()))
            self._chain(items, flags)
        if high == parser.MAXREPEAT:
            self._add(_Op(to=(forks[0],)))
        for fork in forks:
            ways = (fork + 1, len(self._ops))
            self._ops[fork] = _Op(to=ways[::-1] if lazy else ways)

    def _branch(self, branches: Any, flags: int) -> None:
        fork, starts, ends = self._add(_Op()), [], []
        for items in branches:
            starts.append(len(self._ops))
            self._chain(items, flags)
            ends.append(self._add(_Op()))
        self._ops[fork] = _Op(to=tuple(starts))
        for end in ends:
            self._ops[end] = _Op(to=(len(self._ops),))

    # -- the machine ---------------------------------------------------------------------------------------------------

    def find(self, text: str, *, last: bool = False) -> str | None:
        """The first group that took part in the first (or last, of those that do not overlap) match, or without groups
        the match itself; None where nothing matches. Pure. Errors: InputFileError after MAX_STEPS steps."""
        found, at, steps, empty = None, 0, MAX_STEPS, False
        while True:
            marks, steps = self._search(text, at, steps, empty)
            if marks is None or marks[0] is None or marks[1] is None:
                break
            found, at, empty = marks, marks[1], marks[0] == marks[1]
            if not last:
                break
        if found is None:
            return None
        spans = list(zip(found[::2], found[1::2], strict=True))
        start, end = next((s for s in spans[1:] if s[1] is not None), spans[0])
        return text[start:end]

    def _search(self, text: str, first: int, steps: int, advance: bool) -> tuple[Marks | None, int]:
        """The marks of the leftmost match from `first` on, and the steps that are left; with `advance` not the empty
        one at `first`, which was found before. Errors: InputFileError."""
        found: Marks | None = None
        ways: list[tuple[int, Marks]] = []
        nothing: Marks = (None,) * (2 * self.groups + 2)
        for place in range(first, len(text) + 1):
            started = ways if found is not None else [*ways, (0, nothing)]
            reached, steps = self._reach(started, text, place, steps)
            if steps < 0:
                raise InputFileError(
                    f"extracting {self.pattern!r} from an answer of {len(text)} characters took more than "
                    f"{MAX_STEPS:,} steps; write a pattern with less to try"
                )
            ways = []
            for index, marks in reached:
                test = self._ops[index].test
                if test is None:  # a match; what comes behind it in the list would have been tried later
                    if advance and place == first:
                        continue
                    found = marks
                    break
                if place < len(text) and test.match(text[place]):
                    ways.append((index + 1, marks))
            if not ways and found is not None:
                break
        return found, steps

    def _reach(
        self, started: list[tuple[int, Marks]], text: str, place: int, steps: int
    ) -> tuple[list[tuple[int, Marks]], int]:
        """What is reached without reading: reading and matching instructions, the preferred first."""
        reached, seen, todo = [], set(), started[::-1]
        while todo:
            index, marks = todo.pop()
            if index in seen:
                continue
            seen.add(index)
            steps -= 1
            op = self._ops[index]
            if op.save is not None:
                todo.append((index + 1, (*marks[: op.save], place, *marks[op.save + 1 :])))
            elif op.at is not None:
                if self._holds(op.at, text, place):
                    todo.append((index + 1, marks))
            elif op.to:
                todo.extend((to, marks) for to in reversed(op.to))
            else:
                reached.append((index, marks))
        return reached, steps

    def _holds(self, at: str, text: str, place: int) -> bool:
        """Whether an anchor holds between two characters. Pure."""
        if at == "BEGINNING_LINE":
            return place == 0 or text[place - 1] == "\n"
        if at in ("BEGINNING", "BEGINNING_STRING"):
            return place == 0
        if at == "END_STRING":
            return place == len(text)
        if at in ("END", "END_LINE"):
            return place == len(text) or (text[place] == "\n" and (at == "END_LINE" or place == len(text) - 1))
        before = place > 0 and self._word.match(text[place - 1]) is not None
        after = place < len(text) and self._word.match(text[place]) is not None
        return (before != after) == (at == "BOUNDARY")
