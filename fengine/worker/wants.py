"""What a plan's requests want of its step beyond drawn tokens: arrays of a step beside `Staged`. No torch.

    plan --wants_of--> Wants --(extended step)--> Findings --land--> Request.record

What a preempted request computes again is not asked for again: it is admitted only after the step that was in flight
has landed, so its record is complete up to where it was. A request that goes on has records one step behind, but asks
for positions of its new chunk only.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fengine.core.record import ProcessorRequest, Record
from fengine.core.request import Request
from fengine.core.sampling_params import SamplingParams
from fengine.core.scheduler_output import Plan
from fengine.structured_output.cursor import Cursor
from fengine.structured_output.masks import MaskRow, Masks


class Edits(NamedTuple):
    """Changes to single logits, each (row, id) once: ((x + before) scaled) + after, see `ops/edit_logits.py`."""

    row_E: np.ndarray  # int32, row of the plan
    id_E: np.ndarray  # int32
    before_E: np.ndarray  # float32; -inf bans the id
    scale_E: np.ndarray  # float32 > 0
    after_E: np.ndarray  # float32


EDIT_TYPES = (np.int32, np.int32, np.float32, np.float32, np.float32)


class Span(NamedTuple):
    """Consecutive positions of one row, and where they begin in the arrays that all rows share."""

    row: int
    first: int
    count: int
    at: int


class Scored(NamedTuple):
    """Rows whose logprobs are wanted: of the ids in id_PK (padded with 0) and of the `top` likeliest."""

    index_P: np.ndarray  # int32, into the tokens of the step (prompts) or its rows (outputs)
    id_PK: np.ndarray  # int32
    top: int
    spans: list[Span]


class Processor(NamedTuple):
    """A row's own Python function on its logits."""

    row: int
    function: Callable[..., Any]
    params: dict[str, Any]


class Wants(NamedTuple):
    """What an extended step must bring, or do, beside drawing."""

    edits: Edits
    processors: list[Processor]
    masks: Masks | None  # what grammars allow
    prompts: list[Scored]  # in id_PK column 0: the token that stands behind the position; one for each width of id_PK
    outputs: Scored
    hidden_H: np.ndarray  # int32, tokens of the step whose hidden state is wanted
    hidden_spans: list[Span]
    draws: bool  # some row draws a token


class _Chunk(NamedTuple):
    """A row that wants more than a drawn token: start : end of its request; the first is token `at` of the step."""

    row: int
    request: Request
    params: SamplingParams
    record: Record
    start: int
    end: int
    at: int
    sample: bool


def wants_of(plan: Plan, q_start_B: np.ndarray, feed_index_T: np.ndarray) -> Wants | None:
    """What the step must bring; None if a plain step does. `feed_index_T` is that of `Staged`.

    Modifies: "__req__" of the processors' own dicts; records that get their cursor.
    """
    chunks = [
        _Chunk(i, r, r.params, r.record, start, start + count, int(q_start_B[i]), sample)
        for i, (r, start, count, sample) in enumerate(
            zip(plan.requests, plan.starts, plan.counts, plan.samples, strict=True)
        )
        if r.record is not None
    ]
    drawing = [c for c in chunks if c.sample and c.params.pool is None]
    edits = _edits(drawing)
    processors = [_processor(c) for c in drawing if c.params.processor is not None]
    masked = [_mask_row(c, feed_index_T) for c in drawing if c.params.grammar is not None]
    prompts = [c for c in chunks if c.params.logprob_start is not None and _scores_due(c, c.params.logprob_start)]
    outputs = [c for c in drawing if c.params.top_logprobs or c.params.logprob_ids]
    hidden = [(c, first, last) for c in chunks if c.params.hidden or c.params.pool for first, last in _hidden_due(c)]
    pooled = [c for c in chunks if c.params.pool is not None]
    if not (len(edits.row_E) or processors or masked or prompts or outputs or hidden or pooled):
        return None
    index_H, spans = _gather([(c.row, first, np.arange(first, last) - c.start + c.at) for c, first, last in hidden])
    return Wants(
        edits,
        processors,
        Masks(masked) if masked else None,
        _by_width(prompts),
        _scored([_output_ids(c) for c in outputs], [c.params.top_logprobs for c in outputs]),
        index_H,
        spans,
        len(pooled) < len(plan.requests),
    )


