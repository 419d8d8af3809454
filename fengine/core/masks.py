"""What a step asks of grammars, and what it gets: the types that both sides know. No torch."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from fengine.core.request import Request


class MaskedDraft(NamedTuple):
    """Guesses behind what the cursor `index` of a step has taken, which draw in the rows `row` and on."""

    index: int
    token_ids: Sequence[int]
    row: int


class Filled(NamedTuple):
    """Masks as `ops/edit_logits.py` takes them; rows in `errors` have nothing to draw."""

    row_M: np.ndarray  # int32
    mask_MW: np.ndarray  # int32
    errors: dict[int, Any]


class Grammar(Protocol):
    """A compiled grammar, `SamplingParams.grammar`."""

    def cursor(self, request: Request, barred: Sequence[int]) -> Any:
        """Where the request's output stands, as far as it is known; `barred` ids are never drawn. Its `catch_up(count,
        last)` goes on to so many tokens, of which that is the last."""
        ...

    def masks(self, rows: Sequence[int], cursors: Sequence[Any], drafts: Sequence[MaskedDraft] = ()) -> Filled:
        """The masks of rows whose outputs stand at these cursors, of this and other grammars, and of their drafts."""
        ...
