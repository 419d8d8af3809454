"""Products in FP8: the bits of the declared tree, of each row by itself, near to those of the dequantized matrix.

The Triton kernels run in Triton's interpreter, in a process of its own (see test_interpreted.py), and on a device,
where they must equal the model of the tensor core.
"""

import itertools

import numpy as np
import pytest
import torch
from interpreted import INTERPRETED
from tensor_core import FP8_MMA, FP8_WGMMA, chain
from torch import Tensor

from fengine.errors import UnsupportedFeatureError
from fengine.ops import activations, cpu, e4m3, linear, norm_kernels, quantized, rms_norm, w8a8, w8a8_launch
from fengine.ops.quantized import Codes

SIZES = ((33, 64, 0), (70, 300, 0), (40, 256, 128), (65, 200, 128), (32, 70, 32))  # N, K, columns that share scales


def made(n: int, k: int, group: int) -> Codes:
    torch.manual_seed(n + k)
    codes = quantized.encoded(torch.randn(n, k + -k % (group or 1)), "w8a8", group)
    return codes._replace(code_NK=codes.code_NK[:, :k].contiguous(), group=codes.group if group else k)


def rows(m: int, k: int) -> Tensor:
    """In bfloat16's numbers, of which many lie in the middle of two of e4m3."""
    x = (torch.randn(m, k) * torch.exp2(torch.randn(m, 1) * 6)).bfloat16().float()
    x[-1] = 0
    return x


