"""q, k and v of each token, behind their product: an RMS norm of each head, rotary embedding, k and v to pages.

Rotate-half form: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) over the two halves of a head, in fp32 from an fp32
table, one rounding to x's dtype. The norm (Qwen3) is `rms_norm` over one head, with its two roundings.

Reduction tree: the norm reduces over the K values of one head, in a thread layout fixed by K."""
# pyright: reportInvalidTypeForm=false

import torch
from torch import Tensor

from fengine.errors import UnsupportedFeatureError
from fengine.ops import kv_fp8, rms_norm
from fengine.ops.ahead import launcher
from fengine.ops.cpu import contiguous, integers, maybe, readable, schedule
from fengine.ops.fp8_kernels import store_heads
from fengine.ops.registration import begin, dependent_launch, plain, register, tl, triton, wait, wide

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


def reference(
    qkv_TC: Tensor, rope_MK: Tensor, pos_T: Tensor, slot_T: Tensor, k_PSGK: Tensor, v_PSGK: Tensor,
    num_heads: int, q_norm_K: Tensor | None, k_norm_K: Tensor | None, eps: float, shift: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The math; returns (q, k pages, v pages) as new tensors. Pure."""
    groups, width = k_PSGK.shape[2], kv_fp8.width_of(k_PSGK)
    q_THK, k_TGK, v_TGK = qkv_TC.unflatten(1, (-1, width)).split((num_heads, groups, groups), 1)

    def rotate(x_THK: Tensor, norm_K: Tensor | None) -> Tensor:
        if norm_K is not None:
            x_THK = rms_norm.reference(x_THK, norm_K, eps, shift)
        first, second = wide(x_THK).chunk(2, -1)
        cos, sin = rope_MK[pos_T][:, None].chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_THK.dtype)

    def write(pages_PSGK: Tensor, x_TGK: Tensor) -> Tensor:
        written_PSGK = pages_PSGK.clone()
        kv_fp8.write(written_PSGK, slot_T, x_TGK)
        return written_PSGK

    return rotate(q_THK, q_norm_K), write(k_PSGK, rotate(k_TGK, k_norm_K)), write(v_PSGK, v_TGK)


def on_cpu(
    qkv: Tensor, rope: Tensor, pos: Tensor, slot: Tensor, k_pages: Tensor, v_pages: Tensor, num_heads: int,
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float, shift: float = 0.0,
) -> Tensor:  # fmt: skip
    qkv, rope = contiguous(qkv, "rope's qkv"), contiguous(rope, "rope's table")
    pos, slot = integers(pos, "rope's pos"), integers(slot, "rope's slot")
    few = k_pages.dtype == torch.uint8  # codes: see kv_fp8.py
    if not (few or k_pages.dtype == torch.float32) or not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise UnsupportedFeatureError(f"KV pages are {k_pages.dtype}; on the CPU they must be contiguous float32")
    q_norm, q_norm_at, kind = maybe(readable, q_norm, "q_norm")
    k_norm, k_norm_at, k_kind = maybe(readable, k_norm, "k_norm")
    if kind != k_kind:
        raise UnsupportedFeatureError("q_norm and k_norm are of two dtypes, or one is missing; they must be alike")
    tokens, (size, groups, width) = qkv.shape[0], k_pages.shape[1:]
    q = qkv.new_empty((tokens, num_heads, width - few))
    library, threads = schedule(8 * qkv.numel())
    library.fengine_rope_kv_write(
        qkv.data_ptr(), rope.data_ptr(), pos.data_ptr(), slot.data_ptr(), q.data_ptr(), k_pages.data_ptr(),
        v_pages.data_ptr(), q_norm_at, k_norm_at, tokens, num_heads, groups, width - few, size, kind, few, eps, shift,
        threads,
    )  # fmt: skip
    return q


_op = register(
    "rope_kv_write_", launch, on_cpu,
    lambda qkv, rope, pos, slot, k_pages, v_pages, num_heads, *_: qkv.new_empty(
        (qkv.shape[0], num_heads, kv_fp8.width_of(k_pages))
    ),
    mutates=("k_pages", "v_pages"),
)  # fmt: skip


def rope_kv_write(
    qkv_TC: Tensor, rope_MK: Tensor, pos_T: Tensor, slot_T: Tensor, k_PSGK: Tensor, v_PSGK: Tensor,
    num_heads: int, q_norm_K: Tensor | None = None, k_norm_K: Tensor | None = None, eps: float = 0.0,
    shift: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(q_THK rotated, k pages, v pages). Modifies: the storage of the pages; use the returned ones from here on. C = (H
    + 2G) K in the order q, k, v; both norm weights or neither; pos_T and slot_T int32, slot = page * S + offset."""
    arguments = (qkv_TC, rope_MK, pos_T, slot_T, k_PSGK, v_PSGK, num_heads, q_norm_K, k_norm_K, eps)
    return _op(*arguments, *((shift,) if shift else ())), k_PSGK, v_PSGK
