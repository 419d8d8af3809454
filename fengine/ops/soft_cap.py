"""y = cap * tanh(x / cap), in fp32. No reduction.

tanh(z) = 1 - 2 / (exp(2 z) + 1), so that an element's bits do not depend on where it stands: a library's vector and
scalar forms may differ.
"""
# pyright: reportInvalidTypeForm=false

import torch
from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.registration import begin, dependent_launch, plain, register, tl, triton, wait, wide

BLOCK = 1024


def reference(x_RV: Tensor, cap: float) -> Tensor:
    """The math, in fp32 (fp64 where x is). Pure."""
    return cap * torch.tanh(wide(x_RV) / cap)


@triton.jit
def soft_cap_kernel(x_ptr, y_ptr, N, cap, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """BLOCK elements."""
    begin(PDL)
    wait(PDL)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N, other=0.0)
    y = cap * (1.0 - 2.0 / (tl.exp(x * (2.0 / cap)) + 1.0))
    tl.store(y_ptr + i, y, mask=i < N)


def launch(x_RV: Tensor, cap: float) -> Tensor:
    x_RV = plain(x_RV)
    y_RV = torch.empty_like(x_RV)
    if count := x_RV.numel():
        launcher(soft_cap_kernel, (triton.cdiv(count, BLOCK),))(
            x_RV, y_RV, count, cap, BLOCK, num_warps=4, **dependent_launch(x_RV.device.index)
        )
    return y_RV


def fake(x_RV: Tensor, cap: float) -> Tensor:
    return x_RV.new_empty(x_RV.shape)


_op = register("soft_cap(Tensor x, float cap) -> Tensor", launch, fake)


def soft_cap(x_RV: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap) of float32 logits. Pure."""
    return _op(x_RV, cap)
