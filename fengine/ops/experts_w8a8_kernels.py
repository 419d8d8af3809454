"""Triton kernels of experts that multiply in FP8: the trees of w8a8.py over each expert's own rows."""
# pyright: reportInvalidTypeForm=false

from fengine.ops.experts_kernels import gated
from fengine.ops.registration import begin, tl, triton, wait


@triton.jit
def joined(acc, part, of_x, of_w, BY_STEP: tl.constexpr, SWAP: tl.constexpr):
    """The sum with one more part."""
    if BY_STEP:
        scale = of_w[:, None] * of_x[None, :] if SWAP else of_x[:, None] * of_w[None, :]
        acc = tl.fma(part, scale, acc)
    else:
        acc += part
    return acc


@triton.jit
def products(x_rows, scale_rows, real, w_ptr, scale_ptr, col, N, K, BM: tl.constexpr, BN: tl.constexpr,
             STEP: tl.constexpr, BY_STEP: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr,
             GATED: tl.constexpr):  # fmt: skip
    """x @ w.T for codes at x_rows and columns `col` of w [N or 2N, K]: [BM, BN] twice, the second for w's later half if
    GATED. SWAP makes the weights the M side, which has 64 rows or more."""
    WIDTH = 2 * N if GATED else N
    k = tl.arange(0, STEP)
    col = col % N
    x_tile = x_rows[:, None] + k[None, :]
    w_tile = w_ptr + col.to(tl.int64)[:, None] * K + k[None, :]
    up_tile = w_tile + N.to(tl.int64) * K
    scale_tile = scale_ptr + col
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    up_acc = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    of_x = tl.load(scale_rows, mask=real, other=0.0)
    of_w = tl.load(scale_tile)
    of_up = tl.load(scale_tile + N) if GATED else of_w
    for start in range(0, K, STEP):
        inside = (start + k < K)[None, :]
        x = tl.load(x_tile, mask=real[:, None] if EVEN else real[:, None] & inside, other=0.0)
        w = tl.load(w_tile) if EVEN else tl.load(w_tile, mask=inside, other=0.0)
        if BY_STEP:
            of_x = tl.load(scale_rows, mask=real, other=0.0)
            of_w = tl.load(scale_tile)
            of_up = tl.load(scale_tile + N) if GATED else of_w
        part = tl.dot(w, x.T) if SWAP else tl.dot(x, w.T)
        acc = joined(acc, part, of_x, of_w, BY_STEP, SWAP)
        if GATED:
            w = tl.load(up_tile) if EVEN else tl.load(up_tile, mask=inside, other=0.0)
            part = tl.dot(w, x.T) if SWAP else tl.dot(x, w.T)
            up_acc = joined(up_acc, part, of_x, of_up, BY_STEP, SWAP)
            up_tile += STEP
        x_tile += STEP
        w_tile += STEP
        scale_rows += 1
        scale_tile += WIDTH
    if SWAP:
        acc = acc.T
        up_acc = up_acc.T
    if not BY_STEP:
        acc *= of_x[:, None] * of_w[None, :]
        up_acc *= of_x[:, None] * of_up[None, :]
    return acc, up_acc


@triton.jit(do_not_specialize=["T"])
def w8a8_experts_kernel(q_ptr, x_scale_ptr, w_ptr, scale_ptr, bias_ptr, rows_ptr, count_ptr, tile_ptr, weight_ptr,
                        y_ptr, T, E, N, K, steps, limit, A: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
                        LIMITED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SWAP: tl.constexpr,
                        STEP: tl.constexpr, BY_STEP: tl.constexpr, EVEN: tl.constexpr,
                        PDL: tl.constexpr):  # fmt: skip
    """BN columns of BM pairs of one expert: y[pair] is the gated product of x[token], or weight * x[pair] w.T; x has
    `steps` scales a row."""
    begin(PDL)
    blocks = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    wait(PDL)
    expert = tl.load(tile_ptr + pid // blocks * 2)
    if expert >= E:
        return
    row = tl.load(tile_ptr + pid // blocks * 2 + 1) + tl.arange(0, BM)
    real = row < tl.load(count_ptr + expert)
    pair = tl.load(rows_ptr + expert.to(tl.int64) * T + row, mask=real, other=0)
    col = pid % blocks * BN + tl.arange(0, BN)
    WIDTH = 2 * N if GATED else N
    line = (pair // A if GATED else pair).to(tl.int64)
    expert = expert.to(tl.int64)
    acc, up_acc = products(q_ptr + line * K, x_scale_ptr + line * steps, real, w_ptr + expert * WIDTH * K,
                           scale_ptr + expert * WIDTH * (steps if BY_STEP else 1), col, N, K, BM, BN, STEP, BY_STEP,
                           SWAP, EVEN, GATED)  # fmt: skip
    if BIAS:
        acc += tl.load(bias_ptr + expert * WIDTH + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            up_acc += tl.load(bias_ptr + expert * WIDTH + N + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        out = gated(acc, up_acc, limit, LIMITED, y_ptr.dtype.element_ty)
    else:
        weight = tl.load(weight_ptr + pair, mask=real, other=0.0)
        out = (acc * weight[:, None]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + pair.to(tl.int64)[:, None] * N + col[None, :], out, mask=real[:, None] & (col < N)[None, :])
