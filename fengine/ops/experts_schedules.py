"""Which schedules of the experts' products to try, and in which order: by sizes alone, found on an H200. Pure."""

from typing import NamedTuple

import torch

from fengine.ops.linear_schedules import cdiv


class Tiles(NamedTuple):
    """How one product is cut: rows (tokens), columns, and columns of K at a time."""

    block_m: int
    block_n: int
    block_k: int
    swap: bool  # the weights are the M side of the MMA
    warps: int
    stages: int


class Schedule(NamedTuple):
    """How the tree is computed; free to differ per call, because the bits do not depend on it."""

    kind: str  # "few": no lists, a program a pair. "grouped": lists of each expert's pairs. "hopper": experts_hopper.py
    gate: Tiles
    down: Tiles
    ahead: int = 0  # "few": columns of the down weights, at most, fetched while the product in front runs


REFERENCE = Schedule("grouped", Tiles(64, 64, 64, False, 4, 3), Tiles(64, 64, 64, False, 4, 3))
FLOAT32 = Schedule("grouped", Tiles(16, 64, 32, False, 4, 2), Tiles(16, 64, 32, False, 4, 2))
FEW = Schedule("few", Tiles(16, 32, 128, False, 2, 5), Tiles(16, 16, 64, True, 8, 5), 1024)
FEW_PAIRS = 16  # more pairs than that meet in the same experts: read once, they outweigh the lists
# By rows that an expert has on average, largest first.
GROUPED = (
    (4, Schedule("grouped", Tiles(16, 32, 128, False, 2, 5), Tiles(16, 64, 128, True, 4, 4))),
    (16, Schedule("grouped", Tiles(32, 64, 128, True, 4, 3), Tiles(32, 64, 128, True, 4, 4))),
    (64, Schedule("grouped", Tiles(64, 64, 64, True, 4, 4), Tiles(64, 128, 64, True, 4, 4))),
)
MANY = Schedule("grouped", Tiles(128, 128, 64, False, 8, 3), Tiles(128, 128, 64, False, 4, 3))
HOPPER = Schedule("hopper", Tiles(128, 128, 64, False, 4, 4), Tiles(128, 128, 64, False, 4, 5))


def tiles_at_most(pairs: int, experts: int, block_m: int) -> int:
    """Tiles of block_m rows that `pairs` can fill, however they spread over the experts. Pure."""
    return min(pairs, experts + pairs // block_m)


def schedules(tokens: int, experts: int, top_k: int, dtype: torch.dtype, hopper: bool) -> list[Schedule]:
    """Schedules for so many tokens, fastest first. `hopper`: on a device that runs experts_hopper.py. Pure."""
    if dtype == torch.float32:
        return [FLOAT32]
    pairs = tokens * top_k
    if pairs <= FEW_PAIRS:
        return [FEW, GROUPED[0][1]]
    rows = cdiv(pairs, experts)
    ours = [s for most, s in GROUPED if rows <= most][:1] or [MANY]
    return [HOPPER, *ours] if hopper and rows > GROUPED[-1][0] else ours
