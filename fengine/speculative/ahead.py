"""Guesses behind a step in flight: the device goes on by what the step draws, while the host waits for it. No bit of an
answer, and no guess, is another than if the host had read the step first; of a try that grows there are fewer."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fengine.core.scheduler_output import SchedulerOutput
from fengine.core.speculation import Ask
from fengine.speculative.memo import Chained, Memo


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
