"""Attention of many tokens a row on NVIDIA Hopper: `tiles_kernel` of attention_kernels.py, with its warps specialised.

One warp copies keys and values (TMA) into a ring in shared memory; two groups of four warps attend to 64 rows each. The
scores of the next block are on the tensor cores while the softmax of this one runs. The same reduction tree, hence the
same bits: see attention.py. After FlashAttention-3 (arXiv 2407.08608).

Gluon, the language of this kernel, comes with Triton and is experimental: where it is missing or has changed, `usable`
says no or the launch raises, and the Triton kernel computes.
"""
# pyright: reportInvalidTypeForm=false

import torch
from torch import Tensor

from fengine.ops.gluon import (
    TensorDescriptor,
    async_load,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BM = 128  # rows of a tile: tokens times query heads
PIECE = 64  # keys that are copied and multiplied together; a block of the tree is one or two
STAGES = 2  # blocks of keys and of values in the ring


def usable(q_THK: Tensor, k_PSGK: Tensor) -> bool:
    """Whether the kernel is written for these types and shapes and this device."""
    width, size = q_THK.shape[2], k_PSGK.shape[1]
    return (
        TensorDescriptor is not None
        and q_THK.is_cuda
        and q_THK.dtype in (torch.bfloat16, torch.float16)
        and k_PSGK.dtype == q_THK.dtype
        and width in (64, 128)
        and size % PIECE == 0
        and k_PSGK.data_ptr() % 16 == 0
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(q_THK.device)[0] == 9
    )


def launch(q_THK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, q_start_B: Tensor, kv_len_R: Tensor, page_table_RN: Tensor,
           o_THK: Tensor, c: float, limit: int, chunk: int, block: int) -> None:  # fmt: skip
    """Rows of more than `limit` tokens, and zeros behind the last row. Modifies: o_THK."""
    tokens, heads, width = q_THK.shape
    size, groups = k_PSGK.shape[1:3]
    rows, table_width = page_table_RN.shape
    per_group = heads // groups
    packed = min(per_group & -per_group, BM)  # heads that share a tile: a power of two, so that no row is idle
    layout = gl.NVMMASharedLayout.get_default_for([PIECE, width], gl.bfloat16)  # two bytes a value, fp16 alike
    k, v = (TensorDescriptor.from_tensor(x.view(-1, groups * width), [PIECE, width], layout) for x in (k_PSGK, v_PSGK))
    grid = (tokens // (BM // packed) + min(rows, tokens // (limit + 1)) + 1, groups * (per_group // packed))
    specialised_kernel[grid](
        q_THK, k, v, q_start_B, kv_len_R, page_table_RN, o_THK, c, tokens, rows, table_width, limit, heads, groups,
        width, size, packed, chunk, block, STAGES, num_warps=4
    )  # fmt: skip


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def total(sums):
    """[64, 64] -> [64], as `total` of attention_kernels.py."""
    x = gl.sum(sums.reshape((64, 32, 2)), 2)
    x = gl.sum(x.reshape((64, 16, 2)), 2)
    x = gl.sum(x.reshape((64, 8, 2)), 2)
    x = gl.sum(x.reshape((64, 4, 2)), 2)
    x = gl.sum(x.reshape((64, 2, 2)), 2)
    return gl.sum(x, 1)


@gluon.jit
def copy_blocks(k_desc, v_desc, table_ptr, k_ring, v_ring, k_full, k_empty, v_full, v_empty, seen, kv_len, column,
                S: gl.constexpr, K: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The copying warp: block after block as the ring has room. Pages behind kv_len are page 0."""
    PIECES: gl.constexpr = BLOCK // 64
    for n in range(0, gl.cdiv(seen, BLOCK)):
        slot = n % STAGES
        phase = ((n // STAGES) & 1) ^ 1
        mbarrier.wait(k_empty.index(slot), phase)
        mbarrier.expect(k_full.index(slot), BLOCK * K * 2)
        for piece in gl.static_range(PIECES):
            key = n * BLOCK + piece * 64
            line = gl.load(table_ptr + key // S, mask=key < kv_len, other=0) * S + key % S
            async_load(k_desc, [line, column], k_full.index(slot),
                                            k_ring.index(slot * PIECES + piece))  # fmt: skip
        mbarrier.wait(v_empty.index(slot), phase)
        mbarrier.expect(v_full.index(slot), BLOCK * K * 2)
        for piece in gl.static_range(PIECES):
            key = n * BLOCK + piece * 64
            line = gl.load(table_ptr + key // S, mask=key < kv_len, other=0) * S + key % S
            async_load(v_desc, [line, column], v_full.index(slot),
                                            v_ring.index(slot * PIECES + piece))  # fmt: skip


@gluon.jit
def hide(s, start, position, seen_by_all, end, LAYOUT: gl.constexpr):
    """Scores of keys that a row does not see become -inf; `end` of the block tells whether there are any."""
    if end > seen_by_all:
        key = start + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
        s = gl.where(key[None, :] <= position[:, None], s, float("-inf"))
    return s


@gluon.jit
def clear_unowned(values, start, kv_len, LAYOUT: gl.constexpr):
    """Zeros in the slots at kv_len and behind, whatever they held: 0 * NaN would be NaN."""
    x = values.load(LAYOUT)
    key = start + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    values.store(gl.where((key < kv_len)[:, None], x, 0.0))
    fence_async_shared()


@gluon.jit
def weights_of(s, safe, c, none):
    return gl.exp2(gl.fma(s, c + none, (safe * -c)[:, None] + none))


@gluon.jit
def attend(q_tiles, WHO: gl.constexpr, o_ptr, k_ring, v_ring, k_full, k_empty, v_full, v_empty, seen, seen_by_all,
           kv_len, c, start, tokens, first, head, H: gl.constexpr, PACK: gl.constexpr, K: gl.constexpr,
           CHUNK: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """A group of four warps: 64 rows of the tile, all keys. A block of 128 keys is two pieces: s and t, p and r."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    BY_SCORE: gl.constexpr = gl.SliceLayout(1, SCORES)
    BY_SUM: gl.constexpr = gl.SliceLayout(1, SUMS)
    DTYPE: gl.constexpr = o_ptr.dtype.element_ty
    TWO: gl.constexpr = BLOCK == 128
    PIECES: gl.constexpr = BLOCK // 64
    position = kv_len - tokens + first + (WHO * 64 + gl.arange(0, 64, layout=BY_SCORE)) // PACK
    q = q_tiles.index(WHO)
    none = gl.zeros([64, 64], gl.float32, SCORES)
    m = gl.full([64], float("-inf"), gl.float32, BY_SCORE)
    sum = gl.full([64], -0.0, gl.float32, BY_SCORE)
    acc = gl.full([64, K], -0.0, gl.float32, SUMS)
    for low in range(0, seen, CHUNK):
        block = low // BLOCK
        end = gl.cdiv(gl.minimum(low + CHUNK, seen), BLOCK)
        slot = block % STAGES
        mbarrier.wait(k_full.index(slot), (block // STAGES) & 1)
        s = warpgroup_mma(q, k_ring.index(slot * PIECES).permute((1, 0)), none, use_acc=False, is_async=True)
        if TWO:
            t = warpgroup_mma(q, k_ring.index(slot * 2 + 1).permute((1, 0)), none, use_acc=False, is_async=True)
            s, t = warpgroup_mma_wait(0, deps=[s, t])
        else:
            s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(slot))
        s = hide(s, low, position, seen_by_all, low + BLOCK, SCORES)
        most = s
        if TWO:
            t = hide(t, low + 64, position, seen_by_all, low + BLOCK, SCORES)
            most = gl.maximum(s, t)
        m2 = gl.max(most, 1)
        safe = gl.where(m2 == float("-inf"), 0.0, m2)
        p = weights_of(s, safe, c, none)
        p_sums = p
        p_weights = gl.convert_layout(p.to(DTYPE), WEIGHTS)
        if TWO:
            r = weights_of(t, safe, c, none)
            r_sums = r
            r_weights = gl.convert_layout(r.to(DTYPE), WEIGHTS)
        acc2 = gl.zeros([64, K], gl.float32, SUMS)
        for n in range(block + 1, end):
            slot = n % STAGES
            before = (n - 1) % STAGES
            mbarrier.wait(k_full.index(slot), (n // STAGES) & 1)
            s = warpgroup_mma(q, k_ring.index(slot * PIECES).permute((1, 0)), none, use_acc=False, is_async=True)
            if TWO:
                t = warpgroup_mma(q, k_ring.index(slot * 2 + 1).permute((1, 0)), none, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), ((n - 1) // STAGES) & 1)
            acc2 = warpgroup_mma(p_weights, v_ring.index(before * PIECES), acc2, is_async=True)
            if TWO:
                acc2 = warpgroup_mma(r_weights, v_ring.index(before * 2 + 1), acc2, is_async=True)
                s, t = warpgroup_mma_wait(2, deps=[s, t])
            else:
                s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(k_empty.index(slot))
            s = hide(s, n * BLOCK, position, seen_by_all, (n + 1) * BLOCK, SCORES)
            most = s
            if TWO:
                t = hide(t, n * BLOCK + 64, position, seen_by_all, (n + 1) * BLOCK, SCORES)
                most = gl.maximum(s, t)
            m_new = gl.maximum(m2, gl.max(most, 1))
            safe = gl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = gl.exp2((m2 - safe) * c)
            m2 = m_new
            p = weights_of(s, safe, c, none)
            p_sums = gl.fma(p_sums, alpha[:, None] + none, p)
            if TWO:
                r = weights_of(t, safe, c, none)
                r_sums = gl.fma(r_sums, alpha[:, None] + none, r)
            acc2 = warpgroup_mma_wait(0, deps=[acc2])
            mbarrier.arrive(v_empty.index(before))
            acc2 = acc2 * gl.convert_layout(alpha, BY_SUM)[:, None]
            p_weights = gl.convert_layout(p.to(DTYPE), WEIGHTS)
            if TWO:
                r_weights = gl.convert_layout(r.to(DTYPE), WEIGHTS)
        slot = (end - 1) % STAGES
        mbarrier.wait(v_full.index(slot), ((end - 1) // STAGES) & 1)
        if end * BLOCK > kv_len:
            for piece in gl.static_range(PIECES):
                clear_unowned(v_ring.index(slot * PIECES + piece), (end - 1) * BLOCK + piece * 64, kv_len, LINES)
        acc2 = warpgroup_mma(p_weights, v_ring.index(slot * PIECES), acc2, is_async=True)
        if TWO:
            acc2 = warpgroup_mma(r_weights, v_ring.index(slot * 2 + 1), acc2, is_async=True)
        acc2 = warpgroup_mma_wait(0, deps=[acc2])
        mbarrier.arrive(v_empty.index(slot))
        sum2 = total(p_sums)
        if TWO:
            sum2 = sum2 + total(r_sums)
        m_new = gl.maximum(m, m2)
        safe = gl.where(m_new == float("-inf"), 0.0, m_new)
        a = gl.exp2((m - safe) * c)
        b = gl.exp2((m2 - safe) * c)
        m = m_new
        sum = gl.fma(gl.convert_layout(sum2, BY_SCORE), b, sum * a)
        b_sum = gl.convert_layout(b, BY_SUM)[:, None] + gl.zeros_like(acc2)
        acc = gl.fma(acc2, b_sum, acc * gl.convert_layout(a, BY_SUM)[:, None])
    o = acc / gl.convert_layout(sum, BY_SUM)[:, None]
    i = WHO * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    d = gl.arange(0, K, layout=gl.SliceLayout(0, LINES))
    line = (start + first + i // PACK).to(gl.int64) * H + head + i % PACK
    gl.store(o_ptr + line[:, None] * K + d[None, :], gl.convert_layout(o.to(DTYPE), LINES),
             mask=(first + i // PACK < tokens)[:, None] & (d < K)[None, :])  # fmt: skip


@gluon.jit
def find_tile(q_start_ptr, tile, R, T, limit, BQ: gl.constexpr):
    """As `find_tile` of attention_kernels.py."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    r = tile * 0 + R + 1
    before = tile * 0
    first = tile * 0
    base = 0
    while (base <= R) & (r > R):
        i = base + gl.arange(0, 512, layout=LAYOUT)
        start = gl.load(q_start_ptr + i, mask=i <= R, other=0)
        tokens = gl.load(q_start_ptr + i + 1, mask=i < R, other=T) - start
        tiles = gl.where((i == R) | ((i < R) & (tokens > limit)), (tokens + BQ - 1) // BQ, 0)
        end = before + gl.associative_scan(tiles, 0, add)
        here = (end > tile) & (end - tiles <= tile)
        found = gl.sum(gl.where(here, i + 1, 0), 0)
        if found > 0:
            r = found - 1
            first = (tile - gl.sum(gl.where(here, end - tiles, 0), 0)) * BQ
        before += gl.sum(tiles, 0)
        base += 512
    return r, first


@gluon.jit(do_not_specialize=["T", "R", "N", "limit"])
def specialised_kernel(
    q_ptr, k_desc, v_desc, q_start_ptr, kv_len_ptr, table_ptr, o_ptr, c, T, R, N, limit, H: gl.constexpr,
    G: gl.constexpr, K: gl.constexpr, S: gl.constexpr, PACK: gl.constexpr, CHUNK: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """128 // PACK tokens of a row of more than `limit` tokens, PACK query heads of a kv head; zeros behind."""
    BQ: gl.constexpr = 128 // PACK
    J: gl.constexpr = H // G
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    tile = gl.num_programs(0) - 1 - gl.program_id(0)  # the last tiles see the most keys: first out
    g = gl.program_id(1) // (J // PACK)
    head = gl.program_id(1) * PACK
    r, first = find_tile(q_start_ptr, tile, R, T, limit, BQ)
    if r <= R:
        start = gl.load(q_start_ptr + r)
        tokens = gl.load(q_start_ptr + r + 1, mask=r < R, other=T) - start
        kv_len = gl.load(kv_len_ptr + r, mask=r < R, other=0)
        RING: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, K], DTYPE)
        q_tiles = gl.allocate_shared_memory(DTYPE, [2, 64, K], RING)
        for who in gl.static_range(2):
            i = who * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
            d = gl.arange(0, K, layout=gl.SliceLayout(0, LINES))
            at = ((start + first + i // PACK).to(gl.int64) * H + head + i % PACK)[:, None] * K + d[None, :]
            mask = (first + i // PACK < tokens)[:, None] & (d < K)[None, :]
            if r < R:
                q_tiles.index(who).store(gl.load(q_ptr + at, mask=mask, other=0.0))
            else:
                gl.store(o_ptr + at, gl.zeros([64, K], DTYPE, LINES), mask=mask)
        if r < R:
            fence_async_shared()
            k_ring = gl.allocate_shared_memory(DTYPE, [STAGES * (BLOCK // 64), 64, K], RING)
            v_ring = gl.allocate_shared_memory(DTYPE, [STAGES * (BLOCK // 64), 64, K], RING)
            k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
            k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
            v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
            v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
            for stage in gl.static_range(STAGES):
                mbarrier.init(k_full.index(stage), count=1)
                mbarrier.init(k_empty.index(stage), count=2)
                mbarrier.init(v_full.index(stage), count=1)
                mbarrier.init(v_empty.index(stage), count=2)
            seen = gl.minimum(kv_len, kv_len - tokens + first + BQ)
            seen_by_all = kv_len - tokens + first + 1
            table = table_ptr + r.to(gl.int64) * N
            gl.warp_specialize(
                [
                    (attend, (q_tiles, 0, o_ptr, k_ring, v_ring, k_full, k_empty, v_full, v_empty, seen, seen_by_all,
                              kv_len, c, start, tokens, first, head, H, PACK, K, CHUNK, BLOCK, STAGES)),
                    (attend, (q_tiles, 1, o_ptr, k_ring, v_ring, k_full, k_empty, v_full, v_empty, seen, seen_by_all,
                              kv_len, c, start, tokens, first, head, H, PACK, K, CHUNK, BLOCK, STAGES)),
                    (copy_blocks, (k_desc, v_desc, table, k_ring, v_ring, k_full, k_empty, v_full, v_empty, seen,
                                   kv_len, g * K, S, K, BLOCK, STAGES)),
                ],
                [4, 1], [240, 24],
            )  # fmt: skip
