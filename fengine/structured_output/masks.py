"""Which tokens may be drawn: where each request stands in its grammar, and one mask for each such row of a step.

    step n is launched --> its tokens --> cursors --matchers--> masks of step n + 1

With overlap, step n + 1 is launched before the tokens of step n are known. When they are, the masks of its rows are
computed where the loop is, while the forward pass runs; many of a large vocabulary by the matchers' own threads, which
take longer to wake than few masks. A thread of Python's beside the loop would not begin before the loop leaves the GIL,
which takes longer than most masks. No torch."""

from collections.abc import Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fengine.core.masks import Filled, MaskedDraft
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


NO_BITS = bits_of(frozenset())


class Cursor:
    """Modifies: itself, by the loop alone. `ends` are the ids that end the request: allowed where the text may end,
    whatever text they have of their own; before `least` tokens are drawn neither they nor `early` ids are. `barred` ids
    never are. With `eager` False an end is drawn only where nothing else can be (ignore_eos)."""

    __slots__ = ("grammar", "stop_ids", "ends", "barred", "shut", "shut_early", "least", "eager", "tokens", "draft",
                 "matcher", "error")  # fmt: skip

    def __init__(
        self, grammar: Any, ends: Collection[int], barred: Iterable[int], early: Iterable[int], *, eager: bool = True,
        least: int = 0,
    ) -> None:  # fmt: skip
        tokens, size = grammar.vocabulary.tokens, grammar.vocabulary.size
        known = [[id for id in ids if 0 <= id < size] for ids in (ends, barred, (*ends, *early))]
        self.grammar, self.stop_ids, self.eager, self.least = grammar, ends, eager, least
        self.ends, self.barred = (bits_of(frozenset(ids)) for ids in known[:2])
        self.shut, self.shut_early = (  # the others have no text that the matcher could allow
            bits_of(frozenset(id for id in ids if tokens[id])) for ids in (known[0], known[2])
        )
        self.tokens: list[int] = []  # taken so far
        self.draft: Sequence[int] = ()  # guesses behind them, of which some may have been drawn since
        self.matcher: Any = grammar.matcher()
        self.error: GrammarError | None = None

    def catch_up(self, count: int, last: int) -> None:
        """Goes on to `count` tokens, of which `last` is the last one; those between were guesses. An end goes nowhere:
        what a row draws behind it is not looked at."""
        if (due := count - len(self.tokens)) and last not in self.stop_ids:
            if due > 1:
                self.take(list(self.draft[: due - 1]))
            self.tokens.append(last)
            if self.error is None and not self.matcher.consume_token(last):
                self.renew()

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


def fill(rows: Sequence[int], cursors: Sequence[Cursor], drafts: Sequence[MaskedDraft] = ()) -> Filled:
    """The masks where the cursors of these rows stand, and behind each of their drafts that may come there. Modifies:
    the cursors' drafts, and those that are stuck."""
    found = _filled(rows, cursors)
    live = [(draft, cursors[draft.index].fork()) for draft in drafts if cursors[draft.index].error is None]
    for draft in drafts:
        cursors[draft.index].draft = draft.token_ids
    for k in range(max((len(draft.token_ids) for draft, _ in live), default=0)):
        live = [one for one in live if k < len(one[0].token_ids) and one[1].advance(one[0].token_ids[k])]
        if live:
            more = _filled([draft.row + k for draft, _ in live], [cursor for _, cursor in live])
            row_M, mask_MW = (np.concatenate(pair) for pair in zip(found[:2], more[:2], strict=True))
            found = Filled(row_M, mask_MW, found.errors | more.errors)
    return found


def _filled(rows: Sequence[int], cursors: Sequence[Cursor]) -> Filled:
    """What the matchers allow, with the ends of each row. Modifies: the cursors that are stuck."""
    mask_MW, complete_M = _allowed(cursors)
    early_M = [len(cursor.tokens) < cursor.least for cursor in cursors]
    drawable_M = _with_ends(cursors, mask_MW, complete_M, early_M)
    if not all(drawable_M):
        for cursor, drawable, *where in zip(cursors, drawable_M, complete_M, early_M, strict=True):
            if not drawable and cursor.error is None:
                cursor.fail(_why_stuck(*where))
    errors = {int(row): cursor.error for row, cursor in zip(rows, cursors, strict=True) if cursor.error is not None}
    return Filled(np.asarray(rows, np.int32), mask_MW, errors)


def _with_ends(
    cursors: Sequence[Cursor], mask_MW: np.ndarray, complete_M: list[bool], early_M: list[bool]
) -> list[bool]:
    """Allows the ends of the rows whose text may end, alone, and bars what is barred; whether a row allows anything.
    Modifies: mask_MW."""
    shut = [cursor.shut_early if early else cursor.shut for cursor, early in zip(cursors, early_M, strict=True)]
    _change(mask_MW, shut, False)
    goes_on_M = _any(mask_MW)
    ending = [
        cursor.ends if complete and not early and (cursor.eager or not goes_on) else NO_BITS
        for cursor, complete, early, goes_on in zip(cursors, complete_M, early_M, goes_on_M, strict=True)
    ]
    changed = _change(mask_MW, ending, True) | _change(mask_MW, [cursor.barred for cursor in cursors], False)
    return _any(mask_MW) if changed else goes_on_M


def _any(mask_MW: np.ndarray) -> list[bool]:
    """Whether a row has a bit. Pure."""
    found: list[bool] = (np.bitwise_or.reduce(mask_MW, axis=1) != 0).tolist()
    return found


def _why_stuck(complete: bool, early: bool) -> str:
    if not complete:
        return "no token of this vocabulary can come next, stop_token_ids and logit_bias considered"
    if early:
        return "the text is complete and cannot go on, but min_new_tokens is not reached; lower it"
    return "the text is complete, but logit_bias bars the tokens that could end it or go on"


def _allowed(cursors: Sequence[Cursor]) -> tuple[np.ndarray, list[bool]]:
    """(masks int32 [M, words of V], whether the text may end here). Modifies: the cursors that fail."""
    vocabulary = cursors[0].grammar.vocabulary
    size, words = vocabulary.size, -(-(vocabulary.size + 1) // 32)
    mask_MW = np.empty((len(cursors), words), np.int32)
    live = [(cursor.matcher, i) for i, cursor in enumerate(cursors) if cursor.error is None]
    if len(live) < len(cursors):
        mask_MW[[i for i, cursor in enumerate(cursors) if cursor.error is not None]] = 0
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
    return mask_MW[:, : -(-size // 32)], complete_M


def _alone(cursor: Cursor, mask_W: np.ndarray) -> None:
    """The mask of a cursor that begins again. Modifies: mask_W; the cursor."""
    cursor.renew()
    if cursor.error is None:
        cursor.matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
        if cursor.matcher.is_error():
            cursor.fail(reason(cursor.matcher))
    if cursor.error is not None:
        mask_W[:] = 0


def _change(mask_MW: np.ndarray, bits_M: Sequence[Bits], allow: bool) -> bool:
    """Sets or clears bits of rows; whether there are any. Modifies: mask_MW."""
    some = {bits for bits in bits_M if len(bits.word)}
    for bits in some:
        at = np.array([i for i, one in enumerate(bits_M) if one is bits])[:, None], bits.word
        mask_MW[at] = mask_MW[at] | bits.bit if allow else mask_MW[at] & ~bits.bit
    return bool(some)
