"""The Triton kernels of w8a8.py: activations to e4m3, and the product. Weights and activations meet in wgmma."""
# pyright: reportInvalidTypeForm=false

from fengine.ops.fp8_kernels import INTERPRETED, e4m3
from fengine.ops.registration import begin, tl, triton, wait


@triton.jit
def quantize_kernel(x_ptr, q_ptr, scale_ptr, K, group, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """`group` <= BLOCK columns of a row, under their own scale."""
    begin(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    col = tl.program_id(1) * group + i
    inside = (i < group) & (col < K)
    x = tl.load(x_ptr + row * K + col, mask=inside, other=0.0).to(tl.float32)
    top = tl.max(tl.abs(x), 0)
    top = tl.where(top < 7.888609052210118e-31, 448.0, top)  # 2^-100
    tl.store(scale_ptr + row * tl.num_programs(1) + tl.program_id(1), tl.div_rn(top, 448.0))
    x *= tl.div_rn(448.0, top)
    if INTERPRETED:  # whose casts are not to the nearest
        tl.store(q_ptr + row * K + col, e4m3(x).to(tl.uint8), mask=inside)
    else:
        tl.store(q_ptr + row * K + col, x.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=inside)


@triton.jit(do_not_specialize=["M"])
def w8a8_kernel(q_ptr, x_scale_ptr, w_ptr, scale_ptr, bias_ptr, y_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr,
                STEP: tl.constexpr, BY_STEP: tl.constexpr, SWAP: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr,
                FEW: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One BM x BN tile of y. SWAP makes the weights the M side, which has 64 rows or more. FEW: M < BM."""
    begin(PDL)
    pid = tl.program_id(0)
    group = pid // (GROUP * tl.cdiv(N, BN))  # GROUP row blocks walk the columns together: see linear_kernels.py
    group_m = min(tl.cdiv(M, BM) - group * GROUP, GROUP)
    local = pid % (GROUP * tl.cdiv(N, BN))
    row = (group * GROUP + local % group_m) * BM + tl.arange(0, BM)
    col = (local // group_m) * BN + tl.arange(0, BN)
    k = tl.arange(0, STEP)
    steps = tl.cdiv(K, STEP)
    x_tile = q_ptr + (row % M).to(tl.int64)[:, None] * K + k[None, :]
    w_tile = w_ptr + (col % N).to(tl.int64)[:, None] * K + k[None, :]
    x_scale_tile = x_scale_ptr + row % M * steps if BY_STEP else x_scale_ptr + row % M
    scale_tile = scale_ptr + col % N
    wait(PDL)
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    for start in range(0, K, STEP):
        if EVEN:
            x = tl.load(x_tile, mask=(row < M)[:, None], other=0.0) if FEW else tl.load(x_tile)
            w = tl.load(w_tile)
        else:
            x = tl.load(x_tile, mask=(row < M)[:, None] & (start + k < K)[None, :], other=0.0)
            w = tl.load(w_tile, mask=(start + k < K)[None, :], other=0.0)
        part = tl.dot(w, x.T) if SWAP else tl.dot(x, w.T)
        if BY_STEP:
            of_x = tl.load(x_scale_tile)
            of_w = tl.load(scale_tile)
            scale = of_w[:, None] * of_x[None, :] if SWAP else of_x[:, None] * of_w[None, :]
            acc = tl.fma(part, scale, acc)
            x_scale_tile += 1
            scale_tile += N
        else:
            acc += part
        x_tile += STEP
        w_tile += STEP
    if SWAP:
        acc = acc.T
    if not BY_STEP:
        acc *= tl.load(x_scale_tile)[:, None] * tl.load(scale_tile)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    y_tile = y_ptr + row.to(tl.int64)[:, None] * N + col[None, :]
    tl.store(y_tile, acc.to(y_ptr.dtype.element_ty), mask=(row < M)[:, None] & (col < N)[None, :])
