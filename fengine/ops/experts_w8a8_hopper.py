"""The products of experts in FP8 on NVIDIA Hopper with warps specialised: w8a8_hopper.py over tiles of the experts.

Rows are rounded to e4m3 in the order of the tiles, each expert's together, so that one warp copies boxes of them into
a ring in shared memory (TMA) and another the expert's weights, which does not wait for the kernel in front. Groups of
four warps multiply: 64 outputs, or 32 gates above their 32 ups, for all rows of a tile. What lies in a tile behind an
expert's last row is computed like the rest and read by nobody.

The trees are those of w8a8.py; used where that was proved."""
# pyright: reportInvalidTypeForm=false

from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.fp8_kernels import store_e4m3
from fengine.ops.linear_hopper import experts_product
from fengine.ops.registration import (
    EARLY,
    async_load,
    barriers,
    begin,
    dependent_launch,
    describe,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    mbarrier,
    multiprocessors,
    runs_gluon,
    tl,
    triton,
    wait,
    warpgroup_mma_wait,
)
from fengine.ops.w8a8_hopper import OUTPUTS, STEP, Tiles, begun


def usable(w_ENK: Tensor, step: int) -> bool:
    """Whether the kernel is written for these shapes and this device."""
    return runs_gluon(w_ENK.device) and step == STEP and w_ENK.shape[2] % 16 == 0


