"""Logprobs beside those of the drawn tokens: of ids that were asked, of the likeliest ids, of prompt tokens. For the
draws they are an output of the sampler: every row of the batch gets as many, so that a graph may hold it. Prompts are
unembedded a slice of rows at a time, behind the draw and outside of graphs."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fengine.core.scheduler_output import Scores, Span
from fengine.ops.logprobs import MOST_TOP, logprobs, top_ids
from fengine.worker.chunks import Chunk, PromptRows
from fengine.worker.step_input import Field

SLICE = 256  # rows unembedded at once for prompt logprobs: 125 MiB of logits for a vocabulary of 128k
ASKED = Field("asked_RK", torch.int32)  # ids whose logprobs are wanted of the draws
MOST_ASKED = 16  # K that graphs have
TOPS = (8, MOST_TOP)  # on a GPU so many likeliest ids, or as many as are asked: each number has kernels of its own


class Likeliest(NamedTuple):
    """Logprobs of R rows, of K ids and the X likeliest: Z = K + X of them."""

    logprob_RZ: Tensor
    top_id_RX: Tensor


def score(logits_RV: Tensor, temperature_R: Tensor, id_RK: Tensor, top: int) -> Likeliest:
    """Logprobs of ids id_RK, and of the `top` likeliest ids behind them. Pure."""
    top_id_RX = top_ids(logits_RV, top)
    return Likeliest(logprobs(logits_RV, temperature_R, torch.cat((id_RK, top_id_RX), 1)), top_id_RX)


def scores_of(logprob_RZ: np.ndarray, top_id_RX: np.ndarray, rows: int) -> Scores:
    """What `Likeliest` holds of the first rows, asked ids and likeliest apart. Pure."""
    logprob_RZ, top_id_RX = logprob_RZ[:rows], top_id_RX[:rows]
    asked = logprob_RZ.shape[1] - top_id_RX.shape[1]
    return Scores(logprob_RZ[:, :asked], logprob_RZ[:, asked:], top_id_RX)


def rounded_top(top: int) -> int:
    """How many likeliest ids are computed where `top` are wanted, so that few different numbers come. Pure."""
    return next((size for size in TOPS if 0 < top <= size), top)


def asked_ids(chunks: Sequence[Chunk], rows: int) -> np.ndarray:
    """ids [R, K] whose logprobs the draws of these rows are to come with; 0 where none is asked."""
    asked = [(row, ids) for chunk in chunks if (ids := chunk.new.params.logprob_ids) for row in chunk.rows]
    id_RK = np.zeros((rows, max((len(ids) for _, ids in asked), default=0)), np.int32)
    for row, ids in asked:
        id_RK[row, : len(ids)] = ids
    return id_RK


def prompt_rows(chunks: Sequence[Chunk]) -> list[PromptRows]:
    """What chunks of prompts give, apart by how many ids each wants: none makes its neighbours' arrays wide."""
    groups: dict[tuple[int, int], list[Chunk]] = {}
    for chunk in chunks:
        first, prompt_len, params = chunk.new.first_scored, chunk.new.prompt_len, chunk.new.params
        # With the last chunk of a prompt also where only the first entry, None, lands.
        if chunk.start < prompt_len and first < prompt_len and (chunk.draws or first < chunk.end):
            groups.setdefault((len(params.logprob_ids), params.top_logprobs), []).append(chunk)
    return [_group(group, top) for (_, top), group in groups.items()]


def _group(chunks: list[Chunk], top: int) -> PromptRows:
    spans, index, ids, at = [], [np.zeros(0, np.int64)], [], 0
    for chunk in chunks:
        new, params = chunk.new, chunk.new.params
        first = max(chunk.start, new.first_scored)
        last = min(chunk.end, new.prompt_len - 1)  # not before the first, or it is not scored
        target_P = np.array(new.token_ids[first + 1 : last + 1], np.int32)
        id_K = np.array(params.logprob_ids, np.int32)
        ids.append(np.concatenate((target_P[:, None], np.broadcast_to(id_K, (last - first, len(id_K)))), axis=1))
        index.append(np.arange(first, last) - chunk.start + chunk.at)
        spans.append(Span(chunk.row, first, last - first, at))
        at += last - first
    return PromptRows(np.concatenate(index).astype(np.int32), np.concatenate(ids), top, spans)


def score_prompts(unembed: Callable[[Tensor], Tensor], hidden_TD: Tensor, wanted: PromptRows) -> Callable[[], Scores]:
    """Logprobs (at temperature 1) behind the hidden states `index_P`, SLICE of them at a time; what it returns gives
    them when the device has finished the step. Pure."""
    found, width = [], wanted.id_PK.shape[1]
    top = rounded_top(wanted.top) if hidden_TD.is_cuda else wanted.top
    for start in range(0, len(wanted.index_P), SLICE):
        index_P = padded(wanted.index_P[start : start + SLICE], hidden_TD)
        id_PK = padded(wanted.id_PK[start : start + SLICE], hidden_TD)
        logits_PV = unembed(hidden_TD.index_select(0, put(index_P, hidden_TD)))
        ones_P = torch.ones(len(index_P), dtype=torch.float32, device=hidden_TD.device)
        both = score(logits_PV, ones_P, put(id_PK, hidden_TD), top)
        found.append((to_host(both.logprob_RZ), to_host(both.top_id_RX)))
        del logits_PV, both  # before the next slice takes as much

    def scores() -> Scores:
        logprob_PZ = np.concatenate([part.numpy() for part, _ in found] or [np.zeros((0, width + top), np.float32)])
        top_id_PX = np.concatenate([part.numpy() for _, part in found] or [np.zeros((0, top), np.int32)])
        return scores_of(logprob_PZ, top_id_PX, len(wanted.index_P))

    return scores


def padded(array: np.ndarray, like: Tensor) -> np.ndarray:
    """On a GPU the numbers of rows are few, so that each finds a schedule that is known already. Pure."""
    if not like.is_cuda:
        return array
    rows = max(16, 1 << (len(array) - 1).bit_length())
    return np.pad(array, ((0, rows - len(array)), *((0, 0),) * (array.ndim - 1)))


def put(array: np.ndarray, like: Tensor) -> Tensor:
    """`array` as a tensor on the device of `like`."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else tensor


def to_host(x: Tensor) -> Tensor:
    """A copy on the host, complete once the device has finished the step."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) if x.is_cuda else x
