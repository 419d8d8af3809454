"""The kernels of rms_norm.py and layer_norm.py: a row is a program; block and warps follow from its width alone."""
# pyright: reportInvalidTypeForm=false

import torch
from torch import Tensor

from fengine.ops import e4m3
from fengine.ops.ahead import launcher
from fengine.ops.fp8_kernels import store_e4m3
from fengine.ops.proof import proved, same_bits
from fengine.ops.registration import begin, dependent_launch, plain, row_warps, tl, triton, wait

Pair = tuple[Tensor, Tensor]


@triton.jit
def normed(x, weight, D, eps, SHIFT: tl.constexpr, DTYPE: tl.constexpr):
    """A row (float32) under the norm, rounded to DTYPE."""
    y = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    if SHIFT == 0:
        y = y.to(DTYPE).to(tl.float32)
    else:
        weight += SHIFT
    return (weight * y).to(DTYPE)


@triton.jit
def rms_norm_kernel(
    x_ptr, delta_ptr, index_ptr, weight_ptr, post_ptr, y_ptr, sum_ptr, scale_ptr, D, groups, eps, ADD: tl.constexpr,
    INDEX: tl.constexpr, POST: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr,
    GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of x; ADD: of x + delta, POST: of x + normed delta; INDEX: row index[i] of x. All but x also go to
    `sum`. NORM: the sum, or x, is normed; to e4m3 with a scale for GROUP columns each, if GROUP is not 0."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64) * D
    col = tl.arange(0, BLOCK)
    if NORM:
        weight = tl.load(weight_ptr + col, mask=col < D, other=0.0).to(tl.float32)
    if POST:
        post = tl.load(post_ptr + col, mask=col < D, other=0.0).to(tl.float32)
    wait(PDL)
    if INDEX:
        x_ptr += tl.load(index_ptr + tl.program_id(0)).to(tl.int64) * D - row
    x = tl.load(x_ptr + row + col, mask=col < D, other=0.0).to(tl.float32)
    if INDEX:
        tl.store(sum_ptr + row + col, x.to(sum_ptr.dtype.element_ty), mask=col < D)
    if ADD:
        delta = tl.load(delta_ptr + row + col, mask=col < D, other=0.0).to(tl.float32)
        if POST:
            delta = normed(delta, post, D, eps, SHIFT, delta_ptr.dtype.element_ty).to(tl.float32)
        x = (x + delta).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row + col, x, mask=col < D)
        x = x.to(tl.float32)
    if NORM:
        y = normed(x, weight, D, eps, SHIFT, x_ptr.dtype.element_ty)
        if GROUP:
            at = scale_ptr + tl.program_id(0).to(tl.int64) * groups
            out = tl.multiple_of(y_ptr + row, 8)  # eight codes a thread as of 16-bit numbers, so the sum's layout stays
            store_e4m3(y.to(tl.float32), out, at, 0, D, BLOCK, GROUP)
        else:
            tl.store(y_ptr + row + col, y, mask=col < D)


