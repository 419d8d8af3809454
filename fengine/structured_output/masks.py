"""Which tokens may be drawn: where each request stands in its grammar, and one mask for each such row of a step.

    step n is launched --> its tokens --> cursors --matchers--> masks of step n + 1

With overlap, step n + 1 is launched before the tokens of step n are known. When they are, the masks of its rows are
computed where the loop is, while the forward pass runs; many of a large vocabulary by the matchers' own threads, which
take longer to wake than few masks. A thread of Python's beside the loop would not begin before the loop leaves the GIL,
which takes longer than most masks. No torch."""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fengine.core.masks import Filled, MaskRow
from fengine.errors import GrammarError

AT_HAND = 1 << 18  # rows times ids whose masks the loop computes by itself: some 0.1 ms


@dataclass(frozen=True, slots=True, eq=False)
class Bits:
    """Ids as bits of a mask: `word[i]` gets the bits `bit[i]`, each word once. Equal only to itself."""

    word: np.ndarray
    bit: np.ndarray


@lru_cache(256)
def bits_of(ids: frozenset[int]) -> Bits:
    """One for all that have the same ids, so that their rows change together. Pure."""
    words: dict[int, int] = {}
    for id in ids:
        words[id // 32] = words.get(id // 32, 0) | 1 << id % 32
    return Bits(np.array(list(words), np.int64), np.array(list(words.values()), np.uint32).view(np.int32))


class Cursor:
    """Modifies: itself, by the loop alone. `ends` are the ids that end the request: allowed where the text may end,
    whatever text they have of their own. `barred` ids are never drawn. With `eager` False an end is drawn only where
    nothing else can be (ignore_eos)."""

    __slots__ = ("grammar", "ends", "barred", "early", "eager", "tokens", "matcher", "error")

    def __init__(
        self, grammar: Any, ends: Iterable[int], barred: Iterable[int], early: Iterable[int], eager: bool
    ) -> None:
        size = grammar.vocabulary.size
        ends, barred, early = ([id for id in ids if 0 <= id < size] for ids in (ends, barred, early))
        self.grammar, self.eager = grammar, eager
        self.ends, self.barred, self.early = (bits_of(frozenset(ids)) for ids in (ends, barred, (*ends, *early)))
        self.tokens: list[int] = []  # taken so far
        self.matcher: Any = grammar.matcher()
        self.error: GrammarError | None = None

    def take(self, tokens: list[int]) -> None:
        """Goes on over tokens that were drawn."""
        self.tokens += tokens
        if self.error is None and tokens and not self.matcher.consume_tokens(tokens):
            self.renew()

    def fork(self) -> "Cursor":
        """Another one that stands here. Pure."""
        other = copy(self)
        other.tokens, other.matcher = list(self.tokens), self.matcher.deep_copy()
        return other

    def advance(self, token: int) -> bool:
        """Goes on over a guess; False, and nothing changed, where it cannot come here. Modifies: itself."""
        if self.error is not None or self.matcher.validate_tokens([token]) != 1:
            return False
        self.take([token])
        return self.error is None

    def renew(self) -> None:
        """Begins again with an automaton of its own, for the shared one has failed; `error` tells if that does, too."""
        try:
            self.matcher = self.grammar.anew()
            if self.tokens and not self.matcher.consume_tokens(list(self.tokens)):
                self.fail(reason(self.matcher))
        except GrammarError as error:
            self.error = error

    def fail(self, why: str) -> None:
        """Nothing can be drawn any more."""
        self.error = GrammarError(f"{self.grammar.source.kind}, after {len(self.tokens)} tokens: {why}")


def reason(matcher: Any) -> str:
    """The first line of what the matcher says is wrong."""
    line = matcher.get_error().partition("\n")[0]
    if line.startswith("NoExtension"):
        return "no token of this vocabulary can come next"
    return line.rpartition("failed to compile JSON schema: ")[2][:500]


def checked(matcher: Any) -> Any:
    """Errors: GrammarError if it is in error."""
    if matcher.is_error():
        raise GrammarError(reason(matcher))
    return matcher


def fill(rows: Sequence[MaskRow], drawn: Sequence[int]) -> Filled:
    """The masks behind what rows drew, and behind each of their drafts that may come there; `drawn` are the tokens of
    the step before. Modifies: the cursors."""
    found = _filled(rows, *_allowed(_taken(rows, drawn)))
    live = [row._replace(cursor=row.cursor.fork()) for row in rows if row.draft and row.cursor.error is None]
    for k in range(max((len(row.draft) for row in live), default=0)):
        live = [row for row in live if k < len(row.draft) and row.cursor.advance(row.draft[k])]
        if live:
            behind = [row._replace(row=row.draft_row + k, least=max(row.least - k - 1, 0)) for row in live]
            more = _filled(behind, *_allowed([row.cursor for row in behind]))
            row_M, mask_MW = (np.concatenate(pair) for pair in zip(found[:2], more[:2], strict=True))
            found = Filled(row_M, mask_MW, found.errors | more.errors)
    return found


def _taken(rows: Sequence[MaskRow], drawn: Sequence[int]) -> list[Cursor]:
    """The cursors, behind what was drawn. Modifies: them."""
    for row in rows:
        if row.fed is None or drawn[row.fed] in row.stop_ids:
            row.cursor.take(row.fresh)  # a row that has ended goes nowhere, and what it draws is not looked at
        else:
            row.cursor.take([*row.fresh, drawn[row.fed]])
    return [row.cursor for row in rows]


def _filled(rows: Sequence[MaskRow], mask_MW: np.ndarray, complete_M: list[bool]) -> Filled:
    """What the matchers allow, with the ends of each row. Modifies: mask_MW; the cursors of rows that are stuck."""
    drawable_M = _with_ends(rows, mask_MW, complete_M)
    for row, drawable, complete in zip(rows, drawable_M, complete_M, strict=True):
        if not drawable and row.cursor.error is None:
            row.cursor.fail(_why_stuck(row, complete))
    errors = {row.row: row.cursor.error for row in rows if row.cursor.error is not None}
    return Filled(np.array([row.row for row in rows], np.int32), mask_MW, errors)


def _with_ends(rows: Sequence[MaskRow], mask_MW: np.ndarray, complete_M: list[bool]) -> list[bool]:
    """Allows the ends of the rows whose text may end, alone, and bars what is barred; whether a row allows anything.
    Modifies: mask_MW."""
    _change(mask_MW, [(i, row.cursor.early if row.least else row.cursor.ends) for i, row in enumerate(rows)], False)
    goes_on_M: list[bool] = np.any(mask_MW, axis=1).tolist()
    ending = [
        (i, row.cursor.ends)
        for i, row in enumerate(rows)
        if complete_M[i] and not row.least and (row.cursor.eager or not goes_on_M[i])
    ]
    barred = [(i, row.cursor.barred) for i, row in enumerate(rows) if len(row.cursor.barred.word)]
    _change(mask_MW, ending, True)
    _change(mask_MW, barred, False)
    return np.any(mask_MW, axis=1).tolist() if ending or barred else goes_on_M


def _why_stuck(row: MaskRow, complete: bool) -> str:
    if not complete:
        return "no token of this vocabulary can come next, logit_bias considered"
    if row.least:
        return "the text is complete and cannot go on, but min_new_tokens is not reached; lower it"
    return "the text is complete, but logit_bias bars the tokens that could end it or go on"


def _allowed(cursors: Sequence[Cursor]) -> tuple[np.ndarray, list[bool]]:
    """(masks int32 [M, words of V], whether the text may end here). Modifies: the cursors that fail."""
    vocabulary = cursors[0].grammar.vocabulary
    size, words = vocabulary.size, -(-(vocabulary.size + 1) // 32)
    mask_MW = np.zeros((len(cursors), words), np.int32)
    live = [(cursor.matcher, i) for i, cursor in enumerate(cursors) if cursor.error is None]
    first, bytes_W = mask_MW.ctypes.data, 4 * words
    if len(live) * size > AT_HAND:
        vocabulary.executor.unsafe_compute_mask_ptr(live, first, bytes_W, len(cursors))
    else:
        for matcher, i in live:
            matcher.unsafe_compute_mask_ptr(first + bytes_W * i, bytes_W)
    for matcher, i in live:
        if matcher.is_error():
            _alone(cursors[i], mask_MW[i])
    complete_M: list[bool] = (mask_MW[:, size // 32] >> size % 32 & 1 == 1).tolist()
    mask_MW[:, size // 32] &= (1 << size % 32) - 1  # the id behind the vocabulary, which tells just this
    return np.ascontiguousarray(mask_MW[:, : -(-size // 32)]), complete_M


def _alone(cursor: Cursor, mask_W: np.ndarray) -> None:
    """The mask of a cursor that begins again. Modifies: mask_W; the cursor."""
    cursor.renew()
    if cursor.error is None:
        cursor.matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
        if cursor.matcher.is_error():
            cursor.fail(reason(cursor.matcher))
    if cursor.error is not None:
        mask_W[:] = 0


def _change(mask_MW: np.ndarray, which: Sequence[tuple[int, Bits]], allow: bool) -> None:
    """Sets or clears bits of rows. Modifies: mask_MW."""
    rows: dict[Bits, list[int]] = {}
    for i, bits in which:
        rows.setdefault(bits, []).append(i)
    for bits, some in rows.items():
        at = np.array(some)[:, None], bits.word
        mask_MW[at] = mask_MW[at] | bits.bit if allow else mask_MW[at] & ~bits.bit
