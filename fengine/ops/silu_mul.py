"""y = silu(gate) * up over the two halves of the last axis. No reduction.

silu in fp32, rounded to x's dtype; the product in fp32, rounded again (the two roundings Hugging Face models make).
"""
# pyright: reportInvalidTypeForm=false

import torch
from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.registration import begin, dependent_launch, plain, register, tl, triton, wait, wide

BLOCK = 1024


def reference(x_T2F: Tensor) -> Tensor:
    """The math. Pure."""
    gate_TF, up_TF = wide(x_T2F).chunk(2, -1)
    return (torch.nn.functional.silu(gate_TF).to(x_T2F.dtype) * up_TF).to(x_T2F.dtype)


@triton.jit
def silu_product(gate, up):
    """silu(gate) * up in float32, silu rounded to the type of `gate` first."""
    wide_gate = gate.to(tl.float32)
    silu = (wide_gate / (1.0 + tl.exp(-wide_gate))).to(gate.dtype).to(tl.float32)
    return silu * up.to(tl.float32)


@triton.jit
def silu_mul_kernel(x_ptr, y_ptr, F, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """BLOCK columns of one token."""
    begin(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + token * 2 * F + col, mask=col < F, other=0.0)
    up = tl.load(x_ptr + token * 2 * F + F + col, mask=col < F, other=0.0)
    tl.store(y_ptr + token * F + col, silu_product(gate, up).to(y_ptr.dtype.element_ty), mask=col < F)


def launch(x_T2F: Tensor) -> Tensor:
    x_T2F = plain(x_T2F)
    y_TF = fake(x_T2F)
    tokens, features = y_TF.shape
    if tokens:
        launcher(silu_mul_kernel, (tokens, triton.cdiv(features, BLOCK)))(
            x_T2F, y_TF, features, BLOCK, num_warps=4, **dependent_launch(x_T2F.device.index)
        )
    return y_TF


def fake(x_T2F: Tensor) -> Tensor:
    return x_T2F.new_empty((x_T2F.shape[0], x_T2F.shape[1] // 2))


_op = register("silu_mul(Tensor x) -> Tensor", launch, fake)


def silu_mul(x_T2F: Tensor) -> Tensor:
    """silu(first half) * second half as [T, F], in x's dtype. Pure."""
    return _op(x_T2F)