def _edits(drawing: list[_Chunk]) -> Edits:
    """Penalties count drawn tokens only, as SGLang's do; the ban on stop ids ends with the row's min_new_tokens.

    Over all rows at once: each logit has the key (row << 32) + id.
    """
    drawn, banned, biased, bias = [], [], [], []
    rows = max((c.row for c in drawing), default=-1) + 1
    frequency_R, presence_R, scale_R = np.zeros(rows), np.zeros(rows), np.ones(rows)
    for chunk in drawing:
        request, params, key = chunk.request, chunk.params, chunk.row << 32
        if params.penalised:
            drawn.append(np.array(request.token_ids[request.prompt_len :], np.int64) + key)
            frequency_R[chunk.row], presence_R[chunk.row] = params.frequency_penalty, params.presence_penalty
            scale_R[chunk.row] = params.repetition_penalty
        if chunk.end - request.prompt_len < params.min_new_tokens:
            banned += [key + id for id in request.stop_ids | request.early_ids]
        if params.logit_bias:
            biased += [key + id for id, _ in params.logit_bias]
            bias += [value for _, value in params.logit_bias]
    if not (drawn or banned or biased):
        return Edits(*(np.zeros(0, dtype) for dtype in EDIT_TYPES))
    drawn, count = np.unique(np.concatenate([*drawn, np.zeros(0, np.int64)]), return_counts=True)
    banned, biased = np.array(banned, np.int64), np.array(biased, np.int64)
    keys = np.unique(np.concatenate((drawn, banned, biased)))
    before, scale, after = np.zeros(len(keys)), np.ones(len(keys)), np.zeros(len(keys))
    at, row = np.searchsorted(keys, drawn), drawn >> 32
    before[at], scale[at] = -(count * frequency_R[row] + presence_R[row]), scale_R[row]
    before[np.searchsorted(keys, banned)] = -np.inf
    after[np.searchsorted(keys, biased)] = np.clip(bias, -1e30, 1e30)
    values = (keys >> 32, keys & 0xFFFFFFFF, before, scale, after)
    return Edits(*(value.astype(dtype) for value, dtype in zip(values, EDIT_TYPES, strict=True)))


def _processor(chunk: _Chunk) -> Processor:
    request, params = chunk.request, chunk.params
    assert params.processor is not None
    ids, prompt_len = request.token_ids, request.prompt_len
    own = {} if params.custom_params is None else params.custom_params
    own["__req__"] = ProcessorRequest(request.rid, ids[:prompt_len], ids[prompt_len:])
    return Processor(chunk.row, params.processor, own)


def _mask_row(chunk: _Chunk, feed_index_T: np.ndarray) -> MaskRow:
    """Modifies: the record, at the first time."""
    request, params, record = chunk.request, chunk.params, chunk.record
    assert params.grammar is not None
    if record.cursor is None:
        never = [id for id, bias in params.logit_bias if np.float32(bias) <= np.float32(-1e30)]  # no edit lifts them
        record.cursor = Cursor(params.grammar, request.stop_ids, never, request.early_ids, not params.ignore_eos)
    pending = chunk.end > len(request.token_ids)
    return MaskRow(
        chunk.row,
        record.cursor,
        request.token_ids[request.prompt_len + len(record.cursor.tokens) :],
        int(feed_index_T[chunk.at + chunk.end - chunk.start - 1]) if pending else None,
        request.stop_ids,
        chunk.end - request.prompt_len < params.min_new_tokens,
    )


