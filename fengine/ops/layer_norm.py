"""Layer norm: y = weight * ((x - mean(x)) * rsqrt(var(x) + eps)) (+ bias), fp32 inside, one rounding. A bias stands
behind the weight, in one tensor of 2D values.

Reduction trees: the row's sum, then the sum of squares of what the mean leaves; one row is one program, whose block is
the next power of two of D and whose number of warps follows from D alone, so each has one fixed thread layout."""

import torch
from torch import Tensor

from fengine.ops.cpu import KIND, contiguous, readable, schedule
from fengine.ops.norm_kernels import layer_launch as launch
from fengine.ops.registration import op, wide


def reference(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The math, in fp32 (fp64 where x is). Pure."""
    x32_TD = wide(x_TD)
    centred_TD = x32_TD - x32_TD.mean(-1, keepdim=True)
    scale_T1 = torch.rsqrt(centred_TD.pow(2).mean(-1, keepdim=True) + eps)
    weight_D, *bias = wide(weight_D).split(x_TD.shape[1])
    return sum(bias, weight_D * (centred_TD * scale_T1)).to(x_TD.dtype)


def on_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight, d = contiguous(x, "layer_norm's x"), readable(weight, "layer_norm's weight"), x.shape[-1]
    y = torch.empty_like(x)
    library, threads = schedule(12 * x.numel())
    library.fengine_layer_norm(
        x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // max(d, 1), d, KIND[weight.dtype], eps,
        weight.numel() > d, threads,
    )  # fmt: skip
    return y


@op(launch, on_cpu)
def layer_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The normalized rows, in x's dtype. weight_D may be [2D], the bias behind the weight. Pure."""
    ...
