"""Change single logits in place: penalties of tokens drawn so far, numbers added to chosen ids, tokens barred by masks.

The first two read tables with a line for each row slot of the engine; slot_R names the line of each row of logits, a
negative one leaves the row alone. Penalties first, then what is added: SGLang's order.

    penalize    b = x - (count * frequency + presence), then b * repetition if b < 0 else b / repetition; ids whose
                count is not 0 (Keskar et al. 2019 for the repetition penalty)
    add_at      x + value; -inf bans the id

The subtrahend of `penalize` is computed in float64 and rounded to float32 once. Results are clamped to [-BAN, BAN]: a
banned id ends at a finite number that no temperature lifts to a probability above 0 and none divides into an infinity,
for `draw` takes that as a fault of the row. A logit that is not finite stays as it is, so that `draw` sees it; what is
banned stays banned. No reduction.

    apply_bitmask   the logit of id v in row row_M[k] becomes -BAN where bit v % 32 of mask_MW[k, v // 32] is not set:
                    what a grammar allows next. One that is not finite stays, rows that row_M does not name too"""

import torch
from torch import Tensor

from fengine.errors import UnsupportedFeatureError
from fengine.ops.cpu import contiguous, integers, schedule
from fengine.ops.edit_logits_kernels import add_launch, count_launch, launch, mask_launch
from fengine.ops.registration import op, register

BAN = 1e30  # times or over any temperature of [1e-6, 1e20] it is finite and exp(-z) is 0


def reference(
    logits_RV: Tensor, slot_R: Tensor, frequency_R: Tensor, presence_R: Tensor, repetition_R: Tensor, count_SV: Tensor
) -> None:
    """The math of `penalize`. Modifies: logits_RV."""
    for row, slot in enumerate(slot_R.tolist()):
        if slot >= 0:
            x_V, count_V = logits_RV[row], count_SV[slot]
            b_V = x_V - (count_V.double() * frequency_R[row] + presence_R[row]).float()
            y_V = torch.where(b_V < 0, b_V * repetition_R[row], b_V / repetition_R[row]).clamp(-BAN, BAN)
            logits_RV[row] = torch.where((count_V > 0) & x_V.isfinite(), y_V, x_V)


def add_reference(logits_RV: Tensor, slot_R: Tensor, id_SK: Tensor, value_SK: Tensor) -> None:
    """The math of `add_at`. Modifies: logits_RV."""
    for row, slot in enumerate(slot_R.tolist()):
        if slot >= 0:
            id_K = id_SK[slot].long()
            id_K, value_K = id_K[id_K >= 0], value_SK[slot][id_K >= 0]
            x_K = logits_RV[row, id_K]
            kept_K = ~x_K.isfinite() | (x_K <= -BAN)
            logits_RV[row, id_K] = torch.where(kept_K, x_K, (x_K + value_K).clamp(-BAN, BAN))


