"""How linear.py's products run on CUDA: which schedules are tried, in which order, and which is proved. The order is
found on an H200, by sizes alone, and a matter of speed only; what is used was proved equal to REFERENCE."""

from typing import NamedTuple

import torch
from torch import Tensor

from fengine.ops import activations, linear_few_hopper, linear_hopper
from fengine.ops.ahead import launcher
from fengine.ops.linear_few_hopper import Narrow
from fengine.ops.linear_kernels import linear_kernel
from fengine.ops.proof import proved, random_rows, same_bits
from fengine.ops.registration import (
    EARLY,
    LATE,
    MIDDLE,
    dependent_launch,
    multiprocessors,
    plain,
    stages_that_fit,
    triton,
)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class Schedule(NamedTuple):
    """How the tree is computed; free to differ per call, because the bits do not depend on it."""

    block_m: int
    block_n: int
    block_k: int
    swap: bool
    warps: int
    stages: int
    ahead: int = 0  # columns of each weight row fetched while the kernel in front runs; a power of two, or 0
    trigger: int = EARLY  # when the next kernel may start: see registration.py
    hopper: bool = False  # the kernel of linear_hopper.py, with block_m, block_n and stages


AnySchedule = Schedule | Narrow
LIBRARY = Schedule(0, 0, 0, False, 0, 0)  # cuBLAS
REFERENCE = Schedule(64, 64, 64, False, 4, 3)
# Found on an H200. The first entry with m <= largest M, n >= least N and k >= least K is taken. On Hopper most products
# of few rows are those of linear_few_hopper.py.
FEW_ROWS = (
    (16, 20000, 0, Schedule(16, 64, 128, True, 4, 4, 256, LATE)),
    (16, 2000, 0, Schedule(16, 64, 128, True, 4, 8)),
    (16, 0, 1500, Schedule(16, 16, 256, False, 4, 6)),
    (16, 0, 0, Schedule(16, 64, 128, True, 4, 6, 512)),
    (32, 150000, 0, Schedule(32, 64, 64, True, 4, 8, 256)),
    (32, 20000, 0, Schedule(32, 64, 128, True, 4, 4, 256)),
    (32, 2000, 0, Schedule(32, 64, 128, True, 4, 6, 256)),
    (32, 0, 0, Schedule(32, 16, 256, False, 4, 8, 512)),
    (64, 20000, 4096, Schedule(64, 128, 64, True, 4, 6, 256, MIDDLE)),
    (64, 5000, 0, Schedule(64, 64, 64, True, 4, 6, 256, MIDDLE)),
    (64, 0, 0, Schedule(64, 16, 128, False, 4, 6, 256, MIDDLE)),
    (128, 9000, 0, Schedule(128, 128, 64, True, 8, 5)),
    (128, 5000, 0, Schedule(128, 64, 64, True, 4, 6)),
    (128, 2000, 0, Schedule(64, 64, 128, True, 4, 4)),
    (128, 0, 0, Schedule(64, 32, 128, False, 4, 6)),
    (256, 2000, 4096, Schedule(128, 64, 64, True, 4, 5)),
    (512, 2000, 4096, Schedule(128, 128, 64, False, 4, 4)),
    (512, 0, 4096, Schedule(64, 64, 128, False, 4, 4)),
)
# Tiles of the Hopper kernel: rows, columns, pieces in the ring, and what a wave of them takes (the first one's is 1).
HOPPER = ((128, 128, 5, 1.0), (128, 64, 8, 0.69), (64, 128, 8, 0.65), (64, 64, 12, 0.51))
HOPPER_GATED = ((128, 128, 4, 1.0), (128, 64, 6, 0.505), (64, 64, 8, 0.29))
GATED_SHARE = 0.72  # where more of the work is for rows and columns that exist, the library and silu_mul are slower
# More rows: from large tiles to small, the first with enough tiles for the device.
MANY_ROWS = (
    Schedule(256, 128, 64, True, 8, 3),
    Schedule(128, 128, 64, False, 4, 3),
    Schedule(64, 128, 64, False, 4, 5),
    Schedule(64, 64, 128, False, 4, 4),
)
FLOAT32 = (Schedule(16, 64, 32, False, 4, 2), Schedule(64, 64, 32, False, 4, 2))
FULL_DEVICE = 90  # tiles
GATED = (  # largest M, least N
    (16, 0, Schedule(16, 32, 128, False, 2, 5, 256)),
    (32, 9000, Schedule(32, 64, 128, True, 4, 3, 256)),
    (32, 0, Schedule(32, 64, 128, True, 4, 3, 256, MIDDLE)),
    (64, 0, Schedule(64, 32, 128, False, 4, 3, 256, MIDDLE)),
)
FEW = 64  # rows up to which our kernel is as fast as the library, or faster


