"""The extended step: the plain step's ops, with logits and hidden states in reach. It runs uncompiled.

    forward -> unembed -> edit_logits -> logit processors -> apply_bitmask -> sample     the plain step's, so same bits
       `-> hidden states    `-> prompt logprobs, a slice of rows at a time      `-> logprobs of other ids, the likeliest

Every op that rounds is one of ours, so no compiler has a say in the bits; and no request makes anything compile. Who
runs `forward` is the runner's choice: on CUDA it may be a graph.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fengine.errors import FengineError, LogitProcessorError
from fengine.models import lookup
from fengine.models.kv_state import KVState, Params, SamplingBatch, StepBatch, StepOut
from fengine.models.spec import ModelSpec
from fengine.ops.bitmask import apply_bitmask
from fengine.ops.edit_logits import BAN, edit_logits
from fengine.ops.linear import linear
from fengine.ops.logprobs import logprobs, top_ids
from fengine.structured_output.masks import Filled
from fengine.worker.records import Findings, Scores
from fengine.worker.sampler import sample
from fengine.worker.step import Feed, ForwardFn
from fengine.worker.wants import EDIT_TYPES, Edits, Processor, Scored, Wants

Before = Callable[[], Sequence[int]]  # waits for the tokens that the step before has drawn
ExtendedFn = Callable[
    [Params, KVState, StepBatch, SamplingBatch, Feed, Wants, Before, ForwardFn],
    tuple[KVState, StepOut, Callable[[], Findings]],
]
SLICE = 256  # rows unembedded at once for prompt logprobs: 125 MiB of logits for a vocabulary of 128k


def make_extended(spec: ModelSpec) -> ExtendedFn:
    """`extended_step` with `spec` closed over."""

    def run(
        params: Params, kv: KVState, batch: StepBatch, sampling: SamplingBatch, feed: Feed, wants: Wants,
        before: Before, forward: ForwardFn,
    ) -> tuple[KVState, StepOut, Callable[[], Findings]]:  # fmt: skip
        return extended_step(params, spec, kv, batch, sampling, feed, wants, before, forward)

    return run


def extended_step(
    params: Params, spec: ModelSpec, kv: KVState, batch: StepBatch, sampling: SamplingBatch, feed: Feed, wants: Wants,
    before: Before, forward: ForwardFn,
) -> tuple[KVState, StepOut, Callable[[], Findings]]:  # fmt: skip
    """The step, and a function that gives what else was wanted once the device has finished it.

    Rows that want nothing have the bits of the plain step. Where no row draws there is no unembedding, and tokens and
    logprobs are 0. Modifies: the storage of `kv`, as the plain step.
    """
    masks = None if wants.masks is None else wants.masks.start(before)  # while the model runs
    kv, hidden_TD = forward(params, kv, batch, feed)  # to be read by what is launched here, not later
    unembed = partial(lookup(spec.architecture).unembed, params, spec)
    errors: dict[int, FengineError] = {}
    rows = batch.logit_index_R.shape[0]
    outputs = no_scores(wants.outputs)
    if wants.draws:
        logits_RV = unembed(hidden_TD.index_select(0, batch.logit_index_R))
        logits_RV = apply_edits(logits_RV, wants.edits)
        logits_RV = apply_processors(logits_RV, wants.processors, errors)
        if masks is not None:
            logits_RV = apply_masks(logits_RV, masks(), wants.processors, errors)
        out = sample(logits_RV, sampling)
        if len(wants.outputs.index_P):
            index_P = put(wants.outputs.index_P, hidden_TD)
            outputs = score(logits_RV.index_select(0, index_P), sampling.temperature_R[index_P], wants.outputs)
    else:
        zero_R = torch.zeros(rows, dtype=torch.float32, device=hidden_TD.device)
        out = StepOut(zero_R.int(), zero_R)
    prompts = [score_prompts(unembed, hidden_TD, scored) for scored in wants.prompts]
    hidden_HD = hidden_TD[:0]
    if len(wants.hidden_H):
        hidden_HD = hidden_TD.index_select(0, put(wants.hidden_H, hidden_TD))
    hidden_HD = to_host(hidden_HD.float())

    def findings() -> Findings:
        head = partial(apply_head, params, spec)
        return Findings(wants, [joined(p) for p in prompts], joined([outputs]), hidden_HD.numpy(), errors, head)

    return kv, out, findings


def warm_up(params: Params, spec: ModelSpec) -> None:
    """Loads, and on CUDA compiles and proves, what only an extended step runs. Pure."""
    weight = params["final_norm_D"]
    hidden_TD = weight.new_zeros((1, spec.hidden_size))
    edits = Edits(*(np.zeros(1, dtype) for dtype in EDIT_TYPES))._replace(scale_E=np.ones(1, np.float32))
    unembed = partial(lookup(spec.architecture).unembed, params, spec)
    for rows in (1, 32, 64, 128, SLICE):
        score_prompts(unembed, hidden_TD, Scored(np.zeros(rows, np.int32), np.zeros((rows, 2), np.int32), 1, []))
    apply_edits(unembed(hidden_TD), edits)


# -- logits ------------------------------------------------------------------------------------------------------------


def apply_edits(logits_RV: Tensor, edits: Edits) -> Tensor:
    """Penalties, bans and biases. Ids that the model does not have are left out: an eos id may be one.

    Modifies: logits_RV.
    """
    known_E = (edits.id_E >= 0) & (edits.id_E < logits_RV.shape[1])
    if not known_E.any():
        return logits_RV
    return edit_logits(logits_RV, *(put(array[known_E], logits_RV) for array in edits))


def apply_processors(logits_RV: Tensor, processors: list[Processor], errors: dict[int, FengineError]) -> Tensor:
    """Each row's own Python function on its row. A row whose function fails gets NaN, so that it draws nothing.

    Modifies: logits_RV, in rows with processors; `errors`, by row.
    """
    for processor in processors:
        row_1V = logits_RV[processor.row : processor.row + 1]
        try:
            row_1V.copy_(processed(processor, row_1V))
        except BaseException as error:  # whatever it raises ends its own request: not its neighbours, not the loop
            if not isinstance(error, LogitProcessorError):
                told = LogitProcessorError(f"custom_logit_processor raised {type(error).__name__}: {error!s:.500}")
                told.__cause__ = error
                error = told
            errors[processor.row] = error
            row_1V.fill_(torch.nan)
    return logits_RV


def processed(processor: Processor, row_1V: Tensor) -> Tensor:
    """What the function makes of a copy of the row, checked; banned ids are -inf for it and for what it returns.

    Errors: LogitProcessorError, and whatever the function raises.
    """
    if not bool(row_1V.isfinite().all()):
        return row_1V  # the model's fault, and `draw` will say so
    shown_1V = torch.where(row_1V <= -BAN, -torch.inf, row_1V)
    result = processor.function(shown_1V, [processor.params])
    if not isinstance(result, Tensor) or result.shape != row_1V.shape or not result.is_floating_point():
        got = f"{tuple(result.shape)} {result.dtype}" if isinstance(result, Tensor) else type(result).__name__
        raise LogitProcessorError(
            f"custom_logit_processor returned {got}; it must return a floating-point tensor of shape "
            f"{tuple(row_1V.shape)}, as it got"
        )
    result = result.detach().to(row_1V)
    if bool((result.isnan() | (result == torch.inf)).any()):
        raise LogitProcessorError("custom_logit_processor returned NaN or +inf; logits must be finite, or -inf")
    if bool((result <= -BAN).all()):
        raise LogitProcessorError("custom_logit_processor returned -inf for every token: none is left to draw")
    return result.clamp(-BAN, BAN)


def apply_masks(
    logits_RV: Tensor, filled: Filled, processors: list[Processor], errors: dict[int, FengineError]
) -> Tensor:
    """Bars what grammars do not allow. A row with nothing left gets NaN, so that it draws nothing.

    Modifies: logits_RV, in rows with grammars; `errors`, by row.
    """
    logits_RV = apply_bitmask(logits_RV, put(filled.row_M, logits_RV), put(filled.mask_MW, logits_RV))
    failed: dict[int, FengineError] = {row: error for row, error in filled.errors.items()}
    masked = set(filled.row_M.tolist()) if processors else set()
    for row in {processor.row for processor in processors} & masked - set(errors) - set(failed):
        if not bool(((logits_RV[row] > -BAN) | ~logits_RV[row].isfinite()).any()):
            failed[row] = LogitProcessorError("custom_logit_processor returned -inf for every token the grammar allows")
    for row, error in failed.items():
        errors.setdefault(row, error)
        logits_RV[row].fill_(torch.nan)
    return logits_RV


# -- logprobs ----------------------------------------------------------------------------------------------------------


def no_scores(wanted: Scored) -> Scores[Tensor]:
    """Of no rows."""
    ids, top = (torch.zeros((0, count), dtype=torch.float32) for count in (wanted.id_PK.shape[1], wanted.top))
    return Scores(ids, top, top.int())


def score(logits_PV: Tensor, temperature_P: Tensor, wanted: Scored, rows: slice = slice(None)) -> Scores[Tensor]:
    """Logprobs of the ids wanted of `rows` of `wanted`, and the likeliest ids, on their way to the host. Pure."""
    id_PK = put(wanted.id_PK[rows], logits_PV)
    top_PX = top_ids(logits_PV[: len(id_PK)], wanted.top)
    both_PZ = torch.nn.functional.pad(torch.cat((id_PK, top_PX), 1), (0, 0, 0, len(logits_PV) - len(id_PK)))
    logprob_PZ = logprobs(logits_PV, temperature_P, both_PZ)
    banned_PZ = logits_PV.gather(1, both_PZ.long()) <= -BAN
    logprob_PZ = torch.where(banned_PZ, -torch.inf, logprob_PZ)[: len(id_PK)]
    width = id_PK.shape[1]
    return Scores(to_host(logprob_PZ[:, :width]), to_host(logprob_PZ[:, width:]), to_host(top_PX))


def score_prompts(unembed: Callable[[Tensor], Tensor], hidden_TD: Tensor, wanted: Scored) -> list[Scores[Tensor]]:
    """Logprobs (at temperature 1) behind the hidden states `wanted.index_P`, SLICE of them at a time. Pure."""
    found = [] if len(wanted.index_P) else [no_scores(wanted)]
    for start in range(0, len(wanted.index_P), SLICE):
        index_P = put(padded(wanted.index_P[start : start + SLICE], hidden_TD), hidden_TD)
        logits_PV = unembed(hidden_TD.index_select(0, index_P))
        ones_P = torch.ones(len(index_P), dtype=torch.float32, device=hidden_TD.device)
        found.append(score(logits_PV, ones_P, wanted, slice(start, start + SLICE)))
        del logits_PV  # before the next slice takes as much
    return found


def padded(index_P: np.ndarray, like: Tensor) -> np.ndarray:
    """On a GPU the numbers of rows are few, so that each finds a schedule that is known already. Pure."""
    if not like.is_cuda:
        return index_P
    rows = max(16, 1 << (len(index_P) - 1).bit_length())
    return np.pad(index_P, (0, rows - len(index_P)))


# -- the way to the device and back ------------------------------------------------------------------------------------


def put(array: np.ndarray, like: Tensor) -> Tensor:
    """`array` as a tensor on the device of `like`."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else tensor


def to_host(x: Tensor) -> Tensor:
    """A copy on the host, complete once the device has finished the step."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x, non_blocking=True) if x.is_cuda else x


def joined(slices: list[Scores[Tensor]]) -> Scores[np.ndarray]:
    """All slices in one, once the device has finished the step. Pure."""
    if len(slices) == 1:
        return Scores(*(part.numpy() for part in slices[0]))
    return Scores(*(torch.cat(parts).numpy() for parts in zip(*slices, strict=True)))


def apply_head(params: Params, spec: ModelSpec, pooled_D: np.ndarray) -> np.ndarray:
    """The classification or reward head on one pooled hidden state: float32 [C]. Pure."""
    assert spec.num_labels is not None, "the door refuses `head` for a checkpoint that has none"
    norm_D = params["final_norm_D"]  # of the activations' device and dtype
    x_1D = torch.from_numpy(pooled_D)[None].to(norm_D)
    y_1C = linear(x_1D, params["score"], params.get("score_bias_C"), out_dtype=torch.float32)
    return y_1C[0].cpu().numpy()
