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
in turn and the last to arrive merges their stored results. One runs where it was proved here (proof.py).
"""

import math
from functools import cache, partial

import torch
from einops import einsum, rearrange
from torch import Tensor

from fengine.ops import attention_hopper, kv_fp8
from fengine.ops.ahead import launcher
from fengine.ops.attention_kernels import rows_kernel, tiles_kernel
from fengine.ops.attention_schedules import (
    CAUSAL,
    Bounds,
    Schedule,
    block_of,
    padded_heads,
    reference_schedule,
    schedules,
)
from fengine.ops.fp8_kernels import whole_kernel
from fengine.ops.proof import captured, proofs
from fengine.ops.registration import (
    EARLY,
    MIDDLE,
    dependent_launch,
    multiprocessors,
    plain,
    register,
    triton,
    wide,
)

CHUNK = 1024  # part of the tree
MERGE_AHEAD = 4  # chunk results loaded together by the merge
MAX_PARTIALS = 1 << 26  # float32 values of workspace that a split may take
ARRIVALS = 1 << 13  # counters of a KV pool: a split must do with so many tiles


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


@cache
def arrivals(device: int | None) -> dict[int, Tensor]:
    """Counters of the programs that have arrived, by address of the key pool: zero before and after every launch.

    Launches on one pool follow each other, as each reads what the step before has written; so they may share counters.
    """
    return {}


def counters(k_PSGK: Tensor) -> Tensor | None:
    """The counters of a pool; None in a capture, which must not make them. Modifies: `arrivals`."""
    known = arrivals(k_PSGK.device.index)
    found = known.get(k_PSGK.data_ptr())
    if found is None and not (k_PSGK.is_cuda and torch.cuda.is_current_stream_capturing()):
        found = known[k_PSGK.data_ptr()] = torch.zeros(ARRIVALS, dtype=torch.int32, device=k_PSGK.device)
    return found


def run(
    q_THK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, q_start_B: Tensor, kv_len_R: Tensor, page_table_RN: Tensor,
    scale: float, s: Schedule, bounds: Bounds = CAUSAL, sinks_H: Tensor | None = None, last_T: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Runs the kernels under `s`. A split that would take too much workspace is not made."""
    tokens, heads, width = q_THK.shape
    size, groups = k_PSGK.shape[1:3]
    rows, table_width = page_table_RN.shape
    o_THK = torch.empty_like(q_THK)
    padded, padded_width = padded_heads(q_THK, k_PSGK), triton.next_power_of_2(width)
    block, chunks = block_of(width), triton.cdiv(table_width * size, CHUNK)
    c = (1.0 if bounds.cap else scale) * math.log2(math.e)
    bound = (*bounds, scale if bounds.cap else 0.0, groups * kv_fp8.is_few(k_PSGK))
    per_tile = s.rows.tile // padded
    limit = 0 if s.tiles is None else per_tile
    tensors = (q_THK, k_PSGK, v_PSGK, q_start_B, kv_len_R, page_table_RN, o_THK)
    lines = (rows * per_tile if limit else tokens) * heads * chunks
    fits = lines * (padded_width + 2) <= MAX_PARTIALS
    fits &= (rows + (0 if limit else tokens // per_tile)) * groups <= ARRIVALS
    arrived = counters(k_PSGK) if fits and s.rows.splits > 1 else None
    splits = s.rows.splits if arrived is not None else 1
    m_part, sum_part, acc_part = (
        q_THK.new_empty(lines * n if splits > 1 else 0, dtype=torch.float32) for n in (1, 1, padded_width)
    )
    launcher(rows_kernel, (groups, rows, splits))(
        *tensors, m_part, sum_part, acc_part, kv_len_R if arrived is None else arrived, sinks_H, last_T, c, tokens,
        rows, table_width, chunks, limit, heads, groups, width, padded_width, size, padded, s.rows.tile, CHUNK, block,
        splits > 1, MERGE_AHEAD, *bound, num_warps=s.rows.warps, num_stages=s.rows.stages,
        **dependent_launch(q_THK.device.index, EARLY if rows <= 16 else MIDDLE)
    )  # fmt: skip
    if s.tiles is not None:
        if s.tiles.hopper:
            k_PSGK, v_PSGK, page_table_RN = _whole(q_THK, k_PSGK, v_PSGK, q_start_B, kv_len_R, page_table_RN, limit)
            tensors = (q_THK, k_PSGK, v_PSGK, q_start_B, kv_len_R, page_table_RN, o_THK)
            attention_hopper.launch(*tensors, c, limit, CHUNK, block)
            return o_THK
        grid = (tokens // (s.tiles.tile // padded) + min(rows, tokens // (limit + 1)) + 1, groups)
        launcher(tiles_kernel, grid)(
            *tensors, sinks_H, last_T, c, tokens, rows, table_width, limit, heads, groups, width, padded_width, size,
            padded, s.tiles.tile, CHUNK, block, *bound, num_warps=s.tiles.warps, num_stages=s.tiles.stages
        )  # fmt: skip
    return o_THK


def _whole(
    q_THK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, q_start_B: Tensor, kv_len_R: Tensor, page_table_RN: Tensor,
    limit: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Pages and their table for kernels that read no codes: where pages hold codes, a copy of what rows of more than
    `limit` tokens see, in q's dtype. Pure."""
    if not kv_fp8.is_few(k_PSGK):
        return k_PSGK, v_PSGK, page_table_RN
    (size, groups), width, (rows, table_width) = k_PSGK.shape[1:3], q_THK.shape[2], page_table_RN.shape
    pages = rows * table_width
    k, v = (q_THK.new_empty((pages, size, groups, width)) for _ in "kv")
    for few, whole in ((k_PSGK, k), (v_PSGK, v)):
        launcher(whole_kernel, (table_width, rows, groups))(
            few, q_start_B, kv_len_R, page_table_RN, whole, rows, table_width, limit, groups, width,
            triton.next_power_of_2(width), size, num_warps=4,
        )  # fmt: skip
    table = torch.arange(pages, dtype=torch.int32, device=q_THK.device)
    return k, v, table.view(rows, table_width)


def proved(q_THK: Tensor, k_PSGK: Tensor, s: Schedule, bounds: Bounds = CAUSAL) -> bool:
    """Whether `s` gives the bits of the reference schedule for these heads and pages on this device; compared once."""
    if not q_THK.is_cuda or s == reference_schedule(q_THK, k_PSGK):
        return True  # without a device only Triton's interpreter runs
    known = proofs(q_THK.device.index)
    (heads, width), (size, groups) = q_THK.shape[1:], k_PSGK.shape[1:3]
    rows = (*s.rows[:3], s.rows.splits > 1)  # how many splits is the grid's business, not the kernel's
    key = f"attention {q_THK.dtype} {heads}/{groups}x{width} page {size} chunk {CHUNK} {rows} {s.tiles}"
    key += ("" if bounds == CAUSAL else f" {tuple(bounds)}") + (" few" if kv_fp8.is_few(k_PSGK) else "")
    if torch.cuda.is_current_stream_capturing():  # no time to compare; warm-up has asked before
        return known.known.get(key, False)
    return known.holds(key, lambda: _compare(q_THK, k_PSGK, s, bounds))


def _compare(q_THK: Tensor, k_PSGK: Tensor, s: Schedule, bounds: Bounds) -> bool:
    """Random rows around the edges of blocks and chunks under both schedules, called as they are used: by themselves,
    and inside a captured graph. Slots that no row owns hold NaN."""
    size, width = k_PSGK.shape[1], q_THK.shape[2]
    lengths, tokens = [CHUNK + 200, 700, 2 * CHUNK + 65, 129, 64, 1, 2 * CHUNK], [1, 300, 200, 129, 1, 1, 2]
    pages = [triton.cdiv(length, size) for length in lengths]
    generator = torch.Generator(q_THK.device).manual_seed(width)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=q_THK.device, generator=generator).to(q_THK.dtype)

    shape = (sum(pages) + 1, *k_PSGK.shape[1:3], width)
    q, k, v = random(sum(tokens) + 3, *q_THK.shape[1:]), *(random(*shape) for _ in "kv")
    k[0] = v[0] = math.nan
    order = torch.randperm(sum(pages), device=q.device, generator=generator).int() + 1
    table = torch.zeros(len(lengths), max(pages) + 1, dtype=torch.int32, device=q.device)
    for r, own in enumerate(order.split(pages)):
        table[r, : len(own)] = own
        last = lengths[r] - (len(own) - 1) * size
        k[own[-1], last:] = v[own[-1], last:] = math.nan
    k, v = (kv_fp8.stored_as(k_PSGK, x) for x in (k, v))
    start = torch.tensor([0, *tokens], device=q.device).cumsum(0).int()
    kv_len = torch.tensor(lengths, device=q.device).int()
    sinks = random(q.shape[1]) if bounds.sinks else None
    last = None
    if bounds.reach:  # the first half of a row's tokens see each other
        ends = [n - t + max(t // 2 - 1, at) for n, t in zip(lengths, tokens, strict=True) for at in range(t)]
        last = torch.tensor([*ends, 0, 0, 0], device=q.device).int()
    want = run(q, k, v, start, kv_len, table, width**-0.5, reference_schedule(q, k), bounds, sinks, last)
    run_s = partial(run, q, k, v, start, kv_len, table, width**-0.5, s, bounds, sinks, last)
    try:
        got = [run_s(), run_s(), captured(run_s)]  # twice: the counters are back at zero
    except Exception:  # an experimental compiler: whatever it says, the schedule is not for this machine
        return False
    return bool(want.isfinite().all()) and all(torch.equal(want, each) for each in got)


def launch(
    q_THK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, q_start_B: Tensor, kv_len_R: Tensor, page_table_RN: Tensor,
    scale: float, causal: bool = True, window: int = 0, cap: float = 0.0, sinks_H: Tensor | None = None,
    last_T: Tensor | None = None, chosen: Schedule | None = None,
) -> Tensor:  # fmt: skip
    """Runs `chosen`, by default the fastest schedule for these shapes that is proved."""
    assert k_PSGK.is_contiguous() and v_PSGK.is_contiguous()
    bounds = Bounds(causal, window, cap, sinks_H is not None, last_T is not None)
    q_THK, page_table_RN = plain(q_THK), page_table_RN.contiguous()
    if q_THK.shape[0] == 0:
        return torch.empty_like(q_THK)
    if chosen is None:
        rows, table_width = page_table_RN.shape
        processors = multiprocessors(q_THK.device.index) if q_THK.is_cuda else 1
        found = schedules(q_THK, k_PSGK, rows, table_width * k_PSGK.shape[1], processors, CHUNK, bounds)
        chosen = next((s for s in found if proved(q_THK, k_PSGK, s, bounds)), reference_schedule(q_THK, k_PSGK))
    return run(q_THK, k_PSGK, v_PSGK, q_start_B, kv_len_R, page_table_RN, scale, chosen, bounds, sinks_H, last_T)


def fake(
    q_THK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, q_start_B: Tensor, kv_len_R: Tensor, page_table_RN: Tensor,
    scale: float, causal: bool = True, window: int = 0, cap: float = 0.0, sinks_H: Tensor | None = None,
    last_T: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return q_THK.new_empty(q_THK.shape)


ARGUMENTS = "Tensor q, Tensor k_pages, Tensor v_pages, Tensor q_start, Tensor kv_len, Tensor page_table, float scale"
_op = register(f"attention({ARGUMENTS}) -> Tensor", launch, fake)
_bounded_op = register(  # by itself, for an argument costs a short step as much as half a microsecond
    f"bounded_attention({ARGUMENTS}, bool causal, int window, float cap, Tensor? sinks, Tensor? last=None) -> Tensor",
    launch,
    fake,
)


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
