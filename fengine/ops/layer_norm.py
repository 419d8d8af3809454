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


@op(launch)
def layer_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The normalized rows, in x's dtype. weight_D may be [2D], the bias behind the weight. Pure."""
    x_TD, weight_D, d = contiguous(x_TD, "layer_norm's x"), readable(weight_D, "layer_norm's weight"), x_TD.shape[-1]
    y = torch.empty_like(x_TD)
    library, threads = schedule(12 * x_TD.numel())
    library.fengine_layer_norm(
        x_TD.data_ptr(), weight_D.data_ptr(), y.data_ptr(), x_TD.numel() // max(d, 1), d, KIND[weight_D.dtype], eps,
        weight_D.numel() > d, threads,
    )  # fmt: skip
    return y
