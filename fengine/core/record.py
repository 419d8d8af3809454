"""`Record`: what a request collects beyond tokens and their logprobs while it runs. No torch."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fengine.core.sampling_params import SamplingParams
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
    unasked: tuple[float, int] | None = None  # max_new_tokens 0: logprob and id of the token drawn all the same
    num_seen: int = 0  # prompt tokens up to here have gone into `hidden` or `total`
    total: np.ndarray | None = None  # [D] float64: what is pooled so far
    cursor: Any = None  # where the output stands in its grammar

    def first_needed(self, params: SamplingParams, prompt_len: int, num_cached: int | None) -> int:
        """The first prompt position whose hidden state is still lacking; prompt_len if none is.

        So far at most may a prefix be taken from the cache. `num_cached` is what it was at the first admission, None
        before that: hidden states are asked of tokens that were computed only. Pure.
        """
        due = prompt_len
        if params.logprob_start is not None:
            scored = params.logprob_start + max(len(self.input_logprobs) - 1, 0)
            if scored + 1 < prompt_len:  # the logprob at a position comes from the hidden state in front of it
                due = scored
        if params.pool == "mean" or (params.hidden == "full" and num_cached is not None):
            due = min(due, max(self.num_seen, num_cached or 0))
        if params.pool == "cls" and self.total is None:
            due = 0
        return due


@dataclass(frozen=True, slots=True)
class ProcessorRequest:
    """What a logit processor may know about its request: `custom_params["__req__"]`, a copy made for each call."""

    rid: str
    origin_input_ids: list[int]
    output_ids: list[int]
