"""Weights in four bits as wgmma's operand: the layout of quantized_hopper.py, and its way back to a matrix.

Codes: int32 [blocks, chunks, 16, 32] of 64 outputs and 64 columns. A word is what one thread multiplies in one step of
16 columns: rows r and r + 8, columns 2c, 2c + 1, 2c + 8, 2c + 9, a code in four bits at 16 k0 + 8 row3 + 4 k3, where k0
is the lowest bit of a column, k3 the one of 8, row3 that of a row. The words of a thread's four steps lie together. The
bits of fp4's words are then moved to where few steps make bfloat16s of them: see `MOVES`.

Scales: int32 [blocks, words]. int4: for each group 64 words, the float32 scale with the zero in its low byte (scales
have 11 bits, so these are free), rows with row3 = 0 first. fp4: for each chunk 32 words, exponents + 126 in bytes, at
16 row3 + 8 k5. Experts follow each other; the rows of gate and up alternate in eights, so that a thread holds both."""
# pyright: reportInvalidTypeForm=false

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from fengine.ops.ahead import launcher
from fengine.ops.registration import tl, triton

GROUPS = {"int4": (64, 128), "fp4": (32,)}
# Bits of a word of fp4, and how far they go to the left: a half's first code then lies as in a bfloat16, the second 6
# bits lower, the third 4 bits higher (around the word); the last one's sign and exponent 10 lower, its rest 2.
MOVES = (
    (0x00070007, 6), (0x00080008, 12), (0x00700070, -4), (0x07800780, 2), (0x00000800, 8), (0x08000000, -24),
    (0x10001000, -8), (0x00006000, 16), (0x60000000, -16), (0x80008000, -10),
)  # fmt: skip


class Fragments(NamedTuple):
    """A packed matrix, or several of the same shape below each other."""

    words: Tensor
    scales: Tensor


def fit(kind: str, k: int, group: int, scale: Tensor, dtype: torch.dtype) -> bool:
    """Whether the layout holds such a matrix exactly; of `scale` powers of two between 2^-126 and 2 for fp4. Pure."""
    if dtype != torch.bfloat16 or group not in GROUPS.get(kind, ()) or k % max(group, 64):
        return False
    scale = scale.float()
    bits, size = scale.view(torch.int32), scale.abs()
    if kind == "int4":
        return bool(((bits & 0x1FFF) == 0).all() and (((size >= 2.0**-100) & (size <= 2.0**100)) | (size == 0)).all())
    return bool(((bits & 0x7FFFFF) == 0).all() and ((scale >= 2.0**-126) & (scale <= 2.0)).all())


def alternated(x_RK: Tensor, matrices: int) -> Tensor:
    """Rows of gate above up, of matrices below each other, as eights of each in turn. Pure."""
    return rearrange(x_RK, "(e two f eight) k -> (e f two eight) k", e=matrices, two=2, eight=8)


def moved(word: Tensor) -> Tensor:
    """Words whose bits go where `MOVES` says. Pure."""
    total = torch.zeros_like(word)
    for bits, left in MOVES:
        there = bits << left if left > 0 else bits >> -left
        there -= (there >> 31) << 32  # as int32
        total |= (word << left if left > 0 else word >> -left) & there
    return total


def pack(kind: str, code_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None) -> Fragments:
    """The layout of one matrix whose rows are in the layout's order. Pure."""
    rows = -len(code_NK) % 64
    code_NK = pad(code_NK, (0, 0, 0, rows))
    parts = rearrange(
        code_NK, "(b warp row3 l) (c k5 k4 k3 k21 k0) -> b c (warp l) (k21 k4 k5) (k0 row3 k3)",
        warp=4, row3=2, l=8, k5=2, k4=2, k3=2, k21=4, k0=2,
    )  # fmt: skip
    two = parts[..., 0::2] | parts[..., 1::2] << 4  # bytes
    words = rearrange(two.contiguous().view(torch.int32)[..., 0], "b c (wl l2) w -> b c wl (l2 w)", l2=2)
    scale_NG = pad(scale_NG.float(), (0, 0, 0, rows), value=1.0)
    if kind == "int4":
        assert zero_NG is not None
        bits_NG = scale_NG.view(torch.int32) | pad(zero_NG, (0, 0, 0, rows)).int()
        scales = rearrange(bits_NG, "(b warp row3 l) g -> b (g row3 warp l)", warp=4, row3=2, l=8)
    else:
        byte_NG = ((scale_NG.view(torch.int32) >> 23) + 126).to(torch.uint8)
        words = moved(words)
        byte = rearrange(byte_NG, "(b warp row3 l) (c k5) -> b (c warp l) (row3 k5)", warp=4, row3=2, l=8, k5=2)
        scales = byte.contiguous().view(torch.int32)[..., 0]
    return Fragments(words.contiguous(), scales.contiguous())


