"""Products of weights in four bits on NVIDIA Hopper, eight outputs a warp: more warps for the same outputs.

The sum over K is one chain, so only outputs can be spread over multiprocessors, and a warp decodes no faster for having
the chip to itself. So a group of four warps takes 32 outputs instead of wgmma's 64: the other rows of its operand are
nobody's, and their sums are dropped; of many rows of x, two such blocks are the 64. The layout (int4_words.py) gives
every thread 16 bytes that are its own weights of 128 columns. What comes next is read and decoded while wgmma works.

How words become weights: int4_decode.py. Copying warps fill a ring: codes (TMA) and scales (cp.async) do not wait for
the kernel in front, x does. Of a gated product the two blocks of a group are gates and their ups, and the sums of
neither go to memory. The same tree as linear.py's; used where that was proved.
"""
# pyright: reportInvalidTypeForm=false

from typing import NamedTuple

from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.int4_decode import fetch, operand
from fengine.ops.int4_words import Words
from fengine.ops.linear_hopper import gated_product
from fengine.ops.registration import (
    EARLY,
    async_copy,
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
    warpgroup_mma,
    warpgroup_mma_wait,
)


class Eights(NamedTuple):
    """How a product is cut: rows of x (a sum of up to three powers of two from 8 to 256), blocks of 32 outputs for a
    group of four warps (1 or 2), such groups (1 or 2), chunks of 128 columns in a piece, pieces in the ring (3 at
    least), programs that share a multiprocessor; half chunks in a ring of x's own (0: it has none), for a piece of many
    rows would be too large."""

    block_m: int
    blocks: int
    groups: int
    chunks: int
    stages: int
    programs: int
    halves: int = 0


