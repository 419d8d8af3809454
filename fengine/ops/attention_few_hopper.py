"""Attention of rows of few tokens and few keys on NVIDIA Hopper: `rows_kernel` of attention_kernels.py, WIDE blocks at
a time, where few programs run, and what takes time is one wait behind the other.

A warp of its own copies keys and values to a ring in shared memory: attention_few_copies.py. Of WIDE blocks all scores
are computed, then all weights, then one product after the other. Warps share the keys of a block in the first product,
the columns of values in the second. The same reduction tree, hence the same bits: see attention.py.
"""
# pyright: reportInvalidTypeForm=false

from typing import Any

import torch
from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.attention_few_copies import BOX, copy_rows, first_chunk, span
from fengine.ops.attention_kernels import SUMS
from fengine.ops.attention_merge_hopper import merge, merge_stored, sinks_of, store_rows
from fengine.ops.attention_parts_hopper import halved
from fengine.ops.registration import (
    barrier_ring,
    barriers,
    begin,
    dependent_launch,
    describe,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    mma_v2,
    runs_gluon,
    wait,
)

ROOM = 200 << 10  # bytes of keys and values in the ring, at most
STAGES = 4  # WIDE blocks each, at most
REGISTERS = 152  # of a thread on average, for the kernels in front and behind want some


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
    stages = min(STAGES, ROOM // (wide * block * (width + width // parts) * 2))
    k, v = (describe(x.view(-1, groups * width), 64, columns) for x, columns in ((k, width), (v, width // parts)))
    launcher(few_kernel, (groups * parts, rows, splits))(
        q, k, v, q_start, kv_len, table, o_THK, *workspace, sinks, c, len(o_THK), rows, table_width, chunks, limit,
        heads, groups, width, size, padded, chunk, block, wide, parts, stages, window, sinks is not None, splits > 1,
        merged, row_of(4), row_of(32), by_device["PDL"], num_warps=4, maxnreg=REGISTERS,
        launch_pdl=bool(by_device["PDL"])
    )  # fmt: skip


def row_of(columns: int) -> Any:
    """The layout of [16, columns] in which a thread has all of those rows of which it has sums. Pure."""
    own = [[0, 1 << n] for n in range(columns.bit_length() - 1)]
    rows, none = [[1, 0], [2, 0], [4, 0]], [0, 0]
    return gl.DistributedLinearLayout([[8, 0], *own], [none, none, *rows], [none, none], [], [16, columns])


@gluon.jit
def scores(q, k_ring, first, maxima, at, high, position, SUM: gl.constexpr, RIGHT: gl.constexpr, BLOCK: gl.constexpr,
           WIDE: gl.constexpr, WINDOW: gl.constexpr):  # fmt: skip
    """Masked scores of WIDE blocks from place `first` of the ring on; each warp's largest of each go to `maxima`."""
    W: gl.constexpr = gl.num_warps()
    none = gl.zeros([16, BLOCK], gl.float32, SUM)
    all = ()
    for n in gl.static_range(WIDE):
        s = mma_v2(q, k_ring.index(first + n).permute((1, 0)).load(RIGHT), none)
        key = at + n * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, SUM))
        seen = (key < high)[None, :] & (key[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        all = all + (gl.where(seen, s, float("-inf")),)  # noqa: RUF005
    for n in gl.static_range(WIDE):
        maxima[n].store(gl.max(gl.max(gl.reshape(all[n], (16, BLOCK // (8 * W), W, 8)), 3), 1))  # of own keys
    return all


@gluon.jit
def attend(
    q_ptr, q_start_ptr, kv_len_ptr, o_ptr, m_part_ptr, sum_part_ptr, acc_part_ptr, arrived_ptr, sink_ptr, k_ring,
    v_ring, q_tile, weights, maxima, totals, k_full, v_full, empty, c, chunks, limit, H: gl.constexpr, G: gl.constexpr,
    K: gl.constexpr, GP: gl.constexpr, CHUNK: gl.constexpr, BLOCK: gl.constexpr, WIDE: gl.constexpr,
    PARTS: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr, SPLIT: gl.constexpr,
    MERGED: gl.constexpr, MAXIMA: gl.constexpr, TOTALS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The warps that compute: a row's chunks split, split + splits, ...; the last program merges."""
    W: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    SUM: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, W], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUM, 2)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SUM)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [W, 1], [1, 0])
    ALL: gl.constexpr = WIDE * BLOCK
    BQ: gl.constexpr = 16 // GP
    J: gl.constexpr = H // G
    KV: gl.constexpr = K // PARTS
    g = gl.program_id(0) // PARTS
    column = gl.program_id(0) % PARTS * KV
    r = gl.program_id(1)
    split = gl.program_id(2)
    splits = gl.num_programs(2)
    start = gl.load(q_start_ptr + r)
    tokens = gl.load(q_start_ptr + r + 1) - start
    kv_len = gl.load(kv_len_ptr + r)
    none = gl.zeros([16, BLOCK], gl.float32, SUM)
    i = gl.arange(0, 16, layout=BY_ROW)
    d = column + gl.arange(0, KV, layout=gl.SliceLayout(0, SUM))
    sink = sinks_of(sink_ptr, g * J + gl.minimum(i % GP, J - 1), SINKS)
    n = 0
    wait(PDL)
    if (tokens <= limit) | (limit == 0):
        for first in range(0, tokens, BQ):
            front = kv_len - tokens + first
            seen = gl.minimum(kv_len, front + BQ)
            count = gl.cdiv(seen, CHUNK)
            begin_chunk = first_chunk(front, CHUNK, WINDOW)
            if begin_chunk + split < count:
                iq = gl.arange(0, 16, layout=gl.SliceLayout(1, LINES))
                dq = gl.arange(0, K, layout=gl.SliceLayout(0, LINES))
                real_q = (first + iq // GP < tokens) & (iq % GP < J)
                line_q = (start + first + iq // GP).to(gl.int64) * H + g * J + iq % GP
                q = gl.load(q_ptr + line_q[:, None] * K + dq[None, :], mask=real_q[:, None] & (dq < K)[None, :],
                            other=0.0)  # fmt: skip
                q_tile.store(q)
                gl.thread_barrier()
                q_left = q_tile.load(LEFT)
                position = front + i // GP
                real = (first + i // GP < tokens) & (i % GP < J)
                line = (start + first + i // GP).to(gl.int64) * H + g * J + i % GP
                out = line[:, None] * K + d[None, :]
                home = gl.where(limit == 0, start + first, r * BQ)
                part = ((home + i // GP).to(gl.int64) * H + g * J + i % GP) * chunks
                m = gl.full([16], float("-inf"), gl.float32, BY_ROW)
                sum = gl.full([16], -0.0, gl.float32, BY_ROW)
                acc = gl.full([16, KV], -0.0, gl.float32, SUM)
                for chunk in range(begin_chunk + split, count, splits):
                    low, high = span(chunk, front, seen, CHUNK, BLOCK, WINDOW)
                    m2 = gl.full([16], float("-inf"), gl.float32, BY_ROW)
                    sums = gl.zeros([16, SUMS], gl.float32, SUM)
                    acc2 = gl.zeros([16, KV], gl.float32, SUM)
                    for at in range(low, high, ALL):
                        slot = n % STAGES
                        mbarrier.wait(k_full.index(slot), (n // STAGES) & 1)
                        found = scores(q_left, k_ring, slot * WIDE, maxima, at, high, position, SUM, RIGHT, BLOCK, WIDE,
                                       WINDOW)  # fmt: skip
                        gl.thread_barrier()  # maxima are there, and keys and values of before are in registers
                        mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES), pred=n > 0)
                        alphas = ()
                        for b in gl.static_range(WIDE):
                            top = gl.max(maxima[b].load(MAXIMA), 1)
                            m_new = gl.maximum(m2, gl.convert_layout(top, BY_ROW, assert_trivial=True))
                            safe = gl.where(m_new == float("-inf"), 0.0, m_new)
                            p = gl.exp2(gl.fma(found[b], c + none, (safe * -c)[:, None] + none))
                            alpha = gl.exp2((m2 - safe) * c)
                            m2 = m_new
                            weights[b].store(p.to(DTYPE))
                            later = gl.convert_layout(halved(p, BLOCK, SUMS), SUM, assert_trivial=True)
                            sums = gl.fma(sums, alpha[:, None] + gl.zeros_like(sums), later)
                            alphas = alphas + (alpha[:, None],)  # noqa: RUF005
                        gl.thread_barrier()  # weights are there
                        mbarrier.wait(v_full.index(slot), (n // STAGES) & 1)
                        for b in gl.static_range(WIDE):
                            block = v_ring.index(slot * WIDE + b).load(RIGHT)
                            if at + ALL > high:  # whatever unowned slots hold: 0 * NaN would be NaN
                                key = at + b * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, RIGHT))
                                block = gl.where((key < high)[:, None], block, 0.0)
                            acc2 = mma_v2(weights[b].load(LEFT), block, acc2 * alphas[b])
                        n += 1
                    totals.store(sums)
                    gl.thread_barrier()
                    sum2 = gl.sum(halved(totals.load(TOTALS), SUMS, 2), 1)
                    sum2 = gl.convert_layout(sum2, BY_ROW, assert_trivial=True)
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
                    store_rows(m, sum, acc, sink, o_ptr, out, real, c, SINKS)


@gluon.jit(do_not_specialize=["T", "R", "N", "chunks", "limit"])
def few_kernel(
    q_ptr, k_desc, v_desc, q_start_ptr, kv_len_ptr, table_ptr, o_ptr, m_part_ptr, sum_part_ptr, acc_part_ptr,
    arrived_ptr, sink_ptr, c, T, R, N, chunks, limit, H: gl.constexpr, G: gl.constexpr, K: gl.constexpr,
    S: gl.constexpr, GP: gl.constexpr, CHUNK: gl.constexpr, BLOCK: gl.constexpr, WIDE: gl.constexpr,
    PARTS: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr, SPLIT: gl.constexpr,
    MERGED: gl.constexpr, MAXIMA: gl.constexpr, TOTALS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `rows_kernel` of attention_kernels.py. Of PARTS programs each takes its columns of the values, and all
    keys."""
    DTYPE: gl.constexpr = k_desc.dtype
    J: gl.constexpr = H // G
    k_ring = gl.allocate_shared_memory(DTYPE, [STAGES * WIDE, BLOCK, K], k_desc.layout)
    v_ring = gl.allocate_shared_memory(DTYPE, [STAGES * WIDE, BLOCK, K // PARTS], v_desc.layout)
    q_tile = gl.allocate_shared_memory(DTYPE, [16, K], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    totals = gl.allocate_shared_memory(gl.float32, [16, SUMS], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    weights = ()
    maxima = ()
    for _ in gl.static_range(WIDE):
        weights = weights + (gl.allocate_shared_memory(DTYPE, [16, BLOCK], q_tile.layout),)  # noqa: RUF005
        own = gl.allocate_shared_memory(gl.float32, [16, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        maxima = maxima + (own,)  # noqa: RUF005
    k_full, empty = barriers(STAGES, WIDE * BLOCK // BOX, 1)
    v_full = barrier_ring(STAGES, WIDE * BLOCK // BOX)
    fence_async_shared()
    begin(PDL)
    gl.warp_specialize(
        [
            (attend, (q_ptr, q_start_ptr, kv_len_ptr, o_ptr, m_part_ptr, sum_part_ptr, acc_part_ptr, arrived_ptr,
                      sink_ptr, k_ring, v_ring, q_tile, weights, maxima, totals, k_full, v_full, empty, c, chunks,
                      limit, H, G, K, GP, CHUNK, BLOCK, WIDE, PARTS, STAGES, WINDOW, SINKS, SPLIT, MERGED, MAXIMA,
                      TOTALS, PDL)),
            (copy_rows, (k_desc, v_desc, q_start_ptr, kv_len_ptr, table_ptr, k_ring, v_ring, k_full, v_full, empty, N,
                         limit, K, S, GP, CHUNK, BLOCK, WIDE, PARTS, STAGES, WINDOW, PDL)),
        ],
        [1], [48],
    )  # fmt: skip
    if (limit == 0) & (gl.program_id(2) == 0) & (gl.program_id(0) % PARTS == 0):
        first = gl.program_id(0) // PARTS * J
        for t in range(gl.load(q_start_ptr + R) + gl.program_id(1), T, R):
            j = gl.arange(0, 64, layout=gl.BlockedLayout([2], [32], [4], [0]))
            for low in range(0, J * K, 64):
                zeros = gl.zeros_like(j).to(DTYPE)
                gl.store(o_ptr + ((t + j * 0).to(gl.int64) * H + first) * K + j + low, zeros)
