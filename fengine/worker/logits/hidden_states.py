"""Which hidden states a step brings: for themselves, or to be pooled to an embedding."""

from collections.abc import Sequence

import numpy as np

from fengine.core.scheduler_output import Span
from fengine.worker.chunks import Chunk


def hidden_wanted(chunks: Sequence[Chunk]) -> tuple[list[Span], np.ndarray | None]:
    """The spans of hidden states that chunks want, and their tokens of the step. Pure."""
    spans, index, at = [], [np.zeros(0, np.int64)], 0
    for chunk in chunks:
        for first, last in _due(chunk):
            index.append(np.arange(first, last) - chunk.start + chunk.at)
            spans.append(Span(chunk.row, first, last - first, at))
            at += last - first
    return spans, np.concatenate(index).astype(np.int32) if at else None


def _due(chunk: Chunk) -> list[tuple[int, int]]:
    """Ranges of positions whose hidden states are wanted of this chunk. Pure."""
    new, params, start, end = chunk.new, chunk.new.params, chunk.start, chunk.end
    if params.hidden is None and params.pool is None:
        return []
    last = [(end - 1, end)] if chunk.draws else []
    if params.hidden == "last" or params.pool == "last":
        return last
    if params.pool == "cls":
        return [(0, 1)] if start == 0 == new.num_seen else []
    first, behind = max(start, new.num_seen), min(end, new.prompt_len)
    return ([(first, behind)] if first < behind else []) + (last if params.hidden and end > behind else [])
