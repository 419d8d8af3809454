"""y = x @ w.T (+ bias) for weights in few bits. No reduction tree of its own: it is linear.py's, of

    w[n, k] = (value(code[n, k]) - zero[n, g]) * scale[n, g]        g: the group of column k

in one float32 product, rounded once to the dtype that the matrix would have unquantized. So the bits are those of the
dequantized matrix, whatever the number of rows.

Codes: int4 and int8, unsigned with a zero; fp8, e4m3fn; fp4, e2m1 of OCP's microscaling formats. Schedules on CUDA: few
rows decode in registers inside the product's own order over K, where that was proved equal on this machine (see
proof.py); more rows decode the matrix to scratch and take linear.py's proved schedules. On the CPU see cpu_quantized.c.

Packed on CUDA: the codes of two columns in a byte, the even one low, or one in a byte: [N, bytes of K]; scale and zero
[G, N]. On the CPU 32 outputs side by side, their 4-bit codes in eights of columns: see `on_cpu`."""

import itertools
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from fengine.ops import activations, fragments, int4_words, linear, quantized_hopper, quantized_launch
from fengine.ops.cpu import KIND, LANES, contiguous, maybe, readable, rounded, schedule
from fengine.ops.registration import register

KINDS = ("int4", "int8", "fp8", "fp4")  # by the number that cpu_quantized.c knows them by
FOUR_BITS = ("int4", "fp4")
FLOATS = ("fp8", "w8a8")  # the same codes; products of the second take activations in FP8: see w8a8.py
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = 448.0  # of fp8


class Codes(NamedTuple):
    """A matrix in few bits, as read: one code a byte. The group of column k is index_K[k], or k // group."""

    kind: str
    code_NK: Tensor  # uint8
    scale_NG: Tensor
    zero_NG: Tensor | None  # uint8, of int4 and int8
    group: int
    index_K: Tensor | None = None  # int32

    def rows(self, index: Tensor | slice) -> "Codes":
        zero_NG = None if self.zero_NG is None else self.zero_NG[index]
        return self._replace(code_NK=self.code_NK[index], scale_NG=self.scale_NG[index], zero_NG=zero_NG)

    def to(self, device: torch.device) -> "Codes":
        moved = {name: part.to(device) for name, part in self._asdict().items() if isinstance(part, Tensor)}
        return self._replace(**moved)


def values(kind: str, code: Tensor) -> Tensor:
    """What codes stand for, in float32. Pure."""
    if kind in FLOATS:
        return code.view(torch.float8_e4m3fn).float()
    if kind == "fp4":
        return code.new_tensor(E2M1 + tuple(-value for value in E2M1), dtype=torch.float32)[code.long()]
    return code.float()


def dequantized(codes: Codes, dtype: torch.dtype) -> Tensor:
    """The matrix [N, K] that the codes stand for: the definition. Pure."""
    group_K = codes.index_K
    if group_K is None:
        group_K = torch.arange(codes.code_NK.shape[1], device=codes.code_NK.device) // codes.group
    w_NK = values(codes.kind, codes.code_NK)
    if codes.zero_NG is not None:
        w_NK = w_NK - codes.zero_NG.float()[:, group_K]
    return (w_NK * codes.scale_NG.float()[:, group_K]).to(dtype)


def encoded(w_NK: Tensor, kind: str, group: int, shrink: float = 1.0) -> Codes:
    """The nearest fp8, fp4, int4 or int8 codes, under scales symmetric about zero over `group` columns (0: all). Pure.
    Scales of integers have w's dtype, those of fp8 are float32, those of fp4 powers of two (OCP's microscaling); with
    `shrink` < 1 the largest values are clamped."""
    if kind == "fp4":
        return _microscaled(w_NK, group)
    k, scale_dtype = w_NK.shape[1], torch.float32 if kind in FLOATS else w_NK.dtype
    w_NGC = rearrange(w_NK.float(), "n (g c) -> n g c", c=group or k)
    half = {"int4": 7.5, "int8": 127.5}.get(kind, LARGEST)
    scale_NG = (w_NGC.abs().amax(-1) * shrink / half).to(scale_dtype)
    scale_NG = torch.where(scale_NG == 0, 1, scale_NG)
    scaled_NK = rearrange(w_NGC / scale_NG.float()[..., None], "n g c -> n (g c)")
    if kind in FLOATS:
        code_NK = scaled_NK.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
        return Codes(kind, code_NK, scale_NG, None, group or k)
    zero = 8 if kind == "int4" else 128
    code_NK = (scaled_NK.round() + zero).clamp(0, 2 * zero - 1).to(torch.uint8)
    return Codes(kind, code_NK, scale_NG, torch.full_like(scale_NG, zero, dtype=torch.uint8), group or k)


