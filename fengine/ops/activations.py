"""Functions of single elements; no reduction. In fp32, rounded to x's dtype.

y = act(gate) * up over the two halves of the last axis, or act(x) alone: silu, gelu, or its tanh form, x / (1 + exp(-2
u)) with u = sqrt(2 / pi) (x + 0.044715 x^3). The activation is rounded, then the product (as Hugging Face models do),
which may go to e4m3 from there, with the bits that `e4m3.rows` gives.

y = cap * tanh(x / cap) of logits, with tanh(z) = 1 - 2 / (exp(2 z) + 1), so that an element's bits do not depend on
where it stands: a library's vector and scalar forms may differ."""
# pyright: reportInvalidTypeForm=false

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fengine.ops import e4m3
from fengine.ops.ahead import launcher
from fengine.ops.cpu import contiguous, schedule
from fengine.ops.fp8_kernels import store_e4m3
from fengine.ops.registration import begin, dependent_launch, op, plain, register, row_warps, tl, triton, wait, wide

BLOCK = 1024
WIDEST = 1 << 15  # columns that a program takes at once
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


def cap_reference(x_RV: Tensor, cap: float) -> Tensor:
    """The math, in fp32 (fp64 where x is). Pure."""
    return cap * torch.tanh(wide(x_RV) / cap)


@triton.jit
def activated(gate, ACT: tl.constexpr):
    """The activation in float32, rounded to the type of `gate`."""
    x = gate.to(tl.float32)
    if ACT == 0:
        y = x / (1.0 + tl.exp(-x))
    elif ACT == 1:
        u = 0.7978845608028654 * tl.fma(0.044715 * x * x, x, x)  # spelt out, so that every kernel rounds alike
        y = x / (1.0 + tl.exp(-2.0 * u))
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return y.to(gate.dtype)


@triton.jit
def gated_product(gate, up, ACT: tl.constexpr):
    """act(gate) * up in float32, the activation rounded to the type of `gate` first."""
    return activated(gate, ACT).to(tl.float32) * up.to(tl.float32)


@triton.jit
def activate_kernel(
    x_ptr, y_ptr, scale_ptr, F, groups, BLOCK: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one token; in e4m3 with a scale for GROUP columns each, if GROUP is not 0."""
    begin(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    col = first + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + token * (1 + GATED) * F + col, mask=col < F, other=0.0)
    if GATED:
        y = gated_product(gate, tl.load(x_ptr + token * 2 * F + F + col, mask=col < F, other=0.0), ACT)
    else:
        y = activated(gate, ACT)
    y = y.to(x_ptr.dtype.element_ty)
    if GROUP:
        store_e4m3(y.to(tl.float32), y_ptr + token * F, scale_ptr + token * groups, first, F, BLOCK, GROUP)
    else:
        tl.store(y_ptr + token * F + col, y, mask=col < F)


@triton.jit
def soft_cap_kernel(x_ptr, y_ptr, N, cap, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """BLOCK elements."""
    begin(PDL)
    wait(PDL)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N, other=0.0)
    y = cap * (1.0 - 2.0 / (tl.exp(x * (2.0 / cap)) + 1.0))
    tl.store(y_ptr + i, y, mask=i < N)


def run(x_T2F: Tensor, y_TF: Tensor, scale_TG: Tensor, act: int, gated: bool, block: int, group: int) -> None:
    """Modifies: y_TF, scale_TG."""
    tokens, features = y_TF.shape
    if tokens:
        launcher(activate_kernel, (tokens, triton.cdiv(features, block)))(
            x_T2F, y_TF, scale_TG, features, scale_TG.shape[-1], block, act, gated, group,
            num_warps=max(4, row_warps(block)), **dependent_launch(x_T2F.device.index)
        )  # fmt: skip


def launch(x_T2F: Tensor, act: int = 0, gated: bool = True) -> Tensor:
    x_T2F = plain(x_T2F)
    y_TF = fake(x_T2F, act, gated)
    run(x_T2F, y_TF, x_T2F, act, gated, BLOCK, 0)
    return y_TF


def e4m3_launch(x_T2F: Tensor, act: int, group: int) -> e4m3.Pair:
    """One kernel where a row fits into registers."""
    x_T2F, features = plain(x_T2F), x_T2F.shape[1] // 2
    block, share = e4m3.blocks(features, group)
    if block > WIDEST:
        return e4m3.launch(launch(x_T2F, act), group)
    codes_TF, scale_TG = e4m3.room(x_T2F, features, group)
    run(x_T2F, codes_TF, scale_TG, act, True, block, share)
    return codes_TF, scale_TG


def cap_launch(x_RV: Tensor, cap: float) -> Tensor:
    x_RV = plain(x_RV)
    y_RV = torch.empty_like(x_RV)
    if count := x_RV.numel():
        launcher(soft_cap_kernel, (triton.cdiv(count, BLOCK),))(
            x_RV, y_RV, count, cap, BLOCK, num_warps=4, **dependent_launch(x_RV.device.index)
        )
    return y_RV


def on_cpu(x: Tensor, act: int = 0, gated: bool = True) -> Tensor:
    x = contiguous(x, "silu_mul's x")
    y = fake(x, act, gated)
    library, threads = schedule(8 * x.numel())
    library.fengine_silu_mul(x.data_ptr(), y.data_ptr(), *y.shape, act, gated, threads)
    return y


def e4m3_on_cpu(x: Tensor, act: int, group: int) -> e4m3.Pair:
    return e4m3.on_cpu(on_cpu(x, act), group)


def fake(x_T2F: Tensor, act: int = 0, gated: bool = True) -> Tensor:
    return x_T2F.new_empty((x_T2F.shape[0], x_T2F.shape[1] // (1 + gated)))


_op = register("silu_mul(Tensor x, int act=0) -> Tensor", launch, on_cpu, fake)
_e4m3_op = register(
    "silu_mul_e4m3(Tensor x, int act, int group) -> (Tensor, Tensor)", e4m3_launch, e4m3_on_cpu,
    lambda x, act, group: e4m3.fake(x, x.shape[1] // 2, group),
)  # fmt: skip
_alone_op = register(
    "activate(Tensor x, int act) -> Tensor", partial(launch, gated=False), partial(on_cpu, gated=False),
    partial(fake, gated=False),
)  # fmt: skip


def silu_mul(x_T2F: Tensor, act: str = "silu", group: int = 0) -> Any:
    """act(first half) * second half as [T, F], in x's dtype; with a `group` as `e4m3.Rows` (see there). Pure."""
    if group:
        codes_TF, scale_TG = _e4m3_op(x_T2F, ACTS.index(act), group)
        return e4m3.Rows(codes_TF, scale_TG, x_T2F.dtype)
    return _op(x_T2F, ACTS.index(act))


def activate(x_TF: Tensor, act: str) -> Tensor:
    """act(x) as [T, F], in x's dtype. Pure."""
    return _alone_op(x_TF, ACTS.index(act))


@op(cap_launch)
def soft_cap(x_RV: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap) of float32 logits. Pure."""
    x_RV = contiguous(x_RV, "soft_cap's x")
    y = torch.empty_like(x_RV)
    library, threads = schedule(16 * x_RV.numel())
    library.fengine_soft_cap(x_RV.data_ptr(), y.data_ptr(), x_RV.numel(), cap, threads)
    return y
