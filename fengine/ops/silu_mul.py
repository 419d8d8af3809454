"""y = act(gate) * up over the two halves of the last axis, or act(x) alone: silu, gelu, or its tanh form. No reduction.

gelu_tanh(x) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3). The activation in fp32, rounded to x's dtype;
the product in fp32, rounded again (the two roundings Hugging Face models make).
"""
# pyright: reportInvalidTypeForm=false

from functools import partial

from torch import Tensor
from torch.nn import functional

from fengine.ops.ahead import launcher
from fengine.ops.registration import begin, dependent_launch, plain, register, tl, triton, wait, wide

BLOCK = 1024


ACTS = ("silu", "gelu_tanh", "gelu")  # by the number that kernels know them by


def reference(x_T2F: Tensor, act: str = "silu", gated: bool = True) -> Tensor:
    """The math. Pure."""
    known = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    }
    gate_TF, *up = wide(x_T2F).chunk(1 + gated, -1)
    y_TF = known[act](gate_TF).to(x_T2F.dtype)
    return (y_TF * up[0]).to(x_T2F.dtype) if gated else y_TF


@triton.jit
def silu_product(gate, up):
    """silu(gate) * up in float32, silu rounded to the type of `gate` first."""
    wide_gate = gate.to(tl.float32)
    silu = (wide_gate / (1.0 + tl.exp(-wide_gate))).to(gate.dtype).to(tl.float32)
    return silu * up.to(tl.float32)


@triton.jit
def activated(gate, ACT: tl.constexpr):
    """The activation in float32, rounded to the type of `gate`."""
    x = gate.to(tl.float32)
    if ACT == 0:
        y = x / (1.0 + tl.exp(-x))
    elif ACT == 1:
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x / (1.0 + tl.exp(-2.0 * u))
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return y.to(gate.dtype)


@triton.jit
def silu_mul_kernel(
    x_ptr, y_ptr, F, BLOCK: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """BLOCK columns of one token."""
    begin(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + token * (1 + GATED) * F + col, mask=col < F, other=0.0)
    y = activated(gate, ACT)
    if GATED:
        up = tl.load(x_ptr + token * 2 * F + F + col, mask=col < F, other=0.0)
        y = y.to(tl.float32) * up.to(tl.float32)
    tl.store(y_ptr + token * F + col, y.to(y_ptr.dtype.element_ty), mask=col < F)


def launch(x_T2F: Tensor, act: int = 0, gated: bool = True) -> Tensor:
    x_T2F = plain(x_T2F)
    y_TF = fake(x_T2F, act, gated)
    tokens, features = y_TF.shape
    if tokens:
        launcher(silu_mul_kernel, (tokens, triton.cdiv(features, BLOCK)))(
            x_T2F, y_TF, features, BLOCK, act, gated, num_warps=4, **dependent_launch(x_T2F.device.index)
        )
    return y_TF


def fake(x_T2F: Tensor, act: int = 0, gated: bool = True) -> Tensor:
    return x_T2F.new_empty((x_T2F.shape[0], x_T2F.shape[1] // (1 + gated)))


_op = register("silu_mul(Tensor x, int act=0) -> Tensor", launch, fake)
_alone_op = register("activate(Tensor x, int act) -> Tensor", partial(launch, gated=False), partial(fake, gated=False))


def silu_mul(x_T2F: Tensor, act: str = "silu") -> Tensor:
    """act(first half) * second half as [T, F], in x's dtype. Pure."""
    return _op(x_T2F, ACTS.index(act))


def activate(x_TF: Tensor, act: str) -> Tensor:
    """act(x) as [T, F], in x's dtype. Pure."""
    return _alone_op(x_TF, ACTS.index(act))