def waves_of(m: int, n: int, tiles: tuple[tuple[int, int, int, float], ...], processors: int) -> tuple[float, Schedule]:
    """(time in waves of the first kind of tile, schedule) of the Hopper kernel's fastest tiles for m x n. Pure."""

    def waves(tile: tuple[int, int, int, float]) -> float:
        return cdiv(cdiv(m, tile[0]) * cdiv(n, tile[1]), processors) * tile[3]

    best = min(tiles, key=waves)
    return waves(best), Schedule(best[0], best[1], 64, False, 4, best[2], hopper=True)


def schedules(
    m: int, n: int, k: int, dtype: torch.dtype, processors: int | None = None, rounded: bool = True
) -> list[AnySchedule]:
    """Schedules for m rows of k inputs and n outputs, fastest first. `processors`: of a device that runs the kernels
    for Hopper; `rounded`: the result has x's dtype. Pure."""
    if dtype == torch.float32:
        return [FLOAT32[m > 16]]
    few = [even(s, k) for most_m, least_n, least_k, s in FEW_ROWS if m <= most_m and n >= least_n and k >= least_k]
    tiles = [s for s in MANY_ROWS if cdiv(m, s.block_m) * cdiv(n, s.block_n) >= FULL_DEVICE]
    ours: list[AnySchedule] = [[*few, *tiles, MANY_ROWS[-1]][0]]
    if processors is not None:
        ours = [*linear_few_hopper.schedules(m, n, k), *ours]
    if processors is not None and rounded and _hopper_pays(m, n, k):
        waves, hopper = waves_of(m, n, HOPPER, processors)
        ours = [hopper, *ours]
        if 128 < m and waves < 0.7:
            return [hopper, LIBRARY, *ours[1:]]
    return ours if _library_loses(m, n, k) else [LIBRARY, *ours]


def even(s: Schedule, k: int) -> Schedule:
    """`s`, in smaller pieces of K where those fit it and the larger do not."""
    return s._replace(block_k=64, stages=2 * s.stages) if s.block_k == 128 and k % 128 == 64 else s


def _library_loses(m: int, n: int, k: int) -> bool:
    return m <= FEW or (m <= 128 and n < 2000 and k < 4096)


def _hopper_pays(m: int, n: int, k: int) -> bool:
    return m > FEW and n >= 2000 and k >= 4096


def gated_schedules(m: int, n: int, k: int, dtype: torch.dtype, processors: int | None = None) -> list[AnySchedule]:
    """Schedules of the gated product in one kernel; none where a product and silu_mul are faster. Arguments as above.
    Pure."""
    if dtype == torch.float32:
        return []
    narrow = linear_few_hopper.schedules(m, n, k, True) if processors is not None else []
    few = [s for largest_m, least_n, s in GATED if m <= largest_m and n >= least_n]
    if few or processors is None:
        return [*narrow, *few[:1]]
    waves, hopper = waves_of(m, n, HOPPER_GATED, processors)
    return [hopper] if m * n >= GATED_SHARE * waves * processors * 128 * 128 else []


