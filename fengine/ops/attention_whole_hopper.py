"""Attention of whole rows (not causal) with heads of 65 to 96 on NVIDIA Hopper, as towers of images have them.

As attention_hopper.py, of which it is a plainer form: every tile of a row sees the same keys, so programs take tiles in
turn. A head is two pieces, 64 columns and the rest as 16 or 32, zeros behind its end: each product is two, which follow
each other in the same sum, so nothing is multiplied for a width of 128. Queries stay in registers. The same reduction
tree, hence the same bits: see attention.py.
"""
# pyright: reportInvalidTypeForm=false

import torch
from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.attention_kernels import SUMS
from fengine.ops.attention_parts_hopper import clear_unowned, halved, hide, weights_of
from fengine.ops.attention_tiles import table_kernel
from fengine.ops.registration import (
    async_load,
    barriers,
    describe,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    multiprocessors,
    runs_gluon,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BM = 128  # tokens of a tile, of one head
BLOCK = 64  # keys that are copied together, of one page
FIRST = 64  # columns of a head's first piece
STAGES = 5  # blocks of keys and of values in the ring


def usable(q_THK: Tensor, k_PSGK: Tensor) -> bool:
    """Whether the kernel is written for these types and shapes and this device."""
    width, size = q_THK.shape[2], k_PSGK.shape[1]
    return (
        runs_gluon(q_THK.device)
        and q_THK.dtype in (torch.bfloat16, torch.float16)
        and k_PSGK.dtype == q_THK.dtype
        and FIRST < width <= 96
        and width % 8 == 0
        and size % BLOCK == 0
        and k_PSGK.data_ptr() % 16 == 0
    )


def launch(q_THK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, q_start_B: Tensor, kv_len_R: Tensor, page_table_RN: Tensor,
           o_THK: Tensor, c: float, limit: int, chunk: int, block: int) -> None:  # fmt: skip
    """Rows of more than `limit` tokens, and zeros behind the last row. Modifies: o_THK."""
    tokens, heads, width = q_THK.shape
    size, groups = k_PSGK.shape[1:3]
    rows, table_width = page_table_RN.shape
    most = tokens // BM + min(rows, tokens // (limit + 1)) + 1
    tiles = torch.empty(4 + 4 * most, dtype=torch.int32, device=q_THK.device)
    launcher(table_kernel, (most + 1,))(
        q_start_B, kv_len_R, tiles, o_THK, tokens, rows, limit, heads * width, BM, 4096, num_warps=4
    )
    rest = 16 if width - FIRST <= 16 else 32
    pieces = [describe(x, 64, 1, n) for x in (q_THK, k_PSGK.flatten(0, 1), v_PSGK.flatten(0, 1)) for n in (FIRST, rest)]
    launcher(whole_kernel, (multiprocessors(q_THK.device.index),))(
        *pieces, tiles, page_table_RN, o_THK, c, table_width, heads, groups, width, rest, size, chunk, STAGES,
        num_warps=4
    )  # fmt: skip


@gluon.jit
def find_item(tiles_ptr, item, tiles):
    """(first token, the row's tokens from there, position of the first, row, head): head by head, as a head's keys stay
    in the L2 cache."""
    at = tiles_ptr + 4 + item % tiles * 4
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), item // tiles


