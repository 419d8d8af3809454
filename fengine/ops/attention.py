"""Attention over paged keys and values: one op for prefill, chunked prefill and decode.

o = softmax(scale * q k^T) v for the keys at positions 0 .. position(q) of q's row, found through the page table. Not
causal, the keys of the whole row; with `last_T`, up to each token's own last key; with a window, no earlier ones than
itself and window - 1 before it (not causal, and as many behind it); with a cap, cap * tanh(score / cap) is what softmax
sees; with sinks, a score of its own for each head, which has no value.

Reduction tree, by absolute key position and nothing else:
- keys are cut into chunks of CHUNK positions, a chunk into blocks (`block_of` the head width);
- inside a chunk, online softmax block by block: s = q k^T (the MMA, left to right over K), m' = max(m, max s),
  p = exp2(s * c - m' * c) with c = scale * log2(e), alpha = exp2((m - m') * c), acc' = acc * alpha + P V, P being p
  rounded to v's dtype. l has SUMS fp32 sums: the later half of p is added to the earlier until SUMS values are left,
  l' = l * alpha + those; at the end of the chunk l is halved in the same way, to one. (A sum over a register tile would
  follow the thread layout.);
- chunk results (m, l, acc) are merged left to right in fp32, with explicit fused multiply-adds;
- a sink, in units of the scaled scores, is one more (sink, 1, 0), merged last;
- o = acc / l.
A block or chunk with no visible key leaves (m, l, acc) as they are, so how far a tile walks does not matter.

The schedule is free: which queries share a tile, warps, and whether one program walks all chunks or several take chunks
in turn and the last to arrive merges their stored results. One runs where it was proved (attention_launch.py).
"""

import math

import torch
from einops import einsum, rearrange
from torch import Tensor

from fengine.ops import kv_fp8
from fengine.ops.attention_launch import CAUSAL, Bounds, launch
from fengine.ops.cpu import contiguous, integers, maybe, schedule
from fengine.ops.registration import register, wide


def reference(
    q_THK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, q_start_B: Tensor, kv_len_R: Tensor, page_table_RN: Tensor,
    scale: float, bounds: Bounds = CAUSAL, sinks_H: Tensor | None = None, last_T: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The math, in fp32 (fp64 where q is). Reads only the slots that a row owns. Pure."""
    out_THK = torch.zeros_like(q_THK)
    size, groups = k_PSGK.shape[1:3]
    k_PSGK, v_PSGK = kv_fp8.values(k_PSGK), kv_fp8.values(v_PSGK)
    starts = q_start_B.tolist()
    for r, length in enumerate(kv_len_R.tolist()):
        rows = slice(starts[r], starts[r + 1])
        tokens = starts[r + 1] - starts[r]
        if tokens == 0:
            continue
        pages = page_table_RN[r, : -(-length // size)].long()
        owned = (rearrange(wide(x[pages]), "page slot g k -> (page slot) g k")[:length] for x in (k_PSGK, v_PSGK))
        k, v = (x.to(wide(q_THK).dtype) for x in owned)
        q = rearrange(wide(q_THK[rows]), "t (g j) k -> g j t k", g=groups)
        scores = einsum(q, k, "g j t k, s g k -> g j t s") * scale
        if bounds.cap:
            scores = bounds.cap * torch.tanh(scores / bounds.cap)
        position = torch.arange(length - tokens, length, device=q.device)[:, None]
        key = torch.arange(length, device=q.device)
        last = position if last_T is None else last_T[rows, None]
        hidden = key > (last if bounds.causal else length)
        if bounds.window:
            hidden = hidden | (key <= position - bounds.window) | (key >= position + bounds.window)
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks_H is not None:
            sink = rearrange(sinks_H.to(scores.dtype), "(g j) -> g j 1 1", g=groups)
            scores = torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), -1)
        weight = scores.softmax(-1)[..., :length]
        out_THK[rows] = rearrange(einsum(weight, v, "g j t s, s g k -> g j t k"), "g j t k -> t (g j) k").to(
            q_THK.dtype
        )
    return out_THK


def on_cpu(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, q_start: Tensor, kv_len: Tensor, page_table: Tensor, scale: float,
    causal: bool = True, window: int = 0, cap: float = 0.0, sinks: Tensor | None = None, last: Tensor | None = None,
) -> Tensor:  # fmt: skip
    few = k_pages.dtype == torch.uint8  # codes: see kv_fp8.py
    stored = torch.uint8 if few else torch.float32
    q, k_pages = contiguous(q, "attention's q"), contiguous(k_pages, "k pages", stored)
    v_pages = contiguous(v_pages, "v pages", stored)
    q_start, kv_len = integers(q_start, "q_start"), integers(kv_len, "kv_len")
    page_table = integers(page_table, "page_table")
    sinks, sinks_at, _ = maybe(contiguous, sinks, "attention's sinks")
    last = None if last is None else integers(last, "attention's last")
    (tokens, heads, width), (rows, table_width) = q.shape, page_table.shape
    o = torch.empty_like(q)
    # The kernel knows how many keys there are, so it picks the threads; here only a bound on short calls is needed.
    library, _ = schedule(tokens * heads * width * table_width * k_pages.shape[1])
    library.fengine_attention(
        q.data_ptr(), k_pages.data_ptr(), v_pages.data_ptr(), o.data_ptr(), q_start.data_ptr(), kv_len.data_ptr(),
        page_table.data_ptr(), tokens, rows, heads, k_pages.shape[2], width, k_pages.shape[1], table_width, window,
        causal, scale, cap, sinks_at, None if last is None else last.data_ptr(), few, torch.get_num_threads(),
    )  # fmt: skip
    return o


ARGUMENTS = "Tensor q, Tensor k_pages, Tensor v_pages, Tensor q_start, Tensor kv_len, Tensor page_table, float scale"
_op = register(f"attention({ARGUMENTS}) -> Tensor", launch, on_cpu)
_bounded_op = register(  # by itself, for an argument costs a short step as much as half a microsecond
    f"bounded_attention({ARGUMENTS}, bool causal, int window, float cap, Tensor? sinks, Tensor? last=None) -> Tensor",
    launch, on_cpu,
)  # fmt: skip


def attention(
    q_THK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, q_start_B: Tensor, kv_len_R: Tensor, page_table_RN: Tensor,
    scale: float, causal: bool = True, window: int = 0, cap: float = 0.0, sinks_H: Tensor | None = None,
    last_T: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of each token to keys 0 .. its position of its row, or as bounded, as o_THK in q's dtype. Pure.

    Token j of row r stands at position kv_len - row_tokens + j; its key and value are in the pages already. Index
    tensors int32, q_start_B[0] = 0; a row with tokens has kv_len >= its tokens. Tokens behind q_start_B[-1] give zeros.
    `last_T`, int32: the position of each token's last key, not before the token, ascending in a row, within its keys.
    Unowned slots are never read into the result, whatever they hold. Not causal: all tokens of a row are in this step.
    """
    if causal and not window and not cap and sinks_H is None and last_T is None:
        return _op(q_THK, k_PSGK, v_PSGK, q_start_B, kv_len_R, page_table_RN, scale)
    where = (q_THK, k_PSGK, v_PSGK, q_start_B, kv_len_R, page_table_RN)
    return _bounded_op(*where, scale, causal, window, cap, sinks_H, last_T)
