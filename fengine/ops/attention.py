"""Causal attention over paged keys and values: one op for prefill, chunked prefill and decode.

o = softmax(scale * q k^T) v for the keys at positions 0 .. position(q) of q's row, found through the page table.

Reduction tree, by absolute key position and nothing else:
- keys are cut into chunks of CHUNK positions, a chunk into blocks of BLOCK;
- inside a chunk, online softmax block by block: s = q k^T (the MMA, left to right over K), m' = max(m, max s),
  p = exp2(s * c - m' * c) with c = scale * log2(e), l' = l * alpha + P 1, acc' = acc * alpha + P V with
  alpha = exp2((m - m') * c). P is rounded to v's dtype, and its row sum is a product with ones: the MMA adds left to
  right on top of the accumulator whatever the tile, where a sum over a register tile would follow the thread layout;
- chunk results (m, l, acc) are merged left to right in fp32, with explicit fused multiply-adds;
- o = acc / l.
A block with no visible key leaves (m, l, acc) as they are, so how far a tile walks does not matter. The schedule is
free: which queries share a tile, warps, and whether one program walks all chunks or several take chunks in turn and a
second kernel merges their stored results.
"""
# pyright: reportInvalidTypeForm=false

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fengine.ops.registration import multiprocessors, plain, register, tl, triton, wide

CHUNK = 512  # part of the tree
BLOCK = 64  # part of the tree
MERGE_AHEAD = 8  # chunk results loaded together by the merge
MAX_PARTIALS = 1 << 26  # float32 values of workspace that a split may take


