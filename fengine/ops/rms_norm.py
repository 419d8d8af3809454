"""RMS norm, alone or fused with what comes before it: the residual addition, or the look-up of embeddings.

y = weight * (x * rsqrt(mean(x^2) + eps)), fp32 inside, with Hugging Face's two roundings: the normalized row to x's
dtype, then the product. With `shift` (Gemma's 1) the weight is shift + weight in fp32, the product alone is rounded.
The fused form first does residual' = residual + delta, rounded to x's dtype.

Reduction tree: one row is one program, whose block is the next power of two of D and whose number of warps follows from
D alone, so the sum over a row has one fixed thread layout for every T.
"""
# pyright: reportInvalidTypeForm=false

import torch
from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.registration import begin, dependent_launch, plain, register, tl, triton, wait, wide


def reference(x_TD: Tensor, weight_D: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    """The math, in fp32 (fp64 where x is). Pure."""
    x32_TD = wide(x_TD)
    normed_TD = x32_TD * torch.rsqrt(x32_TD.pow(2).mean(-1, keepdim=True) + eps)
    if shift:
        return (normed_TD * (shift + wide(weight_D))).to(x_TD.dtype)
    return (weight_D * normed_TD.to(x_TD.dtype)).to(x_TD.dtype)


def add_reference(
    delta_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, shift: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The math of the fused form. Pure."""
    residual_TD = (wide(residual_TD) + wide(delta_TD)).to(residual_TD.dtype)
    return reference(residual_TD, weight_D, eps, shift), residual_TD


@triton.jit
def rms_norm_kernel(x_ptr, delta_ptr, index_ptr, weight_ptr, y_ptr, sum_ptr, D, eps, ADD: tl.constexpr,
                    INDEX: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One row of x; ADD: of x + delta; INDEX: row index[i] of x. The latter two also go to `sum`."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64) * D
    col = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + col, mask=col < D, other=0.0).to(tl.float32)
    wait(PDL)
    if INDEX:
        x_ptr += tl.load(index_ptr + tl.program_id(0)).to(tl.int64) * D - row
    x = tl.load(x_ptr + row + col, mask=col < D, other=0.0).to(tl.float32)
    if INDEX:
        tl.store(sum_ptr + row + col, x.to(sum_ptr.dtype.element_ty), mask=col < D)
    if ADD:
        x += tl.load(delta_ptr + row + col, mask=col < D, other=0.0).to(tl.float32)
        x = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row + col, x, mask=col < D)
        x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    normed = x * scale
    if SHIFT == 0:
        normed = normed.to(y_ptr.dtype.element_ty).to(tl.float32)
    else:
        weight += SHIFT
    tl.store(y_ptr + row + col, (weight * normed).to(y_ptr.dtype.element_ty), mask=col < D)


def _launch(
    x_TD: Tensor, delta_TD: Tensor | None, index_T: Tensor | None, weight_D: Tensor, eps: float, shift: float
) -> tuple[Tensor, Tensor]:
    x_TD = plain(x_TD)
    tokens, width = x_TD.shape if index_T is None else (len(index_T), x_TD.shape[1])
    y_TD = x_TD.new_empty((tokens, width))
    sum_TD = x_TD if delta_TD is None and index_T is None else torch.empty_like(y_TD)
    block = triton.next_power_of_2(width)
    warps = min(max(block // 512, 1), 16)
    if tokens:
        launcher(rms_norm_kernel, (tokens,))(
            x_TD, None if delta_TD is None else plain(delta_TD), index_T, plain(weight_D), y_TD, sum_TD, width, eps,
            delta_TD is not None, index_T is not None, block, shift, num_warps=warps,
            **dependent_launch(x_TD.device.index),
        )  # fmt: skip
    return y_TD, sum_TD


def launch(x_TD: Tensor, weight_D: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    return _launch(x_TD, None, None, weight_D, eps, shift)[0]


def add_launch(
    delta_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, shift: float = 0.0
) -> tuple[Tensor, Tensor]:
    return _launch(residual_TD, delta_TD, None, weight_D, eps, shift)


def rows_launch(
    table_VD: Tensor, index_T: Tensor, weight_D: Tensor, eps: float, shift: float = 0.0
) -> tuple[Tensor, Tensor]:
    return _launch(table_VD, None, index_T, weight_D, eps, shift)


def fake(x_TD: Tensor, weight_D: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    return x_TD.new_empty(x_TD.shape)


def add_fake(
    delta_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, shift: float = 0.0
) -> tuple[Tensor, Tensor]:
    return residual_TD.new_empty(residual_TD.shape), residual_TD.new_empty(residual_TD.shape)


def rows_fake(
    table_VD: Tensor, index_T: Tensor, weight_D: Tensor, eps: float, shift: float = 0.0
) -> tuple[Tensor, Tensor]:
    shape = (index_T.shape[0], weight_D.shape[0])
    return table_VD.new_empty(shape, dtype=weight_D.dtype), table_VD.new_empty(shape, dtype=weight_D.dtype)


# Norms with a shift are ops of their own: an argument costs a short step as much as half a microsecond.
_op = register("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", launch, fake)
_shifted_op = register("shifted_rms_norm(Tensor x, Tensor weight, float eps, float shift) -> Tensor", launch, fake)
ADD = "Tensor delta, Tensor residual, Tensor weight, float eps"
_add_op = register(f"add_rms_norm({ADD}) -> (Tensor, Tensor)", add_launch, add_fake)
_shifted_add_op = register(f"shifted_add_rms_norm({ADD}, float shift) -> (Tensor, Tensor)", add_launch, add_fake)
ROWS = "Tensor table, Tensor index, Tensor weight, float eps"
_rows_op = register(f"rows_rms_norm({ROWS}) -> (Tensor, Tensor)", rows_launch, rows_fake)
_shifted_rows_op = register(f"shifted_rows_rms_norm({ROWS}, float shift) -> (Tensor, Tensor)", rows_launch, rows_fake)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    """The normalized rows, in x's dtype. Pure."""
    return _shifted_op(x_TD, weight_D, eps, shift) if shift else _op(x_TD, weight_D, eps)


def add_rms_norm(
    delta_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, shift: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(normalized rows of residual + delta, residual + delta), both in the residual's dtype. Pure."""
    if shift:
        return _shifted_add_op(delta_TD, residual_TD, weight_D, eps, shift)
    return _add_op(delta_TD, residual_TD, weight_D, eps)


def rows_rms_norm(
    packed: Tensor, index_T: Tensor, weight_D: Tensor, eps: float, shift: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(normalized rows, rows) of the embeddings that `linear.pack` made `packed` of, both in the weight's dtype. Pure.

    index_T int32.
    """
    if shift:
        return _shifted_rows_op(packed, index_T, weight_D, eps, shift)
    return _rows_op(packed, index_T, weight_D, eps)
