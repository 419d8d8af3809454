"""Triton kernels of a mixture of experts: the products of each expert's own rows, and their sum.

They compute the trees that experts.py states. Nothing is known of the counts on the host: grids are as large as the
worst case, and programs behind the last tile end at once.
"""
# pyright: reportInvalidTypeForm=false

from fengine.ops.activations import gated_product
from fengine.ops.experts_routing import find_tile, slots, weigh
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


# -- few tokens: no lists, a tile has one row --------------------------------------------------------------------------


@triton.jit
def few_gate_kernel(logits_ptr, correction_ptr, x_ptr, w_ptr, bias_ptr, h_ptr, E, N, K, limit, A: tl.constexpr,
                    SIGMOID: tl.constexpr, CORRECTED: tl.constexpr, BIAS: tl.constexpr, LIMITED: tl.constexpr,
                    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr,
                    BE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BN columns of one pair's gated product; every program finds the pair's expert by itself."""
    begin(PDL)
    blocks = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    pair = pid // blocks
    token = pair // A
    wait(PDL)
    slot, _ = slots(logits_ptr + token.to(tl.int64) * E, correction_ptr, E, A, SIGMOID, CORRECTED, BE)
    expert = tl.sum(tl.where(slot == pair % A, tl.arange(0, BE), 0), 0)
    row = tl.arange(0, BM)
    col = pid % blocks * BN + tl.arange(0, BN)
    x_rows = x_ptr + (token + row * 0).to(tl.int64) * K
    w_expert = w_ptr + expert.to(tl.int64) * 2 * N * K
    gate, up = products(x_rows, row == 0, w_expert, col, N, K, BM, BN, BK, SWAP, EVEN, True)
    if BIAS:
        bias_expert = bias_ptr + expert * 2 * N + col
        gate += tl.load(bias_expert, mask=col < N, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_expert + N, mask=col < N, other=0.0).to(tl.float32)[None, :]
    out = gated(gate, up, limit, LIMITED, h_ptr.dtype.element_ty)
    at = h_ptr + pair.to(tl.int64) * N + row[:, None] * 0 + col[None, :]
    tl.store(at, out, mask=(row == 0)[:, None] & (col < N)[None, :])


@triton.jit
def few_down_kernel(logits_ptr, correction_ptr, h_ptr, w_ptr, bias_ptr, shared_ptr, gate_ptr, y_ptr, E, N, K, scale,
                    A: tl.constexpr, AP: tl.constexpr, RENORMALISE: tl.constexpr, SIGMOID: tl.constexpr,
                    CORRECTED: tl.constexpr, BIAS: tl.constexpr, SHARED: tl.constexpr, GATE: tl.constexpr,
                    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, BE: tl.constexpr,
                    PDL: tl.constexpr):  # fmt: skip
    """BN columns of one token's result: all its experts side by side, one a warp, then their sum in order of ids.

    The kernel in front, few_gate_kernel, lets this one start when the logits are there: experts are chosen while that
    one runs.
    """
    begin(PDL)
    blocks = tl.cdiv(N, BN)
    token = tl.program_id(0) // blocks
    col = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
    slot = tl.arange(0, AP)
    k = tl.arange(0, BK)
    row = tl.arange(0, BM)
    place, logit = slots(logits_ptr + token.to(tl.int64) * E, correction_ptr, E, A, SIGMOID, CORRECTED, BE)
    mine = place[None, :] == slot[:, None]
    expert = tl.sum(tl.where(mine, tl.arange(0, BE)[None, :], 0), 1)
    rows = w_ptr + (expert.to(tl.int64)[:, None] * N + (col % N)[None, :]) * K
    weight = weigh(place >= 0, tl.arange(0, BE), logit, E, RENORMALISE, SIGMOID, scale, BE)
    weight = tl.sum(tl.where(mine, weight[None, :], 0.0), 1)  # of one number and zeros
    wait(PDL)
    w_tile = rows[:, :, None] + k[None, None, :]
    h_tile = h_ptr + (token * A + slot).to(tl.int64)[:, None, None] * K + row[None, :, None] * 0 + k[None, None, :]
    there = (slot < A)[:, None, None]
    only = there & (row == 0)[None, :, None]
    acc = tl.zeros((AP, BN, BM), tl.float32)
    for start in range(0, K, BK):
        if EVEN and A == AP:
            w = tl.load(w_tile)
        else:
            w = tl.load(w_tile, mask=there & (start + k < K)[None, None, :], other=0.0)
        h = tl.load(h_tile, mask=only & (start + k < K)[None, None, :], other=0.0)
        acc = tl.dot(w, tl.permute(h, (0, 2, 1)), acc, input_precision="ieee")
        w_tile += BK
        h_tile += BK
    part = tl.sum(tl.where((row == 0)[None, None, :], acc, 0.0), 2)  # of one number and zeros
    if BIAS:
        bias = tl.load(bias_ptr + expert[:, None] * N + col[None, :], mask=(col < N)[None, :], other=0.0)
        part += bias.to(tl.float32)
    part = (part * weight[:, None]).to(y_ptr.dtype.element_ty).to(tl.float32)
    total = tl.zeros((BN,), tl.float32)
    for one in tl.static_range(A):
        total += tl.sum(tl.where((slot == one)[:, None], part, 0.0), 0)
    if SHARED:
        total += shared_part(shared_ptr + token.to(tl.int64) * N + col, col < N, gate_ptr, token, GATE)
    tl.store(y_ptr + token.to(tl.int64) * N + col, total.to(y_ptr.dtype.element_ty), mask=col < N)
