"""The kernels of rope.py: rotation and the write to pages, alone, and for few rows behind the product of q, k and v.
The joined kernel takes columns of the first half of a head together with their partners in the second half; not with
the per-head norm, which needs a whole head. It is used where it was proved equal to the two (see proof.py)."""
# pyright: reportInvalidTypeForm=false

import torch
from torch import Tensor

from fengine.ops import kv_fp8, linear_launch
from fengine.ops.ahead import launcher
from fengine.ops.fp8_kernels import store_heads
from fengine.ops.linear_kernels import fetch, products
from fengine.ops.linear_launch import FEW, REFERENCE, Schedule, schedules
from fengine.ops.proof import COMPARED, proved
from fengine.ops.registration import begin, dependent_launch, end, plain, tl, triton, wait

HEADS = 8  # heads per program, at most
TOKENS, MANY = 4, 512  # tokens per program, in a step of so many tokens or more; one token with the norm, whose sum's
#                        thread layout must not change


@triton.jit
def rotated(x1, x2, cos, sin):
    """The two halves of heads after rotation, in float32. Spelt out, so that every kernel rounds alike."""
    return tl.fma(x1, cos, -(x2 * sin)), tl.fma(x2, cos, x1 * sin)


@triton.jit(do_not_specialize=["T"])
def rope_kv_write_kernel(
    qkv_ptr, rope_ptr, pos_ptr, slot_ptr, q_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr, eps, T,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr,
    TOKENS: tl.constexpr, SHIFT: tl.constexpr, S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HEADS heads (of q, k and v alike) of TOKENS tokens, as two half-heads. S: slots of a page in few bits, or 0."""
    begin(PDL)
    i = tl.arange(0, TOKENS * HEADS)
    token = (tl.program_id(0) * TOKENS + i // HEADS).to(tl.int64)
    head = tl.program_id(1) * HEADS + i % HEADS
    d = tl.arange(0, HALF)
    here = token < T
    inside = (here & (head < H + 2 * G))[:, None] & (d < K // 2)[None, :]
    turned = inside & (head < H + G)[:, None]
    row = qkv_ptr + (token * (H + 2 * G) * K)[:, None]
    at = head[:, None] * K + d[None, :]
    w1 = 0.0
    w2 = 0.0
    if NORM:
        is_q = inside & (head < H)[:, None]
        is_k = inside & (head >= H)[:, None]
        w1 = tl.load(q_norm_ptr + d[None, :], mask=is_q, other=0.0).to(tl.float32)
        w2 = tl.load(q_norm_ptr + K // 2 + d[None, :], mask=is_q, other=0.0).to(tl.float32)
        w1 += tl.load(k_norm_ptr + d[None, :], mask=is_k, other=0.0).to(tl.float32)
        w2 += tl.load(k_norm_ptr + K // 2 + d[None, :], mask=is_k, other=0.0).to(tl.float32)
    wait(PDL)
    pos = tl.load(pos_ptr + token, mask=here, other=0).to(tl.int64)
    slot = tl.load(slot_ptr + token, mask=here, other=0).to(tl.int64)
    raw1 = tl.load(row + at, mask=inside, other=0.0)
    raw2 = tl.load(row + at + K // 2, mask=inside, other=0.0)
    angle = rope_ptr + (pos * K)[:, None] + d[None, :]
    cos = tl.load(angle, mask=turned, other=0.0)
    sin = tl.load(angle + K // 2, mask=turned, other=0.0)
    x1 = raw1.to(tl.float32)
    x2 = raw2.to(tl.float32)
    if NORM:
        dtype = qkv_ptr.dtype.element_ty
        scale = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / K + eps)[:, None]
        if SHIFT == 0:
            x1 = (w1 * (x1 * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
            x2 = (w2 * (x2 * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        else:
            x1 = ((w1 + SHIFT) * (x1 * scale)).to(dtype).to(tl.float32)
            x2 = ((w2 + SHIFT) * (x2 * scale)).to(dtype).to(tl.float32)
    y1, y2 = rotated(x1, x2, cos, sin)
    out = q_ptr + (token * H * K)[:, None] + at
    mask = inside & (head < H)[:, None]
    tl.store(out, y1.to(q_ptr.dtype.element_ty), mask=mask)
    tl.store(out + K // 2, y2.to(q_ptr.dtype.element_ty), mask=mask)
    if S:
        y1 = y1.to(q_ptr.dtype.element_ty).to(tl.float32)
        y2 = y2.to(q_ptr.dtype.element_ty).to(tl.float32)
        is_key = here & (head >= H) & (head < H + G)
        store_heads(k_ptr, slot, head - H, is_key, y1, y2, G, K, HALF, S)
        is_value = here & (head >= H + G) & (head < H + 2 * G)
        store_heads(v_ptr, slot, head - H - G, is_value, raw1.to(tl.float32), raw2.to(tl.float32), G, K, HALF, S)
    else:
        out = k_ptr + (slot * G * K)[:, None] + at - H * K
        mask = turned & (head >= H)[:, None]
        tl.store(out, y1.to(k_ptr.dtype.element_ty), mask=mask)
        tl.store(out + K // 2, y2.to(k_ptr.dtype.element_ty), mask=mask)
        out = v_ptr + (slot * G * K)[:, None] + at - (H + G) * K
        mask = inside & (head >= H + G)[:, None]
        tl.store(out, raw1.to(v_ptr.dtype.element_ty), mask=mask)
        tl.store(out + K // 2, raw2.to(v_ptr.dtype.element_ty), mask=mask)


def launch(
    qkv_TC: Tensor, rope_MK: Tensor, pos_T: Tensor, slot_T: Tensor, k_PSGK: Tensor, v_PSGK: Tensor,
    num_heads: int, q_norm_K: Tensor | None, k_norm_K: Tensor | None, eps: float, shift: float = 0.0,
) -> Tensor:  # fmt: skip
    """Runs the kernel. Modifies: the pages at slot_T."""
    assert k_PSGK.is_contiguous() and v_PSGK.is_contiguous() and rope_MK.is_contiguous()
    assert (q_norm_K is None) == (k_norm_K is None)
    qkv_TC = plain(qkv_TC)
    (size, groups), width, few = k_PSGK.shape[1:3], kv_fp8.width_of(k_PSGK), kv_fp8.is_few(k_PSGK)
    q_THK = qkv_TC.new_empty((qkv_TC.shape[0], num_heads, width))
    count = len(qkv_TC)
    tokens, half = TOKENS if count >= MANY and q_norm_K is None else 1, triton.next_power_of_2(width // 2)
    heads = max(1, min(HEADS, 512 // half))  # what 64 threads load at once
    if count:
        launcher(rope_kv_write_kernel, (triton.cdiv(count, tokens), triton.cdiv(num_heads + 2 * groups, heads)))(
            qkv_TC, rope_MK, pos_T, slot_T, q_THK, k_PSGK, v_PSGK, q_norm_K, k_norm_K, eps, count, num_heads, groups,
            width, half, q_norm_K is not None, heads, tokens, shift,
            size if few else 0,
            num_warps=2 if tokens == 1 else 4, **dependent_launch(qkv_TC.device.index),
        )  # fmt: skip
    return q_THK


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
    acc, _ = products(x_tile, w_tile, w_tile, row < M, D, BM, BN, BK, SWAP, True, True, False)
    end(PDL)
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


def run_joined(
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
    key = f"qkv {x_TD.dtype} {bias_C is not None} {m}x{hidden} {num_heads}/{groups}x{width} {tuple(s)}"
    return s if proved(x_TD.device, key, lambda: _compare(x_TD, w_CD, bias_C, k_PSGK, num_heads, s)) else None


def _compare(x_TD: Tensor, w_CD: Tensor, bias_C: Tensor | None, k_PSGK: Tensor, num_heads: int, s: Schedule) -> bool:
    """Random rows, several times, by the one kernel and by the two ops."""
    m, hidden = x_TD.shape
    size, groups, width = k_PSGK.shape[1:]
    generator = torch.Generator(x_TD.device).manual_seed(m)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=x_TD.device, generator=generator)

    channels = (num_heads + 2 * groups) * width
    for _ in range(max(1, COMPARED // (m * channels))):
        x_TD, rope_MK = random(m, hidden).to(x_TD.dtype), random(m + 3, width)
        pos_T = torch.arange(m, device=x_TD.device, dtype=torch.int32).flip(0) + 3
        slot_T = torch.randperm(m, device=x_TD.device, generator=generator).int() + size
        pages = random(2, triton.cdiv(m, size) + 1, size, groups, width).to(x_TD.dtype)
        want, got = pages.clone(), pages.clone()
        qkv_TC = linear_launch.run(x_TD, w_CD, channels, bias_C, None, REFERENCE)
        want_THK = launch(qkv_TC, rope_MK, pos_T, slot_T, want[0], want[1], num_heads, None, None, 0.0)
        got_THK = run_joined(x_TD, w_CD, bias_C, rope_MK, pos_T, slot_T, got[0], got[1], num_heads, s)
        if not (torch.equal(want_THK, got_THK) and torch.equal(want, got)) or torch.equal(got, pages):
            return False
    return True


def qkv_launch(
    x_TD: Tensor, w_CD: Tensor, bias_C: Tensor | None, rope_MK: Tensor, pos_T: Tensor, slot_T: Tensor, k_PSGK: Tensor,
    v_PSGK: Tensor, num_heads: int, q_norm_K: Tensor | None, k_norm_K: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    """One kernel or two. Modifies: the pages at slot_T."""
    x_TD = plain(x_TD)
    s = choose(x_TD, w_CD, bias_C, k_PSGK, num_heads) if q_norm_K is None and len(x_TD) else None
    if s is not None:
        return run_joined(x_TD, w_CD, bias_C, rope_MK, pos_T, slot_T, k_PSGK, v_PSGK, num_heads, s)
    groups, width = k_PSGK.shape[2], kv_fp8.width_of(k_PSGK)
    qkv_TC = linear_launch.launch(x_TD, w_CD, (num_heads + 2 * groups) * width, bias_C, None)
    return launch(qkv_TC, rope_MK, pos_T, slot_T, k_PSGK, v_PSGK, num_heads, q_norm_K, k_norm_K, eps)
