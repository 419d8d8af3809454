"""Bar tokens by a bitmask, in place: what a grammar allows next.

For each k: the logit of id v in row row_M[k] stays as it is where bit v % 32 of mask_MW[k, v // 32] is set, and becomes
-BAN where it is not; -BAN is as little as a logit can be (see edit_logits.py). A logit that is not finite stays, so
that `draw` sees it. Rows that row_M does not name are not touched, a negative one is none. No reduction; every row
may occur once.
"""
# pyright: reportInvalidTypeForm=false

import torch
from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.cpu import contiguous, schedule
from fengine.ops.edit_logits import BAN, editable
from fengine.ops.registration import register, tl, triton

IDS = 4096  # of one program


def words(vocab: int) -> int:
    """W: how many 32-bit words hold a bit for each of `vocab` ids. Pure."""
    return -(-vocab // 32)


def reference(logits_RV: Tensor, row_M: Tensor, mask_MW: Tensor) -> None:
    """The math. Modifies: logits_RV."""
    row_M, mask_MW = row_M[row_M >= 0], mask_MW[row_M >= 0]
    bit = torch.arange(32, device=mask_MW.device, dtype=torch.int32)
    allowed_MV = ((mask_MW[:, :, None] >> bit) & 1).flatten(1)[:, : logits_RV.shape[1]] == 1
    x_MV = logits_RV[row_M.long()]
    logits_RV[row_M.long()] = torch.where(allowed_MV | ~x_MV.isfinite(), x_MV, -BAN)


@triton.jit
def bitmask_kernel(logits_ptr, row_ptr, mask_ptr, V, W, IDS: tl.constexpr):
    """A block of ids of one masked row."""
    k = tl.program_id(0)
    row = tl.load(row_ptr + k).to(tl.int64)
    if row >= 0:
        id = tl.program_id(1) * IDS + tl.arange(0, IDS)
        inside = id < V
        at = logits_ptr + row * V + id
        word = tl.load(mask_ptr + k.to(tl.int64) * W + id // 32, mask=inside, other=0)
        barred = ((word >> (id % 32)) & 1) == 0
        x = tl.load(at, mask=inside & barred, other=float("inf"))
        tl.store(at, tl.full((IDS,), -1e30, tl.float32), mask=inside & barred & (tl.abs(x) < float("inf")))


def launch(logits_RV: Tensor, row_M: Tensor, mask_MW: Tensor) -> None:
    """Runs the kernel. Modifies: logits_RV."""
    assert logits_RV.is_contiguous() and mask_MW.is_contiguous()
    vocab = logits_RV.shape[1]
    if len(row_M):
        grid = (len(row_M), triton.cdiv(vocab, IDS))
        launcher(bitmask_kernel, grid)(logits_RV, row_M, mask_MW, vocab, mask_MW.shape[1], IDS, num_warps=8)


def on_cpu(logits: Tensor, row: Tensor, mask: Tensor) -> None:
    logits, row, mask = editable(logits), contiguous(row, "row", torch.int32), contiguous(mask, "mask", torch.int32)
    library, _ = schedule(row.shape[0] * logits.shape[1] // 4)
    library.fengine_apply_bitmask(
        logits.data_ptr(), row.data_ptr(), mask.data_ptr(), row.shape[0], logits.shape[1], BAN
    )


_op = register("apply_bitmask_(Tensor(a!) logits, Tensor row, Tensor mask) -> ()", launch, on_cpu)


def apply_bitmask(logits_RV: Tensor, row_M: Tensor, mask_MW: Tensor) -> Tensor:
    """logits_RV (float32, contiguous), masked. Modifies: its storage; use the returned tensor from here on.

    row_M int32, rows of the logits, each at most once, or negative; mask_MW int32 [M, words(V)].
    """
    assert mask_MW.shape == (row_M.shape[0], words(logits_RV.shape[1]))
    _op(logits_RV, row_M, mask_MW)
    return logits_RV
