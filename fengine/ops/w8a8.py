"""y = x @ w.T (+ bias) where both sides are multiplied in FP8 (e4m3). A tree of its own:

    q, s_x: codes and scale of a token, as e4m3.py defines them
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
from fengine.ops import e4m3, linear, w8a8_hopper
from fengine.ops.ahead import launcher
from fengine.ops.cpu import LANES, contiguous, maybe, readable, rounded, schedule
from fengine.ops.fp8_kernels import w8a8_kernel
from fengine.ops.linear_launch import cdiv
from fengine.ops.proof import proved, random_rows, same_bits
from fengine.ops.quantized import Codes
from fengine.ops.registration import (
    EARLY,
    dependent_launch,
    is_hopper,
    register,
    shared_memory,
)
from fengine.ops.w8a8_hopper import Tiles

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


class Matrix(NamedTuple):
    """The tensors and facts of a `W8A8` leaf on CUDA."""

    packed: Tensor
    scale: Tensor
    n: int
    step: int
    by_step: bool


class Schedule(NamedTuple):
    """Tiles of the product: BM rows of x, BN outputs; `swap`: the outputs are the M side of the MMA."""

    block_m: int
    block_n: int
    swap: bool
    warps: int
    stages: int


REFERENCE = Schedule(64, 64, False, 4, 3)
# Found on an H200. Largest M, least N: the first that fits is taken.
TABLE = (
    (16, 0, Schedule(16, 64, True, 4, 8)),
    (32, 0, Schedule(32, 64, True, 4, 8)),
    (64, 8000, Schedule(64, 64, True, 4, 6)),
    (64, 0, Schedule(64, 64, True, 4, 8)),
    (128, 8000, Schedule(128, 64, True, 4, 4)),
    (128, 0, Schedule(64, 64, False, 4, 5)),
    (1 << 30, 0, Schedule(64, 128, False, 4, 4)),
)
# Of the kernel for Hopper, likewise.
HOPPER = (
    (8, 0, Tiles(8, 1, 12, 1)),
    (16, 0, Tiles(16, 1, 22, 1)),
    (32, 0, Tiles(32, 1, 18, 1)),
    (64, 16384, Tiles(64, 1, 6, 2)),
    (64, 0, Tiles(64, 1, 13, 1)),
    (128, 16384, Tiles(128, 2, 6, 1)),
    (128, 0, Tiles(64, 2, 9, 1)),
    (256, 6000, Tiles(128, 2, 6, 1)),
    (256, 0, Tiles(64, 2, 9, 1)),
    (1 << 30, 0, Tiles(128, 2, 6, 1)),
)


def refuse_other_devices(device: torch.device) -> None:
    """Errors: UnsupportedFeatureError for a device whose tensor cores do not compute the tree."""
    if not is_hopper(device):
        raise UnsupportedFeatureError(
            f"quantization='w8a8_fp8' needs the tensor cores of NVIDIA Hopper; {torch.cuda.get_device_name(device)} "
            "has others: use quantization='fp8', which keeps activations in 16 bits."
        )


def plain_schedule(m: int, n: int) -> Schedule:
    """That of the kernel that any compiler knows, for m rows. Pure."""
    return next(s for most, least, s in TABLE if m <= most and n >= least)


def schedules(q_TK: Tensor, matrix: Matrix) -> list[Schedule | Tiles]:
    """Schedules of a product, in the order in which they are tried. Pure."""
    m, n = len(q_TK), matrix.n
    found: list[Schedule | Tiles] = [plain_schedule(m, n), REFERENCE]
    if w8a8_hopper.usable(q_TK, matrix.packed, matrix.step, matrix.by_step):
        found.insert(0, next(s for most, least, s in HOPPER if m <= most and n >= least))
    return found


def run(
    q_TK: Tensor, x_scale: Tensor, matrix: Matrix, bias_N: Tensor | None, out_dtype: torch.dtype, s: Schedule | Tiles
) -> Tensor:
    """The product of codes under `s`. Pure."""
    packed, scale, n, step, by_step = matrix
    m, k = q_TK.shape
    y_TN = torch.empty(m, n, dtype=out_dtype, device=q_TK.device)
    if isinstance(s, Tiles):
        w8a8_hopper.launch(q_TK.view(torch.float8_e4m3fn), x_scale, packed.view(torch.float8_e4m3fn), scale, bias_N,
                           y_TN, s)  # fmt: skip
        return y_TN
    stages = s.stages
    if q_TK.is_cuda:
        per_stage = (s.block_m + s.block_n) * step
        stages = max(1, min(stages, shared_memory(q_TK.device.index) // per_stage))
    launcher(w8a8_kernel, (cdiv(m, s.block_m) * cdiv(n, s.block_n),))(
        q_TK.view(torch.float8_e4m3fn), x_scale, packed.view(torch.float8_e4m3fn), scale, bias_N, y_TN, m, n, k,
        s.block_m, s.block_n, step, by_step, s.swap, 8, bias_N is not None, m < s.block_m, k % step == 0,
        num_warps=s.warps, num_stages=stages, **dependent_launch(q_TK.device.index, EARLY),
    )  # fmt: skip
    return y_TN


def is_proved(q_TK: Tensor, matrix: Matrix, bias_N: Tensor | None, out_dtype: torch.dtype, s: Schedule | Tiles) -> bool:
    """Whether `s` gives the bits of REFERENCE for these sizes on this device; compared once, with random rows."""
    if s == REFERENCE:
        return True
    m, k = q_TK.shape

    def compare() -> bool:
        x_XTK = random_rows(m, k, matrix.n, q_TK.new_empty(0, dtype=torch.float32))
        rows = [e4m3.launch(x, matrix.step if matrix.by_step else k) for x in x_XTK]
        want = torch.stack([run(*each, matrix, bias_N, out_dtype, REFERENCE) for each in rows])
        try:
            return same_bits(want, lambda: torch.stack([run(*each, matrix, bias_N, out_dtype, s) for each in rows]))
        except Exception:
            if isinstance(s, Tiles):  # an experimental compiler: whatever it says, the schedule is not for this machine
                return False
            raise

    key = f"w8a8 {out_dtype} {bias_N is not None} {matrix.step} {matrix.by_step} {m}x{matrix.n}x{k} {tuple(s)}"
    return proved(q_TK.device, key, compare)


def launch(
    q_TK: Tensor, x_scale: Tensor, packed: Tensor, scale: Tensor, n: int, step: int, by_step: bool,
    bias: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The first schedule in order of speed that is proved."""
    matrix = Matrix(packed, scale, n, step, by_step)
    if len(q_TK) == 0:
        return q_TK.new_empty((0, n), dtype=out_dtype)
    s = next(s for s in schedules(q_TK, matrix) if is_proved(q_TK, matrix, bias, out_dtype, s))
    return run(q_TK, x_scale, matrix, bias, out_dtype, s)


