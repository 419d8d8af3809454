"""q, k and v of each token, behind their product: an RMS norm of each head, rotary embedding, k and v to pages.

Rotate-half form: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) over the two halves of a head, in fp32 from an fp32
table, one rounding to x's dtype. The norm (Qwen3) is `rms_norm` over one head, with its two roundings.

Reduction tree: the norm reduces over the K values of one head, in a thread layout fixed by K."""

import torch
from torch import Tensor

from fengine.errors import UnsupportedFeatureError
from fengine.ops import kv_fp8, rms_norm
from fengine.ops.cpu import contiguous, integers, maybe, readable, schedule
from fengine.ops.registration import register, wide
from fengine.ops.rope_kernels import launch


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
