"""The product of w8a8.py on NVIDIA Hopper with warps specialised: weights are the 64-row side of wgmma at any number of
rows.

One warp copies codes of weights into a ring in shared memory (TMA), before the kernel in front has ended; another those
of x, after it. Groups of four warps multiply: a part of 128 columns is one product from zero, and while it is added to
the sums the next one runs, in other registers.

The tree is that of w8a8.py; used where that was proved.
"""
# pyright: reportInvalidTypeForm=false

from typing import NamedTuple

from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.linear_hopper import place
from fengine.ops.registration import (
    EARLY,
    TensorDescriptor,
    async_load,
    dependent_launch,
    describe,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    is_hopper,
    mbarrier,
    multiprocessors,
    warpgroup_mma,
    warpgroup_mma_wait,
)

STEP = 128  # columns of a part
OUTPUTS = 64  # of a group of warps: the rows of wgmma


class Tiles(NamedTuple):
    """How a product is cut: rows of x (8 to 128), groups of warps (of 64 outputs each), pieces in the ring, programs
    that share a multiprocessor."""

    block_m: int
    groups: int
    stages: int
    programs: int


def usable(q_TK: Tensor, w_NK: Tensor, step: int, by_step: bool) -> bool:
    """Whether the kernel is written for these shapes and this device."""
    return (
        TensorDescriptor is not None
        and is_hopper(q_TK.device)
        and step == STEP
        and not by_step
        and q_TK.shape[1] % 16 == 0
        and w_NK.data_ptr() % 16 == 0
    )


