"""Which schedules of the experts' products to try, and in which order: by sizes alone, found on an H200. Pure."""

from typing import NamedTuple

import torch

from fengine.ops.linear_launch import Schedule as Tiles
from fengine.ops.linear_launch import cdiv, even
from fengine.ops.quantized_hopper import Tiles as Blocks


class Schedule(NamedTuple):
    """How the tree is computed; free to differ per call, because the bits do not depend on it. A product of an expert
    is cut as one of linear.py."""

    kind: str  # "narrow": experts_few_hopper.py. "grouped": lists of each expert's pairs. "hopper": experts_hopper.py
    gate: Tiles
    down: Tiles


class FewBits(NamedTuple):
    """Both products by quantized_hopper.py, with as many rows in a tile."""

    gate: Blocks
    down: Blocks


REFERENCE = Schedule("grouped", Tiles(64, 64, 64, False, 4, 3), Tiles(64, 64, 64, False, 4, 3))
FLOAT32 = Schedule("grouped", Tiles(16, 64, 32, False, 4, 2), Tiles(16, 64, 32, False, 4, 2))
NARROW = (  # largest number of pairs; more meet in the same experts: read once, they outweigh the lists
    (8, Schedule("narrow", Tiles(8, 16, 128, True, 4, 4), Tiles(8, 16, 128, True, 4, 12))),
    (16, Schedule("narrow", Tiles(8, 32, 128, True, 4, 4), Tiles(8, 16, 128, True, 4, 6))),
)
GROUPED = (  # largest number of rows that an expert has on average
    (8, Schedule("grouped", Tiles(16, 64, 128, True, 4, 3), Tiles(16, 128, 128, True, 4, 3))),
    (20, Schedule("grouped", Tiles(32, 64, 64, True, 4, 5), Tiles(32, 128, 64, True, 4, 5))),
    (40, Schedule("grouped", Tiles(64, 64, 64, True, 4, 4), Tiles(64, 128, 64, False, 4, 4))),
)
MANY = Schedule("grouped", Tiles(128, 128, 64, False, 8, 3), Tiles(128, 128, 64, False, 4, 3))
FEW_BITS = (  # largest number of rows that an expert has on average, and tiles of quantized_hopper.py
    (1, FewBits(Blocks(8, 1, 8, 2, 3, True), Blocks(8, 1, 8, 4, 2, True))),
    (6, FewBits(Blocks(16, 1, 4, 4, 3, True), Blocks(16, 1, 4, 4, 3, True))),
    (20, FewBits(Blocks(32, 1, 4, 4, 2, False), Blocks(32, 1, 4, 4, 2, False))),
    (80, FewBits(Blocks(64, 2, 4, 3, 1, False), Blocks(64, 2, 4, 3, 1, False))),
    (1 << 30, FewBits(Blocks(128, 2, 3, 3, 1, False), Blocks(128, 2, 3, 3, 1, False))),
)
HOPPER = Schedule("hopper", Tiles(128, 128, 64, False, 4, 4), Tiles(128, 128, 64, False, 4, 5))


def tiles_at_most(pairs: int, experts: int, block_m: int) -> int:
    """Tiles of block_m rows that `pairs` can fill, however they spread over the experts. Pure."""
    return min(pairs, experts + pairs // block_m)


def of_whole_groups(s: FewBits, group: int) -> FewBits:
    """`s`, in pieces of an even number of chunks where a group is two of them. Pure."""
    return FewBits(*(
        tiles._replace(chunks=2, stages=tiles.stages * tiles.chunks // 2) if tiles.chunks * 64 % group else tiles
        for tiles in s
    ))  # fmt: skip


def schedules(tokens: int, experts: int, top_k: int, f: int, d: int, dtype: torch.dtype, hopper: bool,
              group: int = 0) -> list[Schedule | FewBits]:  # fmt: skip
    """Schedules for so many tokens, fastest first. `hopper`: on a device that runs the kernels of experts_hopper.py and
    experts_few_hopper.py; `group`: columns that share a scale, of weights that quantized_hopper.py reads there, or 0.
    Pure."""
    if dtype == torch.float32:
        return [FLOAT32]
    pairs = tokens * top_k
    rows = cdiv(pairs, experts)
    narrow = [s for most, s in NARROW if hopper and pairs <= most][:1]
    many = [HOPPER] if hopper and rows > GROUPED[-1][0] else []
    ours = [s for most, s in GROUPED if rows <= most][:1] or [MANY]
    whole = [s._replace(gate=even(s.gate, d), down=even(s.down, f)) for s in (*narrow, *many, *ours)]
    few_bits = [of_whole_groups(s, group) for most, s in FEW_BITS if group and rows <= most]
    return [*few_bits[:1], *whole]
