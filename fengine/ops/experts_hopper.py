"""The products of many tokens' experts on NVIDIA Hopper: the kernel of linear_hopper.py over tiles of the experts.

A tile is 128 pairs of one expert. The gated product gathers their tokens' rows (cp.async) while the copy engine (TMA)
brings the expert's weights; its results lie together, each expert's from a multiple of 128, so that the down product is
all boxes. What lies between two experts' rows is computed like the rest and read by nobody. The same tree as
linear.py's, hence the same bits; used where that was proved.
"""
# pyright: reportInvalidTypeForm=false

import torch
from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.linear_hopper import experts_product
from fengine.ops.registration import (
    async_copy,
    async_load,
    async_store,
    barriers,
    describe,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    multiprocessors,
    runs_gluon,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BM = 128  # rows of a tile: two groups of four warps multiply 64 each
BK = 64  # columns of x and w in one piece: 128 bytes


def usable(x_TD: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor) -> bool:
    """Whether the kernel is written for these types and shapes and this device."""
    return (
        runs_gluon(x_TD.device)
        and x_TD.dtype in (torch.bfloat16, torch.float16)
        and x_TD.shape[1] % 16 == 0
        and down_EDF.shape[2] % 8 == 0
        and gate_up_EFD.data_ptr() % 16 == 0
        and down_EDF.data_ptr() % 16 == 0
    )


def launch(x: Tensor, w_ENK: Tensor, bias_EN: Tensor | None, rows_ET: Tensor, count_E: Tensor, tile_X2: Tensor,
           weight_P: Tensor, y_XN: Tensor, top_k: int, limit: float, gated: bool, block_n: int,
           stages: int) -> None:  # fmt: skip
    """y = x @ w.T of each tile's expert: gated, of tokens x [T, K]; or of rows x [X, K], times their weights.

    Modifies: y_XN.
    """
    experts, width, k = w_ENK.shape
    n, tiles = y_XN.shape[1], y_XN.shape[0] // BM
    launcher(experts_kernel, (min(tiles * -(-n // block_n), multiprocessors(x.device.index)),))(
        x if gated else describe(x, BM, BK), describe(w_ENK.view(-1, k), block_n, BK), describe(y_XN, 64, block_n),
        bias_EN, rows_ET, count_E, tile_X2, weight_P, tiles, rows_ET.shape[1], experts, n, k, width, limit, top_k,
        bias_EN is not None, gated, limit > 0, block_n, BK, stages, num_warps=4
    )  # fmt: skip


@gluon.jit
def copy_tiles(x, w_desc, x_ring, w_ring, full, empty, rows_ptr, count_ptr, tile_ptr, TILES, T, E, N, K, WIDTH,
               A: gl.constexpr, GATED: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
               STAGES: gl.constexpr):  # fmt: skip
    """The copying warps: all tiles of this program, piece after piece, as the ring has room."""
    HALVES: gl.constexpr = 2 if GATED else 1
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    blocks = gl.cdiv(N, BN)
    n = 0
    for tile in range(gl.program_id(0), TILES * blocks, gl.num_programs(0)):
        expert = gl.load(tile_ptr + tile // blocks * 2)
        if expert < E:
            col = tile % blocks * BN
            if GATED:
                row = gl.load(tile_ptr + tile // blocks * 2 + 1) + gl.arange(0, 128, layout=gl.SliceLayout(1, LINES))
                row = gl.minimum(row, gl.load(count_ptr + expert) - 1)
                token = gl.load(rows_ptr + expert.to(gl.int64) * T + row) // A
                piece = gl.arange(0, BK, layout=gl.SliceLayout(0, LINES))
                lines = x + (token.to(gl.int64) * K)[:, None] + piece[None, :]
            for k in range(0, K, BK):
                slot = n % STAGES
                mbarrier.wait(empty.index(slot), ((n // STAGES) & 1) ^ 1)
                if GATED:
                    async_copy.async_copy_global_to_shared(x_ring.index(slot), lines + k, mask=(piece + k < K)[None, :])
                    async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
                    mbarrier.expect(full.index(slot), BN * HALVES * BK * 2)
                else:
                    mbarrier.expect(full.index(slot), (128 + BN) * BK * 2)
                    async_load(x, [tile // blocks * 128, k], full.index(slot), x_ring.index(slot))
                for half in gl.static_range(HALVES):
                    async_load(w_desc, [expert * WIDTH + col + half * N, k], full.index(slot),
                               w_ring.index(slot * HALVES + half))  # fmt: skip
                n += 1


@gluon.jit
def multiply(y_desc, bias_ptr, WHO: gl.constexpr, x_ring, w_ring, y_tiles, full, empty, rows_ptr, count_ptr, tile_ptr,
             weight_ptr, TILES, T, E, N, K, WIDTH, limit, BIAS: gl.constexpr, GATED: gl.constexpr,
             LIMITED: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """A group of four warps: 64 rows of every tile."""
    DTYPE: gl.constexpr = y_desc.dtype
    COLUMNS: gl.constexpr = BN * 2 if GATED else BN
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    W: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, BK], DTYPE)
    weights = w_ring._reinterpret(DTYPE, [STAGES, COLUMNS, BK], W)
    y_tile = y_tiles.index(WHO)
    blocks = gl.cdiv(N, BN)
    n = 0
    for tile in range(gl.program_id(0), TILES * blocks, gl.num_programs(0)):
        expert = gl.load(tile_ptr + tile // blocks * 2)
        if expert < E:
            row = tile // blocks * 128 + WHO * 64
            col = tile % blocks * BN
            if not GATED:  # asked for now: one load waits for the other
                at = gl.load(tile_ptr + tile // blocks * 2 + 1) + WHO * 64
                at = at + gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS))
                at = gl.minimum(at, gl.load(count_ptr + expert) - 1)
                weight = gl.load(weight_ptr + gl.load(rows_ptr + expert.to(gl.int64) * T + at))
            acc = gl.zeros([64, COLUMNS], gl.float32, SUMS)
            for k in range(0, K, BK):
                slot = n % STAGES
                mbarrier.wait(full.index(slot), (n // STAGES) & 1)
                if GATED:  # rows that came by cp.async are now seen by the tensor cores
                    fence_async_shared()
                acc = warpgroup_mma(x_ring.index(slot).slice(WHO * 64, 64), weights.index(slot).permute((1, 0)), acc,
                                    is_async=True)  # fmt: skip
                acc = warpgroup_mma_wait(1, deps=[acc])
                if k > 0:
                    mbarrier.arrive(empty.index((n - 1) % STAGES))
                n += 1
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index((n - 1) % STAGES))
            if BIAS:
                i = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SUMS))
                at = bias_ptr + expert * WIDTH + i // BN * N + col + i % BN
                acc += gl.load(at, mask=col + i % BN < N, other=0.0).to(gl.float32)[None, :]
            if GATED:
                gate, up = acc.to(DTYPE).reshape((64, 2, BN)).permute((0, 2, 1)).split()
                y = experts_product(gate, up, limit, LIMITED)
            else:
                y = (acc * weight[:, None]).to(DTYPE)
            store_wait(0)
            y_tile.store(y)
            fence_async_shared()
            async_store(y_desc, [row, col], y_tile)
    store_wait(0)


@gluon.jit(do_not_specialize=["TILES", "T"])
def experts_kernel(x, w_desc, y_desc, bias_ptr, rows_ptr, count_ptr, tile_ptr, weight_ptr, TILES, T, E, N, K, WIDTH,
                   limit, A: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr, LIMITED: gl.constexpr,
                   BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """128 x BN tiles of y, one after another. x: a pointer if GATED, else a descriptor. WIDTH: w's rows an expert."""
    HALVES: gl.constexpr = 2 if GATED else 1
    LOADERS: gl.constexpr = 4 if GATED else 1
    X: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, BK], y_desc.dtype)
    x_ring = gl.allocate_shared_memory(y_desc.dtype, [STAGES, 128, BK], X)
    w_ring = gl.allocate_shared_memory(y_desc.dtype, [STAGES * HALVES, BN, BK], w_desc.layout)
    y_tiles = gl.allocate_shared_memory(y_desc.dtype, [2, 64, BN], y_desc.layout)
    full, empty = barriers(STAGES, 129 if GATED else 1, 2)  # each thread that copies rows arrives for itself
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (y_desc, bias_ptr, 0, x_ring, w_ring, y_tiles, full, empty, rows_ptr, count_ptr, tile_ptr,
                        weight_ptr, TILES, T, E, N, K, WIDTH, limit, BIAS, GATED, LIMITED, BN, BK, STAGES)),
            (multiply, (y_desc, bias_ptr, 1, x_ring, w_ring, y_tiles, full, empty, rows_ptr, count_ptr, tile_ptr,
                        weight_ptr, TILES, T, E, N, K, WIDTH, limit, BIAS, GATED, LIMITED, BN, BK, STAGES)),
            (copy_tiles, (x, w_desc, x_ring, w_ring, full, empty, rows_ptr, count_ptr, tile_ptr, TILES, T, E, N, K,
                          WIDTH, A, GATED, BN, BK, STAGES)),
        ],
        [4, LOADERS], [208, 88] if GATED else [240, 24],
    )  # fmt: skip
