"""Experts of few pairs on NVIDIA Hopper: weights are the 64-row side of wgmma, as in linear_few_hopper.py.

A program of the gated products has 16 or 32 gates of one pair above as many ups; one of the down products has as many
outputs of a token, of all its experts: 64 rows are those of four experts, say, and the eight columns are their pairs'
rows, of which each expert's own counts. Sums that count for nothing, of other rows' columns and of what the ring held,
are never added to those that do.

Every program finds its token's experts by itself, in the warp that then copies their weights (TMA). The same trees as
those of experts_kernels.py; used where that was proved.
"""
# pyright: reportInvalidTypeForm=false

from typing import Any

from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.experts_kernels import shared_part
from fengine.ops.experts_routing import Routing, choose, power, scores, weigh
from fengine.ops.linear_hopper import experts_product
from fengine.ops.linear_launch import Schedule as Tiles
from fengine.ops.registration import (
    barriers,
    copy_rows,
    describe,
    describe_rows,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    mbarrier,
    shared_memory,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BK = 64  # columns of a chunk: 128 bytes
ROWS = gl.constexpr(8)  # of x in a chunk: the fewest of a wgmma
CHUNK = (64 + 8) * BK * 2  # bytes of a chunk in the ring, however many of its lines are copied
COPYING = gl.constexpr(56)  # registers of a thread that copies, and finds experts


def gate(x_TD: Tensor, gate_up_EFD: Tensor, bias: Tensor | None, logits_TE: Tensor, correction: Tensor | None,
         r: Routing, limit: float, h_PF: Tensor, s: Tiles) -> None:  # fmt: skip
    """The gated products of all pairs. Modifies: h_PF."""
    (t, e), d, f = logits_TE.shape, x_TD.shape[1], h_PF.shape[1]
    cut, options = _ring(x_TD, s)
    launcher(few_gate_hopper_kernel, (t * r.top_k * -(-f // s.block_n),))(
        describe_rows(x_TD, 1, BK), describe(gate_up_EFD.view(-1, d), s.block_n, BK), bias, logits_TE, correction,
        h_PF, e, f, d, limit, r.top_k, r.sigmoid, correction is not None, bias is not None, limit > 0, s.block_n, BK,
        *cut, power(e), **options
    )  # fmt: skip


def down(h_PF: Tensor, down_EDF: Tensor, bias: Tensor | None, logits_TE: Tensor, correction: Tensor | None, r: Routing,
         shared_TD: Tensor | None, gate_T1: Tensor | None, y_TD: Tensor, s: Tiles) -> None:  # fmt: skip
    """The result, of all pairs' gated products. Modifies: y_TD."""
    (t, e), d, f = logits_TE.shape, y_TD.shape[1], h_PF.shape[1]
    cut, options = _ring(h_PF, s)
    launcher(few_down_hopper_kernel, (t * -(-d // s.block_n),))(
        describe(h_PF, 8, BK), describe(down_EDF.view(-1, f), s.block_n, BK), bias, logits_TE, correction, shared_TD,
        gate_T1, y_TD, e, d, f, r.scale, r.top_k, r.renormalise, r.sigmoid, correction is not None, bias is not None,
        shared_TD is not None, gate_T1 is not None, s.block_n, BK, *cut, power(e), **options
    )  # fmt: skip


def _ring(x: Tensor, s: Tiles) -> tuple[tuple[int, int], dict[str, Any]]:
    """((chunks of a piece, pieces in the ring), options of a launch). Pure."""
    chunks, room = s.block_k // BK, shared_memory(x.device.index) - 1024
    stages = max(1, min(s.stages, room // (chunks * CHUNK)))
    programs = room // (stages * chunks * CHUNK + 1024)  # that share a multiprocessor
    registers = max(64, min(96, 65536 // (256 * programs) // 8 * 8))
    return (chunks, stages), {"num_warps": s.warps, "maxnreg": registers, "launch_pdl": True}


@gluon.jit
def chosen(logits_ptr, correction_ptr, token, E, A: gl.constexpr, SIGMOID: gl.constexpr, CORRECTED: gl.constexpr,
           BE: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """(ids, whether each is an expert of the token, its logits), the same in every warp."""
    EACH: gl.constexpr = BE // 32 if BE > 32 else 1
    id = gl.arange(0, BE, layout=gl.BlockedLayout([EACH], [32], [WARPS], [0]))
    logit, key = scores(logits_ptr + token.to(gl.int64) * E, correction_ptr, id, E, SIGMOID, CORRECTED)
    return id, choose(key, id, E, A, BE), logit


@gluon.jit
def following(expert, id, selected, BE: gl.constexpr):
    """The first that is selected behind `expert`."""
    return gl.min(gl.where(selected & (id > expert), id, BE), 0)


@gluon.jit
def copy(desc, ring, full, empty, lines, first, K, EACH: gl.constexpr, APART: gl.constexpr, BK: gl.constexpr,
         CHUNKS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """A copying warp: boxes of lines from each of `lines` on, all of K, as pieces from number `first` on. A chunk
    takes EACH places of the ring, its boxes lie APART."""
    for piece in range(0, gl.cdiv(K, BK * CHUNKS)):
        slot = (first + piece) % STAGES
        mbarrier.wait(empty.index(slot), ((first + piece) // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(slot), len(lines) * desc.block_shape[0] * BK * 2 * CHUNKS)
        for chunk in gl.static_range(CHUNKS):
            for box in gl.static_range(len(lines)):
                copy_rows(desc, ring.index((slot * CHUNKS + chunk) * EACH + box * APART), lines[box],
                          (piece * CHUNKS + chunk) * BK, full.index(slot))  # fmt: skip


@gluon.jit
def products(x_ring, w_ring, full, empty, first, which, K, BK: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr,
             SUMS: gl.constexpr):  # fmt: skip
    """[64]: of the sums over pieces from number `first` on, those of column `which` of each line."""
    W: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BK], w_ring.dtype)
    weights = w_ring._reinterpret(w_ring.dtype, [STAGES * CHUNKS, 64, BK], W)
    acc = gl.zeros([64, ROWS], gl.float32, SUMS)
    behind = first + gl.cdiv(K, BK * CHUNKS)
    for n in range(first, behind):
        mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1)
        for chunk in gl.static_range(CHUNKS):
            at = n % STAGES * CHUNKS + chunk
            acc = warpgroup_mma(weights.index(at), x_ring.index(at).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(CHUNKS, deps=[acc])
        if n > first:
            mbarrier.arrive(empty.index((n - 1) % STAGES))
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((behind - 1) % STAGES))
    column = gl.arange(0, ROWS, layout=gl.SliceLayout(0, SUMS))
    return gl.sum(gl.where(column[None, :] == which[:, None], acc, 0.0), 1)  # of one number and zeros


@gluon.jit
def copy_gate(w_desc, logits_ptr, correction_ptr, w_ring, full, empty, pair, col, E, N, K, A: gl.constexpr,
              SIGMOID: gl.constexpr, CORRECTED: gl.constexpr, OUTPUTS: gl.constexpr, BK: gl.constexpr,
              CHUNKS: gl.constexpr, STAGES: gl.constexpr, BE: gl.constexpr):  # fmt: skip
    """The warp that copies one expert's weights."""
    gdc_wait()
    gdc_launch_dependents()  # the logits are there: the kernel behind begins with them
    expert = expert_of(logits_ptr, correction_ptr, pair, E, A, SIGMOID, CORRECTED, BE, 1)
    line = expert * 2 * N + col
    copy(w_desc, w_ring, full, empty, (line, line + N), 0, K, 64 // OUTPUTS, 32 // OUTPUTS, BK, CHUNKS, STAGES)


@gluon.jit
def expert_of(logits_ptr, correction_ptr, pair, E, A: gl.constexpr, SIGMOID: gl.constexpr, CORRECTED: gl.constexpr,
              BE: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """The expert of a pair."""
    id, selected, _ = chosen(logits_ptr, correction_ptr, pair // A, E, A, SIGMOID, CORRECTED, BE, WARPS)
    expert = following(-1, id, selected, BE)
    for _ in range(pair % A):
        expert = following(expert, id, selected, BE)
    return expert


@gluon.jit
def copy_x(x_desc, x_ring, full, empty, line, GROUPS: gl.constexpr, EACH: gl.constexpr, K, BK: gl.constexpr,
           CHUNKS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The warp that copies rows: those from `line` on, then those from EACH behind them on, and so on."""
    gdc_wait()
    for group in gl.static_range(GROUPS):
        lines = (line + group * EACH,)
        copy(x_desc, x_ring, full, empty, lines, group * gl.cdiv(K, BK * CHUNKS), K, 1, 1, BK, CHUNKS, STAGES)


@gluon.jit
def multiply_gate(logits_ptr, correction_ptr, bias_ptr, h_ptr, x_ring, w_ring, full, empty, pair, col, E, N, K, limit,
                  A: gl.constexpr, SIGMOID: gl.constexpr, CORRECTED: gl.constexpr, BIAS: gl.constexpr,
                  LIMITED: gl.constexpr, OUTPUTS: gl.constexpr, BK: gl.constexpr, CHUNKS: gl.constexpr,
                  STAGES: gl.constexpr, BE: gl.constexpr):  # fmt: skip
    """A group of four warps: gates in the first half of the sums' lines, ups in the second."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    LINES: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [4, 1], [1, 0])
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS))
    gdc_wait()
    if BIAS:
        expert = expert_of(logits_ptr, correction_ptr, pair, E, A, SIGMOID, CORRECTED, BE, 4)
        own = i % 32
        at = bias_ptr + expert * 2 * N + i // 32 * N + col + own
        bias = gl.load(at, mask=(own < OUTPUTS) & (col + own < N), other=0.0).to(gl.float32)
    both = products(x_ring, w_ring, full, empty, 0, i * 0, K, BK, CHUNKS, STAGES, SUMS)
    if BIAS:
        both += bias
    gate, up = gl.convert_layout(both.to(h_ptr.dtype.element_ty).reshape((2, 32)).permute((1, 0)), LINES).split()
    own = gl.arange(0, 32, layout=gl.SliceLayout(1, LINES))
    y = gl.convert_layout(experts_product(gate, up, limit, LIMITED), gl.SliceLayout(1, LINES))
    gl.store(h_ptr + pair.to(gl.int64) * N + col + own, y, mask=(own < OUTPUTS) & (col + own < N))


@gluon.jit
def few_gate_hopper_kernel(x_desc, w_desc, bias_ptr, logits_ptr, correction_ptr, h_ptr, E, N, K, limit, A: gl.constexpr,
                           SIGMOID: gl.constexpr, CORRECTED: gl.constexpr, BIAS: gl.constexpr, LIMITED: gl.constexpr,
                           OUTPUTS: gl.constexpr, BK: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr,
                           BE: gl.constexpr):  # fmt: skip
    """OUTPUTS columns of one pair's gated product."""
    blocks = gl.cdiv(N, OUTPUTS)
    pair = gl.program_id(0) // blocks
    col = gl.program_id(0) % blocks * OUTPUTS
    x_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * CHUNKS, ROWS, BK], w_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * CHUNKS * (64 // OUTPUTS), OUTPUTS, BK], w_desc.layout)
    full, empty = barriers(STAGES, 2, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_gate, (logits_ptr, correction_ptr, bias_ptr, h_ptr, x_ring, w_ring, full, empty, pair, col, E, N,
                             K, limit, A, SIGMOID, CORRECTED, BIAS, LIMITED, OUTPUTS, BK, CHUNKS, STAGES, BE)),
            (copy_gate, (w_desc, logits_ptr, correction_ptr, w_ring, full, empty, pair, col, E, N, K, A, SIGMOID,
                         CORRECTED, OUTPUTS, BK, CHUNKS, STAGES, BE)),
            (copy_x, (x_desc, x_ring, full, empty, pair // A, 1, 0, K, BK, CHUNKS, STAGES)),
        ],
        [1, 1], [COPYING, COPYING],
    )  # fmt: skip


@gluon.jit
def copy_down(w_desc, logits_ptr, correction_ptr, w_ring, full, empty, token, col, E, N, K, A: gl.constexpr,
              SIGMOID: gl.constexpr, CORRECTED: gl.constexpr, OUTPUTS: gl.constexpr, BK: gl.constexpr,
              CHUNKS: gl.constexpr, STAGES: gl.constexpr, BE: gl.constexpr):  # fmt: skip
    """The warp that copies weights of a token's experts, those of one 64 lines after those of another."""
    EACH: gl.constexpr = 64 // OUTPUTS
    id, selected, _ = chosen(logits_ptr, correction_ptr, token, E, A, SIGMOID, CORRECTED, BE, 1)
    expert = -1
    for group in gl.static_range((A + EACH - 1) // EACH):
        lines = ()
        for one in gl.static_range(EACH):
            if group * EACH + one < A:
                expert = following(expert, id, selected, BE)
                lines = lines + (expert * N + col,)
        pieces = gl.cdiv(K, BK * CHUNKS)
        copy(w_desc, w_ring, full, empty, lines, group * pieces, K, EACH, 1, BK, CHUNKS, STAGES)


@gluon.jit
def multiply_down(logits_ptr, correction_ptr, bias_ptr, shared_ptr, gate_ptr, y_ptr, x_ring, w_ring, full, empty, token,
                  col, E, N, K, scale, A: gl.constexpr, RENORMALISE: gl.constexpr, SIGMOID: gl.constexpr,
                  CORRECTED: gl.constexpr, BIAS: gl.constexpr, SHARED: gl.constexpr, GATE: gl.constexpr,
                  OUTPUTS: gl.constexpr, BK: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr,
                  BE: gl.constexpr):  # fmt: skip
    """A group of four warps: 64 lines of sums are OUTPUTS outputs of EACH experts."""
    EACH: gl.constexpr = 64 // OUTPUTS
    DTYPE: gl.constexpr = y_ptr.dtype.element_ty
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    COLUMNS: gl.constexpr = gl.BlockedLayout([EACH, 1], [1, 32], [1, 4], [0, 1])
    id, selected, logit = chosen(logits_ptr, correction_ptr, token, E, A, SIGMOID, CORRECTED, BE, 4)
    weight = weigh(selected, id, logit, E, RENORMALISE, SIGMOID, scale, BE)
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS))
    which, own = i // OUTPUTS, i % OUTPUTS
    slot = gl.arange(0, EACH, layout=gl.SliceLayout(1, COLUMNS))
    out = col + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, COLUMNS))
    total = gl.zeros([OUTPUTS], gl.float32, gl.SliceLayout(0, COLUMNS))
    expert = -1
    gdc_wait()
    for group in gl.static_range((A + EACH - 1) // EACH):
        experts = i * 0
        weights = experts.to(gl.float32)
        for one in gl.static_range(EACH):
            if group * EACH + one < A:
                expert = following(expert, id, selected, BE)
                experts = gl.where(which == one, expert, experts)
                weights = gl.where(which == one, gl.sum(gl.where(id == expert, weight, 0.0), 0), weights)
        first = group * gl.cdiv(K, BK * CHUNKS)
        part = products(x_ring, w_ring, full, empty, first, which, K, BK, CHUNKS, STAGES, SUMS)
        if BIAS:
            bias = gl.load(bias_ptr + experts * N + col + own, mask=col + own < N, other=0.0)
            part += bias.to(gl.float32)
        part = (part * weights).to(DTYPE).to(gl.float32)
        parts = gl.convert_layout(part.reshape((EACH, OUTPUTS)), COLUMNS)
        for one in gl.static_range(EACH):
            if group * EACH + one < A:
                total += gl.sum(gl.where((slot == one)[:, None], parts, 0.0), 0)
    if SHARED:
        total += shared_part(shared_ptr + token.to(gl.int64) * N + out, out < N, gate_ptr, token, GATE)
    gl.store(y_ptr + token.to(gl.int64) * N + out, total.to(DTYPE), mask=out < N)


@gluon.jit
def few_down_hopper_kernel(x_desc, w_desc, bias_ptr, logits_ptr, correction_ptr, shared_ptr, gate_ptr, y_ptr, E, N, K,
                           scale, A: gl.constexpr, RENORMALISE: gl.constexpr, SIGMOID: gl.constexpr,
                           CORRECTED: gl.constexpr, BIAS: gl.constexpr, SHARED: gl.constexpr, GATE: gl.constexpr,
                           OUTPUTS: gl.constexpr, BK: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr,
                           BE: gl.constexpr):  # fmt: skip
    """OUTPUTS columns of one token's result. The kernel in front lets this one start when the logits are there: experts
    are chosen, and their weights copied, while that one runs."""
    gdc_launch_dependents()
    blocks = gl.cdiv(N, OUTPUTS)
    token = gl.program_id(0) // blocks
    col = gl.program_id(0) % blocks * OUTPUTS
    EACH: gl.constexpr = 64 // OUTPUTS
    x_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * CHUNKS, ROWS, BK], w_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * CHUNKS * EACH, OUTPUTS, BK], w_desc.layout)
    full, empty = barriers(STAGES, 2, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_down, (logits_ptr, correction_ptr, bias_ptr, shared_ptr, gate_ptr, y_ptr, x_ring, w_ring, full,
                             empty, token, col, E, N, K, scale, A, RENORMALISE, SIGMOID, CORRECTED, BIAS, SHARED, GATE,
                             OUTPUTS, BK, CHUNKS, STAGES, BE)),
            (copy_down, (w_desc, logits_ptr, correction_ptr, w_ring, full, empty, token, col, E, N, K, A, SIGMOID,
                         CORRECTED, OUTPUTS, BK, CHUNKS, STAGES, BE)),
            (copy_x, (x_desc, x_ring, full, empty, token * A, (A + EACH - 1) // EACH, EACH, K, BK, CHUNKS, STAGES)),
        ],
        [1, 1], [COPYING, COPYING],
    )  # fmt: skip
