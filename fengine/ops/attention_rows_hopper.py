"""Attention of rows of few tokens (decode) over pages in FP8 on NVIDIA Hopper: `rows_kernel` of attention_kernels.py.

Codes come to shared memory as they are (cp.async), AHEAD blocks ahead. Threads take them out where the tensor cores
want them, and make bfloat16 of them there: see kv_fp8_decode.py. Warps share the keys of a block in the first product,
the columns of values in the second; between them they exchange the largest scores and the weights, behind the same
two barriers that guard the rings. The same reduction tree, hence the same bits: see attention.py.
"""
# pyright: reportInvalidTypeForm=false

from typing import Any

import torch
from torch import Tensor

from fengine.ops import kv_fp8
from fengine.ops.ahead import launcher
from fengine.ops.attention_kernels import SUMS
from fengine.ops.attention_merge_hopper import merge, merge_stored, store_rows
from fengine.ops.attention_parts_hopper import halved
from fengine.ops.kv_fp8_decode import keys_of, layouts, permuted, power, values_of
from fengine.ops.registration import async_copy, begin, dependent_launch, gl, gluon, mma_v2, runs_gluon, wait

REGISTERS = 512  # of a thread, over warps: four programs share a multiprocessor


def usable(q_THK: Tensor, k_PSGK: Tensor) -> bool:
    """Whether the kernel is written for these types and shapes and this device."""
    return (
        runs_gluon(q_THK.device)
        and kv_fp8.is_few(k_PSGK)
        and q_THK.dtype == torch.bfloat16
        and q_THK.shape[2] == 128
        and q_THK.shape[1] // k_PSGK.shape[2] <= 16
        and k_PSGK.shape[1] % 64 == 0
        and k_PSGK.data_ptr() % 16 == 0
    )


def launch(call: Any, o_THK: Tensor, workspace: Any, c: float, chunks: int, limit: int, shape: Any, splits: int,
           merged: int, warps: int, ahead: int, trigger: int) -> None:  # fmt: skip
    """Rows of up to `limit` tokens; 0: all rows. Modifies: o_THK, the workspace."""
    rows, table_width = call[-1].shape
    heads, groups, width, _, size, padded, _, chunk, block = shape
    by_device = dependent_launch(o_THK.device.index, trigger)
    launcher(rows_kernel, (groups, rows, splits))(
        *call, o_THK, *workspace, c, len(o_THK), rows, table_width, chunks, limit, heads, groups, width, size, padded,
        chunk, block, splits > 1, merged, ahead, *layouts(warps, block), by_device["PDL"],
        num_warps=warps, maxnreg=REGISTERS // warps, launch_pdl=bool(by_device["PDL"])
    )  # fmt: skip


