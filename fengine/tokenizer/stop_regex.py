"""Stop patterns: does the text so far hold a match? In time linear in the text, whatever the pattern. No torch.

The syntax is that of Python's `re` without what no finite automaton can do: back-references, look-around, atomic
groups, possessive quantifiers and conditionals are refused by name. A pattern becomes a nondeterministic automaton of
at most MAX_STATES states (R. Cox, "Regular Expression Matching Can Be Simple And Fast"), which reads every character
once, so no pattern can run away. `re` parses, and decides single characters: flags and classes mean what they do there.
"""

import re
import threading
import warnings
from collections.abc import Iterable
from importlib import import_module
from typing import Any, NamedTuple

from fengine.errors import InvalidRequestError

MAX_PATTERNS = 32
MAX_PATTERN_BYTES = 256
MAX_STATES = 2000  # of all patterns of a request together: bounds the work per character
MAX_MEMO = 1 << 14  # remembered transitions of one pattern, and the states in them
parser: Any = import_module("re._parser")  # that `re.compile` itself uses; the same in all supported Pythons
_CLASSES = {"DIGIT": r"\d", "NOT_DIGIT": r"\D", "SPACE": r"\s", "NOT_SPACE": r"\S", "WORD": r"\w", "NOT_WORD": r"\W"}
_REFUSED = {
    "GROUPREF": "a back-reference", "GROUPREF_IGNORE": "a back-reference", "GROUPREF_EXISTS": "a conditional",
    "ASSERT": "look-around", "ASSERT_NOT": "look-around", "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive quantifier",
}  # fmt: skip


_QUIET = threading.Lock()  # the warnings module has one list of filters for all threads


def parse(pattern: str) -> Any:
    """The parser's tree of a user's pattern, without its warnings of syntax to come. Errors: as `re.compile`. Pure."""
    with _QUIET, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return parser.parse(pattern)


def inside(flags: int, more: int, less: int) -> int:
    """The flags inside (?more-less:…): of ASCII and UNICODE there is one. Pure."""
    kinds = re.ASCII | re.UNICODE
    return ((flags & ~kinds if more & kinds else flags) | more) & ~less


def one_character(whole: str, kind: str, value: Any, flags: int) -> re.Pattern[str]:
    """A pattern for one character, from an item of the parser. Pure. Errors: InvalidRequestError for what is no
    character at all; `whole` names the expression it stands in."""
    if kind == "ANY":
        source = "."
    elif kind in ("LITERAL", "NOT_LITERAL"):
        source = f"[{'^' if kind == 'NOT_LITERAL' else ''}{_escaped(value)}]"
    elif kind == "IN":
        parts = []
        for item, what in value:
            name = str(item)
            ends = (what,) if name == "LITERAL" else what if name == "RANGE" else ()
            category = _CLASSES.get(str(what).removeprefix("CATEGORY_"), "")
            parts.append("^" if name == "NEGATE" else "-".join(map(_escaped, ends)) or category)
        source = f"[{''.join(parts)}]"
    else:
        raise InvalidRequestError(
            f"{whole} uses {_REFUSED.get(kind, kind)}, which may take unbounded time; use characters, classes, groups, "
            "|, anchors and the quantifiers * + ? {m,n}."
        )
    return re.compile(source, flags & ~re.VERBOSE)


def _escaped(code: int) -> str:
    return f"\\U{code:08x}"


class _State(NamedTuple):
    """Reads a character that `test` accepts, or nothing where the anchor `at` holds (None: always)."""

    to: list[int]
    test: re.Pattern[str] | None = None
    at: str | None = None


class Spot(NamedTuple):
    """Where a search stands: the states reached, those reached if the newline just read is the last character, and
    what the character behind is. The empty text's is `Spot()`."""

    states: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()
    start: bool = True
    word: bool = False
    newline: bool = False


