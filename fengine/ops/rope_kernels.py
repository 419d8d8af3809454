"""The kernel of rope.py: rotation and the write to pages."""
# pyright: reportInvalidTypeForm=false

from torch import Tensor

from fengine.ops import kv_fp8
from fengine.ops.ahead import launcher
from fengine.ops.fp8_kernels import store_heads
from fengine.ops.registration import begin, dependent_launch, plain, tl, triton, wait

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
    pos = tl.load(pos_ptr + token, mask=here, other=0).to(tl.int64)
    slot = tl.load(slot_ptr + token, mask=here, other=0).to(tl.int64)
    angle = rope_ptr + (pos * K)[:, None] + d[None, :]
    cos = tl.load(angle, mask=turned, other=0.0)
    sin = tl.load(angle + K // 2, mask=turned, other=0.0)
    wait(PDL)
    raw1 = tl.load(row + at, mask=inside, other=0.0)
    raw2 = tl.load(row + at + K // 2, mask=inside, other=0.0)
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
        first = tl.program_id(1) * HEADS  # most programs have heads of q alone, and nothing to encode
        if (first + HEADS > H) & (first < H + G):
            is_key = here & (head >= H) & (head < H + G)
            y1 = y1.to(q_ptr.dtype.element_ty).to(tl.float32)
            y2 = y2.to(q_ptr.dtype.element_ty).to(tl.float32)
            store_heads(k_ptr, slot, head - H, is_key, y1, y2, G, K, HALF, S)
        if first + HEADS > H + G:
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
