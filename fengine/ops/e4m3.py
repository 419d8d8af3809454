"""Rows of activations in FP8 (e4m3), as products of w8a8.py take them: codes, and a scale of each row, or of each
`group` columns of it. The scale comes from these columns alone, so a row's codes are its own:

    top = max |x|, or 448 where that is below 2^-100
    scale = top / 448        q = e4m3(x * (448 / top)), nearest even

Codes are bytes on CUDA; on the CPU they are the numbers themselves, in float32. An op whose result only such a product
reads writes it so at once (`activations.silu_mul`, `rms_norm.add_rms_norm`), with the bits that `rows` gives."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fengine.ops.ahead import launcher
from fengine.ops.cpu import contiguous, schedule
from fengine.ops.fp8_kernels import quantize_kernel
from fengine.ops.registration import EARLY, dependent_launch, plain, register, row_warps, triton

LARGEST = 448.0  # of e4m3
PIECE = 1024  # columns of a program, where groups are smaller
Pair = tuple[Tensor, Tensor]


class Rows(NamedTuple):
    """Activations in e4m3, which were rounded to `dtype` before."""

    codes_TK: Tensor
    scale_TG: Tensor  # float32
    dtype: torch.dtype

    def tensors(self) -> dict[str, Tensor]:
        return {"codes_TK": self.codes_TK, "scale_TG": self.scale_TG}


def reference(x_TK: Tensor, group: int) -> Pair:
    """(e4m3 numbers [T, K] and scales [T, groups], in float32): the definition. Pure."""
    k = x_TK.shape[1]
    x_TGC = pad(x_TK.float(), (0, -k % group)).unflatten(1, (-1, group))
    top_TG = x_TGC.abs().amax(-1)
    top_TG = torch.where(top_TG < 2.0**-100, LARGEST, top_TG)
    inverse_TG = top_TG.new_tensor(LARGEST) / top_TG  # a number over a tensor is its reciprocal's product in torch
    q_TGC = (x_TGC * inverse_TG[..., None]).to(torch.float8_e4m3fn).float()
    return q_TGC.flatten(1)[:, :k], top_TG / LARGEST


def room(x_TK: Tensor, k: int, group: int, dtype: torch.dtype = torch.uint8) -> Pair:
    """Empty codes and scales of as many rows of k columns. Pure."""
    tokens = x_TK.shape[0]
    return x_TK.new_empty((tokens, k), dtype=dtype), x_TK.new_empty((tokens, -(-k // group)), dtype=torch.float32)


def fake(x_TK: Tensor, k: int, group: int) -> Pair:
    return room(x_TK, k, group, torch.float32 if x_TK.device.type == "cpu" else torch.uint8)


def on_cpu(x: Tensor, group: int) -> Pair:
    x, (m, k) = contiguous(x, "e4m3_rows' x"), x.shape
    q, scale = room(x, k, group, torch.float32)
    library, threads = schedule(8 * x.numel())
    library.fengine_e4m3_rows(x.data_ptr(), q.data_ptr(), scale.data_ptr(), m, k, group, threads)
    return q, scale


def blocks(k: int, group: int) -> tuple[int, int]:
    """(columns of a program, columns that share a scale there) of a kernel over rows of k columns. Pure."""
    whole = triton.next_power_of_2(k)
    return (whole, whole) if group >= k else (min(whole, PIECE), group)


def launch(x_TK: Tensor, group: int) -> Pair:
    x_TK, (m, k) = plain(x_TK), x_TK.shape
    q_TK, scale_TG = room(x_TK, k, group)
    block, group = blocks(k, group)
    if m:
        launcher(quantize_kernel, (m, triton.cdiv(k, block)))(
            x_TK, q_TK, scale_TG, k, scale_TG.shape[1], block, group, num_warps=row_warps(block),
            **dependent_launch(x_TK.device.index, EARLY),
        )  # fmt: skip
    return q_TK, scale_TG


_op = register("e4m3_rows", launch, on_cpu, lambda x, group: fake(x, x.shape[1], group))


def rows(x_TK: Tensor, group: int) -> Rows:
    """Codes of x's rows, with a scale for each `group` columns: a power of two, or at least K. Pure."""
    codes_TK, scale_TG = _op(x_TK, group)
    return Rows(codes_TK, scale_TG, x_TK.dtype)