@pytest.mark.parametrize(("n", "k", "group"), SIZES)
def test_the_bits_are_those_of_the_declared_tree(n: int, k: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "SHORT", 0)  # as many threads as there are
    codes = made(n, k, group)
    leaf, bias = w8a8.pack(codes), torch.randn(n)
    for m in (1, 2, 4, 7):
        x = rows(m, k)
        q, scale = e4m3.on_cpu(x, group or k)
        want_q, want_scale = e4m3.reference(x, group or k)
        assert torch.equal(q, want_q) and torch.equal(scale, want_scale)
        got = linear.linear(x, leaf, bias)
        assert torch.equal(got, w8a8.reference(x, codes, bias))
        assert torch.equal(torch.cat([linear.linear(row, leaf, bias) for row in x.split(1)]), got)
    exact = x @ quantized.dequantized(codes, torch.float32).T + bias
    assert ((got - exact).norm() / exact.norm()) < 0.05
    assert linear.linear(x, leaf, out_dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_part_of_the_outputs_has_the_bits_of_all() -> None:
    """Ranks hold some outputs of each matrix."""
    for n, k, group in ((64, 300, 0), (96, 256, 128)):
        codes, x = made(n, k, group), rows(3, k)
        parts = [linear.linear(x, w8a8.pack(codes.rows(part))) for part in (slice(0, n // 2), slice(n // 2, n))]
        assert torch.equal(torch.cat(parts, 1), linear.linear(x, w8a8.pack(codes)))


@pytest.mark.parametrize("group", [256, 64])
def test_norms_and_gated_products_write_the_same_rows(group: int) -> None:
    """As a product would make of what they give in 16 bits."""
    delta, residual, post = rows(7, 200), rows(7, 200), torch.rand(200)
    for shift, behind in ((0.0, None), (1.0, post)):
        normed, total = rms_norm.add_rms_norm(delta, residual, post, 1e-5, shift, behind)
        got, same = rms_norm.add_rms_norm(delta, residual, post, 1e-5, shift, behind, group)
        assert torch.equal(same, total) and alike(got, e4m3.rows(normed, group))
    x, w = rows(7, 200), w8a8.pack(made(256, 200, 0))
    want = e4m3.rows(activations.silu_mul(linear.linear(x, w), "gelu"), group)
    assert alike(linear.gated_linear(e4m3.rows(x, 200), w, act="gelu", group=group), want)


def alike(got: e4m3.Rows, want: e4m3.Rows) -> bool:
    return got.dtype == want.dtype and all(map(torch.equal, got[:2], want[:2]))


def test_what_is_not_finite_stays_so() -> None:
    leaf, x = w8a8.pack(made(33, 64, 0)), rows(3, 64)
    x[1, 5] = torch.nan
    got = linear.linear(x, leaf)
    assert got[1].isnan().all() and got[::2].isfinite().all()


def test_other_blocks_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedFeatureError, match="blocks of 48 columns"):
        w8a8.pack(made(32, 96, 48))


def matrix_of(codes: Codes) -> w8a8_launch.Matrix:
    """As on CUDA."""
    return w8a8_launch.Matrix(
        codes.code_NK, codes.scale_NG.float().T.contiguous(), len(codes.code_NK), *w8a8.tree(codes)
    )


@pytest.mark.skipif(not INTERPRETED, reason="in the interpreter")
@pytest.mark.parametrize(("n", "k", "group"), SIZES)
def test_triton_kernels_quantize_and_multiply(n: int, k: int, group: int) -> None:
    codes, x, bias = made(n, k, group), rows(5, k).half(), torch.randn(n).half()
    q, scale = e4m3.launch(x, group or k)
    want_q, want_scale = e4m3.reference(x, group or k)
    assert torch.equal(q.view(torch.float8_e4m3fn).float(), want_q) and torch.equal(scale, want_scale)
    for s in (w8a8_launch.Schedule(16, 64, True, 4, 2), w8a8_launch.REFERENCE):
        got = w8a8_launch.run(q, scale, matrix_of(codes), bias, torch.float32, s)
        torch.testing.assert_close(got, w8a8.reference(x, codes, bias), rtol=1e-4, atol=1e-4 * float(got.abs().max()))


@pytest.mark.skipif(not INTERPRETED, reason="in the interpreter")
@pytest.mark.parametrize(("k", "group"), [(96, 96), (200, 128), (256, 64), (1500, 32)])
def test_triton_kernels_write_rows_for_products(k: int, group: int) -> None:
    delta, residual, weight = (rows(3, k).half() / 64 for _ in range(3))
    residual[1] = delta[1] = 0
    y, total, _ = norm_kernels.run(residual, delta, None, weight[0], 1e-5, 1.0, weight[1])
    want = *e4m3.launch(y, group), total
    codes, same, scale = norm_kernels.run(residual, delta, None, weight[0], 1e-5, 1.0, weight[1], group)
    assert all(map(torch.equal, (codes, scale, same), want))
    x = rows(3, 2 * k).half() / 64
    got, want = activations.e4m3_launch(x, 0, group), e4m3.launch(activations.launch(x), group)
    assert all(map(torch.equal, got, want))


def by_tensor_core(x: Tensor, codes: Codes, core: object = FP8_WGMMA) -> Tensor:
    """The declared tree by the model of the tensor core, for scales of outputs."""
    q, scale = e4m3.reference(x, x.shape[1])
    w = codes.code_NK.view(torch.float8_e4m3fn).float().numpy()
    total = torch.from_numpy(chain(q.numpy(), w, core, 128))  # type: ignore[arg-type]
    return total * (scale * codes.scale_NG.T)


def test_another_instruction_gives_other_bits() -> None:
    """The control of what a device must compute."""
    codes, x = made(40, 512, 0), rows(5, 512)
    got, other = by_tensor_core(x, codes), by_tensor_core(x, codes, FP8_MMA)
    assert (got.bfloat16() != other.bfloat16()).float().mean() > 0.01
    exact = w8a8.reference(x, codes)
    assert ((got - exact).norm() / exact.norm()) < 1e-3


@pytest.mark.gpu
def test_on_a_device_the_bits_are_those_of_wgmma() -> None:
    for (n, k, group), m in itertools.product(
        ((64, 128, 0), (96, 512, 0), (72, 400, 0), (1000, 384, 0), (256, 1024, 128), (80, 320, 64)),
        (1, 7, 16, 33, 64, 200),
    ):
        codes, x = made(n, k, group), rows(m, k).bfloat16()
        q, scale = e4m3.launch(x.cuda(), group or k)
        want_q, want_scale = e4m3.reference(x, group or k)
        assert torch.equal(q.cpu().view(torch.float8_e4m3fn).float(), want_q) and torch.equal(scale.cpu(), want_scale)
        matrix = matrix_of(codes.to(torch.device("cuda")))
        got = w8a8_launch.run(q, scale, matrix, None, torch.float32, w8a8_launch.REFERENCE)
        if not group and n < 100:
            assert np.array_equal(got.cpu().numpy(), by_tensor_core(x, codes).numpy()), (n, k, m)
        got = got.bfloat16()  # as leaves do: what sums of 32 bits need to be stored is too much for some schedules
        hopper = [tiles for *_, tiles in w8a8_launch.HOPPER] if not matrix.by_step and k % 16 == 0 else []
        for s in dict.fromkeys([*w8a8_launch.schedules(q, matrix), *hopper]):
            assert torch.equal(got, w8a8_launch.run(q, scale, matrix, None, torch.bfloat16, s)), (n, k, m, s)
            assert w8a8_launch.is_proved(q, matrix, None, torch.bfloat16, s), s


@pytest.mark.gpu
def test_on_a_device_gated_products_are_those_of_two_ops() -> None:
    for (n, k), m, act in itertools.product(((128, 256), (352, 400)), (1, 20, 64, 300), range(3)):
        codes, x, bias = made(n, k, 0), rows(m, k).bfloat16(), torch.randn(n).bfloat16().cuda()
        matrix, q = matrix_of(codes.to(torch.device("cuda"))), e4m3.launch(x.cuda(), k)
        want = activations.launch(w8a8_launch.run(*q, matrix, bias, torch.bfloat16, w8a8_launch.REFERENCE), act)
        for _, s in w8a8_launch.GATED:
            assert torch.equal(w8a8_launch.run(*q, matrix, bias, torch.bfloat16, s, act), want), (n, k, m, act, s)


@pytest.mark.gpu
def test_on_a_device_norms_and_gated_products_write_the_same_rows() -> None:
    for (m, k), share in itertools.product(((1, 896), (7, 4096), (300, 5120), (3, 14336)), (1 << 20, 128)):
        delta, residual, weight = (rows(m, k).bfloat16().cuda() for _ in range(3))
        group = min(k, share)
        normed, total = rms_norm.add_rms_norm(delta, residual, weight[0], 1e-5)
        codes, same, scale = norm_kernels.run(residual, delta, None, weight[0], 1e-5, 0.0, None, group)
        assert all(map(torch.equal, (codes, scale, same), (*e4m3.launch(normed, group), total))), (m, k, group)
        x = rows(m, 2 * k).bfloat16().cuda()
        got, want = activations.e4m3_launch(x, 0, group), e4m3.launch(activations.launch(x), group)
        assert all(map(torch.equal, got, want)), (m, k, group)
