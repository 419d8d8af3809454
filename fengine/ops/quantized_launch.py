"""quantized.py on CUDA: kernels that decode, to scratch or in the product of few rows; which of them are proved."""
# pyright: reportInvalidTypeForm=false

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fengine.ops import activations, fragments, int4_hopper, int4_words, linear_launch, quantized_hopper
from fengine.ops.ahead import launcher
from fengine.ops.fragments import Fragments
from fengine.ops.int4_hopper import Eights
from fengine.ops.int4_words import Words
from fengine.ops.linear_launch import REFERENCE, Schedule, cdiv
from fengine.ops.proof import proved, random_rows, same_bits
from fengine.ops.quantized_hopper import Tiles
from fengine.ops.registration import EARLY, begin, dependent_launch, plain, tl, triton, wait

FEW = 64  # rows up to which a product decodes its weights itself


class Matrix(NamedTuple):
    """The tensors and facts of a `Quantized` leaf on CUDA; packed and scale are `Words` where packed has 3 dimensions,
    `Fragments` where it has 4."""

    packed: Tensor
    scale: Tensor
    zero: Tensor | None
    index: Tensor | None
    n: int
    group: int
    kind: str


Decoding = Schedule | Tiles | Eights
# Found on an H200. The first entry with m <= largest M and n >= least N is taken; of more rows scratch is faster.
FRAGMENTS = (
    (8, 16384, Tiles(8, 1, 4, 5, 3, True)),
    (8, 0, Tiles(8, 1, 8, 8, 1, True)),
    (16, 16384, Tiles(16, 1, 4, 4, 3, True)),
    (16, 0, Tiles(16, 1, 8, 6, 1, True)),
    (32, 16384, Tiles(32, 1, 4, 4, 2, True)),
    (32, 0, Tiles(32, 1, 4, 8, 1, True)),
    (64, 16384, Tiles(64, 2, 2, 8, 1, False)),
    (64, 0, Tiles(64, 1, 4, 5, 1, False)),
    (128, 16384, Tiles(128, 2, 2, 4, 1, False)),
    (128, 0, Tiles(128, 1, 2, 5, 1, False)),
    (1024, 16384, Tiles(256, 2, 2, 2, 1, False)),
    (256, 0, Tiles(128, 1, 2, 5, 1, False)),
    (512, 0, Tiles(128, 2, 2, 4, 1, False)),
    (1024, 0, Tiles(256, 2, 2, 2, 1, False)),
)
EIGHTS = (
    (8, 16384, Eights(8, 2, 1, 4, 4, 2)),
    (8, 5000, Eights(8, 2, 1, 4, 8, 1)),
    (8, 0, Eights(8, 1, 1, 8, 6, 1)),
    (16, 16384, Eights(16, 2, 1, 2, 6, 2)),
    (16, 5000, Eights(16, 2, 1, 4, 6, 1)),
    (16, 0, Eights(16, 1, 1, 4, 8, 1)),
    (32, 16384, Eights(32, 2, 1, 2, 4, 2)),
    (32, 5000, Eights(32, 2, 1, 4, 4, 1)),
    (32, 0, Eights(32, 1, 1, 4, 5, 1)),
    (64, 16384, Eights(64, 2, 2, 2, 4, 1)),
    (64, 5000, Eights(64, 2, 1, 2, 5, 1)),
    (64, 0, Eights(64, 1, 1, 2, 6, 1)),
    (128, 16384, Eights(128, 2, 2, 1, 5, 1)),
    (128, 5000, Eights(128, 2, 1, 1, 5, 1)),
    (128, 0, Eights(64, 2, 1, 2, 5, 1)),
    (192, 16384, Eights(192, 2, 2, 1, 4, 1, 7)),
    (192, 5000, Eights(192, 2, 1, 1, 4, 1)),
    (192, 0, Eights(96, 2, 1, 1, 6, 1)),
    (256, 16384, Eights(256, 2, 2, 1, 4, 1, 5)),
    (256, 5000, Eights(256, 2, 1, 1, 4, 1, 6)),
    (256, 0, Eights(128, 2, 1, 1, 5, 1)),
    (320, 5000, Eights(160, 2, 2, 1, 4, 1)),
    (320, 0, Eights(160, 2, 1, 1, 4, 1)),
    (384, 5000, Eights(192, 2, 2, 1, 4, 1, 7)),
    (384, 0, Eights(192, 2, 1, 1, 4, 1)),
    (512, 5000, Eights(256, 2, 2, 1, 4, 1, 5)),
    (512, 0, Eights(256, 2, 1, 1, 4, 1, 6)),
    (1024, 16384, Eights(256, 2, 2, 1, 4, 1, 5)),
    (1024, 5000, Eights(128, 2, 2, 1, 4, 1)),
    (1024, 4000, Eights(256, 2, 2, 1, 4, 1, 5)),
    (1024, 0, Eights(128, 2, 2, 1, 4, 1)),
)
# Of gated products, by the largest M; of more rows scratch is faster.
GATED = (
    (8, Eights(8, 2, 1, 4, 4, 2)),
    (16, Eights(16, 2, 1, 2, 6, 2)),
    (32, Eights(32, 2, 1, 2, 4, 2)),
    (64, Eights(64, 2, 2, 2, 4, 1)),
    (128, Eights(128, 2, 2, 1, 5, 1)),
    (192, Eights(192, 2, 2, 1, 4, 1, 7)),
    (256, Eights(256, 2, 2, 1, 4, 1, 5)),
    (320, Eights(160, 2, 2, 1, 4, 1)),
    (384, Eights(192, 2, 2, 1, 4, 1, 7)),
    (1024, Eights(256, 2, 2, 1, 4, 1, 5)),
)


