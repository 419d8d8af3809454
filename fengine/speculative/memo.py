"""What a draft knows of each request: how much of it is computed, what was guessed behind it, and whether that pays."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from fengine.core.speculation import Ask
from fengine.speculative.pace import REST, Pace


@dataclass(slots=True)
class Memo:
    """What the draft knows of a request. Modifies: itself."""

    pace: Pace
    done: int = 0  # tokens whose KV is written
    guesses: list[int] = field(default_factory=list)  # behind the `known` tokens of the last try
    known: int = 0
    next: int = 0  # tokens known behind it
    room: int = 0  # tokens that pages of its own held then
    cursor: Any = None  # where the known tokens stand in its grammar

    def learn(self, ask: Ask, behind: int) -> None:
        """Takes what became of the last try: guesses that were drawn are computed already, but for a draft that has
        gone on from its own stream where the target's is known now."""
        ids, drafting = ask.request.token_ids, ask.drafting
        if drafting.last is not None:
            self.pace.learn(*drafting.last, len(ids))
            self.next = self.known + drafting.last[1] + 1
            drafting.last = None
            self.tell(ask)
        pairs = zip(self.guesses[:-1], ids[self.known :], strict=False)  # the last one was not computed
        right = 0 if behind else sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        done = max(self.done, min(self.known - behind + right, self.room))
        self.done, self.guesses = min(done, len(ids) - behind - 1), []  # what the last token gives is needed

    def see(self, known: int, room: int, behind: int, count: int) -> None:
        """So many known tokens are computed, and `count` guesses behind them."""
        self.known, self.room, self.guesses = known, room, [0] * count
        self.done = min(known - behind, room)

    def tell(self, ask: Ask) -> None:
        """When it is to be asked again, and what for. Modifies: the ask's drafting."""
        drafting = ask.drafting
        drafting.rest_until = drafting.try_from = self.pace.resume_at - 1
        drafting.gain = self.pace.gain
        drafting.hope_from = hopes_at(ask)


def hopes_at(ask: Ask) -> int:
    """From so many computed tokens on it is as a new request, if nobody tries it before. Pure."""
    return len(ask.request.token_ids) + 2 * REST + ask.request.num_output


class Chained(NamedTuple):
    """A run of the chain: who is guessed for, whether all it knows is seen then, and what waits for the guesses."""

    rows: list[tuple[Ask, Memo, bool]]
    guesses: Callable[[], np.ndarray]
