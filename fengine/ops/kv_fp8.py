"""Keys and values in FP8: pages of codes, and an exponent for each (slot, kv head), taken from the vector itself.

    e = the smallest whole number with max |x| <= 448 * 2^e        code = e4m3(x / 2^e), nearest even
    the key or value is code * 2^e

A power of two costs e4m3 no precision, and the stored number is exact in bfloat16 and float32. So attention over such
pages has no tree of its own: it is attention.py's over the stored numbers, and a kernel may scale codes, or scores and
weights, with the same bits. Every query reads what is stored, also of its own chunk.

Pages are bytes [P, S, G, K + 1]: of a page first the codes [G, S, K], then the exponents [G, S], each plus 127:
what a kv head needs lies together.
"""

import torch
from torch import Tensor


def is_few(pages_PSGK: Tensor) -> bool:
    """Whether pages hold codes. Pure."""
    return pages_PSGK.dtype == torch.uint8


def width_of(pages_PSGK: Tensor) -> int:
    """Values of one head. Pure."""
    return pages_PSGK.shape[3] - is_few(pages_PSGK)


def parts(pages_PSGK: Tensor) -> tuple[Tensor, Tensor]:
    """Views of contiguous pages: codes [P, S, G, K] and exponents [P, S, G]. Pure."""
    pages, size, groups, _ = pages_PSGK.shape
    codes, exponents = pages_PSGK.view(pages, -1).split([size * groups * width_of(pages_PSGK), size * groups], 1)
    codes = codes.unflatten(1, (groups, size, -1)).transpose(1, 2)
    return codes, exponents.unflatten(1, (groups, size)).transpose(1, 2)


def encoded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [..., K] and exponents [...] of vectors [..., K]: the definition. Pure."""
    top = x.float().abs().amax(-1)
    exponent = ((top.view(torch.int32) + 0x1FFFFF >> 23) - 8).clamp(min=1)  # 448 = 1.75 * 2^8
    inverse = (254 - exponent << 23).view(torch.float32)
    code = (x.float() * inverse[..., None]).to(torch.float8_e4m3fn)
    return code.view(torch.uint8), exponent.to(torch.uint8)


def values(pages_PSGK: Tensor) -> Tensor:
    """What pages [P, S, G, K] hold, in float32; pages that hold numbers as they are. Pure."""
    if not is_few(pages_PSGK):
        return pages_PSGK
    codes, exponents = parts(pages_PSGK)
    scale = (exponents.int() << 23).view(torch.float32)
    return codes.contiguous().view(torch.float8_e4m3fn).float() * scale[..., None]


def write(pages_PSGK: Tensor, slot_T: Tensor, x_TGK: Tensor) -> None:
    """Stores vectors. Modifies: the pages at slot_T."""
    size = pages_PSGK.shape[1]
    place = (slot_T.long() // size, slot_T.long() % size)
    if not is_few(pages_PSGK):
        pages_PSGK[place] = x_TGK.to(pages_PSGK.dtype)
        return
    for part, new in zip(parts(pages_PSGK), encoded(x_TGK), strict=True):
        part[place] = new


def stored_as(like_PSGK: Tensor, x_PSGK: Tensor) -> Tensor:
    """Pages of the kind of others, on x's device, that hold x. Pure."""
    if not is_few(like_PSGK):
        return x_PSGK.to(like_PSGK.dtype)
    pages_PSGK = x_PSGK.new_empty((*x_PSGK.shape[:3], x_PSGK.shape[3] + 1), dtype=torch.uint8)
    slot_T = torch.arange(pages_PSGK.shape[0] * pages_PSGK.shape[1], device=x_PSGK.device)
    write(pages_PSGK, slot_T, x_PSGK.flatten(0, 1))
    return pages_PSGK