def words(vocab: int) -> int:
    """W: how many 32-bit words hold a bit for each of `vocab` ids. Pure."""
    return -(-vocab // 32)


def mask_reference(logits_RV: Tensor, row_M: Tensor, mask_MW: Tensor) -> None:
    """The math. Modifies: logits_RV."""
    row_M, mask_MW = row_M[row_M >= 0], mask_MW[row_M >= 0]
    bit = torch.arange(32, device=mask_MW.device, dtype=torch.int32)
    allowed_MV = ((mask_MW[:, :, None] >> bit) & 1).flatten(1)[:, : logits_RV.shape[1]] == 1
    x_MV = logits_RV[row_M.long()]
    logits_RV[row_M.long()] = torch.where(allowed_MV | ~x_MV.isfinite(), x_MV, -BAN)


def editable(logits: Tensor) -> Tensor:
    """Errors: UnsupportedFeatureError."""
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise UnsupportedFeatureError(f"logits are {logits.dtype}; they must be contiguous float32 to be edited")
    return logits


def on_cpu(
    logits: Tensor, slot: Tensor, frequency: Tensor, presence: Tensor, repetition: Tensor, count: Tensor
) -> None:
    logits, (rows, vocab) = editable(logits), logits.shape
    slot, count = integers(slot, "slot"), integers(count, "count")
    frequency = contiguous(frequency, "frequency", torch.float64)
    presence = contiguous(presence, "presence", torch.float64)
    repetition = contiguous(repetition, "repetition")
    schedule(rows * vocab // 4)[0].fengine_penalize(
        logits.data_ptr(), slot.data_ptr(), frequency.data_ptr(), presence.data_ptr(), repetition.data_ptr(),
        count.data_ptr(), rows, vocab, 1e30,
    )  # fmt: skip


def add_on_cpu(logits: Tensor, slot: Tensor, id: Tensor, value: Tensor) -> None:
    logits, (rows, vocab) = editable(logits), logits.shape
    slot, id, value = integers(slot, "slot"), integers(id, "id"), contiguous(value, "value")
    schedule(rows * id.shape[1])[0].fengine_add_at(
        logits.data_ptr(), slot.data_ptr(), id.data_ptr(), value.data_ptr(), rows, vocab, id.shape[1], 1e30
    )


def mask_on_cpu(logits: Tensor, row: Tensor, mask: Tensor) -> None:
    logits, row, mask = editable(logits), integers(row, "row"), integers(mask, "mask")
    library, _ = schedule(row.shape[0] * logits.shape[1] // 4)
    library.fengine_apply_bitmask(
        logits.data_ptr(), row.data_ptr(), mask.data_ptr(), row.shape[0], logits.shape[1], BAN
    )


_penalize = register("penalize_", launch, on_cpu, mutates=("logits",))
_add_at = register("add_at_", add_launch, add_on_cpu, mutates=("logits",))
_bar = register("apply_bitmask_", mask_launch, mask_on_cpu, mutates=("logits",))


def penalize(
    logits_RV: Tensor, slot_R: Tensor, frequency_R: Tensor, presence_R: Tensor, repetition_R: Tensor, count_SV: Tensor
) -> Tensor:
    """logits_RV (float32, contiguous), penalised. Modifies: its storage; use the returned tensor from here on. slot_R,
    count_SV int32; frequency, presence float64; repetition float32 > 0."""
    _penalize(logits_RV, slot_R, frequency_R, presence_R, repetition_R, count_SV)
    return logits_RV


def add_at(logits_RV: Tensor, slot_R: Tensor, id_SK: Tensor, value_SK: Tensor) -> Tensor:
    """logits_RV (float32, contiguous), with value_SK added at id_SK. Modifies: its storage; use what is returned.
    slot_R int32; id_SK int32 within logits_RV, each at most once in its line, negative for none; value_SK float32."""
    _add_at(logits_RV, slot_R, id_SK, value_SK)
    return logits_RV


@op(count_launch, mutates=("count_SV",), name="count_")
def count(count_SV: Tensor, slot_R: Tensor, token_R: Tensor) -> None:
    """Adds 1 at [slot_R, token_R] where the slot is not negative. Modifies: count_SV. All int32."""
    if count_SV.dtype != torch.int32 or not count_SV.is_contiguous():
        raise UnsupportedFeatureError(f"counts are {count_SV.dtype}; they must be contiguous int32")
    slot_R, token_R = integers(slot_R, "slot"), integers(token_R, "token")
    schedule(slot_R.shape[0])[0].fengine_count(
        count_SV.data_ptr(), slot_R.data_ptr(), token_R.data_ptr(), slot_R.shape[0], count_SV.shape[1]
    )


def apply_bitmask(logits_RV: Tensor, row_M: Tensor, mask_MW: Tensor) -> Tensor:
    """logits_RV (float32, contiguous), masked. Modifies: its storage; use the returned tensor from here on. row_M
    int32, rows of the logits, each at most once, or negative; mask_MW int32 [M, words(V)]. Pinned ones will do, too."""
    assert mask_MW.shape == (row_M.shape[0], words(logits_RV.shape[1]))
    _bar(logits_RV, row_M, mask_MW)
    return logits_RV