class StopRegex:
    """One pattern. Immutable but for a memo of transitions, so that many requests may share it."""

    def __init__(self, pattern: str) -> None:
        """Errors: InvalidRequestError (no regular expression, too long or large, unsupported, matches no text)."""
        size = len(pattern.encode("utf-8", "surrogatepass"))
        if size > MAX_PATTERN_BYTES:
            raise InvalidRequestError(f"stop_regex is {size} bytes, over the {MAX_PATTERN_BYTES}-byte limit")
        self.pattern = pattern
        self._states: list[_State] = []
        try:
            tree = parse(pattern)
            self._flags: int = tree.state.flags
            self._accept = self._new([])
            self._first = self._sequence(tree, self._flags, self._accept)
        except (re.error, OverflowError, RecursionError) as error:
            raise InvalidRequestError(f"stop_regex {pattern!r} is not a regular expression: {error}") from None
        self._word = re.compile(r"\w", self._flags & re.ASCII)
        self._memo: dict[tuple[Spot, str], tuple[Spot, bool]] = {}
        self._remembered = 0
        if self.ends(Spot()):
            raise InvalidRequestError(f"stop_regex {pattern!r} matches the empty text: it would match at once.")

    @property
    def size(self) -> int:
        return len(self._states)

    # -- construction (K. Thompson, 1968), from the end: the first state of what goes on to the state `then` ----------

    def _new(self, to: list[int], test: re.Pattern[str] | None = None, at: str | None = None) -> int:
        if len(self._states) >= MAX_STATES:
            raise InvalidRequestError(f"stop_regex {self.pattern!r} needs more than {MAX_STATES} states; repeat less.")
        self._states.append(_State(to, test, at))
        return len(self._states) - 1

    def _sequence(self, items: Any, flags: int, then: int) -> int:
        for kind, value in reversed(items):
            then = self._piece(str(kind), value, flags, then)
        return then

    def _piece(self, kind: str, value: Any, flags: int, then: int) -> int:
        if kind == "SUBPATTERN":
            _, more, less, items = value
            return self._sequence(items, inside(flags, more, less), then)
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):  # lazy or not, the same texts hold a match
            low, high, items = value
            return self._repeat(low, high, items, flags, then)
        if kind == "BRANCH":
            return self._new([self._sequence(items, flags, then) for items in value[1]])
        if kind == "AT":
            return self._new([then], at=self._anchor(str(value).removeprefix("AT_"), flags))
        return self._new([then], one_character(f"stop_regex {self.pattern!r}", kind, value, flags))

    def _anchor(self, name: str, flags: int) -> str:
        """Errors: InvalidRequestError for edges of words where other characters make words than in the rest."""
        if name.endswith("BOUNDARY") and (flags ^ self._flags) & re.ASCII:
            raise InvalidRequestError(
                f"stop_regex {self.pattern!r} has \\b or \\B in a group with an ASCII flag of its own, which is not "
                "built; give the flag for the whole pattern: (?a)."
            )
        return name + ("_LINE" if flags & re.MULTILINE else "")

    def _repeat(self, low: int, high: int, items: Any, flags: int, then: int) -> int:
        end = then
        if high == parser.MAXREPEAT:
            then = self._new(to := [end])
            to.append(self._sequence(items, flags, then))
        else:
            for _ in range(high - low):
                then = self._new([end, self._sequence(items, flags, then)])
        for _ in range(low):  # each with a state of its own, so that also those of nothing are counted
            then = self._new([self._sequence(items, flags, then)])
        return then

    # -- search -------------------------------------------------------------------------------------------------------

    def step(self, spot: Spot, character: str) -> tuple[Spot, bool]:
        """(where the search stands behind `character`, whether a match ends before it). Pure but for the memo."""
        known = self._memo.get((spot, character))
        if known is None:
            known = self._step(spot, character)
            size = 1 + len(known[0].states) + len(known[0].last)
            if self._remembered + size > MAX_MEMO:
                self._memo.clear()
                self._remembered = 0
            self._memo[spot, character] = known
            self._remembered += size
        return known

    def _step(self, spot: Spot, character: str) -> tuple[Spot, bool]:
        newline = character == "\n"
        word = self._word.match(character) is not None
        states, last = self._reach(spot, word, newline, False), frozenset()
        if newline:  # `$` also holds before a newline that ends the text
            final = self._reach(spot, word, newline, True)
            last = self._read(final, character) | (final & {self._accept})
        moved = Spot(self._read(states, character), last, start=False, word=word, newline=newline)
        return moved, self._accept in states

    def ends(self, spot: Spot) -> bool:
        """Whether a match ends where the text ends. Pure."""
        return self._accept in spot.last or self._accept in self._reach(spot, False, False, True)

    def _read(self, states: Iterable[int], character: str) -> frozenset[int]:
        return frozenset(
            to for i in states if (s := self._states[i]).test is not None and s.test.match(character) for to in s.to
        )

    def _reach(self, spot: Spot, word: bool, newline: bool, final: bool) -> frozenset[int]:
        """All states that are reached without reading; `word` and `newline` are of the character ahead, and with
        `final` it is the last one, or (where it is no newline) there is none."""
        ended = final and not newline
        boundary = spot.word != word
        holds = {
            "BEGINNING": spot.start, "BEGINNING_LINE": spot.start or spot.newline, "BEGINNING_STRING": spot.start,
            "BOUNDARY": boundary, "NON_BOUNDARY": not boundary,
            "END": final, "END_LINE": ended or newline, "END_STRING": ended,
        }  # fmt: skip
        todo = [self._first, *spot.states, *(spot.last if ended else ())]
        seen: set[int] = set()
        while todo:
            i = todo.pop()
            to, test, at = self._states[i]
            if i in seen or (at is not None and not holds[at if at in holds else at.removesuffix("_LINE")]):
                continue
            seen.add(i)
            if test is None:
                todo.extend(to)
        return frozenset(seen)


class StopRegexSearch:
    """The patterns of one request over its growing text. Copyable with `copy.copy`."""

    def __init__(self, patterns: Iterable[StopRegex]) -> None:
        self._at = [(pattern, Spot()) for pattern in patterns]

    def feed(self, text: str, peek: str = "") -> str | None:
        """Takes what is new; the first pattern that the text so far, or with `peek` behind it, holds a match of."""
        hit, moved = None, []
        for pattern, spot in self._at:
            found = False
            for kept, part in ((True, text), (False, peek)):
                for character in part:
                    spot, ended = pattern.step(spot, character)
                    found = found or ended
                if kept:
                    moved.append((pattern, spot))
                found = found or pattern.ends(spot)
            if hit is None and found:
                hit = pattern.pattern
        self._at = moved
        return hit


def compile_patterns(patterns: Iterable[str]) -> tuple[StopRegex, ...]:
    """Errors: InvalidRequestError."""
    given = tuple(patterns)
    if len(given) > MAX_PATTERNS:
        raise InvalidRequestError(f"at most {MAX_PATTERNS} stop_regex patterns are allowed, got {len(given)}")
    compiled: list[StopRegex] = []
    for pattern in given:
        compiled.append(StopRegex(pattern))
        if sum(one.size for one in compiled) > MAX_STATES:
            raise InvalidRequestError(
                f"the stop_regex patterns together need more than {MAX_STATES} states; give fewer, or repeat less."
            )
    return tuple(compiled)