@gluon.jit
def begin_scores(q1, q2, k1_ring, k2_ring, slot, none):
    """The scores of a block, under way."""
    s = warpgroup_mma(q1, k1_ring.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
    return warpgroup_mma(q2, k2_ring.index(slot).permute((1, 0)), s, is_async=True)


@gluon.jit
def begin_values(weights, v1, v2, acc1, acc2, W2: gl.constexpr):
    acc1 = warpgroup_mma(weights, v1, acc1, is_async=True)
    return acc1, warpgroup_mma(gl.convert_layout(weights, W2), v2, acc2, is_async=True)


@gluon.jit
def joined(acc, acc2, a, b, OUT: gl.constexpr):
    """A chunk's sums (acc2) joined to the running ones."""
    b_out = gl.convert_layout(b, gl.SliceLayout(1, OUT))[:, None] + gl.zeros_like(acc2)
    return gl.fma(acc2, b_out, acc * gl.convert_layout(a, gl.SliceLayout(1, OUT))[:, None])


@gluon.jit
def store_rows(o_ptr, acc, sum, WHO: gl.constexpr, line, left, head, FROM: gl.constexpr, H: gl.constexpr,
               K: gl.constexpr, OUT: gl.constexpr):  # fmt: skip
    """A piece of the columns, from FROM on."""
    WIDTH: gl.constexpr = acc.shape[1]
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    i = WHO * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    d = FROM + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LINES))
    o = (acc / gl.convert_layout(sum, gl.SliceLayout(1, OUT))[:, None]).to(o_ptr.dtype.element_ty)
    at = ((line + i).to(gl.int64) * H + head) * K
    gl.store(o_ptr + at[:, None] + d[None, :], gl.convert_layout(o, LINES), mask=(i < left)[:, None] & (d < K)[None, :])


