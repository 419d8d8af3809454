"""y = x @ w.T (+ bias) where both sides are multiplied in FP8 (e4m3). A tree of its own:

    top = max |x| of a token, or 448 where that is below 2^-100
    s_x = top / 448        q = e4m3(x * (448 / top)), nearest even
    parts: of each STEP columns the sum of q * code, from zero        s_w: of an output

    a scale for each output:  y = (part + part + ...) * (s_x * s_w)
    scales for blocks of columns:  y = fma(part, s_x * s_w, y) block by block; s_x is of the token's block, too

left to right, in float32; the bias is added last. Scales come from the token alone and from the weights, so a row's
bits are its own. Inside a part CUDA adds as wgmma does, groups of 32 one on the other with 13 bits (mma.sync keeps
more, and would give other bits: every schedule has 64 rows on its M side); the CPU has a chain of multiply-adds.

Packed on CUDA: codes [N, K] and scales [steps or 1, N]; on the CPU 32 outputs side by side.
"""

from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from fengine.errors import UnsupportedFeatureError
from fengine.ops import cpu_w8a8, linear, w8a8_launch
from fengine.ops.cpu import LANES
from fengine.ops.quantized import Codes
from fengine.ops.registration import register
from fengine.ops.w8a8_launch import STEP

LARGEST = 448.0  # of e4m3


def quantized_rows(x_TK: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """(e4m3 numbers [T, K] and scales [T, groups], in float32): the definition. Pure."""
    k = x_TK.shape[1]
    x_TGC = pad(x_TK.float(), (0, -k % group)).unflatten(1, (-1, group))
    top_TG = x_TGC.abs().amax(-1)
    top_TG = torch.where(top_TG < 2.0**-100, LARGEST, top_TG)
    q_TGC = (x_TGC * (LARGEST / top_TG)[..., None]).to(torch.float8_e4m3fn).float()
    return q_TGC.flatten(1)[:, :k], top_TG / LARGEST


def reference(x_TK: Tensor, codes: Codes, bias_N: Tensor | None = None) -> Tensor:
    """The math in float32 [T, N], by the CPU's tree: the definition of its bits. Pure."""
    step, by_step = tree(codes)
    k = x_TK.shape[1]
    q_TK, x_scale_TG = quantized_rows(x_TK, step if by_step else k)
    w_NK = codes.code_NK.view(torch.float8_e4m3fn).float()
    y_TN = q_TK.new_zeros(len(q_TK), len(w_NK))
    for g, first in enumerate(range(0, k, step)):
        part_TN = torch.zeros_like(y_TN)
        for column in range(first, min(first + step, k)):
            part_TN = part_TN + q_TK[:, column, None] * w_NK[None, :, column]  # products are exact
        if by_step:
            scale_TN = x_scale_TG[:, g, None] * codes.scale_NG[None, :, g].float()
            y_TN = (part_TN.double() * scale_TN.double() + y_TN.double()).float()
        else:
            y_TN = y_TN + part_TN
    y_TN = y_TN if by_step else y_TN * (x_scale_TG * codes.scale_NG.float().T)
    return y_TN if bias_N is None else y_TN + bias_N.float()


def tree(codes: Codes) -> tuple[int, bool]:
    """(columns of a part, whether scales are of such blocks). Pure. Errors: UnsupportedFeatureError."""
    if codes.scale_NG.shape[1] == 1:
        return STEP, False
    if codes.group not in (32, 64, 128):
        raise UnsupportedFeatureError(
            f"FP8 activations with scales for blocks of {codes.group} columns are not built (32, 64 and 128 are); "
            "leave quantization='w8a8_fp8' out: the weights alone are then in FP8."
        )
    return codes.group, True


_op = register(
    "w8a8_linear(Tensor x, Tensor packed, Tensor scale, int n, int step, bool by_step, Tensor? bias, "
    "ScalarType? out_dtype) -> Tensor",
    w8a8_launch.launch, w8a8_launch.fake, cpu_w8a8.w8a8_linear,
)  # fmt: skip


class W8A8(NamedTuple):
    """A matrix of `n` outputs in e4m3, whose products take activations in e4m3."""

    packed: Tensor
    scale: Tensor
    n: int
    step: int
    by_step: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def linear(
        self, x_TK: Tensor, bias_N: Tensor | None, adapters: Any, out_dtype: torch.dtype | None, exact: bool
    ) -> Tensor:
        """As `linear.linear`. Pure."""
        return _op(x_TK, *self, bias_N, out_dtype)

    def plain(self, adapters: Any) -> None:
        """Nothing that kernels for dense matrices could read."""


def pack(codes: Codes) -> linear.Leaf:
    """The layout that `linear` reads on the codes' device, once at load. Pure. Errors: UnsupportedFeatureError."""
    step, by_step = tree(codes)
    scale_NG, n = codes.scale_NG.float(), len(codes.code_NK)
    if codes.code_NK.device.type != "cpu":
        w8a8_launch.refuse_other_devices(codes.code_NK.device)
        return W8A8(codes.code_NK.contiguous(), scale_NG.T.contiguous(), n, step, by_step)

    def blocks(t: Tensor) -> Tensor:
        return rearrange(pad(t, (0, 0, 0, -n % LANES)), "(b lane) k -> b k lane", lane=LANES).contiguous()

    return W8A8(blocks(codes.code_NK), blocks(scale_NG), n, step, by_step)
