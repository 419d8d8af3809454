"""Products with weights in few bits: the bits of the dequantized matrix, whatever the codes, sizes, rows, instructions.

The Triton kernels run in Triton's interpreter, in a process of its own (see test_interpreted.py), and on a device.
"""

import itertools

import pytest
import torch
from interpreted import INTERPRETED
from quantized_checkpoints import from_fragments, from_words
from torch import Tensor

from fengine.ops import activations, cpu, fragments, int4_words, linear, linear_launch, quantized, quantized_launch
from fengine.ops.ahead import compiling
from fengine.ops.quantized import Codes

SIZES = ((33, 64, 16, False), (95, 96, 32, True), (64, 40, 40, False), (70, 24, 12, False), (130, 257, 257, False))
KINDS = tuple(quantized.KINDS)
DTYPES = (torch.bfloat16, torch.float16)


def random_codes(
    kind: str, n: int, k: int, group: int, ordered: bool, scale_dtype: torch.dtype = torch.float16
) -> Codes:
    """Any code but NaN, scales over many powers of two, groups in order or not."""
    torch.manual_seed(n + k)
    groups = -(-k // group)
    code_NK = torch.randint(0, 16 if kind in quantized.FOUR_BITS else 256, (n, k), dtype=torch.uint8)
    code_NK[(code_NK & 127 == 127) & (kind == "fp8")] = 3
    scale_NG = (torch.rand(n, groups) + 0.5) * 0.01 * torch.exp2(torch.randint(-9, 2, (n, groups)).float())
    zero_NG = torch.randint(0, 16 if kind == "int4" else 256, (n, groups), dtype=torch.uint8)
    index_K = torch.randint(0, groups, (k,), dtype=torch.int32) if ordered else None
    scale_NG = scale_NG.float() if kind == "fp8" else scale_NG.to(scale_dtype)
    return Codes(kind, code_NK, scale_NG, zero_NG if kind.startswith("int") else None, group, index_K)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_are_those_of_the_dequantized_matrix(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "SHORT", 0)  # as many threads as there are
    for n, k, group, ordered in SIZES:
        codes = random_codes(kind, n, k, group, ordered)
        few, dense = quantized.pack(codes, dtype), linear.pack(quantized.dequantized(codes, dtype))
        assert isinstance(few, quantized.Quantized)
        for m, bias in itertools.product((1, 2, 3, 4, 5, 17), (None, torch.randn(n).to(dtype))):
            x = torch.randn(m, k)
            assert same_bits(linear.linear(x, few, bias), linear.linear(x, dense, bias)), (n, k, m)
        assert linear.linear(x, few, out_dtype=torch.bfloat16).dtype == torch.bfloat16


def test_every_code_is_decoded_as_defined() -> None:
    """x is a row of the identity, so the product is a weight."""
    for kind, dtype in itertools.product(KINDS, DTYPES):
        codes = random_codes(kind, 3, 256, 256, False)
        code = torch.arange(256, dtype=torch.uint8) & (15 if kind in quantized.FOUR_BITS else 255)
        code[(code & 127 == 127) & (kind == "fp8")] = 0
        codes = codes._replace(code_NK=code.expand(3, 256).contiguous())
        got = linear.linear(torch.eye(256)[:5], quantized.pack(codes, dtype))
        assert torch.equal(got, quantized.dequantized(codes, dtype).float().T[:5])
        got = torch.cat([linear.linear(row, quantized.pack(codes, dtype)) for row in torch.eye(256).split(1)])
        assert torch.equal(got, quantized.dequantized(codes, dtype).float().T)


def test_scales_that_are_not_exact_keep_a_matrix_dequantized() -> None:
    for kind, scale in (("int4", 0.1), ("int8", 1e-32), ("fp8", 3.0), ("fp4", 1e-32)):
        codes = random_codes(kind, 40, 32, 32, False, torch.float32)._replace(scale_NG=torch.full((40, 1), scale))
        leaf = quantized.pack(codes, torch.bfloat16)
        assert isinstance(leaf, linear.Dense)
        assert torch.equal(linear.unpack(leaf), quantized.dequantized(codes, torch.bfloat16))
    assert isinstance(quantized.pack(random_codes("int4", 40, 32, 32, False), torch.float32), linear.Dense)


def test_encoded_codes_are_the_nearest() -> None:
    torch.manual_seed(0)
    w = torch.randn(6, 64, dtype=torch.bfloat16)
    w[2] = 0
    for kind, group in (("int4", 16), ("int8", 0), ("fp8", 0)):
        codes = quantized.encoded(w, kind, group)
        got, step = (
            quantized.dequantized(codes, torch.float32),
            codes.scale_NG.float().repeat_interleave(codes.group, 1),
        )
        error = (got - w.float()).abs()
        assert torch.equal(got[2], torch.zeros(64))
        room = w.float().abs() / 16 + step / 512 if kind == "fp8" else 0.55 * step  # of symmetric codes 7.5 is clamped
        assert bool((error <= room).all()), kind
    assert quantized.joined([codes, quantized.encoded(w, "int4", 16)]) is None


def as_on_cuda(codes: Codes) -> quantized_launch.Matrix:
    leaf = quantized.packed_rows(codes, torch.float16)
    return quantized_launch.Matrix(*leaf[:7])


def fragment_codes(kind: str, n: int, k: int, group: int) -> Codes:
    """Codes that fragments hold: fp4 has powers of two for scales."""
    codes = random_codes(kind, n, k, group, False)
    if kind == "int4":
        return codes
    return codes._replace(scale_NG=torch.exp2(torch.randint(-90, 2, codes.scale_NG.shape).float()).bfloat16())


FRAGMENTS = (("int4", 130, 256, 128), ("int4", 64, 192, 64), ("fp4", 100, 192, 32), ("fp4", 128, 64, 32))


def test_fragments_hold_every_code_scale_and_zero() -> None:
    for kind, n, k, group in FRAGMENTS:
        codes = fragment_codes(kind, n, k, group)
        assert fragments.fit(kind, k, group, codes.scale_NG, torch.bfloat16)
        code, scale, zero = from_fragments(
            *fragments.pack(codes.kind, codes.code_NK, codes.scale_NG, codes.zero_NG), group
        )
        assert torch.equal(torch.from_numpy(code[:n]).to(torch.uint8), codes.code_NK)
        assert torch.equal(torch.from_numpy(scale[:n]), codes.scale_NG.float())
        assert codes.zero_NG is None or torch.equal(torch.from_numpy(zero[:n]).to(torch.uint8), codes.zero_NG)
    scale = torch.ones(64, 2)
    assert not fragments.fit("int4", 256, 128, scale * 0.1, torch.bfloat16)  # more than 11 bits
    assert not fragments.fit("int4", 256, 128, scale, torch.float16)
    assert not fragments.fit("int4", 160, 32, scale, torch.bfloat16)
    assert not fragments.fit("fp4", 64, 32, scale * 4, torch.bfloat16)
    assert not fragments.fit("fp4", 64, 32, scale * 1.5, torch.bfloat16)


EIGHTS = ((130, 256, 128), (64, 384, 64), (33, 128, 128))


def test_words_of_int4_hold_every_code_scale_and_zero() -> None:
    for n, k, group in EIGHTS:
        codes = fragment_codes("int4", n, k, group)
        assert codes.zero_NG is not None and int4_words.fit("int4", k, group, codes.scale_NG, torch.bfloat16)
        code, scale, zero = from_words(*int4_words.pack(codes.code_NK, codes.scale_NG, codes.zero_NG), group)
        assert torch.equal(torch.from_numpy(code[:n]).to(torch.uint8), codes.code_NK)
        assert torch.equal(torch.from_numpy(scale[:n]), codes.scale_NG.float())
        assert torch.equal(torch.from_numpy(zero[:n]).to(torch.uint8), codes.zero_NG)
    scale = torch.ones(64, 2)
    assert not int4_words.fit("int4", 192, 64, scale, torch.bfloat16)  # no whole chunks
    assert not int4_words.fit("fp4", 128, 32, scale, torch.bfloat16)
    assert not int4_words.fit("int4", 256, 128, scale * 0.1, torch.bfloat16)


@pytest.mark.skipif(not INTERPRETED, reason="in the interpreter")
def test_triton_words_of_int4_are_unpacked() -> None:
    for n, k, group in EIGHTS:
        codes = fragment_codes("int4", n, k, group)
        assert codes.zero_NG is not None
        w = int4_words.pack(codes.code_NK, codes.scale_NG, codes.zero_NG)
        assert torch.equal(int4_words.unpack(w, n, group, torch.float32), quantized.dequantized(codes, torch.float32))


@pytest.mark.skipif(not INTERPRETED, reason="in the interpreter")
def test_triton_fragments_are_unpacked() -> None:
    for kind, n, k, group in FRAGMENTS:
        codes = fragment_codes(kind, n, k, group)
        want = quantized.dequantized(codes, torch.float32)
        got = fragments.unpack(
            fragments.pack(codes.kind, codes.code_NK, codes.scale_NG, codes.zero_NG), n, group, dtype=torch.float32
        )
        assert torch.equal(got, want), kind
    codes = fragment_codes("fp4", 256, 64, 32)  # two matrices of gate above up
    f = fragments.pack("fp4", fragments.alternated(codes.code_NK, 2), fragments.alternated(codes.scale_NG, 2), None)
    got = fragments.unpack(f, 128, 32, True, torch.float32)
    assert torch.equal(got, quantized.dequantized(codes, torch.float32))


@pytest.mark.skipif(not INTERPRETED, reason="in the interpreter")
@pytest.mark.parametrize("kind", KINDS)
def test_triton_kernels_decode_and_multiply(kind: str) -> None:
    for n, k, group, ordered in ((33, 64, 16, False), (20, 48, 16, True), (64, 256, 128, False), (17, 40, 40, False)):
        codes = random_codes(kind, n, k, group, ordered)
        matrix, w_NK = as_on_cuda(codes), quantized.dequantized(codes, torch.float16)
        assert torch.equal(quantized_launch.decode(matrix, k, torch.float16), w_NK)
        x, bias = torch.randn(5, k).half(), torch.randn(n).half()
        for s in (linear_launch.Schedule(16, 16, 64, True, 4, 2), linear_launch.Schedule(16, 64, 128, True, 4, 2)):
            got = quantized_launch.run(x, matrix, bias, torch.float32, s)
            torch.testing.assert_close(got, x.float() @ w_NK.float().T + bias.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(96, 256), (1000, 1152), (4096, 1024), (2880, 2880)])
