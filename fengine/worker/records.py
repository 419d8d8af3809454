"""How what an extended step found lands in the records of its requests. No torch."""

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from fengine.core.record import Record
from fengine.core.request import Request
from fengine.errors import FengineError
from fengine.worker.wants import Span, Wants

Array = TypeVar("Array")


class Scores(NamedTuple, Generic[Array]):
    """Logprobs of the rows of a `Scored`: numpy arrays, or tensors on their way to the host."""

    logprob_PK: Array
    top_logprob_PX: Array
    top_id_PX: Array


class Findings(NamedTuple):
    """What an extended step found, on the host."""

    wants: Wants
    prompts: list[Scores[np.ndarray]]
    outputs: Scores[np.ndarray]
    hidden_HD: np.ndarray  # float32
    errors: dict[int, FengineError]  # by row: its processor failed
    head: Callable[[np.ndarray], np.ndarray]  # pooled [D] -> [C], the checkpoint's own


def land(
    requests: Sequence[Request], samples: Sequence[bool], findings: Findings, logprobs: list[float]
) -> dict[str, str]:
    """Puts what a step found into the records of its requests; those that have ended meanwhile get nothing.

    To be called before `Scheduler.update` of the same step; returns its `faults`. Modifies: the records; `logprobs`,
    where a pooled row turns out not to be finite: it becomes NaN, as for a row that draws.
    """
    wants = findings.wants
    for row, error in findings.errors.items():
        if (found := _open(requests[row])) is not None:
            found[1].error = error
    for scored, scores in zip(wants.prompts, findings.prompts, strict=True):
        for span in scored.spans:
            if (found := _open(requests[span.row])) is not None:
                _land_prompt(*found, span, scores)
    for span in wants.outputs.spans:
        if (found := _open(requests[span.row])) is not None and logprobs[span.row] == logprobs[span.row]:
            _land_output(*found, span, findings.outputs)
    for span in wants.hidden_spans:
        if (found := _open(requests[span.row])) is not None:
            rows = findings.hidden_HD[span.at : span.at + span.count]
            if not _land_hidden(*found, span.first, rows):
                logprobs[span.row] = float("nan")
    for request, sample in zip(requests, samples, strict=True):
        if sample and request.params.pool and (found := _open(request)) is not None:
            _finish_pool(*found, findings.head)
    return {requests[row].rid: str(error) for row, error in findings.errors.items()}


def _open(request: Request) -> tuple[Request, Record] | None:
    return None if request.finish is not None or request.record is None else (request, request.record)


def _pairs(logprobs: np.ndarray, ids: np.ndarray) -> list[list[tuple[float, int]]]:
    """Rows of (logprob, id). Pure."""
    return [list(zip(*row, strict=True)) for row in zip(logprobs.tolist(), ids.tolist(), strict=True)]


def _land_prompt(request: Request, record: Record, span: Span, scores: Scores[np.ndarray]) -> None:
    params = request.params
    assert params.logprob_start is not None
    first = not record.input_logprobs  # the first position has nothing in front of it that could be asked
    if first:
        record.input_logprobs.append((None, request.token_ids[params.logprob_start]))
    begin = params.logprob_start + len(record.input_logprobs) - 1
    assert begin == span.first or not span.count, "input logprobs land once, in order"
    rows = slice(span.at, span.at + span.count)
    logprob_PK = scores.logprob_PK[rows]
    target_P = request.token_ids[begin + 1 : begin + 1 + len(logprob_PK)]
    record.input_logprobs += zip(logprob_PK[:, 0].tolist(), target_P, strict=True)
    request.num_scored = len(record.input_logprobs)
    if params.top_logprobs:
        k = params.top_logprobs
        record.input_top += [None] * first + _pairs(scores.top_logprob_PX[rows, :k], scores.top_id_PX[rows, :k])
    if params.logprob_ids:
        ids = np.broadcast_to(np.array(params.logprob_ids), (len(logprob_PK), len(params.logprob_ids)))
        record.input_ids += [None] * first + _pairs(logprob_PK[:, 1 : 1 + ids.shape[1]], ids)


def _land_output(request: Request, record: Record, span: Span, scores: Scores[np.ndarray]) -> None:
    params, rows = request.params, slice(span.at, span.at + 1)
    if params.top_logprobs:
        k = params.top_logprobs
        record.output_top += _pairs(scores.top_logprob_PX[rows, :k], scores.top_id_PX[rows, :k])
    if params.logprob_ids:
        ids = np.array([params.logprob_ids])
        record.output_ids += _pairs(scores.logprob_PK[rows, : ids.shape[1]], ids)


def _land_hidden(request: Request, record: Record, first: int, rows: np.ndarray) -> bool:
    """Keeps hidden states of positions first, first + 1, …; False if they are to be pooled and are not finite."""
    params = request.params
    if params.hidden == "last":
        if not (request.params.stop or request.params.stop_regex):  # which may end it at an earlier token than this
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


def _finish_pool(request: Request, record: Record, head: Callable[[np.ndarray], np.ndarray]) -> None:
    params = request.params
    assert record.total is not None
    pooled = (record.total / (request.prompt_len if params.pool == "mean" else 1)).astype(np.float32)
    record.embedding = head(pooled) if params.head else pooled