@gluon.jit
def attend(tiles_ptr, WHO: gl.constexpr, o_ptr, q1_ring, q2_ring, k1_ring, k2_ring, v1_ring, v2_ring, full, empty, c,
           H: gl.constexpr, K: gl.constexpr, REST: gl.constexpr, CHUNK: gl.constexpr,
           STAGES: gl.constexpr):  # fmt: skip
    """A group of four warps: 64 rows of every item, all keys.

    The first scores of a chunk (s) are begun at the end of the chunk before, of this item or the one before.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    Q: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    OUT1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUT2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])
    W1: gl.constexpr = gl.DotOperandLayout(0, OUT1, 2)
    W2: gl.constexpr = gl.DotOperandLayout(0, OUT2, 2)
    V1: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    V2: gl.constexpr = gl.BlockedLayout([1, 8], [256 // REST, REST // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    DTYPE: gl.constexpr = o_ptr.dtype.element_ty
    none = gl.zeros([64, 64], gl.float32, SCORES)
    tiles = gl.load(tiles_ptr)
    items = tiles * H
    n = 0  # blocks so far
    j = 0  # items so far
    item = gl.program_id(0)
    mbarrier.wait(full.index(2 * STAGES), 0, pred=item < items)
    mbarrier.wait(full.index(0), 0, pred=item < items)
    s = begin_scores(q1_ring.index(WHO).load(Q), q2_ring.index(WHO).load(Q), k1_ring, k2_ring, 0, none)
    while item < items:
        line, left, start, _, head = find_item(tiles_ptr, item, tiles)
        kv_len = start + left
        last = gl.zeros([64], gl.int32, ROWS) + kv_len - 1
        q1 = q1_ring.index((j % 2) * 2 + WHO).load(Q)
        q2 = q2_ring.index((j % 2) * 2 + WHO).load(Q)
        m = gl.full([64], float("-inf"), gl.float32, ROWS)
        sum = gl.full([64], -0.0, gl.float32, ROWS)
        acc1 = gl.full([64, 64], -0.0, gl.float32, OUT1)
        acc2 = gl.full([64, REST], -0.0, gl.float32, OUT2)
        following = item + gl.num_programs(0)
        for low in range(0, kv_len, CHUNK):
            end = gl.cdiv(gl.minimum(low + CHUNK, kv_len), 64)
            first = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(empty.index(n % STAGES))
            first = hide(first, low, last, kv_len, 64, SCORES)
            m2 = gl.max(first, 1)
            p, safe = weights_of(first, m2, c, none)
            sums = halved(p, 64, SUMS)
            weights = gl.convert_layout(p.to(DTYPE), W1)
            new1 = gl.zeros([64, 64], gl.float32, OUT1)
            new2 = gl.zeros([64, REST], gl.float32, OUT2)
            for block in range(low // 64 + 1, end):
                before = n % STAGES
                phase = (n // STAGES) & 1
                n += 1
                mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1)
                u = begin_scores(q1, q2, k1_ring, k2_ring, n % STAGES, none)
                mbarrier.wait(full.index(STAGES + before), phase)
                new1, new2 = begin_values(weights, v1_ring.index(before), v2_ring.index(before), new1, new2, W2)
                u = warpgroup_mma_wait(2, deps=[u])
                u = hide(u, block * 64, last, kv_len, 64, SCORES)
                m_new = gl.maximum(m2, gl.max(u, 1))
                p, safe = weights_of(u, m_new, c, none)
                alpha = gl.exp2((m2 - safe) * c)
                m2 = m_new
                by = gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))[:, None] + gl.zeros_like(sums)
                sums = gl.fma(sums, by, halved(p, 64, SUMS))
                # Passes at once. ptxas leaves the exponentials in front of it; without it they stand behind the wait
                # for the product that they are to run beside.
                mbarrier.wait(full.index(STAGES + before), phase)
                new1, new2 = warpgroup_mma_wait(0, deps=[new1, new2])
                mbarrier.arrive(empty.index(n % STAGES))
                mbarrier.arrive(empty.index(STAGES + before))
                new1 = new1 * gl.convert_layout(alpha, gl.SliceLayout(1, OUT1))[:, None]
                new2 = new2 * gl.convert_layout(alpha, gl.SliceLayout(1, OUT2))[:, None]
                weights = gl.convert_layout(p.to(DTYPE), W1)
            slot = n % STAGES
            mbarrier.wait(full.index(STAGES + slot), (n // STAGES) & 1)
            if end * 64 > kv_len:
                clear_unowned(v1_ring.index(slot), (end - 1) * 64, kv_len, 64, V1)
                clear_unowned(v2_ring.index(slot), (end - 1) * 64, kv_len, 64, V2)
            new1, new2 = begin_values(weights, v1_ring.index(slot), v2_ring.index(slot), new1, new2, W2)
            sum2 = gl.sum(halved(sums, SUMS, 2), 1)
            n += 1
            i = j + gl.where(low + CHUNK < kv_len, 0, 1)
            more = (i == j) | (following < items)  # behind the last block: scores that nobody reads
            mbarrier.wait(full.index(2 * STAGES + i % 2), (i // 2) & 1, pred=more)
            mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1, pred=more)
            at = (i % 2) * 2 + WHO
            s = begin_scores(q1_ring.index(at).load(Q), q2_ring.index(at).load(Q), k1_ring, k2_ring, n % STAGES, none)
            new1, new2 = warpgroup_mma_wait(2, deps=[new1, new2])
            mbarrier.arrive(empty.index(STAGES + slot))
            m_new = gl.maximum(m, m2)
            safe = gl.where(m_new == float("-inf"), 0.0, m_new)
            a = gl.exp2((m - safe) * c)
            b = gl.exp2((m2 - safe) * c)
            m = m_new
            sum = gl.fma(gl.convert_layout(sum2, ROWS), b, sum * a)
            acc1 = joined(acc1, new1, a, b, OUT1)
            acc2 = joined(acc2, new2, a, b, OUT2)
        mbarrier.arrive(empty.index(2 * STAGES + j % 2))
        j += 1
        item = following
        store_rows(o_ptr, acc1, sum, WHO, line, left, head, 0, H, K, OUT1)
        store_rows(o_ptr, acc2, sum, WHO, line, left, head, 64, H, K, OUT2)
    warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def lines(ring, desc, COUNT: gl.constexpr, WIDTH: gl.constexpr):
    """A ring of COUNT pieces as the copy engine writes them: one head of 64 tokens."""
    return ring._reinterpret(desc.dtype, [COUNT, 64, 1, WIDTH], desc.layout)


@gluon.jit
def copy_block(desc1, desc2, line, head, ring1, ring2, slot, full, empty, phase, BYTES: gl.constexpr):
    """A block of keys or values, when its place is free."""
    mbarrier.wait(empty, phase)
    mbarrier.expect(full, BYTES)
    async_load(desc1, [line, head, 0], full, ring1.index(slot))
    async_load(desc2, [line, head, 64], full, ring2.index(slot))


@gluon.jit
def copy_items(q1_desc, q2_desc, k1_desc, k2_desc, v1_desc, v2_desc, tiles_ptr, table_ptr, N, q1_ring, q2_ring, k1_ring,
               k2_ring, v1_ring, v2_ring, full, empty, H: gl.constexpr,
               G: gl.constexpr, REST: gl.constexpr, S: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The copying warp: item after item, block after block, as the rings have room."""
    BYTES: gl.constexpr = 64 * (64 + REST) * 2
    q1 = lines(q1_ring, q1_desc, 4, 64)
    q2 = lines(q2_ring, q2_desc, 4, REST)
    k1 = lines(k1_ring, k1_desc, STAGES, 64)
    k2 = lines(k2_ring, k2_desc, STAGES, REST)
    v1 = lines(v1_ring, v1_desc, STAGES, 64)
    v2 = lines(v2_ring, v2_desc, STAGES, REST)
    tiles = gl.load(tiles_ptr)
    n = 0
    j = 0
    for item in range(gl.program_id(0), tiles * H, gl.num_programs(0)):
        line, left, start, row, head = find_item(tiles_ptr, item, tiles)
        table, kv_head = table_ptr + row.to(gl.int64) * N, head // (H // G)
        there = full.index(2 * STAGES + j % 2)
        mbarrier.wait(empty.index(2 * STAGES + j % 2), ((j // 2) & 1) ^ 1)
        mbarrier.expect(there, 2 * BYTES)
        for who in gl.static_range(2):
            async_load(q1_desc, [line + who * 64, head, 0], there, q1.index((j % 2) * 2 + who))
            async_load(q2_desc, [line + who * 64, head, 64], there, q2.index((j % 2) * 2 + who))
        for key in range(0, start + left, 64):
            at = gl.load(table + key // S) * S + key % S
            slot = n % STAGES
            phase = ((n // STAGES) & 1) ^ 1
            copy_block(k1_desc, k2_desc, at, kv_head, k1, k2, slot, full.index(slot), empty.index(slot), phase, BYTES)
            copy_block(v1_desc, v2_desc, at, kv_head, v1, v2, slot, full.index(STAGES + slot),
                       empty.index(STAGES + slot), phase, BYTES)  # fmt: skip
            n += 1
        j += 1


@gluon.jit(do_not_specialize=["N"])
def whole_kernel(
    q1_desc, q2_desc, k1_desc, k2_desc, v1_desc, v2_desc, tiles_ptr, table_ptr, o_ptr, c, N, H: gl.constexpr,
    G: gl.constexpr, K: gl.constexpr, REST: gl.constexpr, S: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Items: tiles of 128 tokens, from table_kernel, of one head. Programs take them in turn."""
    DTYPE: gl.constexpr = q1_desc.dtype
    FIRST: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], DTYPE)
    SECOND: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, REST], DTYPE)
    q1_ring = gl.allocate_shared_memory(DTYPE, [4, 64, 64], FIRST)
    q2_ring = gl.allocate_shared_memory(DTYPE, [4, 64, REST], SECOND)
    k1_ring = gl.allocate_shared_memory(DTYPE, [STAGES, 64, 64], FIRST)
    k2_ring = gl.allocate_shared_memory(DTYPE, [STAGES, 64, REST], SECOND)
    v1_ring = gl.allocate_shared_memory(DTYPE, [STAGES, 64, 64], FIRST)
    v2_ring = gl.allocate_shared_memory(DTYPE, [STAGES, 64, REST], SECOND)
    full, empty = barriers(2 * STAGES + 2, 1, 2)  # keys, values, queries
    fence_async_shared()
    gl.warp_specialize(
        [
            (attend, (tiles_ptr, 0, o_ptr, q1_ring, q2_ring, k1_ring, k2_ring, v1_ring, v2_ring, full, empty, c, H, K,
                      REST, CHUNK, STAGES)),
            (attend, (tiles_ptr, 1, o_ptr, q1_ring, q2_ring, k1_ring, k2_ring, v1_ring, v2_ring, full, empty, c, H, K,
                      REST, CHUNK, STAGES)),
            (copy_items, (q1_desc, q2_desc, k1_desc, k2_desc, v1_desc, v2_desc, tiles_ptr, table_ptr, N, q1_ring,
                          q2_ring, k1_ring, k2_ring, v1_ring, v2_ring, full, empty, H, G, REST, S, STAGES)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
