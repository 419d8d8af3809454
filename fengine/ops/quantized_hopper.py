"""Products of weights in four bits on NVIDIA Hopper: decoded in registers, where the tensor cores take them.

The layout (fragments.py) gives every thread the words whose weights are its own operand, 16 bytes at a time. Copying
warps fill a ring in shared memory with codes (TMA) and scales (cp.async), which do not wait for the kernel in front,
and with x, which does; groups of four warps decode 64 outputs each. Few rows take mma.sync, whose warps wait for nobody
and decode while their products run; many take wgmma, with the weights as its 64-row side.

The same tree as linear.py's, of weights rounded as quantized.py says: int4 by an exact product with the scale's last
bits and one fused multiply-add, fp4 by one exact product. Used where that was proved. A tile is of one matrix, or of
one of many experts as in experts_hopper.py."""
# pyright: reportInvalidTypeForm=false

from typing import NamedTuple

import torch
from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.fragments import Fragments
from fengine.ops.fragments_copy import copy_weights, copy_x, find
from fengine.ops.fragments_decode import decoded, scales_of
from fengine.ops.linear_hopper import experts_product
from fengine.ops.registration import (
    EARLY,
    barriers,
    dependent_launch,
    describe,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    mbarrier,
    mma_v2,
    multiprocessors,
    runs_gluon,
    warpgroup_mma,
    warpgroup_mma_wait,
)


