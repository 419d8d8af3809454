"""Weights of four bits, zeros and scales as the tensor cores' operand, eight outputs a warp: the layout of
int4_hopper.py, and its way back to a matrix.

Codes: int32 [blocks, chunks, 512] of 32 outputs and 128 columns. A word is what one thread multiplies in two steps of
16 columns: of one row the columns 2c, 2c + 1, 2c + 8 and 2c + 9 of each, a code in four bits at 16 k0 + 8 k4 + 4 k3,
where k0 is the lowest bit of a column. The words of a thread's eight steps lie together: 16 row + 4 c + 2 k6 + k5.

Scales: int32 [blocks, words], for each group 32 of them, the float32 scale times 64 with the zero in its low byte
(scales have 11 bits, so these are free).
"""
# pyright: reportInvalidTypeForm=false

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from fengine.ops import fragments
from fengine.ops.ahead import launcher
from fengine.ops.registration import tl, triton


class Words(NamedTuple):
    """A packed matrix."""

    words: Tensor
    scales: Tensor


def fit(kind: str, k: int, group: int, scale: Tensor, dtype: torch.dtype) -> bool:
    """Whether the layout holds such a matrix exactly. Pure."""
    return kind == "int4" and k % 128 == 0 and fragments.fit(kind, k, group, scale, dtype)


def pack(code_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor) -> Words:
    """The layout of one matrix. Pure."""
    rows = -len(code_NK) % 64
    parts = rearrange(
        pad(code_NK, (0, 0, 0, rows)), "(b row) (c k6 k5 k4 k3 k21 k0) -> b c (row k21 k6 k5) (k0 k4 k3)",
        row=32, k6=2, k5=2, k4=2, k3=2, k21=4, k0=2,
    )  # fmt: skip
    two = parts[..., 0::2] | parts[..., 1::2] << 4  # bytes
    bits_NG = (pad(scale_NG.float(), (0, 0, 0, rows)) * 64.0).view(torch.int32) | pad(zero_NG, (0, 0, 0, rows)).int()
    scales = rearrange(bits_NG, "(b row) g -> b (g row)", row=32)
    return Words(two.contiguous().view(torch.int32)[..., 0].contiguous(), scales.contiguous())


def unpack(w: Words, n: int, group: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The matrix [n, K] in `dtype`. Pure."""
    blocks, chunks = w.words.shape[:2]
    w_NK = torch.empty(n, chunks * 128, dtype=dtype, device=w.words.device)
    launcher(unpack_kernel, (blocks, chunks))(w.words, w.scales, w_NK, n, chunks, w.scales.shape[1], group, num_warps=4)
    return w_NK


@triton.jit
def unpack_kernel(word_ptr, scale_ptr, w_ptr, n, chunks, scales, GROUP: tl.constexpr):
    """32 x 128 weights."""
    block = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    word = tl.load(word_ptr + (block * chunks + chunk) * 512 + tl.arange(0, 512))
    code = (word[:, None] >> (4 * tl.arange(0, 8))[None, :]) & 15
    code = tl.permute(code.reshape((32, 4, 2, 2, 2, 2, 2)), (0, 2, 3, 5, 6, 1, 4)).reshape((32, 128))
    row = tl.arange(0, 32)
    k = chunk * 128 + tl.arange(0, 128)
    bits = tl.load(scale_ptr + block * scales + (k // GROUP * 32)[None, :] + row[:, None])
    w = (code - (bits & 255)).to(tl.float32) * ((bits & -8192).to(tl.float32, bitcast=True) * 0.015625)
    own = block * 32 + row
    tl.store(w_ptr + own[:, None] * chunks * 128 + k[None, :], w.to(w_ptr.dtype.element_ty), mask=(own < n)[:, None])
