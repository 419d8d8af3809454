"""The kernels of edit_logits.py; 1e30 is its BAN."""
# pyright: reportInvalidTypeForm=false

from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.registration import tl, triton

IDS = 4096  # of one program
WORDS = 256  # of masks of one program


@triton.jit
def penalize_kernel(logits_ptr, slot_ptr, frequency_ptr, presence_ptr, repetition_ptr, count_ptr, V,
                    IDS: tl.constexpr):  # fmt: skip
    """A block of ids of one row."""
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row)
    if slot >= 0:
        id = tl.program_id(1) * IDS + tl.arange(0, IDS)
        count = tl.load(count_ptr + slot.to(tl.int64) * V + id, mask=id < V, other=0)
        at = logits_ptr + row.to(tl.int64) * V + id
        x = tl.load(at, mask=count > 0, other=float("inf"))
        total = count.to(tl.float64) * tl.load(frequency_ptr + row) + tl.load(presence_ptr + row)
        b = x - total.to(tl.float32)
        scale = tl.load(repetition_ptr + row)
        y = tl.where(b < 0.0, b * scale, tl.div_rn(b, scale))
        y = tl.minimum(tl.maximum(y, -1e30), 1e30)
        tl.store(at, y, mask=(count > 0) & (tl.abs(x) < float("inf")))


@triton.jit
def add_kernel(logits_ptr, slot_ptr, id_ptr, value_ptr, V, K, IDS: tl.constexpr):
    """One row."""
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    if slot >= 0:
        for start in range(0, K, IDS):
            k = start + tl.arange(0, IDS)
            id = tl.load(id_ptr + slot * K + k, mask=k < K, other=-1)
            at = logits_ptr + row.to(tl.int64) * V + id
            x = tl.load(at, mask=id >= 0, other=float("inf"))
            y = x + tl.load(value_ptr + slot * K + k, mask=id >= 0, other=0.0)
            y = tl.minimum(tl.maximum(y, -1e30), 1e30)
            tl.store(at, y, mask=(id >= 0) & (tl.abs(x) < float("inf")) & (x > -1e30))


@triton.jit(do_not_specialize=["R"])
def count_kernel(count_ptr, slot_ptr, token_ptr, R, V, ROWS: tl.constexpr):
    """A block of rows."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slot_ptr + r, mask=r < R, other=-1).to(tl.int64)
    tl.atomic_add(count_ptr + slot * V + tl.load(token_ptr + r, mask=slot >= 0, other=0), 1, mask=slot >= 0)


@triton.jit
def bitmask_kernel(logits_ptr, row_ptr, mask_ptr, V, W, WORDS: tl.constexpr):
    """A block of words of one masked row. Each word is read once, beside others: masks may lie on the host."""
    k = tl.program_id(0)
    row = tl.load(row_ptr + k).to(tl.int64)
    if row >= 0:
        w = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
        word = tl.load(mask_ptr + k.to(tl.int64) * W + w, mask=w < W, other=0)
        bit = tl.arange(0, 32)
        id = w[:, None] * 32 + bit[None, :]
        barred = (((word[:, None] >> bit[None, :]) & 1) == 0) & (id < V)
        at = logits_ptr + row * V + id
        x = tl.load(at, mask=barred, other=float("inf"))
        tl.store(at, tl.full((WORDS, 32), -1e30, tl.float32), mask=barred & (tl.abs(x) < float("inf")))


def launch(
    logits_RV: Tensor, slot_R: Tensor, frequency_R: Tensor, presence_R: Tensor, repetition_R: Tensor, count_SV: Tensor
) -> None:
    """Runs the kernel; no product is fused with a sum. Modifies: logits_RV."""
    rows, vocab = logits_RV.shape
    if rows:
        launcher(penalize_kernel, (rows, triton.cdiv(vocab, IDS)))(
            logits_RV, slot_R, frequency_R, presence_R, repetition_R, count_SV, vocab, IDS, num_warps=8,
            enable_fp_fusion=False,
        )  # fmt: skip


def add_launch(logits_RV: Tensor, slot_R: Tensor, id_SK: Tensor, value_SK: Tensor) -> None:
    """Runs the kernel. Modifies: logits_RV."""
    rows, vocab = logits_RV.shape
    if rows:
        launcher(add_kernel, (rows,))(logits_RV, slot_R, id_SK, value_SK, vocab, id_SK.shape[1], 1024, num_warps=4)


def count_launch(count_SV: Tensor, slot_R: Tensor, token_R: Tensor) -> None:
    """Runs the kernel. Modifies: count_SV."""
    if len(slot_R):
        launcher(count_kernel, (triton.cdiv(len(slot_R), 128),))(
            count_SV, slot_R, token_R, len(slot_R), count_SV.shape[1], 128, num_warps=4
        )


def mask_launch(logits_RV: Tensor, row_M: Tensor, mask_MW: Tensor) -> None:
    """Runs the kernel, which reads pinned memory of the host as well. Modifies: logits_RV."""
    assert logits_RV.is_contiguous() and mask_MW.is_contiguous()
    (rows, width), vocab = mask_MW.shape, logits_RV.shape[1]
    if rows:
        grid = (rows, triton.cdiv(width, WORDS))
        launcher(bitmask_kernel, grid)(logits_RV, row_M, mask_MW, vocab, width, WORDS, num_warps=8)
