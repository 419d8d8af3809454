"""Triton kernels of a mixture of experts: the products of each expert's own rows, and their sum.

They compute the trees that experts.py states. Nothing is known of the counts on the host: grids are as large as the
worst case, and programs behind the last tile end at once.
"""
# pyright: reportInvalidTypeForm=false

from fengine.ops.activations import gated_product
from fengine.ops.experts_routing import find_tile
from fengine.ops.linear_kernels import products as summed
from fengine.ops.registration import begin, tl, triton, wait


@triton.jit
def products(x_rows, real, w_ptr, col, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr,
             EVEN: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
    """x @ w.T for rows at x_rows and columns `col` of w [N or 2N, K]: [BM, BN] twice, the second for w's later half if
    GATED. The tree of linear.py."""
    k = tl.arange(0, BK)
    x_tile = x_rows[:, None] + k[None, :]
    w_tile = w_ptr + (col % N).to(tl.int64)[:, None] * K + k[None, :]
    up_tile = w_tile + N.to(tl.int64) * K
    return summed(x_tile, w_tile, up_tile, real, K, BM, BN, BK, SWAP, True, EVEN, GATED)


@triton.jit
def gated(gate, up, limit, LIMITED: tl.constexpr, DTYPE: tl.constexpr):
    """silu(gate) * up of sums rounded to DTYPE; LIMITED: both clamped, (up + 1) * gate * sigmoid(1.702 gate)."""
    gate = gate.to(DTYPE)
    up = up.to(DTYPE)
    if LIMITED:
        g = tl.minimum(gate.to(tl.float32), limit)
        u = tl.minimum(tl.maximum(up.to(tl.float32), -limit), limit)
        out = (u + 1.0) * (g / (1.0 + tl.exp(-1.702 * g)))
    else:
        out = gated_product(gate, up, 0)
    return out.to(DTYPE)


@triton.jit(do_not_specialize=["T"])
def grouped_kernel(x_ptr, w_ptr, bias_ptr, rows_ptr, count_ptr, weight_ptr, y_ptr, T, E, N, K, limit, A: tl.constexpr,
                   GATED: tl.constexpr, BIAS: tl.constexpr, LIMITED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                   BK: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr, BE: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    """BM pairs of one expert, BN columns. y[pair] is the gated product of x[token], or weight * x[pair] w.T."""
    begin(PDL)
    blocks = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    wait(PDL)
    expert, first = find_tile(count_ptr, pid // blocks, E, BM, BE)
    if expert >= E:
        return
    row = first + tl.arange(0, BM)
    real = row < tl.load(count_ptr + expert)
    pair = tl.load(rows_ptr + expert.to(tl.int64) * T + row, mask=real, other=0)
    col = pid % blocks * BN + tl.arange(0, BN)
    x_rows = x_ptr + (pair // A if GATED else pair).to(tl.int64) * K
    w_expert = w_ptr + expert.to(tl.int64) * (2 * N if GATED else N) * K
    acc, up_acc = products(x_rows, real, w_expert, col, N, K, BM, BN, BK, SWAP, EVEN, GATED)
    bias_expert = bias_ptr + expert * (2 * N if GATED else N) + col if BIAS else bias_ptr
    if BIAS:
        acc += tl.load(bias_expert, mask=col < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            up_acc += tl.load(bias_expert + N, mask=col < N, other=0.0).to(tl.float32)[None, :]
        out = gated(acc, up_acc, limit, LIMITED, y_ptr.dtype.element_ty)
    else:
        out = (acc * tl.load(weight_ptr + pair, mask=real, other=0.0)[:, None]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + pair.to(tl.int64)[:, None] * N + col[None, :], out, mask=real[:, None] & (col < N)[None, :])


@triton.jit
def shared_part(rows, mask, gate_ptr, token, GATE: tl.constexpr):
    """The shared expert's output for one token; GATE: times the sigmoid of its gate, rounded."""
    part = tl.load(rows, mask=mask, other=0.0)
    if GATE:
        sigmoid = 1.0 / (1.0 + tl.exp(-tl.load(gate_ptr + token)))
        part = (part.to(tl.float32) * sigmoid).to(part.dtype)
    return part.to(tl.float32)


@triton.jit
def combine_kernel(part_ptr, id_ptr, index_ptr, base_ptr, shared_ptr, gate_ptr, y_ptr, D, A: tl.constexpr,
                   SORTED: tl.constexpr, SHARED: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    """BLOCK columns of one token: its pairs' parts in order, the shared expert last. SORTED: parts of an expert lie
    together, from its base."""
    begin(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(A):
        row = token * A + slot
        if SORTED:
            row = (tl.load(base_ptr + tl.load(id_ptr + row)) + tl.load(index_ptr + row)).to(tl.int64)
        total += tl.load(part_ptr + row * D + col, mask=col < D, other=0.0).to(tl.float32)
    if SHARED:
        total += shared_part(shared_ptr + token * D + col, col < D, gate_ptr, token, GATE)
    tl.store(y_ptr + token * D + col, total.to(y_ptr.dtype.element_ty), mask=col < D)
