"""What a step asks of grammars, and what it gets: the types that both sides know. No torch."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np


class MaskRow(NamedTuple):
    """A row that draws under a grammar."""

    row: int
    cursor: Any
    fresh: list[int]  # drawn tokens that the cursor has not taken yet
    fed: int | None  # the row in the step before whose token comes behind them
    stop_ids: frozenset[int]
    least: int  # tokens that are still to be drawn until min_new_tokens is reached
    draft: Sequence[int] = ()  # guesses behind its last token, which draw in the rows `draft_row` and on
    draft_row: int = 0


class Filled(NamedTuple):
    """Masks as `ops/edit_logits.py` takes them; rows in `errors` have nothing to draw."""

    row_M: np.ndarray  # int32
    mask_MW: np.ndarray  # int32
    errors: dict[int, Any]


class Grammar(Protocol):
    """A compiled grammar, `SamplingParams.grammar`."""

    def cursor(self, ends: frozenset[int], barred: Sequence[int], early: frozenset[int], eager: bool) -> Any:
        """Where an output that has not begun stands. `ends` end it, `barred` are never drawn; with `eager` False an end
        is drawn only where nothing else can be."""
        ...

    def masks(self, rows: list[MaskRow], drawn: Sequence[int]) -> Filled:
        """The masks of a step, of this and other grammars. `drawn` are the tokens of the step before."""
        ...
