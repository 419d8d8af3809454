"""The Triton kernels of quantized.py: codes to weights, and the product of few rows that decodes in registers."""
# pyright: reportInvalidTypeForm=false

from fengine.ops.registration import begin, tl, triton, wait


@triton.jit
def decoded(code, zero, scale, KIND: tl.constexpr):
    """Weights in float32 of codes (uint8), zeros (float32) and scales (float32)."""
    if KIND == "int4" or KIND == "int8":
        return (code.to(tl.float32) - zero) * scale
    bits = code.to(tl.int16)  # a half that is 2^8 or 2^14 times smaller
    if KIND == "fp8":
        half = ((bits & 127) << 7) | ((bits & 128) << 8)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0 * scale
    half = ((bits & 7) << 9) | ((bits & 8) << 12)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0 * scale


@triton.jit
def weights(packed_ptr, scale_ptr, zero_ptr, index_ptr, col, start, N, K, row_bytes, group, BN: tl.constexpr,
            BK: tl.constexpr, KIND: tl.constexpr, INDEX: tl.constexpr, ONE_GROUP: tl.constexpr):  # fmt: skip
    """Weights [BN, BK] in float32 of outputs `col` < N and columns from `start`; zeros behind K.

    ONE_GROUP: these columns are of one group.
    """
    ZERO: tl.constexpr = KIND == "int4" or KIND == "int8"
    k = start + tl.arange(0, BK)
    if KIND == "int4" or KIND == "fp4":
        byte = start // 2 + tl.arange(0, BK // 2)
        at = packed_ptr + col.to(tl.int64)[:, None] * row_bytes + byte[None, :]
        two = tl.load(at, mask=(byte < row_bytes)[None, :], other=0)
        code = tl.join(two & 15, two >> 4).reshape((BN, BK))
    else:
        at = packed_ptr + col.to(tl.int64)[:, None] * row_bytes + k[None, :]
        code = tl.load(at, mask=(k < K)[None, :], other=0)
    if ONE_GROUP:
        where = (start // group).to(tl.int64) * N + col
        scale = tl.load(scale_ptr + where).to(tl.float32)[:, None]
        zero = tl.load(zero_ptr + where).to(tl.float32)[:, None] if ZERO else 0.0
    else:
        g = tl.load(index_ptr + k, mask=k < K, other=0) if INDEX else k // group
        where = g.to(tl.int64)[None, :] * N + col[:, None]
        inside = (k < K)[None, :]
        scale = tl.load(scale_ptr + where, mask=inside, other=0.0).to(tl.float32)
        zero = tl.load(zero_ptr + where, mask=inside, other=0).to(tl.float32) if ZERO else 0.0
    return decoded(code, zero, scale, KIND)


@triton.jit
def decode_kernel(packed_ptr, scale_ptr, zero_ptr, index_ptr, w_ptr, N, K, row_bytes, group, BN: tl.constexpr,
                  BK: tl.constexpr, KIND: tl.constexpr, INDEX: tl.constexpr):  # fmt: skip
    """BN x BK elements of the matrix [N, K], rounded to its dtype."""
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    start = tl.program_id(1) * BK
    k = start + tl.arange(0, BK)
    w = weights(packed_ptr, scale_ptr, zero_ptr, index_ptr, col % N, start, N, K, row_bytes, group, BN, BK, KIND,
                INDEX, False)  # fmt: skip
    at = w_ptr + col.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(at, w.to(w_ptr.dtype.element_ty), mask=(col < N)[:, None] & (k < K)[None, :])


@triton.jit(do_not_specialize=["M"])
def product_kernel(x_ptr, packed_ptr, scale_ptr, zero_ptr, index_ptr, bias_ptr, y_ptr, M, N, K, row_bytes, group,
                   BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr, INDEX: tl.constexpr,
                   ONE_GROUP: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """All M <= BM rows of BN outputs. The weights are the M side of the MMA; the order over K is linear.py's."""
    begin(PDL)
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    x_tile = x_ptr + row.to(tl.int64)[:, None] * K + k[None, :]
    wait(PDL)
    acc = tl.zeros((BN, BM), tl.float32)
    for start in range(0, K, BK):
        w = weights(packed_ptr, scale_ptr, zero_ptr, index_ptr, col % N, start, N, K, row_bytes, group, BN, BK, KIND,
                    INDEX, ONE_GROUP).to(x_ptr.dtype.element_ty)  # fmt: skip
        x = tl.load(x_tile, mask=(row < M)[:, None] & (start + k < K)[None, :], other=0.0)
        acc = tl.dot(w, x.T, acc, input_precision="ieee")
        x_tile += BK
    y = acc.T
    if BIAS:
        y += tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    at = y_ptr + row.to(tl.int64)[:, None] * N + col[None, :]
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=(row < M)[:, None] & (col < N)[None, :])
