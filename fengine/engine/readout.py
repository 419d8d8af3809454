"""What a step has found beyond tokens and their logprobs goes to the states of its requests."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fengine.core.request import Request
from fengine.core.scheduler_output import SchedulerOutput, Scores, Span, StepOutput
from fengine.engine.request_state import RequestState
from fengine.errors import NumericsError
from fengine.worker.pools import pools_of

Head = Callable[[np.ndarray], np.ndarray]  # pooled [D] -> [C], the checkpoint's own


def record(states: Mapping[str, RequestState], step: SchedulerOutput, out: StepOutput, head: Head) -> dict[str, str]:
    """Puts what a step found into the states of its requests; those that have ended meanwhile get nothing. To be called
    before `Scheduler.update` of the same step; returns its `faults`. Modifies: the states, and `out.logprobs` where
    what was asked of a row's prompt turns out not to be finite: it becomes NaN, as for a row that draws."""
    found = [_open(states, request) for request in step.requests]
    _add_faults(found, out)
    for spans, scores in out.prompts:
        for span in spans:
            if (state := found[span.row]) is not None and not _add_prompt(state, span, scores):
                out.logprobs[span.row] = float("nan")
    if out.outputs is not None:
        rows = _drawn(step, out) + _drawn_behind(step, out)
        _add_outputs([(at, state) for at, row in rows if (state := found[row]) is not None], out.outputs)
    _add_hidden_states(found, out)
    for row in out.pooled:
        if (state := found[row]) is not None:
            _finish_pool(state, head)
    return {step.requests[row].rid: str(error) for row, error in out.errors.items()}


def _add_faults(found: Sequence[RequestState | None], out: StepOutput) -> None:
    """Modifies: the states; of `out` draws behind a guess, which is not kept."""
    for row in [row for row in out.errors if row >= len(found)]:
        out.tokens[row] = -1
        del out.errors[row]
    for row, error in out.errors.items():
        if (state := found[row]) is not None:
            state.fault = error


def _drawn(step: SchedulerOutput, out: StepOutput) -> list[tuple[int, int]]:
    """Draws that count, and their rows: each row's own. Pure."""
    drawn = [sample and x == x for sample, x in zip(step.samples, out.logprobs, strict=False)]
    return [(row, row) for row, draws in enumerate(drawn) if draws]


def _open(states: Mapping[str, RequestState], request: Request) -> RequestState | None:
    """The request's state, if it has not ended: its rid may belong to another one since."""
    state = states.get(request.rid)
    return None if state is None or state.request is not request else state


def _pairs(logprobs: np.ndarray, ids: np.ndarray) -> list[list[tuple[float, int]]]:
    """Rows of (logprob, id). Pure."""
    return [list(zip(*row, strict=True)) for row in zip(logprobs.tolist(), ids.tolist(), strict=True)]


def _not_finite(state: RequestState, what: str, at: int) -> None:
    """Whatever comes behind it may be finite: a window moves on."""
    message = f"request {state.request.rid!r}: non-finite {what} at position {at}; dtype=float32 may help"
    state.fault = state.fault or NumericsError(message)


def _add_prompt(state: RequestState, span: Span, scores: Scores) -> bool:
    """Keeps logprobs of the prompt's tokens; False if they, or those of a chunk before, are not finite: then they are
    lacking, and what draws is scored."""
    request, params, start = state.request, state.request.params, state.request.params.logprob_start
    assert start is not None, "input logprobs of a request that asked for none"
    rows = slice(span.at, span.at + span.count)
    logprob_PK = scores.logprob_PK[rows]
    if (bad := np.isnan(logprob_PK[:, 0])).any():
        _not_finite(state, "logits", span.first + 1 + int(bad.argmax()))
    if state.fault is not None:
        return False
    first = not state.input_logprobs  # the first position has nothing in front of it that could be asked
    if first:
        state.input_logprobs.append((None, request.token_ids[start]))
    begin = start + len(state.input_logprobs) - 1
    assert begin == span.first or not span.count, "input logprobs land once, in order"
    target_P = request.token_ids[begin + 1 : begin + 1 + len(logprob_PK)]
    state.input_logprobs += zip(logprob_PK[:, 0].tolist(), target_P, strict=True)
    request.num_scored = len(state.input_logprobs)
    if k := params.top_logprobs:
        state.input_top += [None] * first + _pairs(scores.top_logprob_PX[rows, :k], scores.top_id_PX[rows, :k])
    if params.logprob_ids:
        ids = np.broadcast_to(np.array(params.logprob_ids), (len(logprob_PK), len(params.logprob_ids)))
        state.input_ids += [None] * first + _pairs(logprob_PK[:, 1 : 1 + ids.shape[1]], ids)
    return True


def _drawn_behind(step: SchedulerOutput, out: StepOutput) -> list[tuple[int, int]]:
    """(draw, row of the step) behind drafts that were drawn, in order. Those behind a row's end do no harm. Pure."""
    found, at = [], len(step.rows)
    for row, draft in step.drafts:
        for k, token in enumerate(draft):
            if out.tokens[at + k - 1 if k else row] != token or out.logprobs[at + k] != out.logprobs[at + k]:
                break
            found.append((at + k, row))
        at += len(draft)
    return found


def _add_outputs(states: Sequence[tuple[int, RequestState]], scores: Scores) -> None:
    """Of these draws. All arrays become lists at once: row by row that takes ten times as long."""
    tops, ids, asked = scores.top_logprob_PX.tolist(), scores.top_id_PX.tolist(), scores.logprob_PK.tolist()
    for row, state in states:
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
    pools = pools_of(params.pool or "last")
    for at, row in enumerate(rows.astype(np.float64), first):  # one by one: the same sum however the prompt was cut
        state.totals = [
            pool.add(total, row, at) for pool, total in zip(pools, state.totals or [0.0] * len(pools), strict=True)
        ]
    if (good := np.isfinite(rows).all(axis=1)).all():
        return True
    _not_finite(state, "hidden states", first + int(good.argmin()))
    return False


def _finish_pool(state: RequestState, head: Head) -> None:
    params = state.request.params
    assert state.totals and params.pool, "a pooled row draws when all that it pools is there"
    each = zip(pools_of(params.pool), state.totals, strict=True)
    pooled = np.concatenate([pool.finish(total, state.request.prompt_len) for pool, total in each]).astype(np.float32)
    state.embedding = head(pooled) if params.head else pooled