def gated_schedules(m: int, n: int, packed: Tensor) -> Sequence[Eights]:
    """Those of a gated product in one kernel, of two halves of n outputs; they begin where blocks do. Pure."""
    if packed.dim() != 3 or n % 32:
        return []
    return [s for most, s in GATED if m <= most][:1]


def schedules(m: int, n: int, dtype: torch.dtype, dimensions: int) -> Sequence[Decoding]:
    """Schedules for m rows of a matrix whose `packed` has so many dimensions, in the order in which they are tried;
    none where scratch is faster. Pure."""
    if dimensions == 3:
        return [s for largest_m, least_n, s in EIGHTS if m <= largest_m and n >= least_n][:1]
    if dimensions == 4:
        return [s for largest_m, least_n, s in FRAGMENTS if m <= largest_m and n >= least_n][:1]
    if m > FEW or dtype == torch.float32:
        return []
    return [Schedule(16 if m <= 16 else 32 if m <= 32 else 64, 64, 128, True, 4, 4)]


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
    """Weights [BN, BK] in float32 of outputs `col` < N and columns from `start`; zeros behind K. ONE_GROUP: these
    columns are of one group."""
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


def decode(matrix: Matrix, k: int, dtype: torch.dtype) -> Tensor:
    """The matrix [N, K] in `dtype`: scratch of one product. Pure."""
    packed, scale, zero, index, n, group, kind = matrix
    if packed.dim() == 3:
        return int4_words.unpack(Words(packed, scale), n, group, dtype)
    if packed.dim() == 4:
        return fragments.unpack(Fragments(packed, scale), n, group, dtype=dtype)
    w_NK = torch.empty(n, k, dtype=dtype, device=packed.device)
    launcher(decode_kernel, (cdiv(n, 32), cdiv(k, 128)))(
        packed, scale, zero, index, w_NK, n, k, packed.shape[1], group, 32, 128, kind, index is not None, num_warps=4
    )
    return w_NK


