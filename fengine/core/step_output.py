"""`StepOutput`: what a step found, on the host; `record`: how it lands in the records of its requests. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fengine.core.record import Record
from fengine.core.request import Request
from fengine.errors import FengineError

Head = Callable[[np.ndarray], np.ndarray]  # pooled [D] -> [C], the checkpoint's own


class Scores(NamedTuple):
    """Logprobs of rows: of the ids that were asked, and of the likeliest, best first. float32, ids int32."""

    logprob_PK: np.ndarray
    top_logprob_PX: np.ndarray
    top_id_PX: np.ndarray


class Span(NamedTuple):
    """Consecutive positions of one row of the step, and where they begin in the arrays that rows share."""

    row: int
    first: int
    count: int
    at: int


@dataclass(slots=True)
class StepOutput:
    """A token and its logprob for each draw: NaN where the row has an error, or its logits were not finite.

    Of `outputs` row r is that of the step's row r. `prompts`: in column 0 of logprob_PK the token behind the position.
    `hidden_HD` float32. `pooled`: rows of which the last hidden state is here now.
    """

    tokens: list[int]
    logprobs: list[float]
    errors: dict[int, FengineError] = field(default_factory=dict)
    outputs: Scores | None = None
    prompts: list[tuple[list[Span], Scores]] = field(default_factory=list)
    hidden: list[Span] = field(default_factory=list)
    hidden_HD: np.ndarray | None = None
    pooled: list[int] = field(default_factory=list)

    @property
    def more(self) -> bool:
        """Whether there is more than tokens and logprobs."""
        return bool(self.errors or self.outputs or self.prompts or self.hidden or self.pooled)


def record(requests: Sequence[Request], samples: Sequence[bool], out: StepOutput, head: Head) -> dict[str, str]:
    """Puts what a step found into the records of its requests; those that have ended meanwhile get nothing.

    To be called before `Scheduler.update` of the same step; returns its `faults`. Modifies: the records, and
    `out.logprobs` where a pooled row turns out not to be finite: it becomes NaN, as for a row that draws.
    """
    for row, error in out.errors.items():
        if (found := _open(requests[row])) is not None:
            found[1].error = error
    for spans, scores in out.prompts:
        for span in spans:
            if (found := _open(requests[span.row])) is not None:
                _add_prompt(*found, span, scores)
    if out.outputs is not None:
        drawn = [sample and x == x for sample, x in zip(samples, out.logprobs, strict=False)]
        _add_outputs(requests, drawn, out.outputs)
    _add_hidden_states(requests, out)
    for row in out.pooled:
        if (found := _open(requests[row])) is not None:
            _finish_pool(*found, head)
    return {requests[row].rid: str(error) for row, error in out.errors.items()}


def _open(request: Request) -> tuple[Request, Record] | None:
    return None if request.finish is not None or request.record is None else (request, request.record)


def _pairs(logprobs: np.ndarray, ids: np.ndarray) -> list[list[tuple[float, int]]]:
    """Rows of (logprob, id). Pure."""
    return [list(zip(*row, strict=True)) for row in zip(logprobs.tolist(), ids.tolist(), strict=True)]


def _add_prompt(request: Request, record: Record, span: Span, scores: Scores) -> None:
    params, start = request.params, request.params.logprob_start
    assert start is not None, "input logprobs of a request that asked for none"
    first = not record.input_logprobs  # the first position has nothing in front of it that could be asked
    if first:
        record.input_logprobs.append((None, request.token_ids[start]))
    begin = start + len(record.input_logprobs) - 1
    assert begin == span.first or not span.count, "input logprobs land once, in order"
    rows = slice(span.at, span.at + span.count)
    logprob_PK = scores.logprob_PK[rows]
    target_P = request.token_ids[begin + 1 : begin + 1 + len(logprob_PK)]
    record.input_logprobs += zip(logprob_PK[:, 0].tolist(), target_P, strict=True)
    request.num_scored = len(record.input_logprobs)
    if k := params.top_logprobs:
        record.input_top += [None] * first + _pairs(scores.top_logprob_PX[rows, :k], scores.top_id_PX[rows, :k])
    if params.logprob_ids:
        ids = np.broadcast_to(np.array(params.logprob_ids), (len(logprob_PK), len(params.logprob_ids)))
        record.input_ids += [None] * first + _pairs(logprob_PK[:, 1 : 1 + ids.shape[1]], ids)


def _add_outputs(requests: Sequence[Request], drawn: Sequence[bool], scores: Scores) -> None:
    """Of the rows that have drawn. All arrays become lists at once: row by row that takes ten times as long."""
    tops, ids = scores.top_logprob_PX.tolist(), scores.top_id_PX.tolist()
    asked = scores.logprob_PK.tolist() if any(request.params.logprob_ids for request in requests) else []
    for row, request in enumerate(requests):
        found = _open(request) if drawn[row] else None
        if found is None:
            continue
        params, record = request.params, found[1]
        if k := params.top_logprobs:
            record.output_top.append(list(zip(tops[row][:k], ids[row][:k], strict=True)))
        if params.logprob_ids:
            record.output_ids.append(list(zip(asked[row], params.logprob_ids, strict=False)))


def _add_hidden_states(requests: Sequence[Request], out: StepOutput) -> None:
    """Modifies: the records, and `out.logprobs` as `record` tells."""
    if out.hidden_HD is None:
        return
    for span in out.hidden:
        found, rows = _open(requests[span.row]), out.hidden_HD[span.at : span.at + span.count]
        if found is not None and not _add_hidden(*found, span.first, rows):
            out.logprobs[span.row] = float("nan")


def _add_hidden(request: Request, record: Record, first: int, rows: np.ndarray) -> bool:
    """Keeps hidden states of positions first, first + 1, …; False if they are to be pooled and are not finite."""
    params = request.params
    if params.hidden == "last":
        if not (params.stop or params.stop_regex):  # which may end it at an earlier token than this
            record.hidden.clear()
        record.hidden.append(rows[-1].copy())
        return True
    if params.hidden and first >= request.prompt_len:
        record.hidden.append(rows[-1].copy())
        return True
    assert request.num_seen in (0, first), "hidden states land once, in order"
    request.num_seen = first + len(rows)
    if params.hidden:
        record.hidden.append(rows.copy())
        if request.num_seen == request.prompt_len:  # the last chunk: one array for all of them
            record.hidden = [np.concatenate(record.hidden)]
        return True
    total = np.zeros(rows.shape[1]) if record.total is None else record.total
    for row in rows:  # one by one: the same sum however the prompt was cut into chunks
        total += row
    record.total = total
    return bool(np.isfinite(total).all())


def _finish_pool(request: Request, record: Record, head: Head) -> None:
    params = request.params
    assert record.total is not None, "a pooled row draws when all that it pools is there"
    pooled = (record.total / (request.prompt_len if params.pool == "mean" else 1)).astype(np.float32)
    record.embedding = head(pooled) if params.head else pooled
