"""Prompt lookup: what followed the longest earlier copy of a sequence's last tokens will follow again. No torch.

    ... the cat sat on the mat ... the cat sat on        last tokens; an earlier copy of them; proposed: the mat ...

The copy is looked for among the CANDIDATES latest places where the last `least` tokens stood before. A token costs one
dictionary entry, a look-up a few comparisons. The longer the copy, the more is tried; what fails is tried less and less
often. Source: Saxena 2023, "Prompt Lookup Decoding".
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from fengine.core.speculation import Ask, Proposer

CANDIDATES = 8
ID_BITS = 32  # of a token in the number that stands for a run: an int is looked up sooner than a tuple is made
CATCH_UP = 8192  # tokens indexed in one go: a long prompt must not hold up the loop
SIZES = (3, 3, 4, 15)  # first tries behind copies of 1, 2-3, 4-7, and more tokens
REST = 7  # tokens between two looks where nothing was right for 8 * REST tokens, sooner fewer: a look takes the time of
# 1 % of a step of a small model
PATIENCE = 7  # after n tries in vain 2 ** n tokens are drawn before the next one; n grows no further


class NgramIndex:
    """Where each run of `least` tokens of one growing sequence has occurred. Modifies: itself."""

    __slots__ = ("least", "most", "num_indexed", "_run", "_kept", "_latest", "_before")

    def __init__(self, least: int, most: int) -> None:
        """Copies of `least` tokens count; they are compared up to `most` tokens back. 1 <= least <= most."""
        self.least, self.most = least, most
        self.num_indexed = 0  # tokens that the index knows
        self._run, self._kept = 0, (1 << ID_BITS * least) - 1  # the last `least` tokens as one number, and its bits
        self._latest: dict[int, int] = {}  # a run -> the index behind its latest occurrence
        self._before = array("i", [0])  # index behind an occurrence -> that of the one before it; 0: there is none

    def extend(self, ids: Sequence[int], count: int) -> None:
        """Takes in the first `count` tokens of the sequence; those that it knows must still be the same."""
        run, kept, least, latest, before = self._run, self._kept, self.least, self._latest, self._before
        for end in range(self.num_indexed + 1, count + 1):
            run = (run << ID_BITS | ids[end - 1]) & kept
            if end < least:
                before.append(0)
            else:
                before.append(latest.get(run, 0))
                latest[run] = end
        self._run, self.num_indexed = run, count

    def match(self, ids: Sequence[int]) -> tuple[int, int] | None:
        """(its length, the index behind it) of the longest earlier copy of the end of `ids`, all of which is indexed;
        of equally long ones the latest. None if the last `least` tokens are new. Pure."""
        known, best = len(ids), None
        end = self._before[known]
        for _ in range(CANDIDATES):
            if not end:
                break
            length, longest = self.least, min(self.most, end)
            while length < longest and ids[end - 1 - length] == ids[known - 1 - length]:
                length += 1
            if best is None or length > best[0]:
                best = length, end
                if length == self.most:
                    break
            end = self._before[end]
        return best


def follow(ids: Sequence[int], end: int, count: int) -> list[int]:
    """`count` tokens that followed index `end`; where the sequence ends they go on as they began there. Pure."""
    found = list(ids[end : end + count])
    while len(found) < count:
        found += found[: count - len(found)]
    return found


@dataclass(slots=True)
class Trust:
    """How far copies of some length are followed. Modifies: itself."""

    size: int  # tokens of the next try
    misses: int = 0  # tries in vain since the last that was not
    resume_at: int = 0  # no try before so many tokens are known

    def learn(self, tried: int, right: int, known: int) -> None:
        if not right:
            self.misses = min(self.misses + 1, PATIENCE)
            self.size = max(self.size // 2, 1)
            self.resume_at = known + (1 << self.misses)
        else:
            self.misses = self.resume_at = 0
            self.size = max(self.size, 2 * tried + 1) if right == tried else right


class Lookup:
    """What a request's tokens repeat, and how its tries fared: a function of its own history alone, so that it is
    treated alike whatever its neighbours do. Modifies: itself."""

    __slots__ = ("index", "trusts", "level", "right_at")

    def __init__(self, least: int, most: int, known: int) -> None:
        self.index = NgramIndex(least, most)
        self.trusts = [Trust(size) for size in SIZES]
        self.level = 0  # of the last proposal
        self.right_at = known  # tokens known when a draft was last right, or this was made

    def propose(self, ask: Ask) -> list[int]:
        """Modifies: itself. Learns from the try before."""
        ids, index, drafting = ask.request.token_ids, self.index, ask.drafting
        known = len(ids)
        if drafting.last is not None:
            self._learn(*drafting.last, known)
            drafting.last = None
        index.extend(ids, min(known, index.num_indexed + CATCH_UP))
        if index.num_indexed < known:
            return []
        if (match := index.match(ids)) is not None:
            length, end = match
            self.level = min(length.bit_length(), len(SIZES)) - 1
            trust = self.trusts[self.level]
            count = min(trust.size, ask.most)
            if known >= trust.resume_at and count >= ask.least:
                return follow(ids, end, ask.skip + count)[ask.skip :]
        drafting.rest_until = known + ask.skip + min((known - self.right_at) // 8, REST)
        return []

    def _learn(self, tried: int, right: int, known: int) -> None:
        """A success speaks for longer copies too, a failure against shorter ones."""
        own = self.trusts[self.level]
        own.learn(tried, right, known)
        if right:
            self.right_at = known
            for longer in self.trusts[self.level + 1 :]:
                longer.size, longer.misses, longer.resume_at = max(own.size, longer.size), 0, 0
        else:
            for shorter in self.trusts[: self.level]:
                shorter.learn(tried, 0, known)


def ngram_proposer(least: int, most: int) -> Proposer:
    """Proposes by look-up in each request's own tokens. Modifies: `Drafting.memo`, a `Lookup`."""

    def propose(asks: Sequence[Ask]) -> list[list[int]]:
        for ask in asks:
            if ask.drafting.memo is None:
                ask.drafting.memo, ask.drafting.last = Lookup(least, most, len(ask.request.token_ids)), None
        return [ask.drafting.memo.propose(ask) for ask in asks]

    return propose
