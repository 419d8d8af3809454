"""`RequestState`: a request as its caller sees it, and what its steps find beyond tokens and their logprobs."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from fengine.core.request import FinishReason, Request
from fengine.errors import FengineError


class Detokenizer(Protocol):
    """Ids to text, a few at a time; finds what ends a request in its text."""

    @property
    def matched(self) -> str | None:
        """The stop string or pattern that was found."""
        ...

    @property
    def matched_tokens(self) -> int | None:
        """With how many output tokens."""
        ...

    def push(self, token_ids: list[int], *, trim_last: bool = False) -> str: ...

    def finish(self) -> str: ...


class RequestOutput(NamedTuple):
    """What a caller may see of a request: text and number of output tokens so far; `finish` once it has ended."""

    text: str = ""
    num_tokens: int = 0
    finish: FinishReason | None = None


@dataclass(slots=True, eq=False)
class RequestState:
    """Written by the loop and the text thread, read by the caller after `notify`. `live` ones (streamed, or with stops
    in their text) are detokenized step by step, the others once at the end."""

    request: Request
    detokenizer: Detokenizer | None
    live: bool
    notify: Callable[["RequestState"], None]
    now: Callable[[], float] = time.perf_counter  # the clock of its moments
    decode: Callable[[list[int], bool], str] | None = None  # the text of all ids; without special tokens, or with
    received: float = field(default_factory=time.time)  # the moment of `submitted`; the others are of `now`
    submitted: float = field(default_factory=time.perf_counter)
    quiet_until: float = 0.0  # nobody wants to know of its tokens before, unless it has ended
    output: RequestOutput = RequestOutput()  # replaced as one, for the caller may look at any moment
    error: FengineError | None = None
    started: float | None = None  # its first step was scheduled
    first_token: float | None = None
    finished: float | None = None
    abandoned: bool = False  # its caller has gone away, so it is being aborted
    # What was asked for besides, as (logprob, id):
    input_logprobs: list[tuple[float | None, int]] = field(default_factory=list)
    input_top: list[list[tuple[float, int]] | None] = field(default_factory=list)
    input_ids: list[list[tuple[float, int]] | None] = field(default_factory=list)
    output_top: list[list[tuple[float, int]]] = field(default_factory=list)  # one entry per output token
    output_ids: list[list[tuple[float, int]]] = field(default_factory=list)
    hidden: list[np.ndarray] = field(default_factory=list)  # [uncached prompt tokens, D], then [D] per decode step;
    # "last": [D] of the last step, or of every step if a stop string may end the output at an earlier one
    embedding: np.ndarray | None = None  # [D] for each way to pool, not normalised; or the head's output [C]
    totals: list[Any] = field(default_factory=list)  # [D] float64: what is pooled so far, each way
    fault: FengineError | None = None  # of what it brought along, as a grammar; of its prompt: numbers not finite

    @property
    def done(self) -> bool:
        return self.output.finish is not None or self.error is not None

    @property
    def stops_in_text(self) -> bool:
        """Whether its text may end it."""
        return bool(self.request.params.stop or self.request.params.stop_regex)

    def fail(self, error: FengineError) -> None:
        """Ends it, unless it has ended. Modifies: itself."""
        if not self.done:
            self.finished = self.now()
            self.error = error

    def tell(self) -> None:
        """Notifies the caller. Errors: whatever that raises: nobody can be told any more."""
        done = self.done
        try:
            self.notify(self)
        finally:
            if done:  # the last time. The call that is told holds its states: a circle, if they held it on
                self.notify = lambda state: None  # nobody waits for the rest

    def relabel(self, version: str) -> None:
        """Tokens drawn from now on belong to these weights. Modifies: the request; no step may be in flight."""
        request = self.request
        before = [span for span in request.versions if span[1] < request.num_output]
        request.versions = (*before, (version, request.num_output))

    def forget_prompt(self) -> None:
        """Has its prompt read again if nothing is drawn: what is told of it is of the weights that drew the first
        token. No step may be in flight. Modifies: itself, its request."""
        request = self.request
        if not request.params.bare and not request.num_output:
            self.input_logprobs, self.input_top, self.input_ids, self.hidden, self.totals = [], [], [], [], []
            self.fault = None
            request.num_cached, request.num_scored, request.num_seen = 0, 0, 0


def version_spans(request: Request, count: int) -> list[dict[str, Any]]:
    """SGLang's `weight_versions` of the first `count` output tokens, in order; one span for an empty output. Pure."""
    spans = []
    ends = [start for _, start in request.versions[1:]] + [count]
    for (version, start), end in zip(request.versions, ends, strict=True):
        end = min(end, count)
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = end
        elif start < end or not spans:
            spans.append({"version": version, "start": start, "end": end})
    return spans
