"""`Extras` (what a request asks for beyond one drawn token and its logprob) and `Record` (what it gets). No torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fengine.errors import FengineError
from fengine.structured_output.backend import Grammar
from fengine.structured_output.cursor import Cursor


@dataclass(frozen=True, slots=True)
class Extras:
    """Validated at the door, in SGLang's words. A plan with such a request runs as an extended step."""

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0  # until then the request's stop ids (eos included) have logit -inf
    early_ids: frozenset[int] = frozenset()  # and these: with ignore_eos what would have been stop ids
    processor: Callable[..., Any] | None = None  # (logits [1, V], [custom_params]) -> logits; may write to them
    custom_params: dict[str, Any] | None = None  # the processor's own dict; "__req__" is added: `ProcessorRequest`
    grammar: Grammar | None = None  # what the output must be; the mask comes after edits and processor
    ignore_eos: bool = False  # a grammar's own: the output ends only where it cannot go on
    logprob_start: int | None = None  # first prompt position whose input logprob is wanted; None: none
    top_logprobs: int = 0
    logprob_ids: tuple[int, ...] = ()
    hidden: str | None = None  # "full" | "last"
    pool: str | None = None  # "last" | "mean" | "cls": an embedding; the request draws nothing (max_new_tokens 0)
    head: bool = False  # apply the checkpoint's classification or reward head to the pooled hidden state

    @property
    def penalised(self) -> bool:
        """Whether the logits depend on the tokens seen before."""
        penalties = (self.frequency_penalty, self.presence_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)

    @property
    def lockstep(self) -> bool:
        """Whether the host must know a row's last token before its next step is planned."""
        return self.penalised or self.processor is not None

    @property
    def in_step(self) -> bool:
        """Whether anything here needs an extended step: an `Extras()` asks for nothing."""
        return self != NOTHING

    def first_needed(self, record: "Record", prompt_len: int, num_cached: int | None) -> int:
        """The first prompt position whose hidden state `record` still lacks; prompt_len if it lacks none.

        So far at most may a prefix be taken from the cache. `num_cached` is what it was at the first admission, None
        before that: hidden states are asked of tokens that were computed only. Pure.
        """
        due = prompt_len
        if self.logprob_start is not None:
            scored = self.logprob_start + max(len(record.input_logprobs) - 1, 0)
            if scored + 1 < prompt_len:  # the logprob at a position comes from the hidden state in front of it
                due = scored
        if self.pool == "mean" or (self.hidden == "full" and num_cached is not None):
            due = min(due, max(record.num_seen, num_cached or 0))
        if self.pool == "cls" and record.total is None:
            due = 0
        return due


@dataclass(slots=True)
class Record:
    """What the loop fills in for a request with extras. Modifies: itself, by the loop alone."""

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
    cursor: Cursor | None = None  # where the output stands in its grammar


@dataclass(frozen=True, slots=True)
class ProcessorRequest:
    """What a logit processor may know about its request: `custom_params["__req__"]`, a copy made for each call."""

    rid: str
    origin_input_ids: list[int]
    output_ids: list[int]


NOTHING = Extras()
