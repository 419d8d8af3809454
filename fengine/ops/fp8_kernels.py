"""Triton kernels of e4m3 numbers (FP8 with NaN and without infinities): of kv_fp8.py, e4m3.py and w8a8.py."""
# pyright: reportInvalidTypeForm=false

import os

from fengine.ops.registration import begin, tl, triton, wait

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def e4m3(x):
    """Codes (int32) of the nearest e4m3 numbers, ties to even, of float32; of what is larger than they are, NaN."""
    sign = x.to(tl.int32, bitcast=True) >> 24 & 128
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    size = bits.to(tl.float32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (size + 16384.0).to(
        tl.int32, bitcast=True
    ) - 0x46800000  # below 2^-6 they lie 2^-9 apart, as floats at 2^14
    return tl.where(size <= 464.0, tl.where(size < 0.015625, small, normal), 127) | sign


def decoding(words: int, *picks: str) -> str:
    """Assembler: each word's four codes to pairs of bfloat16, as `picks` of `prmt` choose: bytes, and their signs.
    Sign, exponent and mantissa come where bfloat16 has its own; so the number is 2^120 times too small until the
    end."""
    outputs = words * len(picks)
    lines = (
        f"prmt.b32 ${n}, ${outputs + n // len(picks)}, 0, {picks[n % len(picks)]}; shl.b32 ${n}, ${n}, 4; "
        f"and.b32 ${n}, ${n}, 0x87f087f0; mul.rn.bf16x2 ${n}, ${n}, p; "
        for n in range(outputs)
    )
    return "{ .reg .b32 p; mov.b32 p, 0x7b807b80; " + "".join(lines) + "}"  # p: 2^120, twice


IN_ORDER = tl.constexpr(decoding(1, "0x9180", "0xb3a2"))  # (c0, c1) and (c2, c3)


@triton.jit
def from_e4m3(code, DTYPE: tl.constexpr):
    """Codes (uint8) as numbers of DTYPE, but on a device as bfloat16: exact but for NaN. In assembler that the compiler
    does not look into: where an operand of mma.sync was loaded as bytes, it would give each instruction other columns,
    and sums other bits."""
    if INTERPRETED:
        x = code.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    else:
        x = tl.inline_asm_elementwise(IN_ORDER, "=&r,=&r,r", [code], dtype=tl.bfloat16, is_pure=False, pack=4)
    return x


@triton.jit
def power_of_two(exponent):
    """The float32 of exponents as pages hold them. In assembler for the same reason: a byte that weights are multiplied
    by would change the columns of their product."""
    x = exponent.to(tl.int32)
    if INTERPRETED:
        x = x << 23
    else:
        x = tl.inline_asm_elementwise("shl.b32 $0, $1, 23;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)
    return x.to(tl.float32, bitcast=True)


@triton.jit
def store_heads(pages_ptr, slot, group, here, x1, x2, G: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr,
                S: tl.constexpr):  # fmt: skip
    """Heads (float32) as two halves to pages of S slots in FP8, where `here` says so: see kv_fp8.py."""
    d = tl.arange(0, HALF)
    top = tl.max(tl.maximum(tl.abs(x1), tl.abs(x2)), 1)
    exponent = tl.maximum(((top.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8, 1)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    at = group * S + slot % S
    page = pages_ptr + slot // S * (S * G * (K + 1))
    out = page[:, None] + (at * K)[:, None] + d[None, :]
    mask = here[:, None] & (d < K // 2)[None, :]
    tl.store(out, e4m3(x1 * inverse).to(tl.uint8), mask=mask)
    tl.store(out + K // 2, e4m3(x2 * inverse).to(tl.uint8), mask=mask)
    tl.store(page + S * G * K + at, exponent.to(tl.uint8), mask=here)


@triton.jit
def to_e4m3(x, top):
    """Codes of x, whose largest size is `top`, under the scale of e4m3.py."""
    x *= tl.div_rn(448.0, top)
    if INTERPRETED:  # whose casts are not to the nearest
        code = e4m3(x).to(tl.uint8)
    else:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return code


@triton.jit
def largest(x, AXIS: tl.constexpr):
    top = tl.max(tl.abs(x), AXIS)
    return tl.where(top < 7.888609052210118e-31, 448.0, top)  # 2^-100


@triton.jit
def store_e4m3(x, q_ptr, scale_ptr, first, K, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Columns first .. first + BLOCK - 1 of a row (float32), and a scale for each GROUP of them; BLOCK: for all K."""
    i = tl.arange(0, BLOCK)
    x = tl.where(first + i < K, x, 0.0)
    if GROUP == BLOCK:
        top = largest(x, 0)
        tl.store(scale_ptr, tl.div_rn(top, 448.0))
        code = to_e4m3(x, top)
    else:
        x = tl.reshape(x, (BLOCK // GROUP, GROUP))
        top = largest(x, 1)
        group = first // GROUP + tl.arange(0, BLOCK // GROUP)
        tl.store(scale_ptr + group, tl.div_rn(top, 448.0), mask=group * GROUP < K)
        code = tl.reshape(to_e4m3(x, top[:, None]), (BLOCK,))
    tl.store(q_ptr + first + i, code, mask=first + i < K)


@triton.jit
def quantize_kernel(x_ptr, q_ptr, scale_ptr, K, groups, BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr):
    """BLOCK columns of a row, which has so many groups."""
    begin(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    col = first + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * K + col, mask=col < K, other=0.0).to(tl.float32)
    store_e4m3(x, q_ptr + row * K, scale_ptr + row * groups, first, K, BLOCK, GROUP)


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
