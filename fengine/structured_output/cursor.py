"""`Cursor`: where one request stands in its grammar, a function of the tokens that it has drawn. No torch."""

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fengine.errors import GrammarError


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
    """Modifies: itself, by the loop alone.

    `ends` are the ids that end the request: allowed where the text may end, whatever text they have of their own.
    `barred` ids are never drawn. With `eager` False an end is drawn only where nothing else can be (ignore_eos).
    """

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
