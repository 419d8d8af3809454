"""Triton functions that write e4m3 numbers (OCP's FP8 with NaN and without infinities)."""
# pyright: reportInvalidTypeForm=false

import os

from fengine.ops.registration import tl, triton

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


@triton.jit
def store_heads(pages_ptr, slot, group, here, x1, x2, G: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr,
                S: tl.constexpr):  # fmt: skip
    """Heads (float32) as two halves to pages of S slots in FP8, where `here` says so: see kv_fp8.py."""
    d = tl.arange(0, HALF)
    top = tl.max(tl.maximum(tl.abs(x1), tl.abs(x2)), 1)
    exponent = tl.maximum(((top.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8, 1)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    at = slot % S * G + group
    page = pages_ptr + slot // S * (S * G * (K + 1))
    out = page[:, None] + (at * K)[:, None] + d[None, :]
    mask = here[:, None] & (d < K // 2)[None, :]
    tl.store(out, e4m3(x1 * inverse).to(tl.uint8), mask=mask)
    tl.store(out + K // 2, e4m3(x2 * inverse).to(tl.uint8), mask=mask)
    tl.store(page + S * G * K + at, exponent.to(tl.uint8), mask=here)