def run(
    x_TD: Tensor, delta_TD: Tensor | None, index_T: Tensor | None, weight_D: Tensor | None, eps: float,
    shift: float, post_D: Tensor | None = None, group: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(normed, sum, scales of `group` columns) as `rms_norm_kernel` says. Pure."""
    x_TD = plain(x_TD)
    tokens, width = x_TD.shape if index_T is None else (len(index_T), x_TD.shape[1])
    y_TD, scale_TG = x_TD.new_empty((0 if weight_D is None else tokens, width)), x_TD.new_empty(0)
    sum_TD = x_TD if delta_TD is None and index_T is None else x_TD.new_empty((tokens, width))
    block = triton.next_power_of_2(width)
    if group:
        y_TD, scale_TG = e4m3.room(sum_TD, width, group)
        group = block if group >= width else group
    options = dependent_launch(x_TD.device.index)
    if index_T is not None:  # the first kernel of a pass is none that overlaps: see `begin`
        options = {"PDL": options["PDL"]}
    if tokens:
        launcher(rms_norm_kernel, (tokens,))(
            x_TD, _plain(delta_TD), index_T, _plain(weight_D), _plain(post_D), y_TD, sum_TD, scale_TG, width,
            scale_TG.shape[-1], eps, delta_TD is not None, index_T is not None, post_D is not None,
            weight_D is not None, block, shift, group, num_warps=row_warps(block), **options,
        )  # fmt: skip
    return y_TD, sum_TD, scale_TG


def _plain(x: Tensor | None) -> Tensor | None:
    return None if x is None else plain(x)


def launch(x_TD: Tensor, weight_D: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    return run(x_TD, None, None, weight_D, eps, shift)[0]


def add_launch(
    delta_TD: Tensor, residual_TD: Tensor, weight_D: Tensor | None, eps: float, shift: float = 0.0,
    post_D: Tensor | None = None,
) -> Pair:  # fmt: skip
    """Two norms in one kernel where that was proved equal to one after the other."""
    if post_D is not None and not _is_proved(delta_TD, residual_TD, weight_D, eps, shift, post_D):
        delta_TD, post_D = launch(delta_TD, post_D, eps, shift), None
    return run(residual_TD, delta_TD, None, weight_D, eps, shift, post_D)[:2]


def e4m3_launch(
    delta_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, shift: float, post_D: Tensor | None, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales, sum), in one kernel where that was proved equal."""
    if not _is_proved(delta_TD, residual_TD, weight_D, eps, shift, post_D, group):
        normed_TD, sum_TD = add_launch(delta_TD, residual_TD, weight_D, eps, shift, post_D)
        return *e4m3.launch(normed_TD, group), sum_TD
    codes_TD, sum_TD, scale_TG = run(residual_TD, delta_TD, None, weight_D, eps, shift, post_D, group)
    return codes_TD, scale_TG, sum_TD


def _is_proved(
    delta_TD: Tensor, residual_TD: Tensor, weight_D: Tensor | None, eps: float, shift: float, post_D: Tensor | None,
    group: int = 0,
) -> bool:  # fmt: skip
    """Not in float32, where no rounding keeps a product apart from the sum behind it."""
    if delta_TD.dtype == torch.float32:
        return False

    def compare() -> bool:
        generator = torch.Generator(delta_TD.device).manual_seed(1)
        shape = (2, 32, delta_TD.shape[1])
        a_TD, b_TD = torch.randn(shape, device=delta_TD.device, generator=generator).to(delta_TD.dtype)
        before_TD = a_TD if post_D is None else launch(a_TD, post_D, eps, shift)
        normed_TD, sum_TD, scale_TG = run(b_TD, before_TD, None, weight_D, eps, shift)
        if group:
            normed_TD, scale_TG = e4m3.launch(normed_TD, group)

        def together() -> Tensor:
            return _bytes(*run(b_TD, a_TD, None, weight_D, eps, shift, post_D, group))

        return same_bits(_bytes(normed_TD, sum_TD, scale_TG), together)

    key = f"post norm {delta_TD.dtype} {residual_TD.dtype} {delta_TD.shape[1]} {weight_D is None} {eps} {shift}"
    return proved(delta_TD.device, f"{key} {post_D is None} {group}" if group else key, compare)


def _bytes(*parts: Tensor) -> Tensor:
    return torch.cat([part.view(torch.uint8).flatten() for part in parts])


def rows_launch(table_VD: Tensor, index_T: Tensor, weight_D: Tensor, eps: float, shift: float = 0.0) -> Pair:
    return run(table_VD, None, index_T, weight_D, eps, shift)[:2]


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


def layer_launch(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    x_TD = plain(x_TD)
    y_TD = torch.empty_like(x_TD)
    block = triton.next_power_of_2(x_TD.shape[1])
    if len(x_TD):
        launcher(layer_norm_kernel, (len(x_TD),))(
            x_TD, plain(weight_D), y_TD, x_TD.shape[1], eps, block, weight_D.numel() > x_TD.shape[1],
            num_warps=row_warps(block), **dependent_launch(x_TD.device.index),
        )  # fmt: skip
    return y_TD
