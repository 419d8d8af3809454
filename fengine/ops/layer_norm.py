"""Layer norm: y = weight * ((x - mean(x)) * rsqrt(var(x) + eps)) (+ bias), fp32 inside, one rounding. A bias stands
behind the weight, in one tensor of 2D values.

Reduction trees: the row's sum, then the sum of squares of what the mean leaves; one row is one program, whose block is
the next power of two of D and whose number of warps follows from D alone, so each has one fixed thread layout.
"""
# pyright: reportInvalidTypeForm=false

import torch
from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.cpu import KIND, contiguous, readable, schedule
from fengine.ops.registration import begin, dependent_launch, plain, register, row_warps, tl, triton, wait, wide


def reference(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The math, in fp32 (fp64 where x is). Pure."""
    x32_TD = wide(x_TD)
    centred_TD = x32_TD - x32_TD.mean(-1, keepdim=True)
    scale_T1 = torch.rsqrt(centred_TD.pow(2).mean(-1, keepdim=True) + eps)
    weight_D, *bias = wide(weight_D).split(x_TD.shape[1])
    return sum(bias, weight_D * (centred_TD * scale_T1)).to(x_TD.dtype)


@triton.jit
def layer_norm_kernel(x_ptr, weight_ptr, y_ptr, D, eps, BLOCK: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr):
    """One row."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64) * D
    col = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + col, mask=col < D, other=0.0).to(tl.float32)
    wait(PDL)
    x = tl.load(x_ptr + row + col, mask=col < D, other=0.0).to(tl.float32)
    centred = tl.where(col < D, x - tl.sum(x, 0) / D, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / D + eps)
    y = weight * (centred * scale)
    if BIAS:
        y = tl.fma(weight, centred * scale, tl.load(weight_ptr + D + col, mask=col < D, other=0.0).to(tl.float32))
    tl.store(y_ptr + row + col, y.to(y_ptr.dtype.element_ty), mask=col < D)


def launch(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    x_TD = plain(x_TD)
    y_TD = torch.empty_like(x_TD)
    block = triton.next_power_of_2(x_TD.shape[1])
    if len(x_TD):
        launcher(layer_norm_kernel, (len(x_TD),))(
            x_TD, plain(weight_D), y_TD, x_TD.shape[1], eps, block, weight_D.numel() > x_TD.shape[1],
            num_warps=row_warps(block), **dependent_launch(x_TD.device.index),
        )  # fmt: skip
    return y_TD


def on_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight, d = contiguous(x, "layer_norm's x"), readable(weight, "layer_norm's weight"), x.shape[-1]
    y = torch.empty_like(x)
    library, threads = schedule(12 * x.numel())
    library.fengine_layer_norm(
        x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // max(d, 1), d, KIND[weight.dtype], eps,
        weight.numel() > d, threads,
    )  # fmt: skip
    return y


_op = register("layer_norm(Tensor x, Tensor weight, float eps) -> Tensor", launch, on_cpu)


def layer_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The normalized rows, in x's dtype. weight_D may be [2D], the bias behind the weight. Pure."""
    return _op(x_TD, weight_D, eps)
