"""The product of w8a8.py on NVIDIA Hopper with warps specialised: weights are the 64-row side of wgmma at any number of
rows.

One warp copies codes of weights into a ring in shared memory (TMA), before the kernel in front has ended; another those
of x, after it. Groups of four warps multiply: a part of 128 columns is one product from zero, and while it is added to
the sums others run, in other registers or of another group. Of a gated product a group has 32 gates above their
32 ups, and writes neither to memory. Products of many rows wait for L2: three groups have larger tiles.

The tree is that of w8a8.py; used where that was proved.
"""
# pyright: reportInvalidTypeForm=false

from typing import NamedTuple

from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.linear_hopper import gated_product, place
from fengine.ops.registration import (
    EARLY,
    async_load,
    barriers,
    copy_rows,
    dependent_launch,
    describe,
    describe_rows,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    mbarrier,
    multiprocessors,
    runs_gluon,
    warpgroup_mma,
    warpgroup_mma_wait,
)

STEP = 128  # columns of a part
OUTPUTS = 64  # of a group of warps: the rows of wgmma


class Tiles(NamedTuple):
    """How a product is cut: rows of x (8 to 128), groups of warps (1 to 3, of 64 outputs each), pieces in the ring,
    programs that share a multiprocessor, registers of a thread at most (0: as many as there are), parts that a group
    begins before it adds the first (2, or up to 32 rows 4)."""

    block_m: int
    groups: int
    stages: int
    programs: int
    registers: int = 0
    together: int = 2


def usable(q_TK: Tensor, w_NK: Tensor, step: int, by_step: bool) -> bool:
    """Whether the kernel is written for these shapes and this device."""
    return (
        runs_gluon(q_TK.device)
        and step == STEP
        and not by_step
        and q_TK.shape[1] % 16 == 0
        and w_NK.data_ptr() % 16 == 0
    )


