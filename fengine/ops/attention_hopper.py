"""Attention of many tokens a row on NVIDIA Hopper: `tiles_kernel` of attention_many.py, with its warps specialised.

A program stays and takes tile after tile, always the next one that nobody has: tiles take unequal time. One warp copies
queries, keys and values (TMA) into rings in shared memory, ahead over the borders of tiles; two groups of four warps
attend to 64 rows each. P V of a block is on the tensor cores while the softmax of the next one runs, and the first
scores of the next chunk, or tile, while a chunk is merged. The same reduction tree, hence the same bits: see
attention.py. After FlashAttention-3 (arXiv 2407.08608).

Scores of 64 rows and 64 keys take as long to multiply as their operands take out of shared memory: where registers have
room, at width 64, the queries are there and a product takes 128 keys. (At width 128 that gained nothing.)

At width 256 registers hold the sums of one chunk: those of the chunks before lie in memory meanwhile. Shared memory has
room for few blocks, so a second warp copies the values: neither kind waits for the other's room."""
# pyright: reportInvalidTypeForm=false

import torch
from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.attention_kernels import SUMS
from fengine.ops.attention_parts_hopper import clear_unowned, end_chunk, halved, hide, store_rows, weights_of, with_sink
from fengine.ops.attention_tiles import copy_items, copy_values, find_item, first_block, item_at, table_kernel
from fengine.ops.registration import (
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

BM = 128  # rows of a tile: tokens times query heads
PIECE = 64  # keys that are copied together, of one page; a block of the tree is one or two


def rings(width: int) -> tuple[int, int, int]:
    """How many tiles of queries, blocks of keys and blocks of values shared memory holds. Pure."""
    return (2, 3, 3) if width <= 128 else (1, 2, 3)


def usable(q_THK: Tensor, k_PSGK: Tensor) -> bool:
    """Whether the kernel is written for these types and shapes and this device."""
    width, size = q_THK.shape[2], k_PSGK.shape[1]
    return (
        runs_gluon(q_THK.device)
        and q_THK.dtype in (torch.bfloat16, torch.float16)
        and k_PSGK.dtype in (q_THK.dtype, torch.uint8)  # codes are decoded beforehand
        and width in (64, 128, 256)
        and size % PIECE == 0
        and k_PSGK.data_ptr() % 16 == 0
    )


def launch(q_THK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, q_start_B: Tensor, kv_len_R: Tensor, page_table_RN: Tensor,
           o_THK: Tensor, c: float, limit: int, chunk: int, block: int, window: int = 0,
           sinks_H: Tensor | None = None) -> None:  # fmt: skip
    """Rows of more than `limit` tokens, and zeros behind the last row. Modifies: o_THK."""
    tokens, heads, width = q_THK.shape
    size, groups = k_PSGK.shape[1:3]
    rows, table_width = page_table_RN.shape
    per_group = heads // groups
    packed = min(per_group & -per_group, BM // 2)  # heads that share a tile: a power of two, so that no row is idle
    most = tokens // (BM // packed) + min(rows, tokens // (limit + 1)) + 1
    tiles = torch.empty(4 + 4 * most, dtype=torch.int32, device=q_THK.device)
    launcher(table_kernel, (most + 1,))(
        q_start_B, kv_len_R, tiles, o_THK, tokens, rows, limit, heads * width, BM // packed, 4096, num_warps=4
    )
    k, v = (describe(x.view(-1, groups * width), PIECE, width) for x in (k_PSGK, v_PSGK))
    programs = multiprocessors(q_THK.device.index)
    parked = torch.empty(programs * BM * width * (width > 128), dtype=torch.float32, device=q_THK.device)
    launcher(persistent_kernel, (programs,))(
        describe(q_THK, 64 // packed, packed, width), k, v, tiles, page_table_RN, o_THK, parked, sinks_H, c,
        table_width, heads, groups, width, size, packed, chunk, block, window, sinks_H is not None, *rings(width),
        num_warps=4
    )  # fmt: skip


@gluon.jit
def queries(q_ring, slot, LAYOUT: gl.constexpr, IN_REGISTERS: gl.constexpr):
    """The queries of a slot as the left side of a product."""
    q = q_ring.index(slot)
    if IN_REGISTERS:
        q = q.load(LAYOUT)
    return q


@gluon.jit
def begin_scores(q, k_ring, slot, none):
    """The scores of a block, under way."""
    return warpgroup_mma(q, k_ring.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def attend(tiles_ptr, WHO: gl.constexpr, o_ptr, parked_ptr, sink_ptr, item_ring, q_ring, k_ring, v_ring, q_full,
           q_empty, k_full, k_empty, v_full, v_empty, c, H: gl.constexpr, K: gl.constexpr, PACK: gl.constexpr,
           CHUNK: gl.constexpr, BLOCK: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr, TILES: gl.constexpr,
           KEYS: gl.constexpr, VALUES: gl.constexpr):  # fmt: skip
    """A group of four warps: 64 rows of every item, all keys.

    The first scores of a chunk (s) are begun at the end of the chunk before, of this item or the one before.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    QUERIES: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    BY_SCORE: gl.constexpr = gl.SliceLayout(1, SCORES)
    BY_OUT: gl.constexpr = gl.SliceLayout(1, OUT)
    DTYPE: gl.constexpr = o_ptr.dtype.element_ty
    SMALL: gl.constexpr = K == 64  # leaves registers for the queries
    WIDE: gl.constexpr = K > 128  # has none for the sums of the chunks before
    none = gl.zeros([64, BLOCK], gl.float32, SCORES)
    tiles = gl.load(tiles_ptr)
    items = tiles * (H // PACK)
    n = 0  # blocks so far
    j = 0  # items so far
    mbarrier.wait(q_full.index(0), 0)
    item = item_at(item_ring, 0, TILES, 4)
    mbarrier.wait(k_full.index(0), 0, pred=item < items)
    s = begin_scores(queries(q_ring, WHO, QUERIES, SMALL), k_ring, 0, none)
    while item < items:
        following = item
        line, left, start, row, part = find_item(tiles_ptr, item, tiles, H // PACK)
        kv_len = start + left
        seen = gl.minimum(kv_len, start + 128 // PACK)
        lines = WHO * 64 + gl.arange(0, 64, layout=BY_SCORE)
        position = start + lines // PACK
        if SINKS:
            sink = gl.load(sink_ptr + part * PACK + lines % PACK)
        begin = first_block(start, BLOCK, WINDOW) * BLOCK
        q = queries(q_ring, (j % TILES) * 2 + WHO, QUERIES, SMALL)
        m = gl.full([64], float("-inf"), gl.float32, BY_SCORE)
        sum = gl.full([64], -0.0, gl.float32, BY_SCORE)
        if not WIDE:
            acc = gl.full([64, K], -0.0, gl.float32, OUT)
        for low in range(begin // CHUNK * CHUNK, seen, CHUNK):
            from_ = gl.maximum(low, begin) if WINDOW else low
            end = gl.cdiv(gl.minimum(low + CHUNK, seen), BLOCK)
            first = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(n % KEYS))
            first = hide(first, from_, position, start + 1, BLOCK, SCORES, WINDOW, 128 // PACK)
            m2 = gl.max(first, 1)
            p, safe = weights_of(first, m2, c, none)
            sums = halved(p, BLOCK, SUMS)
            weights = gl.convert_layout(p.to(DTYPE), WEIGHTS)
            acc2 = gl.zeros([64, K], gl.float32, OUT)
            for block in range(from_ // BLOCK + 1, end):
                before = n % VALUES
                phase = (n // VALUES) & 1
                n += 1
                mbarrier.wait(k_full.index(n % KEYS), (n // KEYS) & 1)
                u = begin_scores(q, k_ring, n % KEYS, none)
                mbarrier.wait(v_full.index(before), phase)
                acc2 = warpgroup_mma(weights, v_ring.index(before), acc2, is_async=True)
                u = warpgroup_mma_wait(1, deps=[u])
                u = hide(u, block * BLOCK, position, start + 1, BLOCK, SCORES, WINDOW, 128 // PACK)
                m_new = gl.maximum(m2, gl.max(u, 1))
                p, safe = weights_of(u, m_new, c, none)
                alpha = gl.exp2((m2 - safe) * c)
                m2 = m_new
                by = gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))[:, None] + gl.zeros_like(sums)
                sums = gl.fma(sums, by, halved(p, BLOCK, SUMS))
                if not SMALL:
                    # Passes at once. ptxas leaves the exponentials in front of it; without it they stand behind the
                    # wait for the product that they are to run beside.
                    mbarrier.wait(v_full.index(before), phase)
                acc2 = warpgroup_mma_wait(0, deps=[acc2])
                mbarrier.arrive(k_empty.index(n % KEYS))
                mbarrier.arrive(v_empty.index(before))
                acc2 = acc2 * gl.convert_layout(alpha, BY_OUT)[:, None]
                weights = gl.convert_layout(p.to(DTYPE), WEIGHTS)
            slot = n % VALUES
            mbarrier.wait(v_full.index(slot), (n // VALUES) & 1)
            if end * BLOCK > kv_len:
                clear_unowned(v_ring.index(slot), (end - 1) * BLOCK, kv_len, BLOCK, LINES)
            acc2 = warpgroup_mma(weights, v_ring.index(slot), acc2, is_async=True)
            sum2 = gl.sum(halved(sums, SUMS, 2), 1)
            n += 1
            last = low + CHUNK >= seen
            mbarrier.arrive(q_empty.index(j % TILES), pred=last)
            i = j + last.to(gl.int32)
            mbarrier.wait(q_full.index(i % TILES), (i // TILES) & 1)
            following = item_at(item_ring, i, TILES, 4)
            more = following < items  # behind the last block: scores that nobody reads
            mbarrier.wait(k_full.index(n % KEYS), (n // KEYS) & 1, pred=more)
            s = begin_scores(queries(q_ring, (i % TILES) * 2 + WHO, QUERIES, SMALL), k_ring, n % KEYS, none)
            acc2 = warpgroup_mma_wait(1, deps=[acc2])
            mbarrier.arrive(v_empty.index(slot))
            m_new = gl.maximum(m, m2)
            safe = gl.where(m_new == float("-inf"), 0.0, m_new)
            a = gl.exp2((m - safe) * c)
            b = gl.exp2((m2 - safe) * c)
            if WINDOW:  # a chunk of which a row sees nothing, all zeros, leaves it as it is, its signs of zero too
                b = gl.where(m2 == float("-inf"), -0.0, b)
            m = m_new
            sum = gl.fma(gl.convert_layout(sum2, BY_SCORE), b, sum * a)
            if WIDE:
                kept = gl.full([64], 1.0, gl.float32, BY_SCORE)
                whole = sum
                if SINKS:
                    whole, kept = with_sink(m, sum, sink, c)
                end_chunk(acc2, a, b, whole, kept, parked_ptr, o_ptr, line, left, part, low > begin // CHUNK * CHUNK,
                          last, WHO, 0, H, K, PACK)  # fmt: skip
            else:
                b_out = gl.convert_layout(b, BY_OUT)[:, None] + gl.zeros_like(acc2)
                acc = gl.fma(acc2, b_out, acc * gl.convert_layout(a, BY_OUT)[:, None])
        j += 1
        item = following
        if not WIDE:
            if SINKS:
                sum, kept = with_sink(m, sum, sink, c)
                acc = acc * gl.convert_layout(kept, BY_OUT)[:, None]
            o = acc / gl.convert_layout(sum, BY_OUT)[:, None]
            store_rows(o_ptr, o.to(DTYPE), WHO, line, left, part, H, K, PACK, LINES)
    warpgroup_mma_wait(0, deps=[s])


@gluon.jit(do_not_specialize=["N"])
def persistent_kernel(
    q_desc, k_desc, v_desc, tiles_ptr, table_ptr, o_ptr, parked_ptr, sink_ptr, c, N, H: gl.constexpr, G: gl.constexpr,
    K: gl.constexpr, S: gl.constexpr, PACK: gl.constexpr, CHUNK: gl.constexpr, BLOCK: gl.constexpr,
    WINDOW: gl.constexpr, SINKS: gl.constexpr, TILES: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Items: tiles of 128 // PACK tokens, from table_kernel, with PACK query heads of a kv head. One after another."""
    DTYPE: gl.constexpr = q_desc.dtype
    RING: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, K], DTYPE)
    item_ring = gl.allocate_shared_memory(gl.int32, [TILES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_ring = gl.allocate_shared_memory(DTYPE, [2 * TILES, 64, K], RING)
    k_ring = gl.allocate_shared_memory(DTYPE, [KEYS, BLOCK, K], RING)
    v_ring = gl.allocate_shared_memory(DTYPE, [VALUES, BLOCK, K], RING)
    COPIES: gl.constexpr = 2 if K > 128 else 1  # warps that copy: of few blocks, none is to wait for another's room
    q_full, q_empty = barriers(TILES, 1, 1 + COPIES)
    k_full, k_empty = barriers(KEYS, 1, 2)
    v_full, v_empty = barriers(VALUES, 1, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (attend, (tiles_ptr, who, o_ptr, parked_ptr, sink_ptr, item_ring, q_ring, k_ring, v_ring, q_full, q_empty,
                      k_full, k_empty, v_full, v_empty, c, H, K, PACK, CHUNK, BLOCK, WINDOW, SINKS, TILES, KEYS,
                      VALUES)) if who < 2 else
            (copy_items, (q_desc, k_desc, v_desc, tiles_ptr, table_ptr, N, item_ring, q_ring, k_ring, v_ring, q_full,
                          q_empty, k_full, k_empty, v_full, v_empty, H, G, K, S, PACK, BLOCK, WINDOW, TILES, KEYS,
                          VALUES, COPIES)) if who == 2 else
            (copy_values, (v_desc, tiles_ptr, table_ptr, N, item_ring, v_ring, q_full, q_empty, v_full, v_empty, H, G,
                           K, S, PACK, BLOCK, WINDOW, TILES, VALUES))
            for who in (0, 1, 2, 3)[:2 + COPIES]
        ],
        [4, 1, 1][:1 + COPIES], [240, 24, 24][:1 + COPIES],
    )  # fmt: skip
