"""`RequestState`: a request as its caller sees it, and what its steps find beyond tokens and their logprobs."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from fengine.core.request import Finish, Request
from fengine.core.scheduler_output import Scores, Span, StepOutput
from fengine.errors import FengineError

Head = Callable[[np.ndarray], np.ndarray]  # pooled [D] -> [C], the checkpoint's own


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
    finish: Finish | None = None


@dataclass(slots=True, eq=False)
class RequestState:
    """Written by the loop and the text thread, read by the caller after `notify`.

    `live` ones (streamed, or with stops in their text) are detokenized step by step, the others once at the end.
    """

    request: Request
    detokenizer: Detokenizer | None
    live: bool
    notify: Callable[["RequestState"], None]
    now: Callable[[], float] = time.perf_counter  # the clock of its moments
    quiet_until: float = 0.0  # nobody wants to know of its tokens before, unless it has ended
    output: RequestOutput = RequestOutput()  # replaced as one, for the caller may look at any moment
    error: FengineError | None = None
    received: float = field(default_factory=time.time)  # the moment of `submitted`; the others are of `now`
    submitted: float = field(default_factory=time.perf_counter)
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
    embedding: np.ndarray | None = None  # [D], not normalised; or the head's output [C]
    total: np.ndarray | None = None  # [D] float64: what is pooled so far
    fault: FengineError | None = None  # of what it brought along: a logit processor, a grammar

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
                self.notify = _nobody

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
            self.input_logprobs, self.input_top, self.input_ids, self.hidden, self.total = [], [], [], [], None
            request.num_cached, request.num_scored, request.num_seen = 0, 0, 0


def _nobody(state: RequestState) -> None:
    """Is told what nobody waits for any more."""


def version_spans(request: Request, count: int) -> list[dict[str, Any]]:
    """SGLang's `weight_versions` of the first `count` output tokens, in order; one span for an empty output. Pure."""
    spans = []
    ends = [start for _, start in request.versions[1:]] + [count]
    for (version, start), end in zip(request.versions, ends, strict=True):
        end = min(end, count)
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = max(end, spans[-1]["end"])
        elif start < end or not spans:
            spans.append({"version": version, "start": start, "end": end})
    return spans


# -- what a step has found ---------------------------------------------------------------------------------------------


def record(
    states: Mapping[str, RequestState], requests: Sequence[Request], samples: Sequence[bool], out: StepOutput,
    head: Head,
) -> dict[str, str]:  # fmt: skip
    """Puts what a step found into the states of its requests; those that have ended meanwhile get nothing.

    To be called before `Scheduler.update` of the same step; returns its `faults`. Modifies: the states, and
    `out.logprobs` where a pooled row turns out not to be finite: it becomes NaN, as for a row that draws.
    """
    found = [_open(states, request) for request in requests]
    for row, error in out.errors.items():
        if (state := found[row]) is not None:
            state.fault = error
    for spans, scores in out.prompts:
        for span in spans:
            if (state := found[span.row]) is not None:
                _add_prompt(state, span, scores)
    if out.outputs is not None:
        drawn = [sample and x == x for sample, x in zip(samples, out.logprobs, strict=False)]
        _add_outputs([state if draws else None for state, draws in zip(found, drawn, strict=True)], out.outputs)
    _add_hidden_states(found, out)
    for row in out.pooled:
        if (state := found[row]) is not None:
            _finish_pool(state, head)
    return {requests[row].rid: str(error) for row, error in out.errors.items()}


def _open(states: Mapping[str, RequestState], request: Request) -> RequestState | None:
    """The request's state, if it has not ended: its rid may belong to another one since."""
    state = states.get(request.rid)
    return None if state is None or state.request is not request else state


def _pairs(logprobs: np.ndarray, ids: np.ndarray) -> list[list[tuple[float, int]]]:
    """Rows of (logprob, id). Pure."""
    return [list(zip(*row, strict=True)) for row in zip(logprobs.tolist(), ids.tolist(), strict=True)]


def _add_prompt(state: RequestState, span: Span, scores: Scores) -> None:
    request, params, start = state.request, state.request.params, state.request.params.logprob_start
    assert start is not None, "input logprobs of a request that asked for none"
    first = not state.input_logprobs  # the first position has nothing in front of it that could be asked
    if first:
        state.input_logprobs.append((None, request.token_ids[start]))
    begin = start + len(state.input_logprobs) - 1
    assert begin == span.first or not span.count, "input logprobs land once, in order"
    rows = slice(span.at, span.at + span.count)
    logprob_PK = scores.logprob_PK[rows]
    target_P = request.token_ids[begin + 1 : begin + 1 + len(logprob_PK)]
    state.input_logprobs += zip(logprob_PK[:, 0].tolist(), target_P, strict=True)
    request.num_scored = len(state.input_logprobs)
    if k := params.top_logprobs:
        state.input_top += [None] * first + _pairs(scores.top_logprob_PX[rows, :k], scores.top_id_PX[rows, :k])
    if params.logprob_ids:
        ids = np.broadcast_to(np.array(params.logprob_ids), (len(logprob_PK), len(params.logprob_ids)))
        state.input_ids += [None] * first + _pairs(logprob_PK[:, 1 : 1 + ids.shape[1]], ids)


def _add_outputs(states: Sequence[RequestState | None], scores: Scores) -> None:
    """Of the rows that have drawn. All arrays become lists at once: row by row that takes ten times as long."""
    tops, ids, asked = scores.top_logprob_PX.tolist(), scores.top_id_PX.tolist(), scores.logprob_PK.tolist()
    for row, state in enumerate(states):
        if state is None:
            continue
        params = state.request.params
        if k := params.top_logprobs:
            state.output_top.append(list(zip(tops[row][:k], ids[row][:k], strict=True)))
        if params.logprob_ids:
            state.output_ids.append(list(zip(asked[row], params.logprob_ids, strict=False)))


def _add_hidden_states(found: Sequence[RequestState | None], out: StepOutput) -> None:
    for span in out.hidden:
        assert out.hidden_HD is not None
        rows = out.hidden_HD[span.at : span.at + span.count]
        if (state := found[span.row]) is not None and not _add_hidden(state, span.first, rows):
            out.logprobs[span.row] = float("nan")


def _add_hidden(state: RequestState, first: int, rows: np.ndarray) -> bool:
    """Keeps hidden states of positions first, first + 1, …; False if they are to be pooled and are not finite."""
    request, params = state.request, state.request.params
    if params.hidden == "last":
        if not state.stops_in_text:  # which may end it at an earlier token than this
            state.hidden.clear()
        state.hidden.append(rows[-1].copy())
        return True
    if params.hidden and first >= request.prompt_len:
        state.hidden.append(rows[-1].copy())
        return True
    assert request.num_seen in (0, first), "hidden states land once, in order"
    request.num_seen = first + len(rows)
    if params.hidden:
        state.hidden.append(rows.copy())
        if request.num_seen == request.prompt_len:  # the last chunk: one array for all of them
            state.hidden = [np.concatenate(state.hidden)]
        return True
    total = np.zeros(rows.shape[1]) if state.total is None else state.total
    for row in rows:  # one by one: the same sum however the prompt was cut into chunks
        total += row
    state.total = total
    return bool(np.isfinite(total).all())


def _finish_pool(state: RequestState, head: Head) -> None:
    params = state.request.params
    assert state.total is not None, "a pooled row draws when all that it pools is there"
    pooled = (state.total / (state.request.prompt_len if params.pool == "mean" else 1)).astype(np.float32)
    state.embedding = head(pooled) if params.head else pooled