def launch(q_TK: Tensor, x_scale: Tensor, w_NK: Tensor, scale: Tensor, bias: Tensor | None, y_TN: Tensor, s: Tiles,
           gated: bool = False, act: int = 0) -> None:  # fmt: skip
    """y = the product of codes, times the scales of rows and outputs, + bias; or the gated product of w's two halves.
    Modifies: y_TN."""
    (m, n), k = y_TN.shape, q_TK.shape[1]
    outputs = OUTPUTS // 2 if gated else OUTPUTS
    tiles = -(-m // s.block_m) * -(-n // (outputs * s.groups))
    threads, box = 128 * (s.groups + 1), s.block_m if m % s.block_m == 0 else min(s.block_m, 64)
    most = s.registers or (0 if s.programs == 1 else 65536 // (threads * s.programs) // 8 * 8)
    launcher(w8a8_hopper_kernel, (min(tiles, multiprocessors(q_TK.device.index) * s.programs),))(
        describe_rows(q_TK, box, STEP), describe(w_NK, outputs, STEP), x_scale, scale, bias, y_TN, m, n, k,
        bias is not None, gated, act, s.block_m, outputs, s.groups, STEP, s.stages, 8, s.together, num_warps=4,
        launch_pdl=bool(dependent_launch(q_TK.device.index, EARLY)["PDL"]), **({"maxnreg": most} if most else {})
    )  # fmt: skip


@gluon.jit
def copy_weights(w_desc, w_ring, full, empty, M, N, K, HALVES: gl.constexpr, BM: gl.constexpr, OUTPUTS: gl.constexpr,
                 GROUPS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, WALK: gl.constexpr,
                 TOGETHER: gl.constexpr):  # fmt: skip
    """The warp that copies weights: all tiles of this program, piece after piece, as the ring has room. Of each group
    HALVES times OUTPUTS."""
    PARTS: gl.constexpr = GROUPS * HALVES
    n = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, BM) * gl.cdiv(N, OUTPUTS * GROUPS), gl.num_programs(0)):
        _, col = place(tile, M, N, BM, OUTPUTS * GROUPS, WALK)
        for k in range(0, gl.cdiv(K, TOGETHER * STEP) * TOGETHER * STEP, STEP):
            slot = n % STAGES
            mbarrier.wait(empty.index(slot), ((n // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), PARTS * OUTPUTS * STEP)
            for part in gl.static_range(PARTS):
                async_load(w_desc, [col + part // HALVES * OUTPUTS + part % HALVES * N, k], full.index(slot),
                           w_ring.index(slot * PARTS + part))  # fmt: skip
            n += 1


@gluon.jit
def copy_x(x_desc, x_ring, full, empty, M, N, K, BM: gl.constexpr, BN: gl.constexpr, STEP: gl.constexpr,
           STAGES: gl.constexpr, WALK: gl.constexpr, TOGETHER: gl.constexpr):  # fmt: skip
    """The warp that copies rows of x. Where a box has no row the first ones come again: the copy engine is slow outside
    of a tensor, and sums of what is there instead are nobody's."""
    BOX: gl.constexpr = x_desc.block_shape[0]
    gdc_wait()
    n = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, BM) * gl.cdiv(N, BN), gl.num_programs(0)):
        row, _ = place(tile, M, N, BM, BN, WALK)
        for k in range(0, gl.cdiv(K, TOGETHER * STEP) * TOGETHER * STEP, STEP):
            slot = n % STAGES
            mbarrier.wait(empty.index(slot), ((n // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), (BM if BOX > 1 else 1) * STEP)
            for box in gl.static_range(BM // BOX if BOX > 1 else 1):
                tile_rows = x_ring.index(slot).slice(box * BOX, BOX) if BOX > 1 else x_ring.index(slot)
                line = row + box * BOX
                copy_rows(x_desc, tile_rows, gl.where(line < M, line, 0), k, full.index(slot))
            n += 1


@gluon.jit
def begun(w_ring, x_ring, full, part, n, WHO: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """The part of piece n, under way in the registers of `part`."""
    slot = n % STAGES
    mbarrier.wait(full.index(slot), (n // STAGES) & 1)
    x = x_ring.index(slot).permute((1, 0))
    return warpgroup_mma(w_ring.index(slot * GROUPS + WHO), x, part, use_acc=False, is_async=True)


@gluon.jit
def added(acc, part):
    """In assembler, which stays where it stands: in front of the product that takes the part's registers."""
    return gl.inline_asm_elementwise("add.rn.f32 $0, $1, $2;", "=f,f,f", [acc, part], gl.float32, False, 1)


@gluon.jit
def part_of(w_ring, x_ring, full, empty, part, n, WHO: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """The part of piece n in the registers of `part`, while other groups have the tensor cores' other turns."""
    first = begun(w_ring, x_ring, full, part, n, WHO, GROUPS, STAGES)
    part = warpgroup_mma_wait(0, deps=[first])
    mbarrier.arrive(empty.index(n % STAGES))
    return part


@gluon.jit
def beside(x_scale_ptr, scale_ptr, bias_ptr, row, col, M, N, BIAS: gl.constexpr, BM: gl.constexpr, WIDTH: gl.constexpr,
           OUTPUTS: gl.constexpr, SUMS: gl.constexpr):  # fmt: skip
    """What a tile's sums meet: scales of its outputs and of its rows, and biases."""
    i = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, SUMS))
    there = col + i % OUTPUTS < N
    i = col + i % OUTPUTS + i // OUTPUTS * N
    j = row + gl.arange(0, BM, layout=gl.SliceLayout(0, SUMS))
    of_w = gl.load(scale_ptr + i, mask=there, other=0.0)
    of_x = gl.load(x_scale_ptr + j, mask=j < M, other=0.0)
    bias = of_w
    if BIAS:
        bias = gl.load(bias_ptr + i, mask=there, other=0.0)
    return of_w, of_x, bias


@gluon.jit
def finish(acc, of_w, of_x, bias, y_ptr, row, col, M, N, BIAS: gl.constexpr, GATED: gl.constexpr, ACT: gl.constexpr,
           BM: gl.constexpr, OUTPUTS: gl.constexpr):  # fmt: skip
    """Stores sums [64, BM], or the gated products of their first half and their second."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // OUTPUTS, OUTPUTS // 8], [4, 1], [1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 8, 2], [256 // OUTPUTS, OUTPUTS // 8, 1], [4, 1, 1], [2, 1, 0])
    DTYPE: gl.constexpr = y_ptr.dtype.element_ty
    acc *= of_x[None, :] * of_w[:, None]
    if BIAS:
        acc += bias.to(gl.float32)[:, None]
    if GATED:
        pairs = acc.to(DTYPE).reshape((2, OUTPUTS, BM)).permute((2, 1, 0))
        gate, up = gl.convert_layout(pairs, PAIRS).split()
        y = gl.convert_layout(gated_product(gate, up, ACT), LINES)
    else:
        y = gl.convert_layout(acc.to(DTYPE).permute((1, 0)), LINES)
    own = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, LINES))
    row += gl.arange(0, BM, layout=gl.SliceLayout(1, LINES))
    inside = (row < M)[:, None] & (col + own < N)[None, :]
    gl.store(y_ptr + row.to(gl.int64)[:, None] * N + (col + own)[None, :], y, mask=inside)


@gluon.jit
def registers(COUNT: gl.constexpr, WIDTH: gl.constexpr, BM: gl.constexpr, SUMS: gl.constexpr):
    """So many tensors for parts."""
    found = ()
    for _ in gl.static_range(COUNT):
        found = found + (gl.zeros([WIDTH, BM], gl.float32, SUMS),)  # noqa: RUF005
    return found


@gluon.jit
def multiply(x_scale_ptr, scale_ptr, bias_ptr, y_ptr, WHO: gl.constexpr, x_ring, w_ring, full, empty, M, N, K,
             BIAS: gl.constexpr, GATED: gl.constexpr, ACT: gl.constexpr, BM: gl.constexpr, OUTPUTS: gl.constexpr,
             GROUPS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, WALK: gl.constexpr,
             TOGETHER: gl.constexpr):  # fmt: skip
    """A group of four warps: OUTPUTS outputs of every tile, for its BM rows. Behind the last piece come zeros, until
    pieces are a multiple of TOGETHER."""
    WIDTH: gl.constexpr = OUTPUTS * 2 if GATED else OUTPUTS
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 32])
    W: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WIDTH, STEP], w_ring.dtype)
    weights = w_ring._reinterpret(w_ring.dtype, [STAGES * GROUPS, WIDTH, STEP], W)
    parts = registers(TOGETHER, WIDTH, BM, SUMS)
    one = gl.zeros([WIDTH, BM], gl.float32, SUMS)
    gdc_wait()
    n = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, BM) * gl.cdiv(N, OUTPUTS * GROUPS), gl.num_programs(0)):
        row, col = place(tile, M, N, BM, OUTPUTS * GROUPS, WALK)
        col += WHO * OUTPUTS
        acc = gl.zeros([WIDTH, BM], gl.float32, SUMS)
        if BM <= 32:  # asked for now; many rows have no registers for it
            of_w, of_x, bias = beside(x_scale_ptr, scale_ptr, bias_ptr, row, col, M, N, BIAS, BM, WIDTH, OUTPUTS, SUMS)
        for _ in range(0, gl.cdiv(K, TOGETHER * STEP)):
            if GROUPS == 3:
                for piece in gl.static_range(TOGETHER):
                    one = part_of(weights, x_ring, full, empty, one, n + piece, WHO, GROUPS, STAGES)
                    acc = added(acc, one)
            else:
                under_way = ()
                for piece in gl.static_range(TOGETHER):
                    part = begun(weights, x_ring, full, parts[piece], n + piece, WHO, GROUPS, STAGES)
                    under_way = under_way + (part,)  # noqa: RUF005
                parts = ()
                for piece in gl.static_range(TOGETHER):
                    part = warpgroup_mma_wait(TOGETHER - 1 - piece, deps=[under_way[piece]])
                    mbarrier.arrive(empty.index((n + piece) % STAGES))
                    acc += part
                    parts = parts + (part,)  # noqa: RUF005
            n += TOGETHER
        if BM > 32:
            of_w, of_x, bias = beside(x_scale_ptr, scale_ptr, bias_ptr, row, col, M, N, BIAS, BM, WIDTH, OUTPUTS, SUMS)
        finish(acc, of_w, of_x, bias, y_ptr, row, col, M, N, BIAS, GATED, ACT, BM, OUTPUTS)


@gluon.jit(do_not_specialize=["M"])
def w8a8_hopper_kernel(x_desc, w_desc, x_scale_ptr, scale_ptr, bias_ptr, y_ptr, M, N, K, BIAS: gl.constexpr,
                       GATED: gl.constexpr, ACT: gl.constexpr, BM: gl.constexpr, OUTPUTS: gl.constexpr,
                       GROUPS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, WALK: gl.constexpr,
                       TOGETHER: gl.constexpr):  # fmt: skip
    """Tiles of BM rows and OUTPUTS * GROUPS outputs, one after another; WALK row blocks walk the outputs together."""
    HALVES: gl.constexpr = 2 if GATED else 1
    gdc_launch_dependents()
    x_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BM, STEP], w_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * GROUPS * HALVES, OUTPUTS, STEP], w_desc.layout)
    full, empty = barriers(STAGES, 2, GROUPS)
    fence_async_shared()
    MOST: gl.constexpr = 160 if GROUPS == 3 else 240  # registers of a thread of the groups behind the first
    gl.warp_specialize(
        [
            (multiply, (x_scale_ptr, scale_ptr, bias_ptr, y_ptr, who, x_ring, w_ring, full, empty, M, N, K, BIAS, GATED,
                        ACT, BM, OUTPUTS, GROUPS, STEP, STAGES, WALK, TOGETHER)) if who < GROUPS else
            (copy_weights, (w_desc, w_ring, full, empty, M, N, K, HALVES, BM, OUTPUTS, GROUPS, STEP, STAGES, WALK,
                            TOGETHER)) if who == GROUPS else
            (copy_x, (x_desc, x_ring, full, empty, M, N, K, BM, OUTPUTS * GROUPS, STEP, STAGES, WALK, TOGETHER))
            for who in (0, 1, 2, 3, 4)[:GROUPS + 2]
        ],
        [4, 4, 1, 1][3 - GROUPS:], [MOST, MOST, 24, 24][3 - GROUPS:],
    )  # fmt: skip