def run(x_TK: Tensor, w_NK: Tensor, n: int, bias_N: Tensor | None, out_dtype: torch.dtype | None,
        s: AnySchedule, gated: bool = False, act: int = 0) -> Tensor:  # fmt: skip
    """Computes the product under schedule `s`. Pure."""
    if s == LIBRARY:
        return library(x_TK, w_NK, bias_N, out_dtype)
    m, k = x_TK.shape
    y_TN = torch.empty(m, n, dtype=out_dtype or x_TK.dtype, device=x_TK.device)
    if isinstance(s, Narrow):
        linear_few_hopper.launch(x_TK, w_NK, bias_N, y_TN, gated, act, s)
        return y_TN
    if s.hopper:
        linear_hopper.launch(x_TK, w_NK, bias_N, y_TN, gated, act, s.block_m, s.block_n, s.stages)
        return y_TN
    per_stage = (s.block_m + s.block_n * (1 + gated)) * s.block_k * x_TK.element_size()
    grid = (triton.cdiv(m, s.block_m) * triton.cdiv(n, s.block_n),)
    ahead = s.ahead if s.ahead <= k and k % 8 == 0 else 0  # the copy engine wants 16-byte aligned rows
    launcher(linear_kernel, grid)(
        x_TK, w_NK, bias_N, y_TN, m, n, k, s.block_m, s.block_n, s.block_k, s.swap, 8, bias_N is not None,
        m < s.block_m, k % s.block_k == 0, gated, act, ahead, max(32 * s.warps // s.block_n, 1),
        num_warps=s.warps, num_stages=stages_that_fit(x_TK, s.stages, per_stage),
        **dependent_launch(x_TK.device.index, s.trigger),
    )  # fmt: skip
    return y_TN


def library(x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """The product by torch's own matrix multiplication. Pure."""
    if out_dtype is None or out_dtype == x_TK.dtype:
        return torch.mm(x_TK, w_NK.T) if bias_N is None else torch.addmm(bias_N, x_TK, w_NK.T)
    y_TN = torch.mm(x_TK, w_NK.T, out_dtype=out_dtype)
    return y_TN if bias_N is None else y_TN + bias_N


def is_proved(x_TK: Tensor, w_NK: Tensor, n: int, bias_N: Tensor | None, out_dtype: torch.dtype | None,
              s: AnySchedule, gated: bool = False, act: int = 0) -> bool:  # fmt: skip
    """Whether `s` gives the bits of REFERENCE for these sizes on this device; compared once, with random x."""
    if s == REFERENCE or not x_TK.is_cuda:
        return s != LIBRARY
    m, k = x_TK.shape

    def compare() -> bool:
        x_XTK = random_rows(m, k, n, x_TK)
        want = [run(plain(x), w_NK, n * (1 + gated), bias_N, out_dtype, REFERENCE) for x in x_XTK]
        want_XTN = torch.stack([activations.launch(y, act) for y in want] if gated else want)

        def tried() -> Tensor:
            return torch.stack([run(plain(x), w_NK, n, bias_N, out_dtype, s, gated, act) for x in x_XTK])

        return same_bits(want_XTN, tried, isinstance(s, Narrow) or s.hopper)

    key = f"linear {x_TK.dtype} {out_dtype} {bias_N is not None} {gated} {act} {m}x{n}x{k} {tuple(s)}"
    return proved(x_TK.device, key, compare)


def hopper_processors(x_TK: Tensor, w_NK: Tensor) -> int | None:
    """Number of multiprocessors of x's device if the kernels for Hopper can run there."""
    return multiprocessors(x_TK.device.index) if linear_hopper.usable(x_TK, w_NK) else None


def choose(x_TK: Tensor, w_NK: Tensor, n: int, bias_N: Tensor | None, out_dtype: torch.dtype | None) -> AnySchedule:
    """The first schedule in order of speed that is proved on this device."""
    (m, k), rounded = x_TK.shape, out_dtype in (None, x_TK.dtype)
    for s in schedules(m, n, k, x_TK.dtype, hopper_processors(x_TK, w_NK), rounded):
        if is_proved(x_TK, w_NK, n, bias_N, out_dtype, s):
            return s
    return REFERENCE


def launch(x_TK: Tensor, w_NK: Tensor, n: int, bias_N: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    x_TK = plain(x_TK)
    if x_TK.shape[0] == 0:
        return fake(x_TK, w_NK, n, bias_N, out_dtype)
    return run(x_TK, w_NK, n, bias_N, out_dtype, choose(x_TK, w_NK, n, bias_N, out_dtype))


def fake(x_TK: Tensor, packed: Tensor, n: int, bias_N: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    return x_TK.new_empty((x_TK.shape[0], n), dtype=out_dtype or x_TK.dtype)


def fast_launch(x_TK: Tensor, w_NK: Tensor, n: int, bias_N: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """Any schedule, proved or not: what exactness costs is measured against this."""
    m, k = x_TK.shape
    few = m <= 16 and k < 4 * n  # the library splits K there
    if m == 0 or few or x_TK.dtype == torch.float32:
        return launch(x_TK, w_NK, n, bias_N, out_dtype)
    return run(plain(x_TK), w_NK, n, bias_N, out_dtype, LIBRARY)


def gated_launch(x_TK: Tensor, w_NK: Tensor, n: int, bias_N: Tensor | None, act: int = 0) -> Tensor:
    """One kernel where that is faster than a product and silu_mul, and proved."""
    x_TK = plain(x_TK)
    if x_TK.shape[0]:
        for s in gated_schedules(len(x_TK), n, x_TK.shape[1], x_TK.dtype, hopper_processors(x_TK, w_NK)):
            if is_proved(x_TK, w_NK, n, bias_N, None, s, True, act):
                return run(x_TK, w_NK, n, bias_N, None, s, True, act)
    return activations.launch(launch(x_TK, w_NK, 2 * n, bias_N, None), act)
