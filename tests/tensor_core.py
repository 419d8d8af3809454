"""The sum inside a Hopper tensor core as numbers, after MMA-Sim (arXiv 2511.10909): an oracle for declared trees that
needs no GPU.

One instruction adds K products and the accumulator at once: each is cut to `bits` fractional bits below the largest
exponent among them (towards zero), the integers are added, and the sum is cut to float32. bf16 and fp16: K 16, 25 bits,
by mma.sync and wgmma alike; e4m3: K 32, 13 bits by wgmma, 25 by mma.sync.
"""

from typing import NamedTuple

import numpy as np


class Core(NamedTuple):
    """An instruction: how many products it adds, the fractional bits kept inside, and `out`, those of its result."""

    products: int
    bits: int
    out: int = 23


HALVES = Core(16, 25)
FP8_WGMMA, FP8_MMA = Core(32, 13, 13), Core(32, 25)


def fused_sum(a: np.ndarray, b: np.ndarray, acc: np.ndarray, core: Core) -> np.ndarray:
    """acc + sum(a * b, -1) as one instruction adds it; a, b [..., core.products], acc [...], all float32."""
    terms = np.concatenate([acc[..., None].astype(np.float64), a.astype(np.float64) * b.astype(np.float64)], -1)
    # Of a product the exponent is the sum of its factors' exponents: 1.5 * 1.5 counts as 2^0.
    exponents = np.concatenate([np.frexp(acc)[1][..., None] - 1, np.frexp(a)[1] + np.frexp(b)[1] - 2], -1)
    exponents = np.where(terms == 0, -10000, exponents)
    unit = np.exp2(np.maximum(exponents.max(-1), -133).astype(np.float64) - core.bits)
    total = np.trunc(terms / unit[..., None]).sum(-1) * unit  # whole numbers below 2^53: exact
    last = np.exp2(np.floor(np.log2(np.abs(total), where=total != 0, out=np.zeros_like(total))) - core.out)
    return (np.trunc(total / last) * last).astype(np.float32)


def chain(x_MK: np.ndarray, w_NK: np.ndarray, core: Core = HALVES, promote: int = 0) -> np.ndarray:
    """x @ w.T [M, N] by the declared tree: instructions over K from left to right, each on the one before.

    `promote` > 0: sums of so many K begin at zero and are added in float32, as FP8's are each 128.
    """
    (m, k), n = x_MK.shape, len(w_NK)
    total, acc = np.zeros((m, n), np.float32), np.zeros((m, n), np.float32)
    for start in range(0, k, core.products):
        part = slice(start, start + core.products)
        a = np.broadcast_to(x_MK[:, None, part], (m, n, len(range(*part.indices(k)))))
        b = np.broadcast_to(w_NK[None, :, part], a.shape)
        acc = fused_sum(a, b, acc, core)
        if promote and (start + core.products) % promote == 0:
            total, acc = total + acc, np.zeros((m, n), np.float32)
    return total + acc if promote else acc
