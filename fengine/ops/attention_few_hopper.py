"""Attention of rows of few tokens and few keys on NVIDIA Hopper: `rows_kernel` of attention_kernels.py, WIDE blocks at
a time, where few programs run, and what takes time is one wait behind the other.

Keys and values of all these blocks come to shared memory at once (cp.async); the next ones as soon as there is room.
Then all scores are computed, all weights, and one product after the other. Warps share the keys of a block in the first
product, the columns of values in the second. The same reduction tree, hence the same bits: see attention.py.
"""
# pyright: reportInvalidTypeForm=false

from typing import Any

import torch
from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.attention_hopper import halved
from fengine.ops.attention_kernels import SUMS
from fengine.ops.attention_merge_hopper import merge, merge_stored, store_rows
from fengine.ops.kv_fp8_decode import layouts
from fengine.ops.registration import async_copy, begin, dependent_launch, gl, gluon, mma_v2, runs_gluon, wait

PIECE = gl.constexpr(64)  # keys of one page that are copied together


def usable(q_THK: Tensor, k_PSGK: Tensor) -> bool:
    """Whether the kernel is written for these types and shapes and this device."""
    return (
        runs_gluon(q_THK.device)
        and q_THK.dtype in (torch.bfloat16, torch.float16)
        and k_PSGK.dtype == q_THK.dtype
        and q_THK.shape[2] in (64, 128, 256)
        and q_THK.shape[1] // k_PSGK.shape[2] <= 16
        and k_PSGK.shape[1] % 64 == 0
        and k_PSGK.data_ptr() % 16 == 0
    )


def launch(call: Any, o_THK: Tensor, workspace: Any, c: float, chunks: int, limit: int, shape: Any, splits: int,
           merged: int, wide: int, parts: int, window: int, trigger: int) -> None:  # fmt: skip
    """Rows of up to `limit` tokens; 0: all rows. Modifies: o_THK, the workspace."""
    q, k, v, q_start, kv_len, table, sinks, _ = call
    rows, table_width = table.shape
    heads, groups, width, _, size, padded, _, chunk, block = shape
    by_device = dependent_launch(o_THK.device.index, trigger)
    launcher(few_kernel, (groups * parts, rows, splits))(
        q, k, v, q_start, kv_len, table, o_THK, *workspace, sinks, c, len(o_THK), rows, table_width, chunks, limit,
        heads, groups, width, size, padded, chunk, block, wide, parts, window, sinks is not None, splits > 1, merged,
        layouts(4, block)[2], by_device["PDL"], num_warps=4, launch_pdl=bool(by_device["PDL"])
    )  # fmt: skip