class Tiles(NamedTuple):
    """How a product is cut: rows of x, blocks of 64 outputs (1 or 2), chunks of 64 columns in a piece, pieces in the
    ring, programs that share a multiprocessor; `sync`: by mma.sync, else by wgmma."""

    block_m: int
    blocks: int
    chunks: int
    stages: int
    programs: int
    sync: bool

    @property
    def registers(self) -> dict[str, int]:
        """The launch option by which so many programs find room."""
        threads = 32 * (4 * self.blocks + 4) * self.programs
        return {} if self.programs == 1 else {"maxnreg": 65536 // threads // 8 * 8}


class Lists(NamedTuple):
    """Who goes where among experts: see experts_routing.py. Tiles have as many rows as those of the product."""

    rows_ET: Tensor
    count_E: Tensor
    tile_X2: Tensor
    weight_P: Tensor
    top_k: int


def serves(device: torch.device) -> bool:
    """Whether the kernel is written for this device."""
    return runs_gluon(device)


def launch(x: Tensor, w: Fragments, group: int, bias: Tensor | None, y: Tensor, s: Tiles, lists: Lists | None = None,
           gated: bool = False, limit: float = 0.0, half: bool = False) -> None:  # fmt: skip
    """y = x @ w.T + bias. With lists: of each tile's expert, gated, of tokens x [T, K], or of rows x [X, K], times
    their weights. What lies between the two is in the order of tiles, of pairs where there is one `half`.
    Modifies: y."""
    experts = 1 if lists is None else len(lists.count_E)
    blocks, chunks, (m, n), words = w.words.shape[0] // experts, w.words.shape[1], y.shape, w.scales.shape[1]
    per_piece = (32 if group == 32 else 4096 // group) * s.chunks
    rows = -(-m // s.block_m) if lists is None else len(lists.tile_X2)
    tiles = rows * -(-blocks // s.blocks)
    gather, box = gated or half, 16 * (s.chunks if s.blocks == 1 else 1)
    loaders = 2 if gather and s.block_m >= 64 else 1
    warps = 4 * s.blocks
    sums = gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8]) if s.sync else gl.NVMMADistributedLayout(
        [3, 0], [warps, 1], [16, s.block_m, 16]
    )  # fmt: skip
    own = (None, None, None, None, 1) if lists is None else lists
    launcher(few_bits_kernel, (min(tiles, multiprocessors(x.device.index) * s.programs),))(
        x if gather else describe(x, s.block_m, 64), describe(w.words.view(-1, 32), box, 32), w.scales, y, bias,
        *own[:4], tiles, rows, m, 1 if lists is None else lists.rows_ET.shape[1], experts, n, x.shape[1], blocks,
        chunks, words, limit, own[4] if gated else 1, group == 32, group, per_piece,
        1 << (per_piece - 1).bit_length(), s.chunks, s.block_m, s.blocks, lists is not None, gather, gated,
        lists is not None and (half or not gated), bias is not None, limit > 0, gl.bfloat16, sums, s.sync, loaders,
        s.stages, num_warps=warps, launch_pdl=bool(dependent_launch(x.device.index, EARLY)["PDL"]), **s.registers
    )  # fmt: skip


@gluon.jit
def gated(acc, limit, DTYPE: gl.constexpr, LIMITED: gl.constexpr, BM: gl.constexpr, PARTS: gl.constexpr):
    """The experts' product of sums whose rows alternate in eights."""
    gate, up = acc.to(DTYPE).reshape((4 * PARTS, 2, 8, BM)).permute((0, 2, 3, 1)).split()
    return experts_product(gate, up, limit, LIMITED).reshape((32 * PARTS, BM))


@gluon.jit
def add_chunk(w, x_tile, acc, SUMS: gl.constexpr, SYNC: gl.constexpr):
    """acc + w @ x.T; by wgmma it is under way, and the product before it has ended."""
    if SYNC:
        return mma_v2(w, x_tile.permute((1, 0)).load(gl.DotOperandLayout(1, SUMS, 2)), acc)
    else:
        acc = warpgroup_mma(w, x_tile.permute((1, 0)), acc, is_async=True)
        return warpgroup_mma_wait(1, deps=[acc])


@gluon.jit
def beside(bias_ptr, rows_ptr, count_ptr, weight_ptr, expert, block, first, line, M, T, N, BM: gl.constexpr,
           PARTS: gl.constexpr, GATED: gl.constexpr, PAIRS: gl.constexpr, BIAS: gl.constexpr, SUMS: gl.constexpr,
           LINES: gl.constexpr):  # fmt: skip
    """What a tile's sums meet: biases of its outputs, weights of its pairs, the rows of y, and whether they are real.
    PAIRS: the rows are the tile's pairs, else they lie together."""
    i = gl.arange(0, 64 * PARTS, layout=gl.SliceLayout(1, SUMS))
    bias = gl.zeros([64 * PARTS], gl.float32, gl.SliceLayout(1, SUMS))
    weight = gl.zeros([BM], gl.float32, gl.SliceLayout(0, SUMS))
    if BIAS:
        if GATED:  # rows of gate and up alternate in eights
            own = block * 32 * PARTS + i // 16 * 8 + i % 8
            at = (expert * 2 + i // 8 % 2) * N + own
        else:
            own = block * 64 * PARTS + i
            at = expert * N + own
        bias = gl.load(bias_ptr + at, mask=own < N, other=0.0).to(gl.float32)
    row = line + gl.arange(0, BM, layout=gl.SliceLayout(1, LINES))
    real = row < M
    if PAIRS:
        count = gl.load(count_ptr + expert)
        pairs = rows_ptr + expert.to(gl.int64) * T
        at = first + gl.arange(0, BM, layout=gl.SliceLayout(0, SUMS))
        weight = gl.load(weight_ptr + gl.load(pairs + gl.minimum(at, count - 1)))
        at = first + gl.arange(0, BM, layout=gl.SliceLayout(1, LINES))
        real = at < count
        row = gl.load(pairs + at, mask=real, other=0)
    return bias, weight, row, real


@gluon.jit
def multiply(y_ptr, bias_ptr, w_ring, s_ring, x_ring, full, empty, tile_ptr, rows_ptr, count_ptr, weight_ptr, TILES, MT,
             M, T, E, N, blocks, chunks, limit, FP: gl.constexpr, GROUP: gl.constexpr, PIECE: gl.constexpr,
             KS: gl.constexpr, BM: gl.constexpr, PARTS: gl.constexpr, GROUPED: gl.constexpr, GATHER: gl.constexpr,
             GATED: gl.constexpr, PAIRS: gl.constexpr, BIAS: gl.constexpr, LIMITED: gl.constexpr,
             SUMS: gl.constexpr, SYNC: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Groups of four warps: 64 outputs of every tile each, for its BM rows of x."""
    DTYPE: gl.constexpr = x_ring.dtype
    FLAT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4 * PARTS, 1], [1, 0])
    WORDS: gl.constexpr = gl.BlockedLayout([1, 1, 4], [4, 2, 4], [4 * PARTS, 1, 1], [2, 1, 0])
    WIDTH: gl.constexpr = 64 * PARTS // (1 + GATED)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4 * (1 + GATED) // PARTS, 8 * PARTS // (1 + GATED)],
                                           [4 * PARTS, 1], [1, 0])  # fmt: skip
    PER: gl.constexpr = (GROUP + 63) // 64  # chunks that share scales
    UNIT: gl.constexpr = 2 - FP  # of 32 words
    if GATHER:
        gdc_wait()
    n = 0
    for tile in range(gl.program_id(0), TILES, gl.num_programs(0)):
        expert, block, first, line = find(tile, tile_ptr, gl.cdiv(blocks, PARTS), MT, BM, GROUPED)
        if expert < E:
            if SYNC:  # asked for now, as each load waits for the one before; many rows have no registers for it
                bias, weight, row, real = beside(bias_ptr, rows_ptr, count_ptr, weight_ptr, expert, block, first, line,
                                                 M, T, N, BM, PARTS, GATED, PAIRS, BIAS, SUMS, LINES)  # fmt: skip
            acc = gl.zeros([64 * PARTS, BM], gl.float32, SUMS)
            for piece in range(0, gl.cdiv(chunks, KS)):
                slot = n % STAGES
                mbarrier.wait(full.index(slot), (n // STAGES) & 1)
                if GATHER and not SYNC:  # rows that came by cp.async are now seen by wgmma
                    fence_async_shared()
                for c in gl.static_range(KS):
                    if c % PER == 0:
                        scales = scales_of(s_ring, slot * (PIECE // 32) + c // PER * UNIT, FP, WORDS)
                    if PARTS == 1:
                        words = w_ring.index(slot).slice(c * 16, 16).load(FLAT)
                    else:
                        words = w_ring.index(slot * KS + c).load(FLAT)
                    words = gl.convert_layout(words.reshape((16 * PARTS, 2, 16)), WORDS, assert_trivial=True)
                    w = decoded(words, scales, FP, SUMS, PARTS)
                    acc = add_chunk(w, x_ring.index(slot * KS + c), acc, SUMS, SYNC)
                    if c == 0 and not SYNC:
                        mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES), pred=piece > 0)
                if SYNC:
                    mbarrier.arrive(empty.index(slot))
                n += 1
            if not SYNC:
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(empty.index((n - 1) % STAGES))
                bias, weight, row, real = beside(bias_ptr, rows_ptr, count_ptr, weight_ptr, expert, block, first, line,
                                                 M, T, N, BM, PARTS, GATED, PAIRS, BIAS, SUMS, LINES)  # fmt: skip
            if BIAS:
                acc += bias[:, None]
            if GATED:
                y = gated(acc, limit, DTYPE, LIMITED, BM, PARTS)
            else:
                if GROUPED:
                    acc *= weight[None, :]
                y = acc.to(y_ptr.dtype.element_ty)
            y = gl.convert_layout(y.permute((1, 0)), LINES)
            col = block * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LINES))
            inside = real[:, None] & (col < N)[None, :]
            gl.store(y_ptr + row.to(gl.int64)[:, None] * N + col[None, :], y, mask=inside)


@gluon.jit(do_not_specialize=["TILES", "MT", "M", "T"])
def few_bits_kernel(x, w_desc, scale_ptr, y_ptr, bias_ptr, rows_ptr, count_ptr, tile_ptr, weight_ptr, TILES, MT, M, T,
                    E, N, K, blocks, chunks, words, limit, A: gl.constexpr, FP: gl.constexpr, GROUP: gl.constexpr,
                    WORDS: gl.constexpr, PIECE: gl.constexpr, KS: gl.constexpr, BM: gl.constexpr,
                    PARTS: gl.constexpr, GROUPED: gl.constexpr, GATHER: gl.constexpr, GATED: gl.constexpr,
                    PAIRS: gl.constexpr, BIAS: gl.constexpr, LIMITED: gl.constexpr, DTYPE: gl.constexpr,
                    SUMS: gl.constexpr, SYNC: gl.constexpr, LOADERS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """y of tiles of PARTS * 64 outputs and BM rows, one after another. GROUPED: of experts; GATHER: of rows that a list
    names; GATED: the gated product, else one weighted. x: a pointer if GATHER, else a descriptor."""
    if not GATHER:  # else when the lists are there: the kernel behind begins with them
        gdc_launch_dependents()
    X: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, 64], DTYPE)
    x_ring = gl.allocate_shared_memory(DTYPE, [STAGES * KS, BM, 64], X)
    if PARTS == 1:
        w_ring = gl.allocate_shared_memory(gl.int32, [STAGES, KS * 16, 32], w_desc.layout)
    else:
        w_ring = gl.allocate_shared_memory(gl.int32, [STAGES * KS, PARTS * 16, 32], w_desc.layout)
    copied = gl.allocate_shared_memory(gl.int32, [STAGES, PIECE * PARTS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    s_ring = copied._reinterpret(gl.int32, [STAGES * PIECE // 32, PARTS * 16, 2],
                                 gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))  # fmt: skip
    full, empty = barriers(STAGES, 33 + (32 * LOADERS if GATHER else 1), 1)  # a thread's cp.async arrives
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (y_ptr, bias_ptr, w_ring, s_ring, x_ring, full, empty, tile_ptr, rows_ptr, count_ptr, weight_ptr,
                        TILES, MT, M, T, E, N, blocks, chunks, limit, FP, GROUP, PIECE, KS, BM, PARTS, GROUPED, GATHER,
                        GATED, PAIRS, BIAS, LIMITED, SUMS, SYNC, STAGES)),
            (copy_weights, (w_desc, scale_ptr, w_ring, copied, full, empty, tile_ptr, TILES, MT, E, blocks, chunks,
                            words, KS, WORDS, PIECE, BM, PARTS, GROUPED, GATHER, STAGES)),
            (copy_x, (x, x_ring, full, empty, tile_ptr, rows_ptr, count_ptr, TILES, MT, T, E, blocks, chunks, K, A, KS,
                      BM, PARTS, GROUPED, GATHER, LOADERS, STAGES)),
        ],
        [1, LOADERS], [40, 72],
    )  # fmt: skip
