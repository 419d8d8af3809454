"""Products of few rows and few outputs on NVIDIA Hopper: weights are the 64-row side of wgmma, and not all of it.

The sum over K is one chain, and where outputs are few it is what a product waits for: a step of 16 columns takes 18 ns
of mma.sync and 11 of wgmma. But 64 outputs of a program would be few programs, each of which reads no faster than its
multiprocessor can. So a program has 16 or 32 outputs; the other rows of the operand are what the ring in shared memory
held, and their sums are dropped. One warp copies weights (TMA), which do not wait for the kernel in front, another x,
which does. The same tree as linear.py's; used where that was proved.
"""
# pyright: reportInvalidTypeForm=false

from typing import NamedTuple

from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.linear_hopper import gated_product
from fengine.ops.registration import (
    EARLY,
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
    warpgroup_mma,
    warpgroup_mma_wait,
)

BK = 64  # columns of a chunk: 128 bytes
REGISTERS = 96  # of a thread at most, for the small kernels in front and behind want some


class Narrow(NamedTuple):
    """How a product is cut: rows of x (8 to 64, no fewer than there are), outputs of a program (16, 32 or 64; of a
    gated product 16 or 32), chunks of 64 columns in a piece, pieces in the ring."""

    block_m: int
    outputs: int
    chunks: int
    stages: int


# Found on an H200. The first entry with m <= largest M, n >= least N and k >= least K is taken.
PLAIN = (
    (8, 60000, 0, Narrow(8, 64, 2, 5)),
    (8, 4224, 0, Narrow(8, 64, 2, 10)),
    (8, 2112, 0, Narrow(8, 32, 4, 6)),
    (8, 0, 1500, Narrow(8, 16, 4, 6)),
    (8, 0, 0, Narrow(8, 64, 4, 6)),
    (16, 60000, 0, Narrow(16, 64, 2, 5)),
    (16, 4224, 0, Narrow(16, 64, 2, 10)),
    (16, 2112, 0, Narrow(16, 32, 4, 5)),
    (16, 0, 1500, Narrow(16, 16, 4, 5)),
    (16, 0, 0, Narrow(16, 64, 4, 5)),
    (32, 60000, 0, None),
    (32, 8000, 0, Narrow(32, 64, 4, 4)),
    (32, 4224, 0, Narrow(32, 64, 2, 6)),
    (32, 2112, 0, Narrow(32, 32, 2, 6)),
    (32, 0, 1500, Narrow(32, 16, 2, 6)),
    (32, 0, 0, Narrow(32, 64, 4, 4)),
    (64, 60000, 0, None),
    (64, 2500, 0, Narrow(64, 64, 2, 6)),
    (64, 0, 0, Narrow(64, 32, 2, 6)),
)
GATED = (
    (8, 4224, 0, Narrow(8, 32, 2, 5)),
    (8, 0, 0, Narrow(8, 32, 4, 6)),
    (16, 4224, 0, Narrow(16, 32, 2, 5)),
    (16, 0, 0, Narrow(16, 32, 4, 5)),
    (32, 12000, 0, Narrow(32, 32, 4, 4)),
    (32, 4224, 0, None),
    (32, 0, 0, Narrow(32, 32, 4, 4)),
    (64, 0, 0, Narrow(64, 32, 2, 6)),
)


def schedules(m: int, n: int, k: int, gated: bool = False) -> list[Narrow]:
    """The fastest way to cut a product of m rows, n outputs and k inputs; none where other kernels are faster. Pure."""
    fit = (s for rows, outputs, inputs, s in (GATED if gated else PLAIN) if m <= rows and n >= outputs and k >= inputs)
    found = next(fit, None)
    return [] if found is None else [found]