_op = register(
    "w8a8_linear(Tensor q, Tensor x_scale, Tensor packed, Tensor scale, int n, int step, bool by_step, Tensor? bias, "
    "ScalarType out_dtype) -> Tensor",
    launch, on_cpu, lambda q, x_scale, packed, scale, n, *rest: q.new_empty((q.shape[0], n), dtype=rest[-1]),
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
        """As `linear.linear`. Pure."""
        rows = x_TK if isinstance(x_TK, e4m3.Rows) else e4m3.rows(x_TK, self.x_group)
        return _op(rows.codes_TK, rows.scale_TG, *self, bias_N, out_dtype or rows.dtype)

    def plain(self, adapters: Any) -> None:
        """Nothing that kernels for dense matrices could read."""


def pack(codes: Codes) -> linear.Leaf:
    """The layout that `linear` reads on the codes' device, once at load. Pure. Errors: UnsupportedFeatureError."""
    step, by_step = tree(codes)
    scale_NG, n = codes.scale_NG.float(), len(codes.code_NK)
    if codes.code_NK.device.type != "cpu":
        refuse_other_devices(codes.code_NK.device)
        return W8A8(codes.code_NK.contiguous(), scale_NG.T.contiguous(), n, step, by_step)

    def blocks(t: Tensor) -> Tensor:
        return rearrange(pad(t, (0, 0, 0, -n % LANES)), "(b lane) k -> b k lane", lane=LANES).contiguous()

    return W8A8(blocks(codes.code_NK), blocks(scale_NG), n, step, by_step)