def _microscaled(w_NK: Tensor, group: int) -> Codes:
    w_NGC = rearrange(w_NK.float(), "n (g c) -> n g c", c=group)
    exponent_NG = w_NGC.abs().amax(-1).clamp(min=2.0**-120).log2().floor() - 2  # the largest code is 6 = 1.5 * 2^2
    scaled_NGC = w_NGC * torch.exp2(-exponent_NG)[..., None]
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(E2M1)], device=w_NK.device)
    size_NGC = torch.bucketize(scaled_NGC.abs(), middles, out_int32=True).to(torch.uint8)
    code_NGC = size_NGC | (scaled_NGC < 0).to(torch.uint8) << 3
    return Codes("fp4", code_NGC.flatten(1), torch.exp2(exponent_NG).bfloat16(), None, group)


def joined(parts: list[Codes]) -> Codes | None:
    """Matrices above each other as one; None where their kinds or groups differ. Pure."""
    first = parts[0]
    for part in parts[1:]:
        if (part.kind, part.group, part.scale_NG.dtype) != (first.kind, first.group, first.scale_NG.dtype):
            return None
        if part.index_K is None or first.index_K is None:
            if part.index_K is not first.index_K:
                return None
        elif not torch.equal(part.index_K, first.index_K):
            return None
    zeros = [part.zero_NG for part in parts if part.zero_NG is not None]
    code_NK, scale_NG = torch.cat([part.code_NK for part in parts]), torch.cat([part.scale_NG for part in parts])
    return first._replace(code_NK=code_NK, scale_NG=scale_NG, zero_NG=torch.cat(zeros) if zeros else None)