@pytest.mark.parametrize(("kind", "group"), [("int4", 128), ("int4", 64), ("fp4", 32)])
def test_on_a_device_fragments_give_the_bits_of_the_dequantized_matrix(kind: str, group: int, n: int, k: int) -> None:
    k -= k % group
    codes = fragment_codes(kind, n, k, group).to(torch.device("cuda"))
    few, dense = quantized.pack(codes, torch.bfloat16), linear.pack(quantized.dequantized(codes, torch.bfloat16))
    assert isinstance(few, quantized.Quantized)
    bias = torch.randn(n, device="cuda").bfloat16()
    matrix = quantized_launch.Matrix(*few[:7])
    every = {s for *_, s in quantized_launch.EIGHTS} if few.packed.dim() == 3 else set()
    rows = [torch.randn(m, k, device="cuda").bfloat16() for m in (1, 7, 16, 33, 64, 100, 200, 300, 700, 1500)]
    with compiling():  # one after another they would take minutes
        for x in rows:
            for w in (dense, few):
                linear.linear(x, w, bias)
            for s in every:
                quantized_launch.run(x, matrix, bias, None, s)
    for x in rows:
        want = linear.linear(x, dense, bias)
        assert torch.equal(linear.linear(x, few, bias), want), (n, k, len(x))
        if few.packed.dim() > 2:
            for s in quantized_launch.schedules(len(x), n, torch.bfloat16, few.packed.dim()):
                assert quantized_launch.is_proved(x, matrix, bias, None, s), s
        for s in every:  # whatever the rows: of some tiles a part has none, or all has
            assert torch.equal(quantized_launch.run(x, matrix, bias, None, s), want), (n, k, len(x), s)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_device_the_bits_are_those_of_the_dequantized_matrix(kind: str) -> None:
    for (n, k, group, ordered), dtype in itertools.product(
        ((96, 256, 128, False), (1000, 384, 32, True), (4096, 1024, 128, False)), (torch.bfloat16, torch.float16)
    ):
        codes = random_codes(kind, n, k, group, ordered).to(torch.device("cuda"))
        few, dense = quantized.pack(codes, dtype), linear.pack(quantized.dequantized(codes, dtype))
        assert isinstance(few, quantized.Quantized)
        for m in (1, 7, 16, 33, 64, 200):
            x = torch.randn(m, k, device="cuda").to(dtype)
            got, want = linear.linear(x, few), linear.linear(x, dense)
            assert torch.equal(got, want), (n, k, m, dtype)
            for s in quantized_launch.schedules(m, n, dtype, few.packed.dim()):
                assert quantized_launch.is_proved(x, quantized_launch.Matrix(*few[:7]), None, None, s), s


@pytest.mark.gpu
def test_on_a_device_gated_products_of_int4_are_those_of_two_ops() -> None:
    for n, k, act in ((192, 384, 0), (2 * 1056, 256, 1), (2 * 4864, 896, 0), (1000, 256, 2)):
        codes = fragment_codes("int4", n, k, 128).to(torch.device("cuda"))
        few = quantized.pack(codes, torch.bfloat16)
        assert isinstance(few, quantized.Quantized) and few.packed.dim() == 3
        matrix, bias = quantized_launch.Matrix(*few[:7]), torch.randn(n, device="cuda").bfloat16()
        for m in (1, 8, 9, 40, 300, 1100):
            x = torch.randn(m, k, device="cuda").bfloat16()
            want = activations.launch(linear.linear(x, few, bias), act)
            assert torch.equal(linear.gated_linear(x, few, bias, act=activations.ACTS[act]), want), (n, k, m, act)
            for _, s in quantized_launch.GATED if n // 2 % 32 == 0 else ():
                assert torch.equal(quantized_launch.run(x, matrix, bias, None, s, act), want), (n, k, m, act, s)