def unpack(f: Fragments, n: int, group: int, halves: bool = False, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The matrices below each other in `dtype`, each of `n` rows; `halves`: gate above up again. Pure."""
    blocks, chunks = f.words.shape[:2]
    per = -(-n // 64) if not halves else -(-n // 2 // 32)
    w_RK = torch.empty(blocks // per * n, chunks * 64, dtype=dtype, device=f.words.device)
    launcher(unpack_kernel, (blocks, chunks))(
        f.words, f.scales, w_RK, n, per, chunks, f.scales.shape[1], group, group == 32, halves, num_warps=4
    )
    return w_RK


@triton.jit
def moved_back(word):
    """The words of which `moved` made these."""
    first = (word >> 6 & 0x00070007) | (word >> 12 & 0x00080008)
    second = (word << 4 & 0x00700070) | (word >> 2 & 0x00800080)
    third = (word >> 2 & 0x07000700) | (word >> 8 & 0x00000800) | (word << 24 & 0x08000000)
    last = (word << 8 & 0x10001000) | (word >> 16 & 0x00006000) | (word << 16 & 0x60000000)
    return first | second | third | last | (word << 10 & -0x7FFF8000)


@triton.jit
def unpack_kernel(word_ptr, scale_ptr, w_ptr, n, per, chunks, scales, GROUP: tl.constexpr, FP: tl.constexpr,
                  HALVES: tl.constexpr):  # fmt: skip
    """64 x 64 weights."""
    block = tl.program_id(0)
    chunk = tl.program_id(1)
    word = tl.load(word_ptr + (block.to(tl.int64) * chunks + chunk) * 512 + tl.arange(0, 512))
    if FP:
        word = moved_back(word)
    code = (word[:, None] >> (4 * tl.arange(0, 8))[None, :]) & 15
    code = tl.permute(code.reshape((4, 4, 2, 4, 2, 2, 2, 2, 2)), (0, 7, 1, 2, 5, 4, 8, 3, 6)).reshape((64, 64))
    r = tl.arange(0, 64)
    k = tl.arange(0, 64)
    line = r // 16 * 8 + r % 8
    at = scale_ptr + block.to(tl.int64) * scales
    if FP:
        bits = tl.load(at + chunk * 32 + line[:, None] + 0 * k[None, :])
        byte = (bits >> (r // 8 % 2 * 16)[:, None] + (k // 32 * 8)[None, :]) & 255
        half = ((code & 7) << 9) | ((code & 8) << 12)
        value = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
        w = value * ((byte - 126) << 23).to(tl.float32, bitcast=True)
    else:
        bits = tl.load(at + chunk * 64 // GROUP * 64 + r // 8 % 2 * 32 + line)[:, None]
        w = (code - (bits & 255)).to(tl.float32) * (bits & -8192).to(tl.float32, bitcast=True)
    if HALVES:
        own = block % per * 32 + line
        there = own < n // 2
        own += r // 8 % 2 * (n // 2)
    else:
        own = block % per * 64 + r
        there = own < n
    row = (block // per).to(tl.int64) * n + own
    at = w_ptr + row[:, None] * chunks * 64 + (chunk * 64 + k)[None, :]
    tl.store(at, w.to(w_ptr.dtype.element_ty), mask=there[:, None])
