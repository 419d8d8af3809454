"""Which schedules of linear.py's products to try, and in which order: by sizes alone, found on an H200. Pure.

The order is a matter of speed only; what is used must be proved equal to REFERENCE first.
"""

from typing import NamedTuple

import torch

from fengine.ops.registration import EARLY, LATE, MIDDLE, NEVER


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


LIBRARY = Schedule(0, 0, 0, False, 0, 0)  # cuBLAS
REFERENCE = Schedule(64, 64, 64, False, 4, 3)
# Found on an H200. The first entry with m <= largest M, n >= least N and k >= least K is taken.
FEW_ROWS = (
    (16, 100000, 0, Schedule(16, 64, 128, True, 4, 3, 256, LATE)),
    (16, 20000, 0, Schedule(16, 64, 128, True, 4, 4, 256, LATE)),
    (16, 2000, 10000, Schedule(16, 64, 128, True, 4, 8, 256, NEVER)),
    (16, 5000, 4096, Schedule(16, 64, 128, True, 4, 8)),
    (16, 2000, 4096, Schedule(16, 64, 128, True, 4, 8, 512)),
    (16, 0, 4096, Schedule(16, 16, 256, False, 4, 6)),
    (16, 1000, 0, Schedule(16, 64, 128, True, 4, 6, 0, LATE)),
    (16, 0, 1500, Schedule(16, 16, 512, False, 4, 4, 512)),
    (16, 0, 0, Schedule(16, 64, 128, True, 4, 6, 512)),
    (32, 150000, 0, Schedule(32, 64, 64, True, 4, 8, 256)),
    (32, 20000, 0, Schedule(32, 64, 128, True, 4, 4, 256)),
    (32, 2000, 0, Schedule(32, 64, 128, True, 4, 6, 256)),
    (32, 0, 4096, Schedule(32, 16, 256, False, 2, 5, 256)),
    (32, 1000, 0, Schedule(32, 64, 128, True, 4, 6, 256, MIDDLE)),
    (32, 0, 0, Schedule(32, 64, 128, True, 4, 6, 256)),
    (64, 20000, 4096, Schedule(64, 128, 64, True, 4, 6, 256, MIDDLE)),
    (64, 5000, 4096, Schedule(64, 64, 128, True, 4, 5, 256, MIDDLE)),
    (64, 5000, 0, Schedule(64, 64, 64, True, 4, 6, 256, MIDDLE)),
    (64, 2000, 0, Schedule(64, 32, 128, False, 4, 6, 256, MIDDLE)),
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
    (16, 9000, Schedule(16, 32, 128, False, 2, 5, 256, LATE)),
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


def schedules(m: int, n: int, k: int, dtype: torch.dtype, processors: int | None = None) -> list[Schedule]:
    """Schedules for m rows of k inputs and n outputs, fastest first. `processors`: of a device that runs the Hopper
    kernel. Pure."""
    if dtype == torch.float32:
        return [FLOAT32[m > 16]]
    few = [s for largest_m, least_n, least_k, s in FEW_ROWS if m <= largest_m and n >= least_n and k >= least_k]
    tiles = [s for s in MANY_ROWS if cdiv(m, s.block_m) * cdiv(n, s.block_n) >= FULL_DEVICE]
    ours = [[*few, *tiles, MANY_ROWS[-1]][0]]
    if processors is not None and _hopper_pays(m, n, k):
        waves, hopper = waves_of(m, n, HOPPER, processors)
        ours = [hopper, *ours]
        if 128 < m and waves < 0.7:
            return [hopper, LIBRARY, *ours[1:]]
    return ours if _library_loses(m, n, k) else [LIBRARY, *ours]


def _library_loses(m: int, n: int, k: int) -> bool:
    return m <= FEW or (m <= 128 and n < 2000 and k < 4096)


def _hopper_pays(m: int, n: int, k: int) -> bool:
    return m > 32 and n >= 2000 and k >= 4096 and (m > 64 or n < 5000)


def gated_schedules(m: int, n: int, dtype: torch.dtype, processors: int | None = None) -> list[Schedule]:
    """Schedules of the gated product in one kernel; none where a product and silu_mul are faster. Arguments as above.
    Pure."""
    if dtype == torch.float32:
        return []
    few = [s for largest_m, least_n, s in GATED if m <= largest_m and n >= least_n]
    if few or processors is None:
        return few[:1]
    waves, hopper = waves_of(m, n, HOPPER_GATED, processors)
    return [hopper] if m * n >= GATED_SHARE * waves * processors * 128 * 128 else []
