"""`Chunk`: what a step computes of a row that wants more of it than a drawn token; `PromptRows`."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fengine.core.request import Request
from fengine.core.scheduler_output import Span


class Chunk(NamedTuple):
    """Row `row` of a step, which wants more than a drawn token, computes positions start : end; the first of them is
    token `at` of the step. Its last token is `token`, or what row `fed` drew in the step before. `new` is what was told
    of the request, its `token_ids` kept up to date as far as none was fed. Tokens in front of the last that were drawn
    behind drafts are `kept`. Behind it come the guesses `draft`, which draw in the rows `draft_row` and on."""

    row: int
    new: Request
    start: int
    end: int
    at: int
    draws: bool
    token: int
    fed: int | None
    kept: Sequence[int] = ()
    draft: Sequence[int] = ()
    draft_row: int = 0

    @property
    def rows(self) -> list[int]:
        """Every row that draws for it."""
        return [self.row, *range(self.draft_row, self.draft_row + len(self.draft))]


class PromptRows(NamedTuple):
    """Rows whose input logprobs are wanted: of the ids in id_PK (column 0: the token behind) and the `top` likeliest.
    `index_P` is into the tokens of the step."""

    index_P: np.ndarray  # int32
    id_PK: np.ndarray  # int32
    top: int
    spans: list[Span]
