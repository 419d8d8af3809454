"""y = act(gate) * up over the two halves of the last axis: silu, or the tanh form of gelu. No reduction.

gelu(x) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3). The activation in fp32, rounded to x's dtype; the
product in fp32, rounded again (the two roundings Hugging Face models make).
"""
# pyright: reportInvalidTypeForm=false

from functools import partial

import torch
from einops import rearrange
from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.registration import begin, dependent_launch, plain, register, tl, triton, wait, wide

BLOCK = 1024


def reference(x_T2F: Tensor, gelu: bool = False) -> Tensor:
    """The math. Pure."""
    gate_TF, up_TF = rearrange(wide(x_T2F), "t (part f) -> part t f", part=2)
    act = partial(torch.nn.functional.gelu, approximate="tanh") if gelu else torch.nn.functional.silu
    return (act(gate_TF).to(x_T2F.dtype) * up_TF).to(x_T2F.dtype)


@triton.jit
def silu_product(gate, up):
    """silu(gate) * up in float32, silu rounded to the type of `gate` first."""
    wide_gate = gate.to(tl.float32)
    silu = (wide_gate / (1.0 + tl.exp(-wide_gate))).to(gate.dtype).to(tl.float32)
    return silu * up.to(tl.float32)


@triton.jit
def gelu_product(gate, up):
    """gelu(gate) * up, as `silu_product`."""
    x = gate.to(tl.float32)
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return (x / (1.0 + tl.exp(-2.0 * u))).to(gate.dtype).to(tl.float32) * up.to(tl.float32)


@triton.jit
def silu_mul_kernel(x_ptr, y_ptr, F, BLOCK: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr):
    """BLOCK columns of one token."""
    begin(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + token * 2 * F + col, mask=col < F, other=0.0)
    up = tl.load(x_ptr + token * 2 * F + F + col, mask=col < F, other=0.0)
    y = gelu_product(gate, up) if GELU else silu_product(gate, up)
    tl.store(y_ptr + token * F + col, y.to(y_ptr.dtype.element_ty), mask=col < F)


def launch(x_T2F: Tensor, gelu: bool = False) -> Tensor:
    x_T2F = plain(x_T2F)
    y_TF = fake(x_T2F)
    tokens, features = y_TF.shape
    if tokens:
        launcher(silu_mul_kernel, (tokens, triton.cdiv(features, BLOCK)))(
            x_T2F, y_TF, features, BLOCK, gelu, num_warps=4, **dependent_launch(x_T2F.device.index)
        )
    return y_TF


def fake(x_T2F: Tensor, gelu: bool = False) -> Tensor:
    return x_T2F.new_empty((x_T2F.shape[0], x_T2F.shape[1] // 2))


_op = register("silu_mul(Tensor x, bool gelu=False) -> Tensor", launch, fake)


def silu_mul(x_T2F: Tensor, gelu: bool = False) -> Tensor:
    """silu(first half) * second half as [T, F], in x's dtype; or gelu of it. Pure."""
    return _op(x_T2F, gelu)