def _scores_due(chunk: _Chunk, start: int) -> bool:
    """Whether input logprobs (from `start` on) may land with this chunk; with the last one also where only the first
    entry, None, is."""
    prompt_len = chunk.request.prompt_len
    if chunk.start >= prompt_len or len(chunk.record.input_logprobs) >= prompt_len - start:
        return False
    return chunk.sample or next_scored(chunk.params, chunk.record) < chunk.end


def next_scored(params: SamplingParams, record: Record) -> int:
    """The next position whose hidden state gives an input logprob (of the token behind it)."""
    assert params.logprob_start is not None
    return params.logprob_start + max(len(record.input_logprobs) - 1, 0)


def _prompt_ids(chunk: _Chunk) -> tuple[int, int, np.ndarray, np.ndarray]:
    """(row, first position, index into the step's tokens, ids [n, K]) of the input logprobs that this chunk gives."""
    first = max(chunk.start, next_scored(chunk.params, chunk.record))
    last = max(first, min(chunk.end, chunk.request.prompt_len - 1))
    target_P = np.array(chunk.request.token_ids[first + 1 : last + 1], np.int32)
    ids_K = np.array(chunk.params.logprob_ids, np.int32)
    id_PK = np.concatenate((target_P[:, None], np.broadcast_to(ids_K, (len(target_P), len(ids_K)))), axis=1)
    return chunk.row, first, np.arange(first, last) - chunk.start + chunk.at, id_PK


def _output_ids(chunk: _Chunk) -> tuple[int, int, np.ndarray, np.ndarray]:
    return chunk.row, chunk.end, np.array([chunk.row]), np.array([chunk.params.logprob_ids], np.int32)


def _gather(parts: Sequence[tuple[int, int, np.ndarray]]) -> tuple[np.ndarray, list[Span]]:
    """One index array for all parts (row, first position, index), and the span of each."""
    spans, at = [], 0
    for row, first, index in parts:
        spans.append(Span(row, first, len(index), at))
        at += len(index)
    joined = np.concatenate([index for _, _, index in parts]) if parts else np.zeros(0)
    return joined.astype(np.int32), spans


def _by_width(chunks: list[_Chunk]) -> list[Scored]:
    """Apart, so that one request's many ids do not make the arrays of its neighbours' long prompts as wide."""
    groups: dict[tuple[int, int], list[_Chunk]] = {}
    for chunk in chunks:
        groups.setdefault((len(chunk.params.logprob_ids), chunk.params.top_logprobs), []).append(chunk)
    return [_scored([_prompt_ids(c) for c in group], [top]) for (_, top), group in groups.items()]


def _scored(parts: list[tuple[int, int, np.ndarray, np.ndarray]], tops: list[int]) -> Scored:
    index_P, spans = _gather([part[:3] for part in parts])
    id_PK = np.zeros((len(index_P), max((ids.shape[1] for *_, ids in parts), default=0)), np.int32)
    for span, (*_, ids) in zip(spans, parts, strict=True):
        id_PK[span.at : span.at + span.count, : ids.shape[1]] = ids
    return Scored(index_P, id_PK, max(tops, default=0), spans)


def _hidden_due(chunk: _Chunk) -> list[tuple[int, int]]:
    """Ranges of positions whose hidden states the record wants from this chunk; it does want some, or a pooled one."""
    request, params, start, end = chunk.request, chunk.params, chunk.start, chunk.end
    prompt = (max(start, chunk.record.num_seen), min(end, request.prompt_len))
    last = [(end - 1, end)] if chunk.sample else []
    if params.hidden == "last" or params.pool == "last":
        return last
    if params.pool == "cls":
        return [(0, 1)] if start == 0 and chunk.record.total is None else []
    found = [prompt] if prompt[0] < prompt[1] else []
    return found + (last if params.hidden and end > request.prompt_len else [])