def launch(q_XK: Tensor, x_scale: Tensor, w_ENK: Tensor, scale: Tensor, bias: Tensor | None, y: Tensor, s: Tiles,
           lists: tuple[Tensor, ...], by_step: bool, gated: bool, limit: float, pairs: bool) -> None:  # fmt: skip
    """y of all tiles: gated products, or products times the weights of their pairs. `pairs`: where these are in y, else
    in the order of tiles. Modifies: y."""
    rows_ET, count_E, tile_X2, weight_P = lists
    (experts, width, k), n = w_ENK.shape, y.shape[1]
    outputs = OUTPUTS // 2 if gated else OUTPUTS
    tiles = len(tile_X2) * -(-n // (outputs * s.groups))
    threads = 128 * (s.groups + 1)
    most = s.registers or (0 if s.programs == 1 else 65536 // (threads * s.programs) // 8 * 8)
    launcher(w8a8_tiles_kernel, (min(tiles, multiprocessors(y.device.index) * s.programs),))(
        describe(q_XK, s.block_m, STEP), describe(w_ENK.view(-1, k), outputs, STEP), x_scale, scale, bias, rows_ET,
        count_E, tile_X2, weight_P, y, tiles, rows_ET.shape[1], experts, n, k, width, limit, bias is not None, by_step,
        gated, pairs, limit > 0, s.block_m, outputs, s.groups, STEP, s.stages, num_warps=4,
        launch_pdl=bool(dependent_launch(y.device.index, EARLY)["PDL"]), **({"maxnreg": most} if most else {})
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def quantize_tiles_kernel(x_ptr, q_ptr, scale_ptr, rows_ptr, count_ptr, tile_ptr, T, E, K, groups, A: tl.constexpr,
                          BM: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BLOCK columns of one row of a tile of BM: of token pair // A, or of x's own row where A is 0."""
    begin(PDL)
    wait(PDL)
    line = tl.program_id(0)
    expert = tl.load(tile_ptr + line // BM * 2)
    at = tl.load(tile_ptr + line // BM * 2 + 1) + line % BM
    if expert >= E:
        return
    if at >= tl.load(count_ptr + expert):
        return
    row = line
    if A:
        row = tl.load(rows_ptr + expert.to(tl.int64) * T + at) // A
    first = tl.program_id(1) * BLOCK
    col = first + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row.to(tl.int64) * K + col, mask=col < K, other=0.0).to(tl.float32)
    line = line.to(tl.int64)
    store_e4m3(x, q_ptr + line * K, scale_ptr + line * groups, first, K, BLOCK, GROUP)


@gluon.jit
def copy_weights(w_desc, w_ring, full, empty, tile_ptr, TILES, E, N, K, WIDTH, HALVES: gl.constexpr,
                 OUTPUTS: gl.constexpr, GROUPS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The warp that copies weights: all tiles of this program, piece after piece, as the ring has room."""
    PARTS: gl.constexpr = GROUPS * HALVES
    blocks = gl.cdiv(N, OUTPUTS * GROUPS)
    n = 0
    for tile in range(gl.program_id(0), TILES, gl.num_programs(0)):
        expert = gl.load(tile_ptr + tile // blocks * 2)
        if expert < E:
            col = expert * WIDTH + tile % blocks * OUTPUTS * GROUPS
            for k in range(0, gl.cdiv(K, 2 * STEP) * 2 * STEP, STEP):
                slot = n % STAGES
                mbarrier.wait(empty.index(slot), ((n // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(slot), PARTS * OUTPUTS * STEP)
                for part in gl.static_range(PARTS):
                    async_load(w_desc, [col + part // HALVES * OUTPUTS + part % HALVES * N, k], full.index(slot),
                               w_ring.index(slot * PARTS + part))  # fmt: skip
                n += 1


@gluon.jit
def copy_x(x_desc, x_ring, full, empty, tile_ptr, TILES, E, N, K, BM: gl.constexpr, BN: gl.constexpr,
           STEP: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The warp that copies rows of x."""
    gdc_wait()
    blocks = gl.cdiv(N, BN)
    n = 0
    for tile in range(gl.program_id(0), TILES, gl.num_programs(0)):
        if gl.load(tile_ptr + tile // blocks * 2) < E:
            for k in range(0, gl.cdiv(K, 2 * STEP) * 2 * STEP, STEP):
                slot = n % STAGES
                mbarrier.wait(empty.index(slot), ((n // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(slot), BM * STEP)
                async_load(x_desc, [tile // blocks * BM, k], full.index(slot), x_ring.index(slot))
                n += 1


@gluon.jit
def joined(acc, part, x_scale, scale, k, K, N_ALL, BY_STEP: gl.constexpr, STEP: gl.constexpr):
    """The sum with the part from column k on, whose scales the pointers name."""
    if BY_STEP:
        inside = k < K
        of_w = gl.load(scale + k // STEP * N_ALL, mask=inside, other=0.0)
        of_x = gl.load(x_scale + k // STEP, mask=inside, other=0.0)
        acc = gl.fma(part, of_w[:, None] * of_x[None, :], acc)
    else:
        acc += part
    return acc


@gluon.jit
def finish(acc, bias_ptr, rows_ptr, count_ptr, weight_ptr, y_ptr, expert, first, line, col, T, N, WIDTH, limit,
           BIAS: gl.constexpr, GATED: gl.constexpr, PAIRS: gl.constexpr, LIMITED: gl.constexpr, BM: gl.constexpr,
           OUTPUTS: gl.constexpr, SUMS: gl.constexpr):  # fmt: skip
    """Stores sums [64, BM] times the weights of their pairs, or the gated products of their first half and their
    second."""
    ROWS: gl.constexpr = OUTPUTS * 2 if GATED else OUTPUTS
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // OUTPUTS, OUTPUTS // 8], [4, 1], [1, 0])
    PLANES: gl.constexpr = gl.BlockedLayout([1, 8, 2], [256 // OUTPUTS, OUTPUTS // 8, 1], [4, 1, 1], [2, 1, 0])
    DTYPE: gl.constexpr = y_ptr.dtype.element_ty
    count = gl.load(count_ptr + expert)
    pairs = rows_ptr + expert.to(gl.int64) * T
    if BIAS:
        i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
        own = bias_ptr + expert * WIDTH + col + i % OUTPUTS + i // OUTPUTS * N
        acc += gl.load(own, mask=col + i % OUTPUTS < N, other=0.0).to(gl.float32)[:, None]
    if GATED:
        gate, up = gl.convert_layout(acc.to(DTYPE).reshape((2, OUTPUTS, BM)).permute((2, 1, 0)), PLANES).split()
        y = gl.convert_layout(experts_product(gate, up, limit, LIMITED), LINES)
    else:
        at = gl.minimum(first + gl.arange(0, BM, layout=gl.SliceLayout(0, SUMS)), count - 1)
        acc *= gl.load(weight_ptr + gl.load(pairs + at))[None, :]
        y = gl.convert_layout(acc.to(DTYPE).permute((1, 0)), LINES)
    row = gl.arange(0, BM, layout=gl.SliceLayout(1, LINES))
    real = first + row < count
    if PAIRS:
        row = gl.load(pairs + first + row, mask=real, other=0)
    else:
        row += line
    own = col + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, LINES))
    gl.store(y_ptr + row.to(gl.int64)[:, None] * N + own[None, :], y, mask=real[:, None] & (own < N)[None, :])


@gluon.jit
def multiply(x_scale_ptr, scale_ptr, bias_ptr, rows_ptr, count_ptr, tile_ptr, weight_ptr, y_ptr, WHO: gl.constexpr,
             x_ring, w_ring, full, empty, TILES, T, E, N, K, WIDTH, limit, BIAS: gl.constexpr, BY_STEP: gl.constexpr,
             GATED: gl.constexpr, PAIRS: gl.constexpr, LIMITED: gl.constexpr, BM: gl.constexpr, OUTPUTS: gl.constexpr,
             GROUPS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """A group of four warps: OUTPUTS outputs of every tile, for its BM rows. An odd last piece is followed by zeros."""
    ROWS: gl.constexpr = OUTPUTS * 2 if GATED else OUTPUTS
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 32])
    W: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, STEP], w_ring.dtype)
    weights = w_ring._reinterpret(w_ring.dtype, [STAGES * GROUPS, ROWS, STEP], W)
    a = gl.zeros([ROWS, BM], gl.float32, SUMS)
    b = gl.zeros([ROWS, BM], gl.float32, SUMS)
    gdc_wait()
    blocks = gl.cdiv(N, OUTPUTS * GROUPS)
    steps = gl.cdiv(K, STEP) if BY_STEP else 1
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
    j = gl.arange(0, BM, layout=gl.SliceLayout(0, SUMS))
    n = 0
    for tile in range(gl.program_id(0), TILES, gl.num_programs(0)):
        expert = gl.load(tile_ptr + tile // blocks * 2)
        if expert < E:
            first = gl.load(tile_ptr + tile // blocks * 2 + 1)
            line = tile // blocks * BM
            col = (tile % blocks * GROUPS + WHO) * OUTPUTS
            own = gl.minimum(col + i % OUTPUTS, N - 1) + i // OUTPUTS * N
            scale = scale_ptr + expert.to(gl.int64) * WIDTH * steps + own
            x_scale = x_scale_ptr + (line + j).to(gl.int64) * steps
            acc = gl.zeros([ROWS, BM], gl.float32, SUMS)
            for k in range(0, K, 2 * STEP):
                one = begun(weights, x_ring, full, a, n, WHO, GROUPS, STAGES)
                two = begun(weights, x_ring, full, b, n + 1, WHO, GROUPS, STAGES)
                a = warpgroup_mma_wait(1, deps=[one])
                mbarrier.arrive(empty.index(n % STAGES))
                acc = joined(acc, a, x_scale, scale, k, K, WIDTH, BY_STEP, STEP)
                b = warpgroup_mma_wait(0, deps=[two])
                mbarrier.arrive(empty.index((n + 1) % STAGES))
                acc = joined(acc, b, x_scale, scale, k + STEP, K, WIDTH, BY_STEP, STEP)
                n += 2
            if not BY_STEP:
                acc *= gl.load(x_scale)[None, :] * gl.load(scale)[:, None]
            finish(acc, bias_ptr, rows_ptr, count_ptr, weight_ptr, y_ptr, expert, first, line, col, T, N, WIDTH, limit,
                   BIAS, GATED, PAIRS, LIMITED, BM, OUTPUTS, SUMS)  # fmt: skip


@gluon.jit(do_not_specialize=["TILES", "T"])
def w8a8_tiles_kernel(x_desc, w_desc, x_scale_ptr, scale_ptr, bias_ptr, rows_ptr, count_ptr, tile_ptr, weight_ptr,
                      y_ptr, TILES, T, E, N, K, WIDTH, limit, BIAS: gl.constexpr, BY_STEP: gl.constexpr,
                      GATED: gl.constexpr, PAIRS: gl.constexpr, LIMITED: gl.constexpr, BM: gl.constexpr,
                      OUTPUTS: gl.constexpr, GROUPS: gl.constexpr, STEP: gl.constexpr,
                      STAGES: gl.constexpr):  # fmt: skip
    """Tiles of BM rows of one expert and OUTPUTS * GROUPS outputs, one after another. WIDTH: w's rows an expert."""
    HALVES: gl.constexpr = 2 if GATED else 1
    gdc_launch_dependents()
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BM, STEP], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * GROUPS * HALVES, OUTPUTS, STEP], w_desc.layout)
    full, empty = barriers(STAGES, 2, GROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (x_scale_ptr, scale_ptr, bias_ptr, rows_ptr, count_ptr, tile_ptr, weight_ptr, y_ptr, who, x_ring,
                        w_ring, full, empty, TILES, T, E, N, K, WIDTH, limit, BIAS, BY_STEP, GATED, PAIRS, LIMITED, BM,
                        OUTPUTS, GROUPS, STEP, STAGES)) if who < GROUPS else
            (copy_weights, (w_desc, w_ring, full, empty, tile_ptr, TILES, E, N, K, WIDTH, HALVES, OUTPUTS, GROUPS, STEP,
                            STAGES)) if who == GROUPS else
            (copy_x, (x_desc, x_ring, full, empty, tile_ptr, TILES, E, N, K, BM, OUTPUTS * GROUPS, STEP, STAGES))
            for who in (0, 1, 2, 3)[:GROUPS + 2]
        ],
        [4, 1, 1][2 - GROUPS:], [240, 24, 24][2 - GROUPS:],
    )  # fmt: skip