def launch(x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None, y_TN: Tensor, gated: bool, act: int, s: Narrow) -> None:
    """y = x @ w.T + bias, or the gated product of w's two halves. Modifies: y_TN."""
    (m, n), k = y_TN.shape, x_TK.shape[1]
    launcher(narrow_kernel, (-(-n // s.outputs),))(
        describe_rows(x_TK, s.block_m, BK), describe(w_NK, s.outputs, BK), bias_N, y_TN, m, n, k, bias_N is not None,
        gated, act, s.block_m, s.outputs, BK, s.chunks, s.stages, num_warps=4, maxnreg=REGISTERS,
        launch_pdl=bool(dependent_launch(x_TK.device.index, EARLY)["PDL"]),
    )  # fmt: skip


@gluon.jit
def copy_chunks(desc, ring, full, empty, line, N, K, HALVES: gl.constexpr, EACH: gl.constexpr, BK: gl.constexpr,
                CHUNKS: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr):  # fmt: skip
    """A copying warp: a box of lines from `line` on (HALVES: and from N lines behind), piece after piece. A chunk takes
    EACH places of the ring. AHEAD: it does not wait for the kernel in front."""
    if not AHEAD:
        gdc_wait()
    for n in range(0, gl.cdiv(K, BK * CHUNKS)):
        slot = n % STAGES
        mbarrier.wait(empty.index(slot), ((n // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(slot), HALVES * desc.block_shape[0] * BK * 2 * CHUNKS)
        for chunk in gl.static_range(CHUNKS):
            for half in gl.static_range(HALVES):
                copy_rows(desc, ring.index((slot * CHUNKS + chunk) * EACH + half * (EACH // 2)), line + half * N,
                          (n * CHUNKS + chunk) * BK, full.index(slot))  # fmt: skip


@gluon.jit
def multiply(bias_ptr, y_ptr, x_ring, w_ring, full, empty, M, N, K, BIAS: gl.constexpr, GATED: gl.constexpr,
             ACT: gl.constexpr, BM: gl.constexpr, OUTPUTS: gl.constexpr, BK: gl.constexpr, CHUNKS: gl.constexpr,
             STAGES: gl.constexpr):  # fmt: skip
    """A group of four warps: sums [64, BM], of which the first OUTPUTS lines count, and of each half if GATED."""
    HALF: gl.constexpr = 32 if GATED else 64
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [4, 1], [1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 8, 2], [256 // HALF, HALF // 8, 1], [4, 1, 1], [2, 1, 0])
    W: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BK], w_ring.dtype)
    DTYPE: gl.constexpr = y_ptr.dtype.element_ty
    weights = w_ring._reinterpret(w_ring.dtype, [STAGES * CHUNKS, 64, BK], W)
    acc = gl.zeros([64, BM], gl.float32, SUMS)
    col = gl.program_id(0) * OUTPUTS
    if BIAS:
        i = gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS))
        own = i % HALF
        bias = gl.load(bias_ptr + i // HALF * N + col + own, mask=(own < OUTPUTS) & (col + own < N), other=0.0)
    gdc_wait()
    for n in range(0, gl.cdiv(K, BK * CHUNKS)):
        mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1)
        for chunk in gl.static_range(CHUNKS):
            at = n % STAGES * CHUNKS + chunk
            acc = warpgroup_mma(weights.index(at), x_ring.index(at).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(CHUNKS, deps=[acc])
        if n > 0:
            mbarrier.arrive(empty.index((n - 1) % STAGES))
    acc = warpgroup_mma_wait(0, deps=[acc])
    if BIAS:
        acc += bias.to(gl.float32)[:, None]
    if GATED:
        pairs = acc.to(DTYPE).reshape((2, HALF, BM)).permute((2, 1, 0))
        gate, up = gl.convert_layout(pairs, PAIRS).split()
        y = gl.convert_layout(gated_product(gate, up, ACT), LINES)
    else:
        y = gl.convert_layout(acc.to(DTYPE).permute((1, 0)), LINES)
    own = gl.arange(0, HALF, layout=gl.SliceLayout(0, LINES))
    row = gl.arange(0, BM, layout=gl.SliceLayout(1, LINES))
    inside = (row < M)[:, None] & ((own < OUTPUTS) & (col + own < N))[None, :]
    gl.store(y_ptr + row.to(gl.int64)[:, None] * N + (col + own)[None, :], y, mask=inside)


@gluon.jit(do_not_specialize=["M"])
def narrow_kernel(x_desc, w_desc, bias_ptr, y_ptr, M, N, K, BIAS: gl.constexpr, GATED: gl.constexpr, ACT: gl.constexpr,
                  BM: gl.constexpr, OUTPUTS: gl.constexpr, BK: gl.constexpr, CHUNKS: gl.constexpr,
                  STAGES: gl.constexpr):  # fmt: skip
    """OUTPUTS columns of y."""
    HALVES: gl.constexpr = 2 if GATED else 1
    EACH: gl.constexpr = 64 // OUTPUTS
    gdc_launch_dependents()
    x_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * CHUNKS, BM, BK], w_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * CHUNKS * EACH, OUTPUTS, BK], w_desc.layout)
    full, empty = barriers(STAGES, 2, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (bias_ptr, y_ptr, x_ring, w_ring, full, empty, M, N, K, BIAS, GATED, ACT, BM, OUTPUTS, BK,
                        CHUNKS, STAGES)),
            (copy_chunks, (w_desc, w_ring, full, empty, gl.program_id(0) * OUTPUTS, N, K, HALVES, EACH, BK, CHUNKS,
                           STAGES, True)),
            (copy_chunks, (x_desc, x_ring, full, empty, 0, N, K, 1, 1, BK, CHUNKS, STAGES, False)),
        ],
        [1, 1], [24, 24],
    )  # fmt: skip
