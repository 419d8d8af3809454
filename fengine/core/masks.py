"""What a step asks of grammars, and what it gets: the types that both sides know. No torch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


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