def on_cpu(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, index: Tensor | None, n: int, group: int, kind: str,
    dtype: torch.dtype, bias: Tensor | None, out_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """x [T, K] @ w.T + bias -> [T, n]. packed: 4 bits int32 [P, ceil(K/8), 64], 8 bits uint8 [P, K, 64]; scale, zero
    [2 P, G, 32]; P pairs of blocks of 32 outputs. dtype: bfloat16 or float16."""
    x, (m, k) = contiguous(x, "quantized_linear's x"), x.shape
    y = x.new_empty((m, n))
    library, threads = schedule(2 * m * n * k)
    bias, bias_at, bias_kind = maybe(readable, bias, "quantized_linear's bias")
    at = [None if t is None else t.data_ptr() for t in (zero, index)]
    library.fengine_quantized_linear(
        x.data_ptr(), packed.data_ptr(), scale.data_ptr(), *at, bias_at, y.data_ptr(), m, n, k, scale.shape[1], group,
        KINDS.index(kind), KIND[dtype], bias_kind, threads,
    )  # fmt: skip
    return rounded(y, out_dtype)


_op = register(
    "quantized_linear(Tensor x, Tensor packed, Tensor scale, Tensor? zero, Tensor? index, int n, int group, str kind, "
    "ScalarType dtype, Tensor? bias, ScalarType? out_dtype) -> Tensor",
    quantized_launch.launch, on_cpu, lambda x, *rest: x.new_empty((x.shape[0], rest[4]), dtype=rest[-1] or x.dtype),
)  # fmt: skip


def gated_on_cpu(x: Tensor, *rest: Any) -> Tensor:
    return activations.on_cpu(on_cpu(x, *rest[:-1], out_dtype=None), rest[-1])


_gated_op = register(
    "quantized_gated(Tensor x, Tensor packed, Tensor scale, Tensor? zero, Tensor? index, int n, int group, str kind, "
    "ScalarType dtype, Tensor? bias, int act) -> Tensor",
    quantized_launch.gated_launch, gated_on_cpu, lambda x, *rest: x.new_empty((x.shape[0], rest[4] // 2)),
)  # fmt: skip


class Quantized(NamedTuple):
    """A matrix of `n` outputs in few bits, packed for its device; `dtype` is what its values are rounded to."""

    packed: Tensor
    scale: Tensor
    zero: Tensor | None
    index: Tensor | None
    n: int
    group: int
    kind: str
    dtype: torch.dtype

    x_group = 0

    def linear(
        self, x_TK: Tensor, bias_N: Tensor | None, adapters: Any, out_dtype: torch.dtype | None, exact: bool
    ) -> Tensor:
        return _op(x_TK, *self, bias_N, out_dtype)

    def gated(self, x_TK: Tensor, bias_N: Tensor | None, adapters: Any, exact: bool, act: str, group: int) -> Any:
        if group:
            return linear.in_two(self, x_TK, bias_N, adapters, exact, act, group)
        return _gated_op(x_TK, *self, bias_N, linear.ACTS.index(act))


def fits(kind: str, scale_NG: Tensor) -> bool:
    """Whether scales are 2 at most, not tiny and, for integers, have 11 bits, as halves and bfloat16 do. Pure."""
    size, wide = scale_NG.abs(), scale_NG * 8193.0
    usual = (size >= 2.0**-100) & (size <= 2.0) | (size == 0)
    short = wide - (wide - scale_NG) == scale_NG  # Veltkamp's splitting: nothing is behind the 11 bits
    return bool((usual & short if kind in ("int4", "int8") else usual).all())


def pack(codes: Codes, dtype: torch.dtype) -> linear.Leaf:
    """The layout that `linear` reads on the codes' device (see the module docstring), once at load. Pure. On the CPU a
    matrix of float32, or whose scales its kernel could not multiply exactly, is kept dequantized."""
    if codes.code_NK.device.type != "cpu":
        return packed_rows(codes, dtype)
    if dtype == torch.float32 or not fits(codes.kind, codes.scale_NG.float()):
        return linear.pack(dequantized(codes, dtype))
    n, zero_NG = len(codes.code_NK), codes.zero_NG

    def blocks(t: Tensor, lanes: int = LANES) -> Tensor:
        padded = pad(t, (0, 0, 0, -n % (2 * LANES)))
        return rearrange(padded, "(block lane) k -> block k lane", lane=lanes).contiguous()

    packed = _fours(codes.code_NK) if codes.kind in FOUR_BITS else blocks(codes.code_NK, 2 * LANES)
    zero = None if zero_NG is None else blocks(zero_NG)
    return Quantized(packed, blocks(codes.scale_NG.float()), zero, codes.index_K, n, codes.group, codes.kind, dtype)


def _fours(code_NK: Tensor) -> Tensor:
    """Codes of 4 bits as cpu_quantized.c reads them: int32 [pairs of blocks, ceil(K / 8), 64]. Pure."""
    padded = pad(code_NK, (0, -code_NK.shape[1] % 8, 0, -len(code_NK) % (2 * LANES)))
    byte = rearrange(padded[:, 0::2] | padded[:, 1::2] << 4, "(p n) (s b) -> p s (n b)", n=2 * LANES, b=4)
    return byte.contiguous().view(torch.int32)


def pack_experts(codes: Codes, experts: int, gated: bool, dtype: torch.dtype) -> Quantized | None:
    """The layout of matrices below each other, one an expert, of gate above up if `gated`. None: to be whole. Pure."""
    n, k = len(codes.code_NK) // experts, codes.code_NK.shape[1]
    if not quantized_hopper.serves(codes.code_NK.device) or codes.index_K is not None or n % (1 + 15 * gated):
        return None
    if not fragments.fit(codes.kind, k, codes.group, codes.scale_NG, dtype):
        return None

    def whole_blocks(part: Tensor, fill: float = 0) -> Tensor:
        part = fragments.alternated(part, experts) if gated else part
        return pad(part.unflatten(0, (experts, n)), (0, 0, 0, -n % 64), value=fill).flatten(0, 1)

    zero_RG = None if codes.zero_NG is None else whole_blocks(codes.zero_NG)
    f = fragments.pack(codes.kind, whole_blocks(codes.code_NK), whole_blocks(codes.scale_NG, 1.0), zero_RG)
    return Quantized(f.words, f.scales, None, None, n, codes.group, codes.kind, dtype)


def row_bytes(codes: Codes) -> Tensor:
    """The codes of each row in bytes, of 4 bits two in each, padded with zeros to whole words. Pure."""
    if codes.kind not in FOUR_BITS:
        return codes.code_NK.contiguous()
    code_NK = pad(codes.code_NK, (0, -codes.code_NK.shape[1] % 8))
    return code_NK[:, 0::2] | code_NK[:, 1::2] << 4


def packed_rows(codes: Codes, dtype: torch.dtype) -> Quantized:
    """The layout of CUDA: the tensor cores' operand where it holds the matrix, else rows. Pure."""
    kind, n, k = codes.kind, *codes.code_NK.shape
    if quantized_hopper.serves(codes.code_NK.device) and codes.index_K is None:
        w = None
        if codes.zero_NG is not None and int4_words.fit(kind, k, codes.group, codes.scale_NG, dtype):
            w = int4_words.pack(codes.code_NK, codes.scale_NG, codes.zero_NG)
        elif fragments.fit(kind, k, codes.group, codes.scale_NG, dtype):
            w = fragments.pack(kind, codes.code_NK, codes.scale_NG, codes.zero_NG)
        if w is not None:
            return Quantized(w.words, w.scales, None, None, n, codes.group, kind, dtype)
    zero = None if codes.zero_NG is None else codes.zero_NG.T.contiguous()
    scale = codes.scale_NG.T.contiguous()
    return Quantized(row_bytes(codes), scale, zero, codes.index_K, n, codes.group, kind, dtype)
