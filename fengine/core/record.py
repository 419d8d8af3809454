"""`Record`: what a request collects beyond tokens and their logprobs while it runs. No torch."""

from dataclasses import dataclass, field

import numpy as np

from fengine.errors import FengineError


@dataclass(slots=True)
class Record:
    """Modifies: itself, by the loop alone."""

    input_logprobs: list[tuple[float | None, int]] = field(default_factory=list)
    input_top: list[list[tuple[float, int]] | None] = field(default_factory=list)
    input_ids: list[list[tuple[float, int]] | None] = field(default_factory=list)
    output_top: list[list[tuple[float, int]]] = field(default_factory=list)  # one entry per output token
    output_ids: list[list[tuple[float, int]]] = field(default_factory=list)
    hidden: list[np.ndarray] = field(default_factory=list)  # [uncached prompt tokens, D], then [D] per decode step;
    # "last": [D] of the last step, or of every step if a stop string may end the output at an earlier one
    embedding: np.ndarray | None = None  # [D], not normalised; or the head's output [C]
    error: FengineError | None = None  # a failing processor
    total: np.ndarray | None = None  # [D] float64: what is pooled so far
