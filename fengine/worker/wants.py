"""What the rows of a step want beyond drawn tokens: arrays beside `Staged`, from what each row was admitted with.

    SchedulerOutput --wants_of--> Wants --(extended step)--> Findings --land--> records of the requests

What a preempted request computes again is not asked for again: it is admitted only after the step that was in flight
has been read, so `NewRow` says what is still lacking. No torch.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fengine.core.sampling_params import SamplingParams
from fengine.core.scheduler_output import NewRow, SchedulerOutput
from fengine.structured_output.cursor import Cursor
from fengine.structured_output.masks import MaskRow, Masks


class Edits(NamedTuple):
    """Changes to single logits, each (row, id) once: ((x + before) scaled) + after, see `ops/edit_logits.py`."""

    row_E: np.ndarray  # int32, row of the step
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


@dataclass(frozen=True, slots=True)
class ProcessorRequest:
    """What a logit processor may know about its request: `custom_params["__req__"]`, a copy made for each call."""

    rid: str
    origin_input_ids: list[int]
    output_ids: list[int]


class RowState:
    """What is kept of a row that wants more than a drawn token. Modifies: itself."""

    __slots__ = ("new", "params", "prompt_len", "tokens", "first_scored", "cursor")

    def __init__(self, new: NewRow) -> None:
        self.new, self.params, self.prompt_len = new, new.params, new.prompt_len
        self.tokens = list(new.token_ids)  # the known ones, as long as none is fed
        self.first_scored = new.first_scored
        self.cursor: Cursor | None = None  # where the output stands in its grammar

    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class _Chunk(NamedTuple):
    """Row `row` of the step computes positions start : end; the first of them is token `at` of the step."""

    row: int
    state: RowState
    params: SamplingParams
    start: int
    end: int
    at: int
    sample: bool


def wants_of(
    output: SchedulerOutput, states: Mapping[int, RowState], q_start_B: np.ndarray, feed_index_T: np.ndarray
) -> Wants | None:
    """What the step must bring; None if a plain step does. `feed_index_T` is that of `Staged`.

    Modifies: the states; "__req__" of the processors' own dicts.
    """
    fed = set(output.fed)
    chunks = [
        _Chunk(i, state, state.params, start, start + count, int(q_start_B[i]), sample)
        for i, (row, start, count, sample) in enumerate(
            zip(output.rows, output.starts, output.counts, output.samples, strict=True)
        )
        if (state := states.get(row)) is not None
    ]
    for chunk in chunks:
        _follow(chunk, output.token_ids, fed)
    drawing = [c for c in chunks if c.sample and c.params.pool is None]
    edits = _edits(drawing)
    processors = [_processor(c) for c in drawing if c.params.processor is not None]
    masked = [_mask_row(c, output.token_ids, fed, feed_index_T) for c in drawing if c.params.grammar is not None]
    prompts = [c for c in chunks if _scores_due(c)]
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
        len(pooled) < len(output.rows),
    )


def _follow(chunk: _Chunk, token_ids: Sequence[int], fed: Set[int]) -> None:
    """Takes in a drawn token that the host has come to know. Modifies: the state."""
    last, tokens = chunk.at + chunk.end - chunk.start - 1, chunk.state.tokens
    if chunk.end == len(tokens) + 1 and last not in fed:
        tokens.append(token_ids[last])


def _edits(drawing: list[_Chunk]) -> Edits:
    """Penalties count drawn tokens only, as SGLang's do; the ban on stop ids ends with the row's min_new_tokens.

    Over all rows at once: each logit has the key (row << 32) + id.
    """
    drawn, banned, biased, bias = [], [], [], []
    rows = max((c.row for c in drawing), default=-1) + 1
    frequency_R, presence_R, scale_R = np.zeros(rows), np.zeros(rows), np.ones(rows)
    for chunk in drawing:
        state, params, key = chunk.state, chunk.params, chunk.row << 32
        if params.penalised:
            drawn.append(np.array(state.output_ids(), np.int64) + key)
            frequency_R[chunk.row], presence_R[chunk.row] = params.frequency_penalty, params.presence_penalty
            scale_R[chunk.row] = params.repetition_penalty
        if chunk.end - state.prompt_len < params.min_new_tokens:
            banned += [key + id for id in state.new.stop_ids | state.new.early_ids]
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
    state, params = chunk.state, chunk.params
    own = {} if params.custom_params is None else params.custom_params
    own["__req__"] = ProcessorRequest(state.new.rid, state.tokens[: state.prompt_len], state.output_ids())
    return Processor(chunk.row, params.processor, own)


def _mask_row(chunk: _Chunk, token_ids: Sequence[int], fed: Set[int], feed_index_T: np.ndarray) -> MaskRow:
    """Modifies: the state, at the first time."""
    state, params, new = chunk.state, chunk.params, chunk.state.new
    if state.cursor is None:
        never = [id for id, bias in params.logit_bias if np.float32(bias) <= np.float32(-1e30)]  # no edit lifts them
        state.cursor = Cursor(params.grammar, new.stop_ids, never, new.early_ids, not params.ignore_eos)
    last = chunk.at + chunk.end - chunk.start - 1
    pending = last in fed
    taken, known = len(state.cursor.tokens), chunk.end - state.prompt_len - pending  # of the output
    fresh = list(token_ids[last + 1 - (known - taken) : last + 1]) if not pending else []
    if known - taken > chunk.end - chunk.start:  # it was admitted again with all of them
        fresh = list(new.token_ids[state.prompt_len + taken :])
    return MaskRow(
        chunk.row,
        state.cursor,
        fresh,
        int(feed_index_T[last]) if pending else None,
        new.stop_ids,
        chunk.end - state.prompt_len < params.min_new_tokens,
    )


def _scores_due(chunk: _Chunk) -> bool:
    """Whether input logprobs may land with this chunk; with the last one also where only the first entry, None, is."""
    first, prompt_len = chunk.state.first_scored, chunk.state.prompt_len
    return chunk.start < prompt_len and first < prompt_len and (chunk.sample or first < chunk.end)


def _prompt_ids(chunk: _Chunk) -> tuple[int, int, np.ndarray, np.ndarray]:
    """(row, first position, index into the step's tokens, ids [n, K]) of the input logprobs that this chunk gives.

    Modifies: the state.
    """
    state, prompt_len = chunk.state, chunk.state.prompt_len
    first = max(chunk.start, state.first_scored)
    last = max(first, min(chunk.end, prompt_len - 1))
    state.first_scored = prompt_len if chunk.end >= prompt_len else last
    target_P = np.array(state.new.token_ids[first + 1 : last + 1], np.int32)
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
    """Ranges of positions whose hidden states are wanted from this chunk, of a row that wants some, or a pooled one."""
    params, start, end, first_seen = chunk.params, chunk.start, chunk.end, chunk.state.new.first_seen
    prompt = (max(start, first_seen), min(end, chunk.state.prompt_len))
    last = [(end - 1, end)] if chunk.sample else []
    if params.hidden == "last" or params.pool == "last":
        return last
    if params.pool == "cls":
        return [(0, 1)] if start == 0 and not first_seen else []
    found = [prompt] if prompt[0] < prompt[1] else []
    return found + (last if params.hidden and end > chunk.state.prompt_len else [])
