"""q, k and v of each token: the product with their weights, rotated, k and v written to the pages.

    qkv = x @ w.T (+ bias);  q, k, pages = rope_kv_write(qkv)

Reduction trees: those of linear.py and rope.py. For few rows one kernel computes both, where it was proved equal to the
two one after another on this machine (see proof.py): a program takes columns of the first half of a head together with
their partners in the second half. Not with the per-head norm, which needs a whole head.
"""
# pyright: reportInvalidTypeForm=false

from typing import Any

import torch
from torch import Tensor

from fengine.ops import kv_fp8, linear, rope
from fengine.ops.ahead import launcher
from fengine.ops.linear import Leaf
from fengine.ops.linear_kernels import fetch
from fengine.ops.linear_schedules import FEW, REFERENCE, Schedule, schedules
from fengine.ops.proof import proofs
from fengine.ops.registration import begin, dependent_launch, end, plain, register, tl, triton, wait
from fengine.ops.rope import rotated


@triton.jit(do_not_specialize=["M"])
def qkv_kernel(
    x_ptr, w_ptr, bias_ptr, rope_ptr, pos_ptr, slot_ptr, q_ptr, k_ptr, v_ptr, M, D, H: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, BIAS: tl.constexpr,
    AHEAD: tl.constexpr, PIECES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All M <= BM rows of BN columns: BN / 2 from the first half of a head, and their partners."""
    begin(PDL)
    PART: tl.constexpr = BN // 2
    HALF: tl.constexpr = K // 2
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    i = tl.arange(0, BN)
    head = tl.program_id(0) * PART // HALF
    first = tl.program_id(0) * PART % HALF
    col = head * K + first + i // PART * HALF + i % PART
    row = tl.arange(0, BM)
    k = tl.arange(0, BK)
    inside = (row < M)[:, None]
    x_tile = x_ptr + row[:, None] * D + k[None, :]
    w_tile = w_ptr + col.to(tl.int64)[:, None] * D + k[None, :]
    if PDL and AHEAD:
        fetch(w_ptr + col.to(tl.int64) * D, AHEAD, PIECES)
    wait(PDL)
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    for _ in range(0, D, BK):
        x = tl.load(x_tile, mask=inside, other=0.0)
        w = tl.load(w_tile)
        if SWAP:
            acc = tl.dot(w, x.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
        x_tile += BK
        w_tile += BK
    end(PDL)
    if SWAP:
        acc = acc.T
    if BIAS:
        acc += tl.load(bias_ptr + col).to(tl.float32)[None, :]
    first_half, second_half = acc.to(DTYPE).reshape((BM, 2, PART)).permute((0, 2, 1)).split()
    d = first + tl.arange(0, PART)
    slot = tl.load(slot_ptr + row, mask=row < M, other=0).to(tl.int64) * G * K
    if head < H + G:
        angle = rope_ptr + tl.load(pos_ptr + row, mask=row < M, other=0).to(tl.int64)[:, None] * K + d[None, :]
        cos = tl.load(angle, mask=inside, other=0.0)
        sin = tl.load(angle + HALF, mask=inside, other=0.0)
        y1, y2 = rotated(first_half.to(tl.float32), second_half.to(tl.float32), cos, sin)
        first_half = y1.to(DTYPE)
        second_half = y2.to(DTYPE)
    if head < H:
        out = q_ptr + ((row * H + head) * K)[:, None] + d[None, :]
    elif head < H + G:
        out = k_ptr + (slot + (head - H) * K)[:, None] + d[None, :]
    else:
        out = v_ptr + (slot + (head - H - G) * K)[:, None] + d[None, :]
    tl.store(out, first_half, mask=inside)
    tl.store(out + HALF, second_half, mask=inside)


def run(
    x_TD: Tensor, w_CD: Tensor, bias_C: Tensor | None, rope_MK: Tensor, pos_T: Tensor, slot_T: Tensor, k_PSGK: Tensor,
    v_PSGK: Tensor, num_heads: int, s: Schedule,
) -> Tensor:  # fmt: skip
    """q_THK by the one kernel under `s`. Modifies: the pages at slot_T."""
    m, hidden = x_TD.shape
    groups, width = k_PSGK.shape[2:]
    q_THK = x_TD.new_empty((m, num_heads, width))
    launcher(qkv_kernel, ((num_heads + 2 * groups) * width // s.block_n,))(
        x_TD, w_CD, bias_C, rope_MK, pos_T, slot_T, q_THK, k_PSGK, v_PSGK, m, hidden, num_heads, groups, width,
        s.block_m, s.block_n, s.block_k, s.swap, bias_C is not None, s.ahead if s.ahead <= hidden else 0,
        max(32 * s.warps // s.block_n, 1), num_warps=s.warps, num_stages=s.stages,
        **dependent_launch(x_TD.device.index, s.trigger),
    )  # fmt: skip
    return q_THK


def choose(x_TD: Tensor, w_CD: Tensor, bias_C: Tensor | None, k_PSGK: Tensor, num_heads: int) -> Schedule | None:
    """A schedule of the one kernel that is proved on this device; None where the two ops are to compute."""
    (m, hidden), groups, width = x_TD.shape, k_PSGK.shape[2], kv_fp8.width_of(k_PSGK)
    if not x_TD.is_cuda or m > FEW or x_TD.dtype == torch.float32 or k_PSGK.dtype != x_TD.dtype:
        return None
    s = schedules(m, (num_heads + 2 * groups) * width, hidden, x_TD.dtype)[-1]
    if width % s.block_n and s.block_n % width or s.block_n > width or hidden % s.block_k:
        return None
    known = proofs(x_TD.device.index)
    key = f"qkv {x_TD.dtype} {bias_C is not None} {m}x{hidden} {num_heads}/{groups}x{width} {tuple(s)}"
    if torch.cuda.is_current_stream_capturing():  # no time to compare; warm-up has asked before
        return s if known.known.get(key, False) else None
    return s if known.holds(key, lambda: _compare(x_TD, w_CD, bias_C, k_PSGK, num_heads, s)) else None


def _compare(
    x_TD: Tensor, w_CD: Tensor, bias_C: Tensor | None, k_PSGK: Tensor, num_heads: int, s: Schedule
) -> bool:  # fmt: skip
    """Random rows, several times, by the one kernel and by the two ops."""
    m, hidden = x_TD.shape
    size, groups, width = k_PSGK.shape[1:]
    generator = torch.Generator(x_TD.device).manual_seed(m)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=x_TD.device, generator=generator)

    channels = (num_heads + 2 * groups) * width
    for _ in range(max(1, linear.COMPARED // (m * channels))):
        x_TD, rope_MK = random(m, hidden).to(x_TD.dtype), random(m + 3, width)
        pos_T = torch.arange(m, device=x_TD.device, dtype=torch.int32).flip(0) + 3
        slot_T = torch.randperm(m, device=x_TD.device, generator=generator).int() + size
        pages = random(2, triton.cdiv(m, size) + 1, size, groups, width).to(x_TD.dtype)
        want, got = pages.clone(), pages.clone()
        qkv_TC = linear.run(x_TD, w_CD, channels, bias_C, None, REFERENCE)
        want_THK = rope.launch(qkv_TC, rope_MK, pos_T, slot_T, want[0], want[1], num_heads, None, None, 0.0)
        got_THK = run(x_TD, w_CD, bias_C, rope_MK, pos_T, slot_T, got[0], got[1], num_heads, s)
        if not (torch.equal(want_THK, got_THK) and torch.equal(want, got)) or torch.equal(got, pages):
            return False
    return True


def launch(
    x_TD: Tensor, w_CD: Tensor, bias_C: Tensor | None, rope_MK: Tensor, pos_T: Tensor, slot_T: Tensor, k_PSGK: Tensor,
    v_PSGK: Tensor, num_heads: int, q_norm_K: Tensor | None, k_norm_K: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    """One kernel or two. Modifies: the pages at slot_T."""
    x_TD = plain(x_TD)
    s = choose(x_TD, w_CD, bias_C, k_PSGK, num_heads) if q_norm_K is None and len(x_TD) else None
    if s is not None:
        return run(x_TD, w_CD, bias_C, rope_MK, pos_T, slot_T, k_PSGK, v_PSGK, num_heads, s)
    groups, width = k_PSGK.shape[2], kv_fp8.width_of(k_PSGK)
    qkv_TC = linear.launch(x_TD, w_CD, (num_heads + 2 * groups) * width, bias_C, None)
    return rope.launch(qkv_TC, rope_MK, pos_T, slot_T, k_PSGK, v_PSGK, num_heads, q_norm_K, k_norm_K, eps)


def fake(
    x_TD: Tensor, packed: Tensor, bias_C: Tensor | None, rope_MK: Tensor, pos_T: Tensor, slot_T: Tensor, k_PSGK: Tensor,
    v_PSGK: Tensor, num_heads: int, q_norm_K: Tensor | None, k_norm_K: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    return x_TD.new_empty((x_TD.shape[0], num_heads, kv_fp8.width_of(k_PSGK)))


_op = register(
    "qkv_rope_write_(Tensor x, Tensor packed, Tensor? bias, Tensor rope, Tensor pos, Tensor slot, Tensor(a!) k_pages, "
    "Tensor(b!) v_pages, int num_heads, Tensor? q_norm, Tensor? k_norm, float eps) -> Tensor",
    launch, fake,
)  # fmt: skip


def qkv_rope_write(
    x_TD: Tensor, w: Leaf, bias_C: Tensor | None, rope_MK: Tensor, pos_T: Tensor, slot_T: Tensor, k_PSGK: Tensor,
    v_PSGK: Tensor, num_heads: int, q_norm_K: Tensor | None = None, k_norm_K: Tensor | None = None, eps: float = 0.0,
    adapters: Any = None, exact: bool = True, shift: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(q_THK rotated, k pages, v pages). Modifies: the storage of the pages; use the returned ones from here on.

    `w`: (H + 2G) K outputs in the order q, k, v, as for `linear`; the rest as for `rope_kv_write`.
    """
    where = (rope_MK, pos_T, slot_T, k_PSGK, v_PSGK, num_heads, q_norm_K, k_norm_K, eps)
    dense = w.plain(adapters) if exact and not shift else None
    if dense is None:  # the same bits in two ops
        return rope.rope_kv_write(linear.linear(x_TD, w, bias_C, adapters, exact=exact), *where, shift)
    return _op(x_TD, dense.packed, bias_C, *where), k_PSGK, v_PSGK
