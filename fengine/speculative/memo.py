"""What a draft knows of each request: how much of it is computed, what was guessed behind it, and whether that pays.

Guesses may stand behind a step in flight: the device goes on by what the step draws, while the host waits for it. No
bit of an answer, and no guess, is another than if the host had read the step first; of a try that grows there are
fewer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from fengine.core.scheduler_output import SchedulerOutput
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


class Try(NamedTuple):
    """A row of a step that is fed with guesses, as `catch_up` is told of it."""

    known: int  # tokens in front of the guesses
    tried: int
    own: int  # where its own draw lies
    draws: int  # where those behind its guesses begin
    kept: int  # so many right guesses need not be computed again
    room: int  # the first position that must be
    before: int  # the last known token

    def unseen(self, behind: int) -> int:
        """How many tokens are to be caught up with, at most."""
        computed = self.known - behind + min(self.tried, self.kept)
        return self.known - behind + self.tried + 1 - min(computed, self.room)


class Ahead(NamedTuple):
    """A run of the chain behind a step in flight."""

    memos: list[Memo]  # of its rows
    count: int  # guesses of each
    guesses: Callable[[], np.ndarray]

    def rows_of(self, asks: Sequence[Ask]) -> list[int] | None:
        """Their rows. None: it did not guess for all of them, or there was another step since."""
        row_of = {id(memo): row for row, memo in enumerate(self.memos)}
        rows = [
            row_of[id(ask.drafting.memo)]
            for ask in asks
            if id(ask.drafting.memo) in row_of and len(ask.request.token_ids) == ask.drafting.memo.next
        ]
        return rows if rows and len(rows) == len(asks) else None


def tries_of(chained: Chained, output: SchedulerOutput, behind: int) -> list[Try]:
    """The rows of the last run, as the step in flight tries their guesses; none unless it tries all rows', and each row
    wants guesses again whatever is right. `behind`: as of the head. Pure."""
    if not all(request.params.bare for request in output.requests):
        return []  # its sampler may wait for the host
    places, at = {}, len(output.rows)
    for index, draft in output.drafts:
        places[output.requests[index]] = len(draft), index, at
        at += len(draft)
    tries = []
    for ask, memo, _ in chained.rows:
        tried, own, draws = places.get(ask.request, (0, 0, 0))
        if not tried or ask.drafting.memo is not memo or not memo.pace.sure(tried):
            return []  # also where it has left its row since
        kept = 0 if behind else len(memo.guesses) - 1
        tries.append(Try(memo.known, tried, own, draws, kept, memo.room, ask.request.token_ids[-1]))
    return tries
