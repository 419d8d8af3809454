"""RMS norm, alone or fused with what comes before it: the residual addition, another norm, the look-up of embeddings.

y = weight * (x * rsqrt(mean(x^2) + eps)), fp32 inside, with Hugging Face's two roundings: the normalized row to x's
dtype, then the product. With `shift` (Gemma's 1) the weight is shift + weight in fp32, the product alone is rounded.
The fused form first does residual' = residual + delta, rounded to x's dtype; with `post` the delta is normed itself
before it is added, with the bits that `rms_norm` gives. Without a weight the sum is the result. With `group` the result
is in e4m3, with the bits that `e4m3.rows` gives of it.

Reduction tree: one row is one program, whose block is the next power of two of D and whose number of warps follows from
D alone, so the sum over a row has one fixed thread layout for every T."""

from typing import Any

import torch
from torch import Tensor

from fengine.errors import UnsupportedFeatureError
from fengine.ops import e4m3
from fengine.ops.cpu import KIND, contiguous, integers, maybe, readable, schedule
from fengine.ops.norm_kernels import Pair, add_launch, e4m3_launch, launch, rows_launch
from fengine.ops.registration import op, register, wide


def reference(x_TD: Tensor, weight_D: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    """The math, in fp32 (fp64 where x is). Pure."""
    x32_TD = wide(x_TD)
    normed_TD = x32_TD * torch.rsqrt(x32_TD.pow(2).mean(-1, keepdim=True) + eps)
    if shift:
        return (normed_TD * (shift + wide(weight_D))).to(x_TD.dtype)
    return (weight_D * normed_TD.to(x_TD.dtype)).to(x_TD.dtype)


def add_reference(
    delta_TD: Tensor, residual_TD: Tensor, weight_D: Tensor | None, eps: float, shift: float = 0.0,
    post_D: Tensor | None = None,
) -> Pair:  # fmt: skip
    """The math of the fused form. Pure."""
    delta_TD = delta_TD if post_D is None else reference(delta_TD, post_D, eps, shift)
    residual_TD = (wide(residual_TD) + wide(delta_TD)).to(residual_TD.dtype)
    return residual_TD if weight_D is None else reference(residual_TD, weight_D, eps, shift), residual_TD


def on_cpu(x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    x, weight, d = contiguous(x, "rms_norm's x"), readable(weight, "rms_norm's weight"), x.shape[-1]
    y = torch.empty_like(x)
    library, threads = schedule(8 * x.numel())
    library.fengine_rms_norm(
        x.data_ptr(), None, weight.data_ptr(), None, y.data_ptr(), None, x.numel() // max(d, 1), d, KIND[weight.dtype],
        eps, shift, threads,
    )  # fmt: skip
    return y


def add_on_cpu(
    delta: Tensor, residual: Tensor, weight: Tensor | None, eps: float, shift: float = 0.0, post: Tensor | None = None
) -> Pair:
    delta, residual = contiguous(delta, "add_rms_norm's delta"), contiguous(residual, "add_rms_norm's residual")
    weight, weight_at, kind = maybe(readable, weight, "add_rms_norm's weight")
    post, post_at, post_kind = maybe(readable, post, "add_rms_norm's post weight")
    if weight is not None and post is not None and kind != post_kind:
        raise UnsupportedFeatureError(f"post weight is {post.dtype} and weight {weight.dtype}; they must be alike")
    d, total = delta.shape[-1], torch.empty_like(delta)
    y = delta.new_empty((0, d)) if weight is None else torch.empty_like(delta)
    library, threads = schedule(8 * delta.numel())
    library.fengine_rms_norm(
        delta.data_ptr(), residual.data_ptr(), weight_at, post_at, y.data_ptr(), total.data_ptr(),
        delta.numel() // max(d, 1), d, kind or post_kind, eps, shift, threads,
    )  # fmt: skip
    return y, total


def e4m3_on_cpu(
    delta: Tensor, residual: Tensor, weight: Tensor, eps: float, shift: float, post: Tensor | None, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    y, total = add_on_cpu(delta, residual, weight, eps, shift, post)
    return *e4m3.on_cpu(y, group), total


def add_fake(delta_TD: Tensor, residual_TD: Tensor, weight_D: Tensor | None, *_: object) -> Pair:
    tokens, width = residual_TD.shape
    return residual_TD.new_empty((0 if weight_D is None else tokens, width)), residual_TD.new_empty((tokens, width))


def e4m3_fake(delta_TD: Tensor, residual_TD: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return *e4m3.fake(residual_TD, residual_TD.shape[1], rest[-1]), torch.empty_like(residual_TD)


def rows_fake(table_VD: Tensor, index_T: Tensor, weight_D: Tensor, eps: float, shift: float = 0.0) -> Pair:
    shape = (index_T.shape[0], weight_D.shape[0])
    return table_VD.new_empty(shape, dtype=weight_D.dtype), table_VD.new_empty(shape, dtype=weight_D.dtype)


_op = register("rms_norm", launch, on_cpu)
_add_op = register("add_rms_norm", add_launch, add_on_cpu, add_fake)
_e4m3_op = register("add_rms_norm_e4m3", e4m3_launch, e4m3_on_cpu, e4m3_fake)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    """The normalized rows, in x's dtype. Pure."""
    return _op(x_TD, weight_D, eps, shift) if shift else _op(x_TD, weight_D, eps)


def add_rms_norm(
    delta_TD: Tensor, residual_TD: Tensor, weight_D: Tensor | None, eps: float, shift: float = 0.0,
    post_D: Tensor | None = None, group: int = 0,
) -> tuple[Any, Tensor]:  # fmt: skip
    """(normalized rows of residual + delta, residual + delta), both in the residual's dtype. Pure. The delta is normed
    by `post_D` first, if there is one; without a weight both are the sum. The normalized rows are `e4m3.Rows` if there
    is a `group`: see there."""
    if group and weight_D is not None:
        codes_TD, scale_TG, sum_TD = _e4m3_op(delta_TD, residual_TD, weight_D, eps, shift, post_D, group)
        return e4m3.Rows(codes_TD, scale_TG, residual_TD.dtype), sum_TD
    more = (shift, post_D) if shift or post_D is not None else ()
    normed_TD, sum_TD = _add_op(delta_TD, residual_TD, weight_D, eps, *more)
    return sum_TD if weight_D is None else normed_TD, sum_TD


@op(rows_launch, rows_fake)
def rows_rms_norm(packed: Tensor, index_T: Tensor, weight_D: Tensor, eps: float, shift: float = 0.0) -> Pair:
    """(normalized rows, rows) of the embeddings that `linear.pack` made `packed` of, both in the weight's dtype. Pure.
    index_T int32."""
    packed, weight_D = readable(packed, "the embeddings"), readable(weight_D, "rms_norm's weight")
    index_T = integers(index_T, "index")
    count, d = index_T.shape[0], packed.shape[1]
    y, rows = weight_D.new_empty((count, d), dtype=torch.float32), weight_D.new_empty((count, d), dtype=torch.float32)
    library, threads = schedule(16 * count * d)
    library.fengine_rows_rms_norm(
        packed.data_ptr(), index_T.data_ptr(), weight_D.data_ptr(), y.data_ptr(), rows.data_ptr(), count, d,
        KIND[packed.dtype], KIND[weight_D.dtype], eps, shift, threads,
    )  # fmt: skip
    return y, rows
