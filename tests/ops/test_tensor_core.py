"""The model of a tensor core's sum, and what the declared trees rest on; on a device the ops must equal its vectors."""

import numpy as np
import pytest
import torch
from tensor_core import FP8_MMA, FP8_WGMMA, HALVES, Core, chain, fused_sum
from torch import Tensor

from fengine.ops import linear, quantized


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> np.ndarray:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).float().numpy()


def one(terms: list[tuple[float, float]], acc: float, core: Core) -> float:
    a, b = (np.array([[term[i] for term in terms] + [0.0] * (core.products - len(terms))], np.float32) for i in (0, 1))
    return float(fused_sum(a, b, np.array([acc], np.float32), core)[0])


def test_small_terms_are_cut_at_the_largest_exponent() -> None:
    assert one([(1.0, 1.0), (2.0**-25, 1.0)], 0.0, HALVES) == 1.0  # kept inside, gone in float32
    assert one([(2.0**-25, 1.0)] * 8, 1.0, HALVES) == 1.0 + 2.0**-22  # kept inside, and seen when added up
    assert one([(2.0**-26, 1.0)] * 15, 1.0, HALVES) == 1.0  # each is cut
    assert one([(-(2.0**-26), 1.0)] * 15, 1.0, HALVES) == 1.0  # towards zero
    assert one([(1.5, 1.5), (2.0**-25, 1.0)], 0.0, HALVES) == 2.25
    assert one([(1.0, 1.0), (2.0**-14, 1.0)], 0.0, FP8_WGMMA) == 1.0 == one([(2.0**-14, 1.0)] * 31, 1.0, FP8_WGMMA)
    assert one([(2.0**-14, 1.0)] * 16, 1.0, FP8_MMA) == 1.0 + 2.0**-10
    assert one([], 0.0, HALVES) == 0.0 and one([(2.0**-70, 2.0**-62)], 0.0, HALVES) == 2.0**-132


def test_sums_are_near_and_the_order_inside_a_group_changes_no_bit() -> None:
    x, w = normal(0, 8, 512), normal(1, 40, 512)
    got, exact = chain(x, w), x.astype(np.float64) @ w.T.astype(np.float64)
    assert np.abs(got - exact).max() < 1e-4
    inside = np.concatenate(
        [np.random.default_rng(i).permutation(16) + start for i, start in enumerate(range(0, 512, 16))]
    )
    assert np.array_equal(chain(x[:, inside], w[:, inside]), got)
    across = np.random.default_rng(0).permutation(512)
    assert (chain(x[:, across], w[:, across]) != got).mean() > 0.5


def test_fp8_sums_depend_on_the_instruction() -> None:
    """The control of an exact FP8 product: mma.sync adds otherwise than wgmma; promotion is what keeps wgmma near."""
    x, w = (normal(seed, rows, 1024, dtype=torch.float8_e4m3fn) for seed, rows in ((2, 8), (3, 40)))
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    promoted, chained, other = (chain(x, w, *how) for how in ((FP8_WGMMA, 128), (FP8_WGMMA, 0), (FP8_MMA, 0)))
    errors = [np.sqrt(((y - exact) ** 2).mean() / (exact**2).mean()) for y in (other, promoted, chained)]
    assert errors[0] < errors[1] < errors[2] < 1e-2
    assert (torch.from_numpy(promoted).bfloat16() != torch.from_numpy(other).bfloat16()).float().mean() > 0.01


@pytest.mark.gpu
def test_on_a_device_products_are_the_declared_chain() -> None:
    for n, k, m in ((64, 64, 1), (96, 512, 7), (128, 1024, 64)):
        x, w = normal(n, m, k), normal(k, n, k)
        want = torch.from_numpy(chain(x, w))
        on_device: list[Tensor] = [torch.from_numpy(t).to("cuda", torch.bfloat16) for t in (x, w)]
        got = linear.linear(on_device[0], linear.pack(on_device[1]), out_dtype=torch.float32)
        assert torch.equal(got.cpu(), want)
        codes = quantized.encoded(on_device[1], "int4", 32)
        few = linear.linear(on_device[0], quantized.pack(codes, torch.bfloat16), out_dtype=torch.float32)
        decoded = quantized.dequantized(codes, torch.bfloat16).float().cpu().numpy()
        assert torch.equal(few.cpu(), torch.from_numpy(chain(x, decoded)))