def reference(
    q_THK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, q_start_B: Tensor, kv_len_R: Tensor, page_table_RN: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """The math, in fp32 (fp64 where q is). Reads only the slots that a row owns. Pure."""
    out_THK = torch.zeros_like(q_THK)
    size, groups = k_PSGK.shape[1:3]
    starts = q_start_B.tolist()
    for r, length in enumerate(kv_len_R.tolist()):
        rows = slice(starts[r], starts[r + 1])
        tokens = starts[r + 1] - starts[r]
        if tokens == 0:
            continue
        pages = page_table_RN[r, : -(-length // size)].long()
        k, v = (wide(x[pages]).flatten(0, 1)[:length].to(wide(q_THK).dtype) for x in (k_PSGK, v_PSGK))
        q = wide(q_THK[rows]).unflatten(1, (groups, -1))
        scores = torch.einsum("tgjk,sgk->gjts", q, k) * scale
        position = torch.arange(length - tokens, length, device=q.device)
        visible = torch.arange(length, device=q.device) <= position[:, None]
        weight = scores.masked_fill(~visible, -math.inf).softmax(-1)
        out_THK[rows] = torch.einsum("gjts,sgk->tgjk", weight, v).flatten(1, 2).to(q_THK.dtype)
    return out_THK


@triton.jit
def find_row(q_start_ptr, at, R, BQ: tl.constexpr, TILES: tl.constexpr):
    """The largest r in 0 .. R with q_start[r] // BQ + TILES * r <= at; row R is the padding behind the last row."""
    low = at * 0
    high = low + R
    while low < high:
        middle = (low + high + 1) // 2
        before = tl.load(q_start_ptr + middle) // BQ + TILES * middle <= at
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle - 1)
    return low


@triton.jit
def merge(m, sums, acc, m2, sums2, acc2, c):
    """The next chunk (m2, sums2, acc2) joined to the running (m, sums, acc). `sums` is [rows, 16], columns alike."""
    m_new = tl.maximum(m, m2)
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    a = tl.exp2((m - safe) * c)[:, None]
    b = tl.exp2((m2 - safe) * c)[:, None]
    return m_new, tl.fma(sums2, b, sums * a), tl.fma(acc2, b, acc * a)


@triton.jit
def attend_block(q, m, sums, acc, start, kv_len, position, table_ptr, k_ptr, v_ptr, c, S: tl.constexpr,
                 STRIDE: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr,
                 EDGE: tl.constexpr):  # fmt: skip
    """One online-softmax step over keys start .. start + BLOCK. EDGE: some key may be unowned or unseen by some row."""
    key = start + tl.arange(0, BLOCK)
    d = tl.arange(0, KP)
    page = tl.load(table_ptr + key // S, mask=key < kv_len, other=0) if EDGE else tl.load(table_ptr + key // S)
    at = (page.to(tl.int64) * S + key % S)[:, None] * STRIDE + d[None, :]
    if EDGE:
        held = (key < kv_len)[:, None] & (d < K)[None, :]
        k = tl.load(k_ptr + at, mask=held, other=0.0)
    elif K < KP:
        k = tl.load(k_ptr + at, mask=(d < K)[None, :], other=0.0)
    else:
        k = tl.load(k_ptr + at)
    s = tl.dot(q, k.T, input_precision="ieee")
    if EDGE:
        s = tl.where(key[None, :] <= position[:, None], s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(tl.fma(s, c, (safe * -c)[:, None]))
    alpha = tl.exp2((m - safe) * c)[:, None]
    if EDGE:
        v = tl.load(v_ptr + at, mask=held, other=0.0)
    elif K < KP:
        v = tl.load(v_ptr + at, mask=(d < K)[None, :], other=0.0)
    else:
        v = tl.load(v_ptr + at)
    p = p.to(v.dtype)
    ones = tl.full((BLOCK, 16), 1.0, v.dtype)
    sums = tl.dot(p, ones, sums * alpha, input_precision="ieee")
    acc = tl.dot(p, v, acc * alpha, input_precision="ieee")
    return m_new, sums, acc


@triton.jit(do_not_specialize=["T", "R", "N", "chunks"])
def attention_kernel(
    q_ptr, k_ptr, v_ptr, q_start_ptr, kv_len_ptr, table_ptr, o_ptr, m_part_ptr, sum_part_ptr, acc_part_ptr,
    c, T, R, N, chunks, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, S: tl.constexpr,
    GP: tl.constexpr, BM: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """BM // GP tokens of one row, with all query heads of one kv head; program axis 2 takes chunks in turn."""
    BQ: tl.constexpr = BM // GP
    J: tl.constexpr = H // G  # query heads per kv head, padded to GP rows
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles see the most keys: first out
    g = tl.program_id(1)
    split = tl.program_id(2)
    r = find_row(q_start_ptr, tile, R, BQ, 1)
    start = tl.load(q_start_ptr + r)
    first = (tile - start // BQ - r) * BQ  # first token of the tile, counted within the row
    tokens = tl.load(q_start_ptr + r + 1, mask=r < R, other=T) - start
    if first < tokens:
        i = tl.arange(0, BM)
        d = tl.arange(0, KP)
        head = g * J + i % GP
        line = (start + first + i // GP).to(tl.int64) * H + head  # row of q and o, both [T * H, K]
        real = (first + i // GP < tokens) & (i % GP < J)
        mask = real[:, None] & (d < K)[None, :]
        if r < R:
            kv_len = tl.load(kv_len_ptr + r)
            position = kv_len - tokens + first + i // GP
            seen = tl.minimum(kv_len, kv_len - tokens + first + BQ)  # keys that some token of the tile sees
            seen_by_all = kv_len - tokens + first + 1
            q = tl.load(q_ptr + line[:, None] * K + d[None, :], mask=mask, other=0.0)
            table = table_ptr + r.to(tl.int64) * N
            k_head = k_ptr + g * K
            v_head = v_ptr + g * K
            m = tl.full((BM,), float("-inf"), tl.float32)
            sums = tl.zeros((BM, 16), tl.float32)
            acc = tl.zeros((BM, KP), tl.float32)
            for chunk in range(split, tl.cdiv(seen, CHUNK), tl.num_programs(2)):
                low = chunk * CHUNK
                high = tl.minimum(low + CHUNK, seen)
                inner = low + tl.maximum(tl.minimum(high, seen_by_all) - low, 0) // BLOCK * BLOCK
                m2 = tl.full((BM,), float("-inf"), tl.float32)
                sums2 = tl.zeros((BM, 16), tl.float32)
                acc2 = tl.zeros((BM, KP), tl.float32)
                for n in range(low, inner, BLOCK):
                    m2, sums2, acc2 = attend_block(q, m2, sums2, acc2, n, kv_len, position, table, k_head, v_head, c,
                                                   S, G * K, K, KP, BLOCK, False)  # fmt: skip
                for n in range(inner, high, BLOCK):
                    m2, sums2, acc2 = attend_block(q, m2, sums2, acc2, n, kv_len, position, table, k_head, v_head, c,
                                                   S, G * K, K, KP, BLOCK, True)  # fmt: skip
                if SPLIT:
                    part = line * chunks + chunk
                    tl.store(m_part_ptr + part, m2, mask=real)
                    tl.store(sum_part_ptr + part, tl.max(sums2, 1), mask=real)
                    tl.store(acc_part_ptr + part[:, None] * KP + d[None, :], acc2, mask=real[:, None])
                else:
                    m, sums, acc = merge(m, sums, acc, m2, sums2, acc2, c)
            if not SPLIT:
                o = acc / tl.max(sums, 1)[:, None]
                tl.store(o_ptr + line[:, None] * K + d[None, :], o.to(o_ptr.dtype.element_ty), mask=mask)
        elif not SPLIT:
            zero = tl.zeros((BM, KP), o_ptr.dtype.element_ty)
            tl.store(o_ptr + line[:, None] * K + d[None, :], zero, mask=mask)


@triton.jit(do_not_specialize=["R", "chunks"])
def merge_kernel(
    q_start_ptr, kv_len_ptr, m_part_ptr, sum_part_ptr, acc_part_ptr, o_ptr, c, R, chunks, H: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, CHUNK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Merges the stored chunks of one token and head, left to right; padding tokens get zeros."""
    token = tl.program_id(0)
    line = token.to(tl.int64) * H + tl.program_id(1)
    d = tl.arange(0, KP)
    r = find_row(q_start_ptr, token, R, 1, 0)
    o = tl.zeros((1, KP), tl.float32)
    if r < R:
        end = tl.load(q_start_ptr + r + 1)
        count = tl.cdiv(tl.load(kv_len_ptr + r) - end + token + 1, CHUNK)
        m = tl.full((1,), float("-inf"), tl.float32)
        sums = tl.zeros((1, 1), tl.float32)
        acc = tl.zeros((1, KP), tl.float32)
        for chunk in range(0, count, AHEAD):
            for ahead in tl.static_range(AHEAD):
                next = chunk + ahead + tl.arange(0, 1)
                part = line * chunks + next
                more = next < count
                m2 = tl.load(m_part_ptr + part, mask=more, other=float("-inf"))
                sums2 = tl.load(sum_part_ptr + part, mask=more, other=0.0)[:, None]
                acc2 = tl.load(acc_part_ptr + part[:, None] * KP + d[None, :], mask=more[:, None], other=0.0)
                m, sums, acc = merge(m, sums, acc, m2, sums2, acc2, c)
        o = acc / sums
    tl.store(o_ptr + line * K + d[None, :], o.to(o_ptr.dtype.element_ty), mask=(d < K)[None, :])


class Schedule(NamedTuple):
    """How the tree is computed; free to differ per call, because the bits do not depend on it."""

    tile: int  # rows of the MMA: tokens times padded query heads per kv head
    warps: int
    stages: int
    splits: int  # programs that share the chunks of a tile; 1 merges in registers


TILES = ((16, 2, 5), (64, 4, 3))  # (tile, warps, stages)
FLOAT32_TILES = ((16, 4, 1),)


def schedule(tokens: int, rows: int, keys: int, heads: int, groups: int, width: int, wide_type: bool,
             processors: int) -> Schedule:  # fmt: skip
    """The schedule for shapes alone: `keys` is the longest context that the page table can name. Pure."""
    padded = triton.next_power_of_2(heads // groups)
    lines = triton.cdiv(tokens, max(rows, 1)) * padded  # rows of the MMA that an average request fills
    choices = FLOAT32_TILES if wide_type else TILES
    tile, warps, stages = next((t for t in choices if t[0] >= max(lines, padded)), choices[-1])
    tile = max(tile, padded)
    programs = groups * max(rows, triton.cdiv(tokens * padded, tile))
    chunks = triton.cdiv(keys, CHUNK)
    splits = min(chunks, triton.cdiv(3 * processors, programs))
    if tokens * heads * chunks * (triton.next_power_of_2(width) + 2) > MAX_PARTIALS:
        splits = 1
    return Schedule(tile, warps, stages, max(splits, 1))


def launch(
    q_THK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, q_start_B: Tensor, kv_len_R: Tensor, page_table_RN: Tensor,
    scale: float, chosen: Schedule | None = None,
) -> Tensor:  # fmt: skip
    """Runs the kernels under `chosen`, by default the schedule for these shapes."""
    assert k_PSGK.is_contiguous() and v_PSGK.is_contiguous()
    q_THK = plain(q_THK)
    tokens, heads, width = q_THK.shape
    size, groups = k_PSGK.shape[1:3]
    rows, table_width = page_table_RN.shape
    o_THK = torch.empty_like(q_THK)
    if tokens == 0:
        return o_THK
    s = chosen or schedule(tokens, rows, table_width * size, heads, groups, width, q_THK.dtype == torch.float32,
                           multiprocessors(q_THK.device.index))  # fmt: skip
    padded, padded_width = triton.next_power_of_2(heads // groups), triton.next_power_of_2(width)
    chunks = triton.cdiv(table_width * size, CHUNK)
    c = scale * math.log2(math.e)
    lines = tokens * heads * chunks if s.splits > 1 else 0
    m_part, sum_part, acc_part = (q_THK.new_empty(lines * n, dtype=torch.float32) for n in (1, 1, padded_width))
    grid = (tokens // (s.tile // padded) + rows + 1, groups, s.splits)
    attention_kernel[grid](
        q_THK, k_PSGK, v_PSGK, q_start_B, kv_len_R, page_table_RN.contiguous(), o_THK, m_part, sum_part, acc_part, c,
        tokens, rows, table_width, chunks, heads, groups, width, padded_width, size, padded, s.tile, CHUNK, BLOCK,
        s.splits > 1, num_warps=s.warps, num_stages=s.stages
    )  # fmt: skip
    if s.splits > 1:
        merge_kernel[(tokens, heads)](q_start_B, kv_len_R, m_part, sum_part, acc_part, o_THK, c, rows, chunks, heads,
                                      width, padded_width, CHUNK, MERGE_AHEAD, num_warps=1)  # fmt: skip
    return o_THK


def fake(
    q_THK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, q_start_B: Tensor, kv_len_R: Tensor, page_table_RN: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    return q_THK.new_empty(q_THK.shape)


_op = register(
    "attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor q_start, Tensor kv_len, Tensor page_table, "
    "float scale) -> Tensor",
    launch, fake,
)  # fmt: skip


def attention(
    q_THK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, q_start_B: Tensor, kv_len_R: Tensor, page_table_RN: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """Attention of each token to keys 0 .. its position of its row, as o_THK in q's dtype. Pure.

    Token j of row r stands at position kv_len - row_tokens + j; its key and value are in the pages already. Index
    tensors int32, q_start_B[0] = 0; a row with tokens has kv_len >= its tokens. Tokens behind q_start_B[-1] give zeros.
    Unowned slots are never read into the result, whatever they hold.
    """
    return _op(q_THK, k_PSGK, v_PSGK, q_start_B, kv_len_R, page_table_RN, scale)