def launch(x: Tensor, w: Words, group: int, bias: Tensor | None, y: Tensor, s: Eights, gated: bool = False,
           act: int = 0) -> None:  # fmt: skip
    """y = x @ w.T + bias, or with two blocks a group the gated product of w's two halves. Modifies: y."""
    (blocks, chunks), (m, n), warps = w.words.shape[:2], y.shape, 4 * s.groups
    rows, apart = -(-m // s.block_m), n // 32 if gated else s.groups
    tiles = rows * -(-n // (32 * s.groups * (1 if gated else s.blocks)))
    registers = {} if s.programs == 1 else {"maxnreg": 65536 // (32 * (warps + 4) * s.programs) // 8 * 8}
    launcher(eights_kernel, (min(tiles, multiprocessors(x.device.index) * s.programs),))(
        describe_rows(x, min(64, s.block_m & -s.block_m), 64), describe(w.words.view(-1, 32), 16, 32), w.scales, y,
        bias, tiles, rows, m, n, blocks, chunks, w.scales.shape[1], apart, bias is not None, gated, act, group,
        s.chunks, s.block_m, s.blocks, s.groups, s.stages, s.halves, num_warps=warps,
        launch_pdl=bool(dependent_launch(x.device.index, EARLY)["PDL"]), **registers
    )  # fmt: skip


@gluon.jit
def zeros(ROWS: gl.constexpr, GROUPS: gl.constexpr):
    return gl.zeros([64 * GROUPS, ROWS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4 * GROUPS, 1], [16, ROWS, 16]))


@gluon.jit
def begin_sums(BM: gl.constexpr, GROUPS: gl.constexpr):
    """Sums of BM rows, by powers of two: tensors have no other sizes."""
    sums = ()
    for i in gl.static_range(6):
        if BM & (256 >> i):
            sums = sums + (zeros(256 >> i, GROUPS),)  # noqa: RUF005
    return sums


@gluon.jit
def rings(COUNT: gl.constexpr, BM: gl.constexpr):
    """Memory for COUNT times 64 columns of BM rows, likewise."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, 64], gl.bfloat16)
    found = ()
    for i in gl.static_range(6):
        if BM & (256 >> i):
            found = found + (gl.allocate_shared_memory(gl.bfloat16, [COUNT, 256 >> i, 64], LAYOUT),)  # noqa: RUF005
    return found


@gluon.jit
def product(acc, w, x):
    """acc + w @ x, begun."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return warpgroup_mma(gl.convert_layout(w, LEFT, assert_trivial=True), x.permute((1, 0)), acc, is_async=True)


@gluon.jit
def products(sums, w, x_rings, at):
    """Those of weights with 64 columns of x, begun."""
    found = ()
    for i in gl.static_range(len(sums)):
        found = found + (product(sums[i], w, x_rings[i].index(at)),)  # noqa: RUF005
    return found


@gluon.jit
def waited(sums, PENDING: gl.constexpr):
    """Sums when at most PENDING products are under way."""
    found = warpgroup_mma_wait(PENDING, deps=sums)
    return found if len(sums) > 1 else (found,)


@gluon.jit
def rounded(acc, bias_ptr, col, N, like, BIAS: gl.constexpr, GROUPS: gl.constexpr):
    """Sums [.., 8, rows] of a block of outputs a group, from output `col` of N on."""
    acc = acc.reshape((32 * GROUPS, acc.shape[2]))
    if BIAS:
        col += gl.arange(0, 32 * GROUPS, layout=gl.SliceLayout(1, acc.type.layout))
        acc += gl.load(bias_ptr + col, mask=col < N, other=0.0).to(gl.float32)[:, None]
    return acc.to(like)


@gluon.jit
def store(y_ptr, y, col, line, M, N, GROUPS: gl.constexpr):
    """Rows from `line` on of outputs from `col` on."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [8 // GROUPS, 4 * GROUPS], [4 * GROUPS, 1], [1, 0])
    y = gl.convert_layout(y.permute((1, 0)), LINES)
    row = line + gl.arange(0, y.shape[0], layout=gl.SliceLayout(1, LINES))
    col += gl.arange(0, 32 * GROUPS, layout=gl.SliceLayout(0, LINES))
    at = y_ptr + row.to(gl.int64)[:, None] * N + col[None, :]
    gl.store(at, y, mask=(row < M)[:, None] & (col < N)[None, :])


@gluon.jit
def finish(y_ptr, bias_ptr, acc, col, line, M, N, BIAS: gl.constexpr, GATED: gl.constexpr, ACT: gl.constexpr,
           PARTS: gl.constexpr, GROUPS: gl.constexpr):  # fmt: skip
    """Stores sums of rows from `line` on and of outputs from `col` on, or the gated products of their two blocks."""
    DTYPE: gl.constexpr = y_ptr.dtype.element_ty
    y, y_next = acc.reshape((4 * GROUPS, 2, 8, acc.shape[1])).permute((0, 2, 3, 1)).split()
    y = rounded(y, bias_ptr, col, N, DTYPE, BIAS, GROUPS)
    if PARTS == 2:
        next_col = col + (N if GATED else 32 * GROUPS)
        y_next = rounded(y_next, bias_ptr, next_col, N * (2 if GATED else 1), DTYPE, BIAS, GROUPS)
        if GATED:
            y = gated_product(y, y_next, ACT)
        else:
            store(y_ptr, y_next, next_col, line, M, N, GROUPS)
    store(y_ptr, y, col, line, M, N, GROUPS)


@gluon.jit
def multiply(y_ptr, bias_ptr, w_ring, s_ring, x_rings, full, empty, x_full, x_empty, TILES, MT, M, N, chunks,
             BIAS: gl.constexpr, GATED: gl.constexpr, ACT: gl.constexpr, GROUP: gl.constexpr, KS: gl.constexpr,
             BM: gl.constexpr, PARTS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
             HALVES: gl.constexpr):  # fmt: skip
    """Groups of four warps: PARTS blocks of 32 outputs of every tile each, for its BM rows of x. What they read next is
    on its way before they decode what is there."""
    n = 0
    j = 0  # halves of chunks of x so far
    mbarrier.wait(full.index(0), 0)
    chunk = fetch(w_ring, s_ring, 0, GROUP, PARTS, GROUPS)
    for tile in range(gl.program_id(0), TILES, gl.num_programs(0)):
        sums = begin_sums(BM, GROUPS)
        for piece in range(0, gl.cdiv(chunks, KS)):
            slot = n % STAGES
            for c in gl.static_range(KS):
                if c + 1 < KS:
                    coming = fetch(w_ring, s_ring, slot * KS + c + 1, GROUP, PARTS, GROUPS)
                else:
                    more = ((piece + 1) * KS < chunks) | (tile + gl.num_programs(0) < TILES)
                    mbarrier.wait(full.index((n + 1) % STAGES), ((n + 1) // STAGES) & 1, pred=more)
                    coming = fetch(w_ring, s_ring, (n + 1) % STAGES * KS, GROUP, PARTS, GROUPS)
                for half in gl.static_range(2):
                    at = j % HALVES if HALVES else (slot * KS + c) * 2 + half
                    w = operand(chunk, half, PARTS, sums[0])
                    if HALVES:
                        mbarrier.wait(x_full.index(at), (j // HALVES) & 1)
                    sums = waited(products(sums, w, x_rings, at), len(sums))
                    if HALVES:
                        before = (piece > 0) | (c * 2 + half > 0)
                        mbarrier.arrive(x_empty.index((j + HALVES - 1) % HALVES), pred=before)
                        j += 1
                chunk = coming
                if c == 0:
                    mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES), pred=piece > 0)
            n += 1
        sums = waited(sums, 0)
        mbarrier.arrive(empty.index((n - 1) % STAGES))
        if HALVES:
            mbarrier.arrive(x_empty.index((j - 1) % HALVES))
        col, line = tile // MT * (32 * GROUPS * (1 if GATED else PARTS)), tile % MT * BM
        for i in gl.static_range(len(sums)):
            finish(y_ptr, bias_ptr, sums[i], col, line, M, N, BIAS, GATED, ACT, PARTS, GROUPS)
            line += sums[i].shape[1]


@gluon.jit
def copy_weights(w_desc, scale_ptr, w_ring, s_ring, full, empty, TILES, MT, blocks, chunks, words, apart,
                 GATED: gl.constexpr, KS: gl.constexpr, UNITS: gl.constexpr, PARTS: gl.constexpr, GROUPS: gl.constexpr,
                 STAGES: gl.constexpr):  # fmt: skip
    """The warp that copies codes and scales: all tiles of this program, piece after piece, as the ring has room. In a
    piece a chunk's parts follow each other, `apart` blocks behind each other, in a part the groups' blocks."""
    ROWS: gl.constexpr = 32 * GROUPS
    i = gl.arange(0, KS * PARTS * UNITS * ROWS, layout=gl.BlockedLayout([4], [32], [1], [0]))
    own = i // (UNITS * ROWS) % PARTS * apart + i // 32 % GROUPS
    word = (i // (PARTS * UNITS * ROWS) * UNITS + i // ROWS % UNITS) * 32 + i % 32
    n = 0
    for tile in range(gl.program_id(0), TILES, gl.num_programs(0)):
        first = tile // MT * (GROUPS * (1 if GATED else PARTS))
        for piece in range(0, gl.cdiv(chunks, KS)):
            slot = n % STAGES
            mbarrier.wait(empty.index(slot), ((n // STAGES) & 1) ^ 1)
            at = scale_ptr + (first + own).to(gl.int64) * words + piece * (KS * UNITS * 32) + word
            there = (word < words - piece * (KS * UNITS * 32)) & (first + own < blocks)
            async_copy.async_copy_global_to_shared(s_ring.index(slot), at, mask=there)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            mbarrier.expect(full.index(slot), KS * PARTS * GROUPS * 2048)
            for c in gl.static_range(KS):
                for b in gl.static_range(PARTS * GROUPS):
                    to = w_ring.index((slot * KS + c) * PARTS + b // GROUPS).slice(b % GROUPS * 16, 16)
                    block = first + b // GROUPS * apart + b % GROUPS
                    async_load(w_desc, [(block * chunks + piece * KS + c) * 16, 0], full.index(slot), to)
            n += 1


@gluon.jit
def copy_x(x_desc, x_rings, full, empty, TILES, MT, M, chunks, KS: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
           XK: gl.constexpr):  # fmt: skip
    """The warp that copies rows of x, XK times 64 columns at once."""
    BOX: gl.constexpr = x_desc.block_shape[0]
    gdc_wait()
    n = 0
    for tile in range(gl.program_id(0), TILES, gl.num_programs(0)):
        for piece in range(0, gl.cdiv(chunks, KS) * (2 * KS // XK)):
            slot = n % STAGES
            mbarrier.wait(empty.index(slot), ((n // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), (BM if BOX > 1 else 1) * XK * 128)
            for c in gl.static_range(XK):
                copy_columns(x_desc, x_rings, slot * XK + c, full.index(slot), tile % MT * BM, M,
                             (piece * XK + c) * 64)  # fmt: skip
            n += 1


@gluon.jit
def copy_columns(x_desc, x_rings, at, full, line, M, column):
    """Copies 64 columns of rows from `line` on. Where a box has no row the first ones come again: the copy engine takes
    several times as long for what lies outside a tensor, and sums of what is there instead are nobody's."""
    BOX: gl.constexpr = x_desc.block_shape[0]
    for i in gl.static_range(len(x_rings)):
        ring = x_rings[i].index(at)
        for box in gl.static_range(ring.shape[0] // BOX if BOX > 1 else 1):
            tile = ring.slice(box * BOX, BOX) if BOX > 1 else ring
            copy_rows(x_desc, tile, gl.where(line < M, line, 0), column, full)
            line += BOX


@gluon.jit(do_not_specialize=["TILES", "MT", "M"])
def eights_kernel(x_desc, w_desc, scale_ptr, y_ptr, bias_ptr, TILES, MT, M, N, blocks, chunks, words, apart,
                  BIAS: gl.constexpr, GATED: gl.constexpr, ACT: gl.constexpr, GROUP: gl.constexpr, KS: gl.constexpr,
                  BM: gl.constexpr, PARTS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
                  HALVES: gl.constexpr):  # fmt: skip
    """y of tiles of BM rows and PARTS GROUPS blocks of outputs, one after another. HALVES: if not 0, x has a ring of
    its own, of so many half chunks."""
    gdc_launch_dependents()
    UNITS: gl.constexpr = 128 // GROUP  # of scales in a chunk
    XK: gl.constexpr = 1 if HALVES else KS * 2
    XS: gl.constexpr = HALVES if HALVES else STAGES
    x_rings = rings(XS * XK, BM)
    w_ring = gl.allocate_shared_memory(gl.int32, [STAGES * KS * PARTS, 16 * GROUPS, 32], w_desc.layout)
    copied = gl.allocate_shared_memory(gl.int32, [STAGES, KS * PARTS * UNITS * 32 * GROUPS],
                                       gl.SwizzledSharedLayout(1, 1, 1, [0]))  # fmt: skip
    s_ring = copied._reinterpret(gl.int32, [STAGES * KS * PARTS * UNITS, 16 * GROUPS, 2],
                                 gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))  # fmt: skip
    full, empty = barriers(STAGES, 33 if HALVES else 34, 1)  # a thread's cp.async arrives, and who expects bytes
    x_full = full
    x_empty = empty
    if HALVES:
        x_full, x_empty = barriers(HALVES, 1, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (y_ptr, bias_ptr, w_ring, s_ring, x_rings, full, empty, x_full, x_empty, TILES, MT, M, N, chunks,
                        BIAS, GATED, ACT, GROUP, KS, BM, PARTS, GROUPS, STAGES, HALVES)),
            (copy_weights, (w_desc, scale_ptr, w_ring, copied, full, empty, TILES, MT, blocks, chunks, words, apart,
                            GATED, KS, UNITS, PARTS, GROUPS, STAGES)),
            (copy_x, (x_desc, x_rings, x_full, x_empty, TILES, MT, M, chunks, KS, BM, XS, XK)),
        ],
        [1, 1], [40, 40],
    )  # fmt: skip
