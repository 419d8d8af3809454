"""The products of linear.py on NVIDIA Hopper with warps specialised: one warp copies tiles (TMA) into a ring in shared
memory, groups of four warps multiply 64 rows each. A program stays and takes tile after tile, so that the copies of the
next tile, and the other group's products, run under the end of one.

The same tree as linear.py's (left to right over K), hence the same bits; used where that was proved. The gated form
never writes the 2N columns of its sums to memory. After CUTLASS's persistent cooperative kernels."""
# pyright: reportInvalidTypeForm=false

import torch
from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.registration import (
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

BK = 64  # columns of x and w in one piece: 128 bytes


def usable(x_TK: Tensor, w_NK: Tensor) -> bool:
    """Whether the kernel is written for these types and shapes and this device."""
    return (
        runs_gluon(x_TK.device)
        and x_TK.dtype in (torch.bfloat16, torch.float16)
        and w_NK.dtype == x_TK.dtype
        and x_TK.shape[1] % 8 == 0
        and w_NK.data_ptr() % 16 == 0
    )


def launch(x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None, y_TN: Tensor, gated: bool, act: int, block_m: int,
           block_n: int, stages: int) -> None:  # fmt: skip
    """y = x @ w.T + bias, or the gated product of w's two halves. Modifies: y_TN."""
    m, k = x_TK.shape
    n = y_TN.shape[1]
    tiles = -(-m // block_m) * -(-n // block_n)
    launcher(hopper_kernel, (min(tiles, multiprocessors(x_TK.device.index)),))(
        describe(x_TK, 64, BK), describe(w_NK, block_n, BK), describe(y_TN, 64, block_n), bias_N, m, n, k,
        bias_N is not None, gated, act, block_m, block_n, BK, stages, 8, num_warps=4
    )  # fmt: skip


@gluon.jit
def place(tile, M, N, BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr):
    """(first row, first column) of a tile: GROUP row blocks walk the columns together, as in linear.py."""
    blocks_m = gl.cdiv(M, BM)
    width = GROUP * gl.cdiv(N, BN)
    first = tile // width * GROUP
    high = gl.minimum(blocks_m - first, GROUP)
    local = tile % width
    return (first + local % high) * BM, local // high * BN


@gluon.jit
def copy_tiles(x_desc, w_desc, x_ring, w_ring, full, empty, M, N, K, GATED: gl.constexpr, BM: gl.constexpr,
               BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """The copying warp: all tiles of this program, piece after piece, as the ring has room."""
    HALVES: gl.constexpr = 2 if GATED else 1
    PARTS: gl.constexpr = BM // 64
    n = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, BM) * gl.cdiv(N, BN), gl.num_programs(0)):
        row, col = place(tile, M, N, BM, BN, GROUP)
        for k in range(0, K, BK):
            slot = n % STAGES
            mbarrier.wait(empty.index(slot), ((n // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), (BM + BN * HALVES) * BK * 2)
            for part in gl.static_range(PARTS):
                async_load(x_desc, [row + part * 64, k], full.index(slot), x_ring.index(slot * PARTS + part))
            for half in gl.static_range(HALVES):
                async_load(w_desc, [col + half * N, k], full.index(slot), w_ring.index(slot * HALVES + half))
            n += 1


@gluon.jit
def gated_product(gate, up, ACT: gl.constexpr):
    """That of activations.py, in its words, rounded."""
    DTYPE: gl.constexpr = gate.dtype
    x = gate.to(gl.float32)
    if ACT == 0:
        y = x / (1.0 + gl.exp(-x))
    elif ACT == 1:
        u = 0.7978845608028654 * gl.fma(0.044715 * x * x, x, x)
        y = x / (1.0 + gl.exp(-2.0 * u))
    else:
        y = 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    return (y.to(DTYPE).to(gl.float32) * up.to(gl.float32)).to(DTYPE)


@gluon.jit
def experts_product(gate, up, limit, LIMITED: gl.constexpr):
    """As `gated` of experts_kernels.py."""
    if LIMITED:
        g = gl.minimum(gate.to(gl.float32), limit)
        u = gl.minimum(gl.maximum(up.to(gl.float32), -limit), limit)
        y = ((u + 1.0) * (g / (1.0 + gl.exp(-1.702 * g)))).to(gate.dtype)
    else:
        y = gated_product(gate, up, 0)
    return y


@gluon.jit
def multiply(y_desc, bias_ptr, WHO: gl.constexpr, x_ring, w_ring, y_tiles, full, empty, M, N, K, BIAS: gl.constexpr,
             GATED: gl.constexpr, ACT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
             STAGES: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """A group of four warps: 64 rows of every tile."""
    DTYPE: gl.constexpr = y_desc.dtype
    WIDTH: gl.constexpr = BN * 2 if GATED else BN
    PARTS: gl.constexpr = BM // 64
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    W: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WIDTH, BK], DTYPE)
    weights = w_ring._reinterpret(DTYPE, [STAGES, WIDTH, BK], W)
    y_tile = y_tiles.index(WHO)
    n = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, BM) * gl.cdiv(N, BN), gl.num_programs(0)):
        row, col = place(tile, M, N, BM, BN, GROUP)
        acc = gl.zeros([64, WIDTH], gl.float32, SUMS)
        for k in range(0, K, BK):
            slot = n % STAGES
            mbarrier.wait(full.index(slot), (n // STAGES) & 1)
            acc = warpgroup_mma(x_ring.index(slot * PARTS + WHO), weights.index(slot).permute((1, 0)), acc,
                                is_async=True)  # fmt: skip
            acc = warpgroup_mma_wait(1, deps=[acc])
            if k > 0:
                mbarrier.arrive(empty.index((n - 1) % STAGES))
            n += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((n - 1) % STAGES))
        if BIAS:
            i = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, SUMS))
            bias = gl.load(bias_ptr + i // BN * N + col + i % BN, mask=col + i % BN < N, other=0.0)
            acc += bias.to(gl.float32)[None, :]
        if GATED:
            gate, up = acc.to(DTYPE).reshape((64, 2, BN)).permute((0, 2, 1)).split()
            y = gated_product(gate, up, ACT)
        else:
            y = acc.to(DTYPE)
        store_wait(0)
        y_tile.store(y)
        fence_async_shared()
        async_store(y_desc, [row + WHO * 64, col], y_tile)
    store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def hopper_kernel(x_desc, w_desc, y_desc, bias_ptr, M, N, K, BIAS: gl.constexpr, GATED: gl.constexpr,
                  ACT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
                  GROUP: gl.constexpr):  # fmt: skip
    """BM x BN tiles of y, one after another; BM is 64 or 128."""
    HALVES: gl.constexpr = 2 if GATED else 1
    PARTS: gl.constexpr = BM // 64
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES * PARTS, 64, BK], x_desc.layout)
    w_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES * HALVES, BN, BK], w_desc.layout)
    y_tiles = gl.allocate_shared_memory(x_desc.dtype, [PARTS, 64, BN], y_desc.layout)
    full, empty = barriers(STAGES, 1, PARTS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (y_desc, bias_ptr, who, x_ring, w_ring, y_tiles, full, empty, M, N, K, BIAS, GATED, ACT, BM, BN,
                        BK, STAGES, GROUP)) if who < PARTS else
            (copy_tiles, (x_desc, w_desc, x_ring, w_ring, full, empty, M, N, K, GATED, BM, BN, BK, STAGES, GROUP))
            for who in (0, 1, 2)[:PARTS + 1]
        ],
        [4, 1][2 - PARTS:], [240, 24][2 - PARTS:],
    )  # fmt: skip