def run(
    x_TK: Tensor, matrix: Matrix, bias_N: Tensor | None, out_dtype: torch.dtype | None, s: Decoding,
    act: int | None = None,
) -> Tensor:  # fmt: skip
    """The product that decodes in registers, under `s`; with `act`, of Eights, a gated one of its halves. Pure."""
    packed, scale, zero, index, n, group, kind = matrix
    m, k = x_TK.shape
    y_TN = torch.empty(m, n if act is None else n // 2, dtype=out_dtype or x_TK.dtype, device=x_TK.device)
    if isinstance(s, Eights):
        int4_hopper.launch(x_TK, Words(packed, scale), group, bias_N, y_TN, s, act is not None, act or 0)
        return y_TN
    if isinstance(s, Tiles):
        quantized_hopper.launch(x_TK, Fragments(packed, scale), group, bias_N, y_TN, s)
        return y_TN
    one_group = index is None and group % s.block_k == 0
    launcher(product_kernel, (cdiv(n, s.block_n), cdiv(m, s.block_m)))(
        x_TK, packed, scale, zero, index, bias_N, y_TN, m, n, k, packed.shape[1], group, s.block_m, s.block_n,
        s.block_k, kind, index is not None, one_group, bias_N is not None, num_warps=s.warps, num_stages=s.stages,
        **dependent_launch(x_TK.device.index, EARLY),
    )  # fmt: skip
    return y_TN


def is_proved(
    x_TK: Tensor, matrix: Matrix, bias_N: Tensor | None, out_dtype: torch.dtype | None, s: Decoding,
    act: int | None = None,
) -> bool:  # fmt: skip
    """Whether `s` gives the bits of the decoded matrix under linear.py's reference; compared once for these sizes."""
    m, k = x_TK.shape

    def compare() -> bool:
        x_XTK, w_NK = random_rows(m, k, matrix.n, x_TK), decode(matrix, k, x_TK.dtype)
        want = [linear_launch.run(plain(x), w_NK, matrix.n, bias_N, out_dtype, REFERENCE) for x in x_XTK]
        want_XTN = torch.stack(want if act is None else [activations.launch(y, act) for y in want])

        def tried() -> Tensor:
            return torch.stack([run(plain(x), matrix, bias_N, out_dtype, s, act) for x in x_XTK])

        return same_bits(want_XTN, tried, not isinstance(s, Schedule))

    facts = f"{matrix.kind} {matrix.group} {matrix.index is not None} {matrix.scale.dtype} {bias_N is not None}"
    key = f"quantized {x_TK.dtype} {out_dtype} {facts} {m}x{matrix.n}x{k} {tuple(s)}"
    return proved(x_TK.device, key if act is None else f"{key} gated {act}", compare)


def launch(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, index: Tensor | None, n: int, group: int, kind: str,
    dtype: torch.dtype, bias: Tensor | None, out_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """Decodes in registers where that is proved, else to scratch. On CUDA `dtype` is x's."""
    x, matrix = plain(x), Matrix(packed, scale, zero, index, n, group, kind)
    for s in schedules(x.shape[0], n, x.dtype, packed.dim()) if len(x) else ():
        if is_proved(x, matrix, bias, out_dtype, s):
            return run(x, matrix, bias, out_dtype, s)
    w_NK = decode(matrix, x.shape[1], x.dtype)
    if 0 < len(x) <= FEW and x.dtype != torch.float32:  # the kernels of few rows read weights before that has ended
        return linear_launch.run(x, w_NK, n, bias, out_dtype, REFERENCE)
    return linear_launch.launch(x, w_NK, n, bias, out_dtype)


def gated_launch(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, index: Tensor | None, n: int, group: int, kind: str,
    dtype: torch.dtype, bias: Tensor | None, act: int,
) -> Tensor:  # fmt: skip
    """The gated product of one kernel where that is proved, or of two."""
    x, matrix = plain(x), Matrix(packed, scale, zero, index, n, group, kind)
    for s in gated_schedules(x.shape[0], n // 2, packed) if len(x) else ():
        if is_proved(x, matrix, bias, None, s, act):
            return run(x, matrix, bias, None, s, act)
    return activations.launch(launch(x, *matrix, dtype, bias, None), act)