@gluon.jit
def copy_codes(pages_ptr, page, key, g, codes, inside, G: gl.constexpr, K: gl.constexpr, S: gl.constexpr,
               BLOCK: gl.constexpr):  # fmt: skip
    """Codes of a block's keys or values, on their way to shared memory."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    slot = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LINES))
    d = gl.arange(0, K, layout=gl.SliceLayout(0, LINES))
    here = pages_ptr + page.to(gl.int64) * (S * G * (K + 1))
    at = (g * S + key % S) * K + (slot * K)[:, None] + d[None, :]
    async_copy.async_copy_global_to_shared(codes, here + at, mask=inside)


@gluon.jit
def copy_exponents(pages_ptr, page, key, g, exponents, inside, G: gl.constexpr, K: gl.constexpr, S: gl.constexpr,
                   BLOCK: gl.constexpr):  # fmt: skip
    here = pages_ptr + page.to(gl.int64) * (S * G * (K + 1))
    at = gl.arange(0, BLOCK, layout=gl.BlockedLayout([16], [32], [gl.num_warps()], [0]))
    at = S * G * K + g * S + key % S // BLOCK * BLOCK + at
    async_copy.async_copy_global_to_shared(exponents, here + at, mask=inside)


@gluon.jit
def copy(k_ptr, v_ptr, k_page, v_page, k_key, v_key, seen, g, keys, values, k_exponents, v_exponents, G: gl.constexpr,
         K: gl.constexpr, S: gl.constexpr, BLOCK: gl.constexpr):  # fmt: skip
    """What one step asks for: keys of a block and both kinds of exponents, and values of the block before it."""
    copy_codes(k_ptr, k_page, k_key, g, keys, k_key < seen, G, K, S, BLOCK)
    copy_exponents(k_ptr, k_page, k_key, g, k_exponents, k_key < seen, G, K, S, BLOCK)
    copy_exponents(v_ptr, k_page, k_key, g, v_exponents, k_key < seen, G, K, S, BLOCK)
    copy_codes(v_ptr, v_page, v_key, g, values, v_key < seen, G, K, S, BLOCK)
    async_copy.commit_group()


@gluon.jit
def start_of(n, split, splits, CHUNK: gl.constexpr, BLOCK: gl.constexpr):
    """The first key of a program's block n."""
    PER: gl.constexpr = CHUNK // BLOCK
    return (split + n // PER * splits) * CHUNK + n % PER * BLOCK


@gluon.jit(do_not_specialize=["T", "R", "N", "chunks", "limit"])
def rows_kernel(
    q_ptr, k_ptr, v_ptr, q_start_ptr, kv_len_ptr, table_ptr, o_ptr, m_part_ptr, sum_part_ptr, acc_part_ptr, arrived_ptr,
    c, T, R, N, chunks, limit, H: gl.constexpr, G: gl.constexpr, K: gl.constexpr, S: gl.constexpr, GP: gl.constexpr,
    CHUNK: gl.constexpr, BLOCK: gl.constexpr, SPLIT: gl.constexpr, MERGED: gl.constexpr, AHEAD: gl.constexpr,
    QUERIES: gl.constexpr, WORDS: gl.constexpr, MAXIMA: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `rows_kernel` of attention_kernels.py: a row's chunks split, split + splits, ...; the last merges."""
    W: gl.constexpr = gl.num_warps()
    SUM: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, W], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUM, 2)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SUM)
    BY_KEY: gl.constexpr = gl.SliceLayout(0, SUM)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 1, [0])
    BQ: gl.constexpr = 16 // GP
    J: gl.constexpr = H // G
    g = gl.program_id(0)
    r = gl.program_id(1)
    split = gl.program_id(2)
    splits = gl.num_programs(2)
    k_ring = gl.allocate_shared_memory(gl.uint8, [AHEAD, BLOCK, K], gl.NVMMASharedLayout(128, 8, 2))
    v_ring = gl.allocate_shared_memory(gl.uint8, [AHEAD, BLOCK, K], gl.NVMMASharedLayout(128, 8, 2))
    k_exponents = gl.allocate_shared_memory(gl.uint8, [AHEAD, BLOCK], FLAT)
    v_exponents = gl.allocate_shared_memory(gl.uint8, [AHEAD, BLOCK], FLAT)
    k_words = k_ring._reinterpret(gl.int32, [AHEAD, BLOCK, K // 4], gl.NVMMASharedLayout(128, 32, 2))
    v_pairs = v_ring._reinterpret(gl.int16, [AHEAD, BLOCK, K // 2], gl.NVMMASharedLayout(128, 16, 2))
    maxima = gl.allocate_shared_memory(gl.float32, [16, W], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    weights = gl.allocate_shared_memory(gl.bfloat16, [16, BLOCK], gl.NVMMASharedLayout(128, 16, 2))
    begin(PDL)
    wait(PDL)
    start = gl.load(q_start_ptr + r)
    tokens = gl.load(q_start_ptr + r + 1) - start
    kv_len = gl.load(kv_len_ptr + r)
    table = table_ptr + r.to(gl.int64) * N
    none = gl.zeros([16, BLOCK], gl.float32, SUM)
    unseen = gl.full([16, K // 2], -0.0, gl.float32, SUM)
    unseen = gl.join(unseen, unseen).reshape((16, K))
    OUT: gl.constexpr = unseen.type.layout
    d = gl.arange(0, K, layout=gl.SliceLayout(0, OUT))
    i = gl.arange(0, 16, layout=gl.SliceLayout(1, OUT))
    if (tokens <= limit) | (limit == 0):
        for first in range(0, tokens, BQ):
            front = kv_len - tokens + first
            seen = gl.minimum(kv_len, front + BQ)
            count = gl.cdiv(seen, CHUNK)
            if split < count:
                gl.thread_barrier()
                v_key = seen
                v_page = seen
                k_key = split * CHUNK
                k_page = gl.load(table + k_key // S)
                for n in gl.static_range(AHEAD):
                    next_key = start_of(n + 1, split, splits, CHUNK, BLOCK)
                    next_page = gl.load(table + next_key // S, mask=next_key < seen, other=0)
                    copy(k_ptr, v_ptr, k_page, v_page, k_key, v_key, seen, g, k_ring.index(n),
                         v_ring.index((n + AHEAD - 1) % AHEAD), k_exponents.index(n), v_exponents.index(n), G, K, S,
                         BLOCK)  # fmt: skip
                    v_key = k_key
                    v_page = k_page
                    k_key = next_key
                    k_page = next_page
                iq = gl.arange(0, 16, layout=gl.SliceLayout(1, QUERIES))
                dq = gl.arange(0, K, layout=gl.SliceLayout(0, QUERIES))
                real_q = (first + iq // GP < tokens) & (iq % GP < J)
                line_q = (start + first + iq // GP).to(gl.int64) * H + g * J + iq % GP
                q = gl.load(q_ptr + line_q[:, None] * K + dq[None, :], mask=real_q[:, None], other=0.0)
                q = permuted(q, LEFT)
                position = front + gl.arange(0, 16, layout=BY_ROW) // GP
                real = (first + i // GP < tokens) & (i % GP < J)
                line = (start + first + i // GP).to(gl.int64) * H + g * J + i % GP
                out = line[:, None] * K + d[None, :]
                home = gl.where(limit == 0, start + first, r * BQ)
                part = ((home + i // GP).to(gl.int64) * H + g * J + i % GP) * chunks
                m = gl.full([16], float("-inf"), gl.float32, gl.SliceLayout(1, OUT))
                sum = gl.full([16], -0.0, gl.float32, gl.SliceLayout(1, OUT))
                acc = unseen
                n = 0
                async_copy.wait_group(AHEAD - 1)
                gl.thread_barrier()
                for chunk in range(split, count, splits):
                    m2 = gl.full([16], float("-inf"), gl.float32, BY_ROW)
                    sums = gl.zeros([16, SUMS], gl.float32, SUM)
                    even = gl.zeros([16, K // 2], gl.float32, SUM)
                    odd = gl.zeros([16, K // 2], gl.float32, SUM)
                    for low in range(chunk * CHUNK, gl.minimum(chunk * CHUNK + CHUNK, seen), BLOCK):
                        at = n % AHEAD
                        before = (n + AHEAD - 1) % AHEAD
                        n += 1
                        next_key = start_of(n + AHEAD, split, splits, CHUNK, BLOCK)
                        next_page = gl.load(table + next_key // S, mask=next_key < seen, other=0)
                        s = mma_v2(q, keys_of(k_words.index(at).load(WORDS), RIGHT), none)
                        s *= power(k_exponents.index(at).load(BY_KEY))[None, :]
                        scale = power(v_exponents.index(at).load(BY_KEY))
                        position_key = low + gl.arange(0, BLOCK, layout=BY_KEY)
                        if low + BLOCK > front + 1:
                            s = gl.where(position_key[None, :] <= position[:, None], s, float("-inf"))
                        maxima.store(gl.max(gl.max(s.reshape((16, BLOCK // (8 * W), W, 8)), 3), 1))  # of own keys
                        gl.thread_barrier()  # keys of this block, and values of the one before, are in registers
                        copy(k_ptr, v_ptr, k_page, v_page, k_key, v_key, seen, g, k_ring.index(at),
                             v_ring.index(before), k_exponents.index(at), v_exponents.index(at), G, K, S,
                             BLOCK)  # fmt: skip
                        v_key = k_key
                        v_page = k_page
                        k_key = next_key
                        k_page = next_page
                        top = gl.convert_layout(gl.max(maxima.load(MAXIMA), 1), BY_ROW, assert_trivial=True)
                        m_new = gl.maximum(m2, top)
                        safe = gl.where(m_new == float("-inf"), 0.0, m_new)
                        p = gl.exp2(gl.fma(s, c + none, (safe * -c)[:, None] + none))
                        alpha = gl.exp2((m2 - safe) * c)
                        m2 = m_new
                        if low + BLOCK > kv_len:
                            scale = gl.where(position_key < kv_len, scale, 0.0)
                        weights.store((p * scale[None, :]).to(gl.bfloat16))
                        async_copy.wait_group(AHEAD - 1)
                        gl.thread_barrier()  # weights, values of this block and keys of the next are there
                        w = weights.load(LEFT)
                        later = gl.convert_layout(halved(p, BLOCK, SUMS), SUM, assert_trivial=True)
                        sums = gl.fma(sums, alpha[:, None] + gl.zeros_like(sums), later)
                        v_even, v_odd = values_of(v_pairs.index(at).load(RIGHT))
                        even = mma_v2(w, v_even, even * alpha[:, None])
                        odd = mma_v2(w, v_odd, odd * alpha[:, None])
                    m_end = gl.convert_layout(m2, gl.SliceLayout(1, OUT))
                    sum2 = gl.convert_layout(gl.sum(halved(sums, SUMS, 2), 1), gl.SliceLayout(1, OUT))
                    acc2 = gl.join(even, odd).reshape((16, K))
                    if SPLIT:
                        if count == 1:
                            store_rows(m_end, sum2, acc2, 0, o_ptr, out, real, c, False)
                        else:
                            gl.store(m_part_ptr + part + chunk, m_end, mask=real)
                            gl.store(sum_part_ptr + part + chunk, sum2, mask=real)
                            gl.store(acc_part_ptr + (part + chunk)[:, None] * K + d[None, :], acc2, mask=real[:, None])
                    else:
                        m, sum, acc = merge(m, sum, acc, m_end, sum2, acc2, c, 0)
                if SPLIT:
                    if count > 1:
                        tile = gl.where(limit == 0, start // BQ, 0) + r + first // BQ
                        gl.thread_barrier()  # every thread's stores stand before the arrival
                        programs = gl.minimum(count, splits)
                        counter = arrived_ptr + tile * G + g
                        if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == programs - 1:
                            gl.store(counter, 0)
                            merge_stored(m_part_ptr, sum_part_ptr, acc_part_ptr, home.to(gl.int64), 0, count, g * J,
                                         tokens - first, o_ptr, o_ptr, (start + first).to(gl.int64), chunks, c, 0, H, J,
                                         K, K, GP, MERGED, 0, False)  # fmt: skip
                else:
                    store_rows(m, sum, acc, 0, o_ptr, out, real, c, False)
    if (limit == 0) & (split == 0):
        for t in range(gl.load(q_start_ptr + R) + r, T, R):
            j = gl.arange(0, 128, layout=gl.BlockedLayout([4], [32], [W], [0]))
            at = ((t + j * 0).to(gl.int64) * H + g * J) * K + j
            for low in range(0, J * K, 128):
                gl.store(o_ptr + at + low, gl.zeros_like(j).to(o_ptr.dtype.element_ty))
