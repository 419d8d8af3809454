"""How the products of w8a8.py run on CUDA: which schedules are tried, in which order, and which is proved."""

from typing import NamedTuple

import torch
from torch import Tensor

from fengine.ops import activations, e4m3, w8a8_hopper
from fengine.ops.ahead import launcher
from fengine.ops.fp8_kernels import w8a8_kernel
from fengine.ops.linear_launch import cdiv
from fengine.ops.proof import proved, random_rows, same_bits
from fengine.ops.registration import EARLY, dependent_launch, stages_that_fit
from fengine.ops.w8a8_hopper import Tiles


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
# Of the kernel for Hopper, likewise. Few rows leave registers for the small kernels in front and behind, and no room in
# shared memory for the next product, which would take bandwidth. 128 rows of which half are padding take longer than
# if all were real, as the copy engine is slow outside of a tensor: hence tiles of 64.
HOPPER = (
    (8, 0, Tiles(8, 1, 24, 1, 96, 4)),
    (16, 0, Tiles(16, 1, 22, 1, 96, 4)),
    (32, 0, Tiles(32, 1, 18, 1, 96, 4)),
    (64, 16384, Tiles(64, 1, 6, 2)),
    (64, 0, Tiles(64, 1, 13, 1, 128)),
    (128, 16384, Tiles(128, 2, 6, 1)),
    (128, 0, Tiles(64, 2, 9, 1)),
    (192, 5000, Tiles(64, 3, 6, 1)),
    (192, 0, Tiles(64, 2, 9, 1)),
    (256, 5000, Tiles(128, 2, 6, 1)),
    (256, 0, Tiles(64, 2, 9, 1)),
    (320, 5000, Tiles(64, 2, 9, 1)),
    (320, 0, Tiles(64, 3, 6, 1)),
    (512, 5000, Tiles(128, 3, 5, 1)),
    (512, 0, Tiles(128, 2, 6, 1)),
    (1 << 30, 0, Tiles(128, 3, 5, 1)),
)
# Of gated products there, by the largest M.
GATED = (
    (8, Tiles(8, 1, 24, 1, 96, 4)),
    (16, Tiles(16, 1, 22, 1, 96, 4)),
    (32, Tiles(32, 1, 18, 1, 96, 4)),
    (64, Tiles(64, 1, 6, 2)),
    (128, Tiles(128, 2, 6, 1)),
    (192, Tiles(64, 3, 6, 1)),
    (256, Tiles(128, 2, 6, 1)),
    (320, Tiles(64, 3, 6, 1)),
    (384, Tiles(128, 2, 6, 1)),
    (448, Tiles(64, 3, 6, 1)),
    (512, Tiles(128, 2, 6, 1)),
    (1 << 30, Tiles(128, 3, 5, 1)),
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
    q_TK: Tensor, x_scale: Tensor, matrix: Matrix, bias_N: Tensor | None, out_dtype: torch.dtype, s: Schedule | Tiles,
    act: int | None = None,
) -> Tensor:  # fmt: skip
    """The product of codes under `s`; with `act`, of Tiles, the gated product of its halves. Pure."""
    packed, scale, n, step, by_step = matrix
    m, k = q_TK.shape
    y_TN = torch.empty(m, n if act is None else n // 2, dtype=out_dtype, device=q_TK.device)
    if isinstance(s, Tiles):
        w8a8_hopper.launch(q_TK.view(torch.float8_e4m3fn), x_scale, packed.view(torch.float8_e4m3fn), scale, bias_N,
                           y_TN, s, act is not None, act or 0)  # fmt: skip
        return y_TN
    stages = stages_that_fit(q_TK, s.stages, (s.block_m + s.block_n) * step)
    launcher(w8a8_kernel, (cdiv(m, s.block_m) * cdiv(n, s.block_n),))(
        q_TK.view(torch.float8_e4m3fn), x_scale, packed.view(torch.float8_e4m3fn), scale, bias_N, y_TN, m, n, k,
        s.block_m, s.block_n, step, by_step, s.swap, 8, bias_N is not None, m < s.block_m, k % step == 0,
        num_warps=s.warps, num_stages=stages, **dependent_launch(q_TK.device.index, EARLY),
    )  # fmt: skip
    return y_TN


def is_proved(
    q_TK: Tensor, matrix: Matrix, bias_N: Tensor | None, out_dtype: torch.dtype, s: Schedule | Tiles,
    act: int | None = None,
) -> bool:  # fmt: skip
    """Whether `s` gives the bits of REFERENCE for these sizes on this device; compared once, with random rows."""
    if s == REFERENCE:
        return True
    m, k = q_TK.shape

    def compare() -> bool:
        x_XTK = random_rows(m, k, matrix.n, q_TK.new_empty(0, dtype=torch.float32))
        rows = [e4m3.launch(x, matrix.step if matrix.by_step else k) for x in x_XTK]
        want = [run(*each, matrix, bias_N, out_dtype, REFERENCE) for each in rows]
        want_XTN = torch.stack(want if act is None else [activations.launch(y, act) for y in want])

        def tried() -> Tensor:
            return torch.stack([run(*each, matrix, bias_N, out_dtype, s, act) for each in rows])

        return same_bits(want_XTN, tried, isinstance(s, Tiles))

    key = f"w8a8 {out_dtype} {bias_N is not None} {matrix.step} {matrix.by_step} {m}x{matrix.n}x{k} {tuple(s)}"
    return proved(q_TK.device, key if act is None else f"{key} gated {act}", compare)


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


def gated_launch(
    q_TK: Tensor, x_scale: Tensor, packed: Tensor, scale: Tensor, n: int, step: int, by_step: bool,
    bias: Tensor | None, out_dtype: torch.dtype, act: int, group: int,
) -> e4m3.Pair:  # fmt: skip
    """The gated product as rows for the next: of one kernel and `e4m3`, or of two as one where none is proved."""
    matrix = Matrix(packed, scale, n, step, by_step)
    if len(q_TK) and w8a8_hopper.usable(q_TK, packed, step, by_step):
        s = next(s for most, s in GATED if len(q_TK) <= most)
        if is_proved(q_TK, matrix, bias, out_dtype, s, act):
            return e4m3.launch(run(q_TK, x_scale, matrix, bias, out_dtype, s, act), group)
    return activations.e4m3_launch(launch(q_TK, x_scale, *matrix, bias, out_dtype), act, group)