def launch(q_TK: Tensor, x_scale: Tensor, w_NK: Tensor, scale: Tensor, bias: Tensor | None, y_TN: Tensor,
           s: Tiles) -> None:  # fmt: skip
    """y = the product of codes, times the scales of rows and outputs, + bias. Modifies: y_TN."""
    (m, n), k = y_TN.shape, q_TK.shape[1]
    tiles = -(-m // s.block_m) * -(-n // (OUTPUTS * s.groups))
    threads = 128 * (s.groups + 1)
    registers = {} if s.programs == 1 else {"maxnreg": 65536 // (threads * s.programs) // 8 * 8}
    launcher(w8a8_hopper_kernel, (min(tiles, multiprocessors(q_TK.device.index) * s.programs),))(
        describe(q_TK, s.block_m, STEP), describe(w_NK, OUTPUTS, STEP), x_scale, scale, bias, y_TN, m, n, k,
        bias is not None, s.block_m, OUTPUTS, s.groups, STEP, s.stages, 8, num_warps=4,
        launch_pdl=bool(dependent_launch(q_TK.device.index, EARLY)["PDL"]), **registers
    )  # fmt: skip


@gluon.jit
def copy_weights(w_desc, w_ring, full, empty, M, N, K, BM: gl.constexpr, OUTPUTS: gl.constexpr, GROUPS: gl.constexpr,
                 STEP: gl.constexpr, STAGES: gl.constexpr, WALK: gl.constexpr):  # fmt: skip
    """The warp that copies weights: all tiles of this program, piece after piece, as the ring has room."""
    n = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, BM) * gl.cdiv(N, OUTPUTS * GROUPS), gl.num_programs(0)):
        _, col = place(tile, M, N, BM, OUTPUTS * GROUPS, WALK)
        for k in range(0, gl.cdiv(K, 2 * STEP) * 2 * STEP, STEP):
            slot = n % STAGES
            mbarrier.wait(empty.index(slot), ((n // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), GROUPS * OUTPUTS * STEP)
            for who in gl.static_range(GROUPS):
                async_load(w_desc, [col + who * OUTPUTS, k], full.index(slot),
                           w_ring.index(slot * GROUPS + who))  # fmt: skip
            n += 1


@gluon.jit
def copy_x(x_desc, x_ring, full, empty, M, N, K, BM: gl.constexpr, BN: gl.constexpr, STEP: gl.constexpr,
           STAGES: gl.constexpr, WALK: gl.constexpr):  # fmt: skip
    """The warp that copies rows of x."""
    gdc_wait()
    n = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, BM) * gl.cdiv(N, BN), gl.num_programs(0)):
        row, _ = place(tile, M, N, BM, BN, WALK)
        for k in range(0, gl.cdiv(K, 2 * STEP) * 2 * STEP, STEP):
            slot = n % STAGES
            mbarrier.wait(empty.index(slot), ((n // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), BM * STEP)
            async_load(x_desc, [row, k], full.index(slot), x_ring.index(slot))
            n += 1


@gluon.jit
def begun(w_ring, x_ring, full, part, n, WHO: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """The part of piece n, under way in the registers of `part`."""
    slot = n % STAGES
    mbarrier.wait(full.index(slot), (n // STAGES) & 1)
    x = x_ring.index(slot).permute((1, 0))
    return warpgroup_mma(w_ring.index(slot * GROUPS + WHO), x, part, use_acc=False, is_async=True)


@gluon.jit
def finish(acc, x_scale_ptr, scale_ptr, bias_ptr, y_ptr, row, col, M, N, BIAS: gl.constexpr, BM: gl.constexpr,
           OUTPUTS: gl.constexpr, SUMS: gl.constexpr):  # fmt: skip
    """Stores sums [OUTPUTS, BM]."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = col + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, SUMS))
    j = row + gl.arange(0, BM, layout=gl.SliceLayout(0, SUMS))
    of_w = gl.load(scale_ptr + i, mask=i < N, other=0.0)
    of_x = gl.load(x_scale_ptr + j, mask=j < M, other=0.0)
    acc *= of_x[None, :] * of_w[:, None]
    if BIAS:
        acc += gl.load(bias_ptr + i, mask=i < N, other=0.0).to(gl.float32)[:, None]
    y = gl.convert_layout(acc.to(y_ptr.dtype.element_ty).permute((1, 0)), LINES)
    own = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, LINES))
    row += gl.arange(0, BM, layout=gl.SliceLayout(1, LINES))
    inside = (row < M)[:, None] & (col + own < N)[None, :]
    gl.store(y_ptr + row.to(gl.int64)[:, None] * N + (col + own)[None, :], y, mask=inside)


@gluon.jit
def multiply(x_scale_ptr, scale_ptr, bias_ptr, y_ptr, WHO: gl.constexpr, x_ring, w_ring, full, empty, M, N, K,
             BIAS: gl.constexpr, BM: gl.constexpr, OUTPUTS: gl.constexpr, GROUPS: gl.constexpr, STEP: gl.constexpr,
             STAGES: gl.constexpr, WALK: gl.constexpr):  # fmt: skip
    """A group of four warps: OUTPUTS outputs of every tile, for its BM rows. An odd last piece is followed by zeros."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 32])
    a = gl.zeros([OUTPUTS, BM], gl.float32, SUMS)
    b = gl.zeros([OUTPUTS, BM], gl.float32, SUMS)
    gdc_wait()
    n = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, BM) * gl.cdiv(N, OUTPUTS * GROUPS), gl.num_programs(0)):
        row, col = place(tile, M, N, BM, OUTPUTS * GROUPS, WALK)
        col += WHO * OUTPUTS
        acc = gl.zeros([OUTPUTS, BM], gl.float32, SUMS)
        for _ in range(0, gl.cdiv(K, 2 * STEP)):
            first = begun(w_ring, x_ring, full, a, n, WHO, GROUPS, STAGES)
            second = begun(w_ring, x_ring, full, b, n + 1, WHO, GROUPS, STAGES)
            a = warpgroup_mma_wait(1, deps=[first])
            mbarrier.arrive(empty.index(n % STAGES))
            acc += a
            b = warpgroup_mma_wait(0, deps=[second])
            mbarrier.arrive(empty.index((n + 1) % STAGES))
            acc += b
            n += 2
        finish(acc, x_scale_ptr, scale_ptr, bias_ptr, y_ptr, row, col, M, N, BIAS, BM, OUTPUTS, SUMS)


@gluon.jit(do_not_specialize=["M"])
def w8a8_hopper_kernel(x_desc, w_desc, x_scale_ptr, scale_ptr, bias_ptr, y_ptr, M, N, K, BIAS: gl.constexpr,
                       BM: gl.constexpr, OUTPUTS: gl.constexpr, GROUPS: gl.constexpr, STEP: gl.constexpr,
                       STAGES: gl.constexpr, WALK: gl.constexpr):  # fmt: skip
    """Tiles of BM rows and OUTPUTS * GROUPS outputs, one after another; WALK row blocks walk the outputs together."""
    gdc_launch_dependents()
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BM, STEP], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * GROUPS, OUTPUTS, STEP], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)
        mbarrier.init(empty.index(stage), count=GROUPS)
    fence_async_shared()
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (multiply, (x_scale_ptr, scale_ptr, bias_ptr, y_ptr, 0, x_ring, w_ring, full, empty, M, N, K, BIAS, BM,
                            OUTPUTS, GROUPS, STEP, STAGES, WALK)),
                (multiply, (x_scale_ptr, scale_ptr, bias_ptr, y_ptr, 1, x_ring, w_ring, full, empty, M, N, K, BIAS, BM,
                            OUTPUTS, GROUPS, STEP, STAGES, WALK)),
                (copy_weights, (w_desc, w_ring, full, empty, M, N, K, BM, OUTPUTS, GROUPS, STEP, STAGES, WALK)),
                (copy_x, (x_desc, x_ring, full, empty, M, N, K, BM, OUTPUTS * GROUPS, STEP, STAGES, WALK)),
            ],
            [4, 1, 1], [240, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply, (x_scale_ptr, scale_ptr, bias_ptr, y_ptr, 0, x_ring, w_ring, full, empty, M, N, K, BIAS, BM,
                            OUTPUTS, GROUPS, STEP, STAGES, WALK)),
                (copy_weights, (w_desc, w_ring, full, empty, M, N, K, BM, OUTPUTS, GROUPS, STEP, STAGES, WALK)),
                (copy_x, (x_desc, x_ring, full, empty, M, N, K, BM, OUTPUTS * GROUPS, STEP, STAGES, WALK)),
            ],
            [1, 1], [24, 24],
        )  # fmt: skip
