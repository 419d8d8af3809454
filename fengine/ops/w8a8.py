"""y = x @ w.T (+ bias) where both sides are multiplied in FP8 (e4m3). A tree of its own:

    q, s_x: codes and scale of a token, as e4m3.py defines them
    parts: of each STEP columns the sum of q * code, from zero        s_w: of an output

    a scale for each output:  y = (part + part + ...) * (s_x * s_w)
    scales for blocks of columns:  y = fma(part, s_x * s_w, y) block by block; s_x is of the token's block, too

left to right, in float32; the bias is added last. Scales come from the token alone and from the weights, so a row's
bits are its own. Inside a part CUDA adds as wgmma does, groups of 32 one on the other with 13 bits (mma.sync keeps
more, and would give other bits: every schedule has 64 rows on its M side); the CPU has a chain of multiply-adds.

Packed on CUDA: codes [N, K] and scales [steps or 1, N]; on the CPU 32 outputs side by side. Of experts: see experts.py.
"""

from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from fengine.errors import UnsupportedFeatureError
from fengine.ops import activations, e4m3, linear
from fengine.ops.cpu import LANES, contiguous, maybe, readable, rounded, schedule
from fengine.ops.quantized import Codes
from fengine.ops.registration import is_hopper, register
from fengine.ops.w8a8_launch import gated_launch, launch

STEP = 128  # columns of a part of the sum


def reference(x_TK: Tensor, codes: Codes, bias_N: Tensor | None = None) -> Tensor:
    """The math in float32 [T, N], by the CPU's tree: the definition of its bits. Pure."""
    step, by_step = tree(codes)
    k = x_TK.shape[1]
    q_TK, x_scale_TG = e4m3.reference(x_TK, step if by_step else k)
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


def tree_of(k: int, scales: int) -> tuple[int, bool]:
    """`tree` of a packed matrix of k columns, with so many scales a row. Pure."""
    return (STEP, False) if scales == 1 else (next(step for step in (32, 64, STEP) if -(-k // step) == scales), True)


def on_cpu(
    q: Tensor, x_scale: Tensor, packed: Tensor, scale: Tensor, n: int, step: int, by_step: bool, bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Rows q [T, K] @ w.T + bias -> [T, n]; packed uint8 [B, K, 32], scale [B, steps or 1, 32] of B blocks."""
    q, (m, k) = contiguous(q, "w8a8_linear's rows"), q.shape
    y = q.new_empty((m, n))
    library, threads = schedule(m * n * k)
    bias, bias_at, bias_kind = maybe(readable, bias, "w8a8_linear's bias")
    library.fengine_w8a8_linear(
        q.data_ptr(), x_scale.data_ptr(), packed.data_ptr(), scale.data_ptr(), bias_at, y.data_ptr(), m, n, k, step,
        by_step, bias_kind, threads,
    )  # fmt: skip
    return rounded(y, out_dtype)


def refuse_other_devices(device: torch.device) -> None:
    """Errors: UnsupportedFeatureError for a device whose tensor cores do not compute the tree."""
    if not is_hopper(device):
        raise UnsupportedFeatureError(
            f"quantization='w8a8_fp8' needs the tensor cores of NVIDIA Hopper; {torch.cuda.get_device_name(device)} "
            "has others: use quantization='fp8', which keeps activations in 16 bits."
        )


def gated_on_cpu(q: Tensor, *rest: Any) -> e4m3.Pair:
    *matrix, act, group = rest
    return activations.e4m3_on_cpu(on_cpu(q, *matrix), act, group)


_op = register(
    "w8a8_linear(Tensor q, Tensor x_scale, Tensor packed, Tensor scale, int n, int step, bool by_step, Tensor? bias, "
    "ScalarType out_dtype) -> Tensor",
    launch, on_cpu, lambda q, x_scale, packed, scale, n, *rest: q.new_empty((q.shape[0], n), dtype=rest[-1]),
)  # fmt: skip


_gated_op = register(
    "w8a8_gated(Tensor q, Tensor x_scale, Tensor packed, Tensor scale, int n, int step, bool by_step, Tensor? bias, "
    "ScalarType out_dtype, int act, int group) -> (Tensor, Tensor)",
    gated_launch, gated_on_cpu,
    lambda q, x_scale, packed, scale, n, *rest: e4m3.fake(q, n // 2, rest[-1]),
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

    @property
    def x_group(self) -> int:
        """Columns of the input that share a scale."""
        return self.step if self.by_step else self.packed.shape[1]

    def linear(
        self, x_TK: Tensor | e4m3.Rows, bias_N: Tensor | None, adapters: Any, out_dtype: torch.dtype | None, exact: bool
    ) -> Tensor:
        rows = self.rows(x_TK)
        return _op(rows.codes_TK, rows.scale_TG, *self, bias_N, out_dtype or rows.dtype)

    def gated(
        self, x_TK: Tensor | e4m3.Rows, bias_N: Tensor | None, adapters: Any, exact: bool, act: str, group: int
    ) -> Any:
        if not group:
            return linear.in_two(self, x_TK, bias_N, adapters, exact, act, group)
        rows, how = self.rows(x_TK), (linear.ACTS.index(act), group)
        codes_TF, scale_TG = _gated_op(rows.codes_TK, rows.scale_TG, *self, bias_N, rows.dtype, *how)
        return e4m3.Rows(codes_TF, scale_TG, rows.dtype)

    def rows(self, x_TK: Tensor | e4m3.Rows) -> e4m3.Rows:
        """As the product takes them. Pure."""
        return x_TK if isinstance(x_TK, e4m3.Rows) else e4m3.rows(x_TK, self.x_group)


def pack(codes: Codes, matrices: int = 0) -> linear.Leaf:
    """The layout that `linear` reads on the codes' device, once at load; of so many `matrices` below each other the one
    that `experts` reads, with one more dimension in front. Pure. Errors: UnsupportedFeatureError."""
    step, by_step = tree(codes)
    parts = codes.code_NK, codes.scale_NG.float()
    code, scale = (rearrange(part, "(e n) k -> e n k", e=matrices) if matrices else part for part in parts)
    n = code.shape[-2]
    if code.device.type != "cpu":
        refuse_other_devices(code.device)
        return W8A8(code.contiguous(), scale.mT.contiguous(), n, step, by_step)

    def blocks(t: Tensor) -> Tensor:
        padded = pad(t, (0, 0, 0, -n % LANES))
        return rearrange(padded, "... (b lane) k -> ... b k lane", lane=LANES).contiguous()

    return W8A8(blocks(code), blocks(scale), n, step, by_step)
