"""The Triton kernel of linear.py, plain and gated: one tile of the product, summed left to right over K."""
# pyright: reportInvalidTypeForm=false

from fengine.ops.activations import gated_product
from fengine.ops.registration import begin, end, tl, triton, wait


@triton.jit
def fetch(rows_ptr, AHEAD: tl.constexpr, PIECES: tl.constexpr):
    """Asks for the first AHEAD bf16 or fp16 columns of each row to be in the L2 cache soon, in PIECES a row."""
    piece = tl.arange(0, PIECES)[None, :] * (AHEAD // PIECES)
    at = (rows_ptr[:, None] + piece).to(tl.int64)
    size = tl.zeros_like(at).to(tl.int32) + AHEAD // PIECES * 2
    tl.inline_asm_elementwise("cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r", [at, size],
                              dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip


@triton.jit
def products(x_tile, w_tile, up_tile, real, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr,
             FEW: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
    """The sums of a tile, [BM, BN] twice, the second for `up_tile` if GATED. FEW: only `real` rows of x are read."""
    k = tl.arange(0, BK)
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    up_acc = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    for start in range(0, K, BK):
        if EVEN:
            x = tl.load(x_tile, mask=real[:, None], other=0.0) if FEW else tl.load(x_tile)
            w = tl.load(w_tile)
        else:
            x = tl.load(x_tile, mask=real[:, None] & (start + k < K)[None, :], other=0.0)
            w = tl.load(w_tile, mask=(start + k < K)[None, :], other=0.0)
        if SWAP:
            acc = tl.dot(w, x.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
        if GATED:
            w = tl.load(up_tile) if EVEN else tl.load(up_tile, mask=(start + k < K)[None, :], other=0.0)
            if SWAP:
                up_acc = tl.dot(w, x.T, up_acc, input_precision="ieee")
            else:
                up_acc = tl.dot(x, w.T, up_acc, input_precision="ieee")
            up_tile += BK
        x_tile += BK
        w_tile += BK
    if SWAP:
        acc = acc.T
        up_acc = up_acc.T
    return acc, up_acc


@triton.jit(do_not_specialize=["M"])
def linear_kernel(x_ptr, w_ptr, bias_ptr, y_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                  SWAP: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr, FEW: tl.constexpr, EVEN: tl.constexpr,
                  GATED: tl.constexpr, ACT: tl.constexpr, AHEAD: tl.constexpr, PIECES: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    """One BM x BN tile of y. SWAP makes the weights the M side of the MMA, which suits few rows. GATED: w has 2N rows,
    gate above up, and y is their gated product. AHEAD: so many columns of each weight row are fetched into L2 while the
    kernel in front still runs."""
    begin(PDL)
    pid = tl.program_id(0)
    blocks_m = tl.cdiv(M, BM)
    # GROUP row blocks walk the columns together, so the weights they share are still in L2.
    group = pid // (GROUP * tl.cdiv(N, BN))
    first_m = group * GROUP
    group_m = min(blocks_m - first_m, GROUP)
    local = pid % (GROUP * tl.cdiv(N, BN))
    row = (first_m + local % group_m) * BM + tl.arange(0, BM)
    col = (local // group_m) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # Rows and columns behind the edge wrap around: their loads need no mask and their results are not stored. Not so
    # when FEW rows would be read again and again by every program at once.
    x_tile = x_ptr + (row % M).to(tl.int64)[:, None] * K + k[None, :]
    w_tile = w_ptr + (col % N).to(tl.int64)[:, None] * K + k[None, :]
    up_tile = w_ptr + (col % N + N).to(tl.int64)[:, None] * K + k[None, :]
    if PDL and AHEAD:
        fetch(w_ptr + (col % N).to(tl.int64) * K, AHEAD, PIECES)
        if GATED:
            fetch(w_ptr + (col % N + N).to(tl.int64) * K, AHEAD, PIECES)
    wait(PDL)
    acc, up_acc = products(x_tile, w_tile, up_tile, row < M, K, BM, BN, BK, SWAP, FEW, EVEN, GATED)
    end(PDL)
    if BIAS:
        acc += tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    out = acc.to(y_ptr.dtype.element_ty)
    if GATED:
        if BIAS:
            up_acc += tl.load(bias_ptr + N + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        out = gated_product(out, up_acc.to(y_ptr.dtype.element_ty), ACT).to(y_ptr.dtype.element_ty)
    y_tile = y_ptr + row.to(tl.int64)[:, None] * N + col[None, :]
    tl.store(y_tile, out, mask=(row < M)[:, None] & (col < N)[None, :])
