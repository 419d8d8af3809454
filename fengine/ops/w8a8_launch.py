"""Schedules of w8a8.py on CUDA, proved before they are used: see linear.py and proof.py."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fengine.errors import UnsupportedFeatureError
from fengine.ops import linear
from fengine.ops.ahead import launcher
from fengine.ops.linear_schedules import cdiv
from fengine.ops.proof import captured, proofs
from fengine.ops.registration import EARLY, dependent_launch, plain, shared_memory, triton
from fengine.ops.w8a8_kernels import quantize_kernel, w8a8_kernel

STEP = 128  # columns of a part of the sum


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


def refuse_other_devices(device: torch.device) -> None:
    """Errors: UnsupportedFeatureError for a device whose tensor cores do not compute the tree."""
    if torch.version.cuda is None or torch.cuda.get_device_capability(device)[0] != 9:
        raise UnsupportedFeatureError(
            f"quantization='w8a8_fp8' needs the tensor cores of NVIDIA Hopper; {torch.cuda.get_device_name(device)} "
            "has others: use quantization='fp8', which keeps activations in 16 bits."
        )


def schedules(m: int, n: int) -> list[Schedule]:
    """Schedules for m rows, in the order in which they are tried. Pure."""
    return [next(s for most, least, s in TABLE if m <= most and n >= least), REFERENCE]


def quantized_rows(x_TK: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """(codes [T, K] in bytes, scales [T, groups]) of activations, as w8a8.py defines them. Pure."""
    m, k = x_TK.shape
    q_TK = torch.empty(m, k, dtype=torch.uint8, device=x_TK.device)
    scale_TG = torch.empty(m, cdiv(k, group), dtype=torch.float32, device=x_TK.device)
    block = triton.next_power_of_2(group)
    launcher(quantize_kernel, (m, cdiv(k, group)))(
        x_TK, q_TK, scale_TG, k, group, block, num_warps=min(max(block // 512, 1), 16),
        **dependent_launch(x_TK.device.index, EARLY),
    )  # fmt: skip
    return q_TK, scale_TG


def run(
    q_TK: Tensor, x_scale: Tensor, matrix: Matrix, bias_N: Tensor | None, out_dtype: torch.dtype, s: Schedule
) -> Tensor:
    """The product of codes under `s`. Pure."""
    packed, scale, n, step, by_step = matrix
    m, k = q_TK.shape
    y_TN = torch.empty(m, n, dtype=out_dtype, device=q_TK.device)
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


def proved(q_TK: Tensor, matrix: Matrix, bias_N: Tensor | None, out_dtype: torch.dtype, s: Schedule) -> bool:
    """Whether `s` gives the bits of REFERENCE for these sizes on this device; compared once, with random rows."""
    if s == REFERENCE or not q_TK.is_cuda:  # without a device Triton's interpreter runs
        return True
    m, k = q_TK.shape
    known = proofs(q_TK.device.index)
    key = f"w8a8 {out_dtype} {bias_N is not None} {matrix.step} {matrix.by_step} {m}x{matrix.n}x{k} {tuple(s)}"
    if torch.cuda.is_current_stream_capturing():  # no time to compare; warm-up has asked before
        return known.known.get(key, False)

    def compare() -> bool:
        draws = max(1, linear.COMPARED // (m * matrix.n))
        generator = torch.Generator(q_TK.device).manual_seed(m)
        x_XTK = torch.randn(draws, m, k, device=q_TK.device, generator=generator)
        rows = [quantized_rows(plain(x), matrix.step if matrix.by_step else k) for x in x_XTK]

        def results(s: Schedule) -> Tensor:
            return torch.stack([run(*each, matrix, bias_N, out_dtype, s) for each in rows])

        want = results(REFERENCE)
        reacts = bool((want != want[:1, :1, :1]).any())
        return torch.equal(want, results(s)) and torch.equal(want, captured(lambda: results(s))) and reacts

    return known.holds(key, compare)


def launch(
    x: Tensor, packed: Tensor, scale: Tensor, n: int, step: int, by_step: bool, bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """The first schedule in order of speed that is proved."""
    matrix, dtype = Matrix(packed, scale, n, step, by_step), out_dtype or x.dtype
    if len(x) == 0:
        return x.new_empty((0, n), dtype=dtype)
    q_TK, x_scale = quantized_rows(plain(x), step if by_step else x.shape[1])
    s = next(s for s in schedules(len(x), n) if proved(q_TK, matrix, bias, dtype, s))
    return run(q_TK, x_scale, matrix, bias, dtype, s)


def fake(x: Tensor, packed: Tensor, scale: Tensor, n: int, *rest: Any) -> Tensor:
    """Shape and dtype of `launch`."""
    return x.new_empty((x.shape[0], n), dtype=rest[-1] or x.dtype)