@gluon.jit
def pages_of(table, key, high, S: gl.constexpr, PIECES: gl.constexpr):
    """The pages of PIECES pieces from `key` on, asked for together."""
    pages = ()
    for n in gl.static_range(PIECES):
        at = key + n * PIECE
        pages = pages + (gl.load(table + at // S, mask=at < high, other=0),)  # noqa: RUF005
    return pages


@gluon.jit
def copy(ptr, pages, key, high, to, STRIDE: gl.constexpr, K: gl.constexpr, S: gl.constexpr, PIECES: gl.constexpr):
    """K columns of keys or values from `key` on, on their way to shared memory; zeros at `high` and behind. STRIDE:
    from slot to slot."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [gl.num_warps(), 1], [1, 0])
    slot = gl.arange(0, PIECE, layout=gl.SliceLayout(1, LINES))
    d = gl.arange(0, K, layout=gl.SliceLayout(0, LINES))
    if key < high:
        for n in gl.static_range(PIECES):
            at = key + n * PIECE
            here = ptr + pages[n].to(gl.int64) * (S * STRIDE) + at % S * STRIDE
            inside = (at + slot < high)[:, None] & (d < K)[None, :]
            async_copy.async_copy_global_to_shared(to.slice(n * PIECE, PIECE),
                                                   here + ((slot * STRIDE)[:, None] + d[None, :]),
                                                   mask=inside)  # fmt: skip
    async_copy.commit_group()


@gluon.jit
def scores(q, keys, maxima, at, high, position, SUM: gl.constexpr, RIGHT: gl.constexpr, BLOCK: gl.constexpr,
           WIDE: gl.constexpr, WINDOW: gl.constexpr):  # fmt: skip
    """Masked scores of WIDE blocks; each warp's largest of each block go to `maxima`."""
    W: gl.constexpr = gl.num_warps()
    none = gl.zeros([16, BLOCK], gl.float32, SUM)
    all = ()
    for n in gl.static_range(WIDE):
        s = mma_v2(q, keys.slice(n * BLOCK, BLOCK).permute((1, 0)).load(RIGHT), none)
        key = at + n * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, SUM))
        seen = (key < high)[None, :] & (key[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        s = gl.where(seen, s, float("-inf"))
        maxima.index(n).store(gl.max(gl.max(s.reshape((16, BLOCK // (8 * W), W, 8)), 3), 1))  # of own keys
        all = all + (s,)  # noqa: RUF005
    return all


@gluon.jit(do_not_specialize=["T", "R", "N", "chunks", "limit"])
def few_kernel(
    q_ptr, k_ptr, v_ptr, q_start_ptr, kv_len_ptr, table_ptr, o_ptr, m_part_ptr, sum_part_ptr, acc_part_ptr, arrived_ptr,
    sink_ptr, c, T, R, N, chunks, limit, H: gl.constexpr, G: gl.constexpr, K: gl.constexpr, S: gl.constexpr,
    GP: gl.constexpr, CHUNK: gl.constexpr, BLOCK: gl.constexpr, WIDE: gl.constexpr, PARTS: gl.constexpr,
    WINDOW: gl.constexpr, SINKS: gl.constexpr, SPLIT: gl.constexpr, MERGED: gl.constexpr, MAXIMA: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """As `rows_kernel` of attention_kernels.py: a row's chunks split, split + splits, ...; the last merges.
    Of PARTS programs each takes its columns of the values, and all keys."""
    W: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    SUM: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, W], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUM, 2)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SUM)
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [W, 1], [1, 0])
    ALL: gl.constexpr = WIDE * BLOCK
    PIECES: gl.constexpr = ALL // PIECE
    BQ: gl.constexpr = 16 // GP
    J: gl.constexpr = H // G
    KV: gl.constexpr = K // PARTS
    g = gl.program_id(0) // PARTS
    column = gl.program_id(0) % PARTS * KV
    r = gl.program_id(1)
    split = gl.program_id(2)
    splits = gl.num_programs(2)
    keys = gl.allocate_shared_memory(DTYPE, [ALL, K], SWIZZLED)
    values = gl.allocate_shared_memory(DTYPE, [ALL, KV], SWIZZLED)
    weights = gl.allocate_shared_memory(DTYPE, [WIDE, 16, BLOCK], SWIZZLED)
    maxima = gl.allocate_shared_memory(gl.float32, [WIDE, 16, W], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    begin(PDL)
    wait(PDL)
    start = gl.load(q_start_ptr + r)
    end = gl.load(q_start_ptr + r + 1)
    kv_len = gl.load(kv_len_ptr + r)
    table = table_ptr + r.to(gl.int64) * N
    pages = pages_of(table, split * CHUNK, N * S, S, PIECES)  # of the first keys, before it is known how many there are
    tokens = end - start
    none = gl.zeros([16, BLOCK], gl.float32, SUM)
    i = gl.arange(0, 16, layout=BY_ROW)
    d = column + gl.arange(0, KV, layout=gl.SliceLayout(0, SUM))
    k_ptr += g * K
    v_ptr += g * K + column
    if (tokens <= limit) | (limit == 0):
        for first in range(0, tokens, BQ):
            front = kv_len - tokens + first
            seen = gl.minimum(kv_len, front + BQ)
            count = gl.cdiv(seen, CHUNK)
            begin_chunk = 0
            if WINDOW:
                begin_chunk = gl.maximum(front + 1 - WINDOW, 0) // CHUNK
            if begin_chunk + split < count:
                iq = gl.arange(0, 16, layout=gl.SliceLayout(1, LINES))
                dq = gl.arange(0, K, layout=gl.SliceLayout(0, LINES))
                real_q = (first + iq // GP < tokens) & (iq % GP < J)
                line_q = (start + first + iq // GP).to(gl.int64) * H + g * J + iq % GP
                q = gl.load(q_ptr + line_q[:, None] * K + dq[None, :], mask=real_q[:, None] & (dq < K)[None, :],
                            other=0.0)  # fmt: skip
                position = front + i // GP
                real = (first + i // GP < tokens) & (i % GP < J)
                head = g * J + gl.minimum(i % GP, J - 1)
                line = (start + first + i // GP).to(gl.int64) * H + g * J + i % GP
                out = line[:, None] * K + d[None, :]
                home = gl.where(limit == 0, start + first, r * BQ)
                part = ((home + i // GP).to(gl.int64) * H + g * J + i % GP) * chunks
                m = gl.full([16], float("-inf"), gl.float32, BY_ROW)
                sum = gl.full([16], -0.0, gl.float32, BY_ROW)
                acc = gl.full([16, KV], -0.0, gl.float32, SUM)
                for chunk in range(begin_chunk + split, count, splits):
                    low = chunk * CHUNK
                    high = gl.minimum(low + CHUNK, seen)
                    if WINDOW:
                        low += gl.maximum(front + 1 - WINDOW - low, 0) // BLOCK * BLOCK
                    if (low != split * CHUNK) | (first > 0):
                        pages = pages_of(table, low, high, S, PIECES)
                    gl.thread_barrier()  # nobody reads what was there before
                    copy(k_ptr, pages, low, high, keys, G * K, K, S, PIECES)
                    copy(v_ptr, pages, low, high, values, G * K, KV, S, PIECES)
                    q_left = gl.convert_layout(q, LEFT)
                    m2 = gl.full([16], float("-inf"), gl.float32, BY_ROW)
                    sums = gl.zeros([16, SUMS], gl.float32, SUM)
                    acc2 = gl.zeros([16, KV], gl.float32, SUM)
                    for at in range(low, high, ALL):
                        pages = pages_of(table, at + ALL, high, S, PIECES)
                        async_copy.wait_group(1)
                        gl.thread_barrier()  # keys are there
                        found = scores(q_left, keys, maxima, at, high, position, SUM, RIGHT, BLOCK, WIDE, WINDOW)
                        gl.thread_barrier()  # maxima are there, and keys are in registers
                        copy(k_ptr, pages, at + ALL, high, keys, G * K, K, S, PIECES)
                        alphas = ()
                        for n in gl.static_range(WIDE):
                            top = gl.max(maxima.index(n).load(MAXIMA), 1)
                            m_new = gl.maximum(m2, gl.convert_layout(top, BY_ROW, assert_trivial=True))
                            safe = gl.where(m_new == float("-inf"), 0.0, m_new)
                            p = gl.exp2(gl.fma(found[n], c + none, (safe * -c)[:, None] + none))
                            alpha = gl.exp2((m2 - safe) * c)
                            m2 = m_new
                            weights.index(n).store(p.to(DTYPE))
                            later = gl.convert_layout(halved(p, BLOCK, SUMS), SUM, assert_trivial=True)
                            sums = gl.fma(sums, alpha[:, None] + gl.zeros_like(sums), later)
                            alphas = alphas + (alpha[:, None],)  # noqa: RUF005
                        async_copy.wait_group(1)
                        gl.thread_barrier()  # values and weights are there
                        for n in gl.static_range(WIDE):
                            block = values.slice(n * BLOCK, BLOCK).load(RIGHT)
                            acc2 = mma_v2(weights.index(n).load(LEFT), block, acc2 * alphas[n])
                        gl.thread_barrier()  # values are in registers
                        copy(v_ptr, pages, at + ALL, high, values, G * K, KV, S, PIECES)
                    sum2 = gl.convert_layout(gl.sum(halved(sums, SUMS, 2), 1), BY_ROW)
                    if SPLIT and count - begin_chunk > 1:
                        gl.store(m_part_ptr + part + chunk, m2, mask=real)
                        gl.store(sum_part_ptr + part + chunk, sum2, mask=real)
                        gl.store(acc_part_ptr + (part + chunk)[:, None] * K + d[None, :], acc2, mask=real[:, None])
                    else:
                        m, sum, acc = merge(m, sum, acc, m2, sum2, acc2, c, WINDOW)
                if SPLIT and count - begin_chunk > 1:
                    tile = gl.where(limit == 0, start // BQ, 0) + r + first // BQ
                    gl.thread_barrier()  # every thread's stores stand before the arrival
                    programs = gl.minimum(count - begin_chunk, splits)
                    counter = arrived_ptr + tile * (G * PARTS) + gl.program_id(0)
                    if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == programs - 1:
                        gl.store(counter, 0)
                        merge_stored(m_part_ptr, sum_part_ptr, acc_part_ptr, home.to(gl.int64), begin_chunk, count,
                                     g * J, tokens - first, sink_ptr, o_ptr, (start + first).to(gl.int64), chunks, c,
                                     column, H, J, K, KV, GP, MERGED, WINDOW, SINKS)  # fmt: skip
                else:
                    store_rows(m, sum, acc, sink_ptr, head, o_ptr, out, real, c, SINKS)
    if (limit == 0) & (split == 0) & (column == 0):
        for t in range(gl.load(q_start_ptr + R) + r, T, R):
            j = gl.arange(0, 64, layout=gl.BlockedLayout([2], [32], [W], [0]))
            for low in range(0, J * K, 64):
                zeros = gl.zeros_like(j).to(DTYPE)
                gl.store(o_ptr + ((t + j * 0).to(gl.int64) * H + g * J) * K + j + low, zeros)
