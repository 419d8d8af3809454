"""Triton kernels of attention of rows of many tokens (prefill): `tiles_kernel`, and `rest_kernel` for rows whose pages
found no room where attention_hopper.py reads. The reduction tree is that of attention_kernels.py.
"""
# pyright: reportInvalidTypeForm=false

from typing import Any

from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.attention_kernels import attend_chunk, merge, nothing, store_rows
from fengine.ops.attention_tiles import find_tile, limits, reach
from fengine.ops.kv_fp8_whole import find_page, room_of
from fengine.ops.registration import tl, triton

PROGRAMS = 256  # that look for rows without room


def launch(call: Any, o_THK: Tensor, c: float, limit: int, shape: Any, bound: tuple[float, ...], s: Any,
           most: int) -> None:  # fmt: skip
    """Rows of more than `limit` tokens, and zeros behind the last row; or, with `most`, those whose copies do not fit
    in so many bytes. Modifies: o_THK."""
    tokens, (rows, table_width) = len(call.q_THK), call.page_table_RN.shape
    tiles = tokens // (s.tile // shape[5]) + min(rows, tokens // (limit + 1)) + 1
    kernel, grid, more = tiles_kernel, (tiles, shape[1]), ()
    if most:
        kernel, grid, more = rest_kernel, (PROGRAMS,), (tiles, room_of(call.q_THK, call.k_PSGK, most))
    launcher(kernel, grid)(
        *call[:6], o_THK, *call[6:], c, tokens, rows, table_width, limit, *more, *shape, *bound, s.short,
        num_warps=s.warps, num_stages=s.stages,
    )  # fmt: skip


@triton.jit
def attend_tile(
    q_ptr, k_ptr, v_ptr, q_start_ptr, kv_len_ptr, table_ptr, o_ptr, sink_ptr, last_ptr, c, T, R, N, r, first, g,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, S: tl.constexpr, GP: tl.constexpr,
    BM: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, SINKS: tl.constexpr, REACH: tl.constexpr, SCALE: tl.constexpr, FEW: tl.constexpr,
    SHORT: tl.constexpr,
):  # fmt: skip
    """BM // GP tokens of row r, from its token `first` on, with all query heads of kv head g; zeros of row R."""
    BQ: tl.constexpr = BM // GP
    J: tl.constexpr = H // G
    HEAD: tl.constexpr = S * K if FEW else K
    STRIDE: tl.constexpr = K if FEW else G * K
    start = tl.load(q_start_ptr + r)
    tokens = tl.load(q_start_ptr + r + 1, mask=r < R, other=T) - start
    i = tl.arange(0, BM)
    d = tl.arange(0, KP)
    line = (start + first + i // GP).to(tl.int64) * H + g * J + i % GP
    mask = ((first + i // GP < tokens) & (i % GP < J))[:, None] & (d < K)[None, :]
    if r < R:
        kv_len = tl.load(kv_len_ptr + r)
        head = g * J + tl.minimum(i % GP, J - 1)
        front = kv_len - tokens + first
        back = tl.minimum(kv_len, front + BQ)
        position = front + i // GP
        begin_chunk = tl.maximum(front + 1 - WINDOW, 0) // CHUNK if WINDOW else 0
        seen, seen_by_all = limits(front, back, kv_len, CAUSAL, WINDOW)
        last = position
        if REACH:
            last, seen, seen_by_all = reach(last_ptr + start + first, tokens - first, position, i // GP)
        q = tl.load(q_ptr + line[:, None] * K + d[None, :], mask=mask, other=0.0)
        table = table_ptr + r.to(tl.int64) * N
        m, sum, acc = nothing(BM, KP)
        for low in tl.range(begin_chunk * CHUNK, seen, CHUNK):
            m2, sum2, acc2 = attend_chunk(q, low, seen, seen_by_all, front, back, kv_len, position, last, table,
                                          k_ptr + g * HEAD, v_ptr + g * HEAD, c, g, S, STRIDE, K, KP, BM, CHUNK,
                                          BLOCK, CAUSAL, WINDOW, CAP, SCALE, FEW, SHORT)  # fmt: skip
            m, sum, acc = merge(m, sum, acc, m2, sum2, acc2, c, WINDOW)
        store_rows(m, sum, acc, sink_ptr, head, o_ptr, line, mask, c, K, KP, SINKS)
    else:
        zero = tl.zeros((BM, KP), o_ptr.dtype.element_ty)
        tl.store(o_ptr + line[:, None] * K + d[None, :], zero, mask=mask)


@triton.jit(do_not_specialize=["T", "R", "N", "limit"])
def tiles_kernel(
    q_ptr, k_ptr, v_ptr, q_start_ptr, kv_len_ptr, table_ptr, o_ptr, sink_ptr, last_ptr, c, T, R, N, limit,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, S: tl.constexpr, GP: tl.constexpr,
    BM: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, SINKS: tl.constexpr, REACH: tl.constexpr, SCALE: tl.constexpr, FEW: tl.constexpr,
    SHORT: tl.constexpr,
):  # fmt: skip
    """A tile of a row of more than `limit` tokens; zeros behind the last row."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles see the most keys: first out
    r, first = find_tile(q_start_ptr, tile, R, T, limit, BM // GP, 512)
    if r <= R:
        attend_tile(q_ptr, k_ptr, v_ptr, q_start_ptr, kv_len_ptr, table_ptr, o_ptr, sink_ptr, last_ptr, c, T, R, N, r,
                    first, tl.program_id(1), H, G, K, KP, S, GP, BM, CHUNK, BLOCK, CAUSAL, WINDOW, CAP, SINKS, REACH,
                    SCALE, FEW, SHORT)  # fmt: skip


@triton.jit(do_not_specialize=["T", "R", "N", "limit", "tiles", "room"])
def rest_kernel(
    q_ptr, k_ptr, v_ptr, q_start_ptr, kv_len_ptr, table_ptr, o_ptr, sink_ptr, last_ptr, c, T, R, N, limit, tiles, room,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, S: tl.constexpr, GP: tl.constexpr,
    BM: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, SINKS: tl.constexpr, REACH: tl.constexpr, SCALE: tl.constexpr, FEW: tl.constexpr,
    SHORT: tl.constexpr,
):  # fmt: skip
    """Rows of more than `limit` tokens that kv_fp8_whole.py has not decoded, mostly none; of at most `tiles` tiles."""
    begin, before = find_page(q_start_ptr, kv_len_ptr, room, R, limit, S, 512)
    if begin < R:
        begin += (before < room).to(tl.int32)
        for item in range(tl.program_id(0), tiles * G, tl.num_programs(0)):
            r, first = find_tile(q_start_ptr, tiles - 1 - item // G, R, T, limit, BM // GP, 512)
            if (r >= begin) & (r < R):
                attend_tile(q_ptr, k_ptr, v_ptr, q_start_ptr, kv_len_ptr, table_ptr, o_ptr, sink_ptr, last_ptr, c, T, R,
                            N, r, first, item % G, H, G, K, KP, S, GP, BM, CHUNK, BLOCK, CAUSAL, WINDOW, CAP, SINKS,
                            REACH, SCALE, FEW, SHORT)  # fmt: skip
