"""One product of experts in FP8 on a CUDA device, under a schedule: see experts_w8a8_kernels.py."""

from typing import NamedTuple

import torch
from torch import Tensor

from fengine.ops import e4m3, experts_w8a8_hopper
from fengine.ops.ahead import launcher
from fengine.ops.experts_w8a8_hopper import quantize_tiles_kernel
from fengine.ops.experts_w8a8_kernels import w8a8_experts_kernel
from fengine.ops.linear_launch import cdiv
from fengine.ops.registration import MIDDLE, dependent_launch, row_warps, stages_that_fit
from fengine.ops.w8a8 import tree_of
from fengine.ops.w8a8_hopper import Tiles
from fengine.ops.w8a8_launch import Schedule


class Product(NamedTuple):
    """The matrices of all experts [E, N, K] and [E, steps or 1, N], their tree, and what their products meet."""

    packed: Tensor
    scale: Tensor
    bias: Tensor | None
    step: int
    by_step: bool
    gated: bool
    limit: float = 0.0


class Pairs(NamedTuple):
    """How both products are cut, with as many rows in a tile: both or none as `Tiles` of experts_w8a8_hopper.py."""

    gate: Schedule | Tiles
    down: Schedule | Tiles


REFERENCE = Pairs(Schedule(64, 64, False, 4, 3), Schedule(64, 64, False, 4, 3))
FEW = Pairs(Schedule(16, 64, True, 4, 5), Schedule(16, 64, True, 4, 4))
FEW_ROWS = 8  # of an expert on average
HOPPER = (  # the largest number of such rows; found on an H200
    (4, Tiles(8, 1, 6, 3)),
    (8, Tiles(16, 1, 9, 2)),
    (20, Tiles(32, 1, 8, 2)),
    (48, Tiles(64, 1, 6, 2)),
    (1 << 30, Tiles(128, 2, 6, 1)),
)


def product(packed: Tensor, scale: Tensor, bias: Tensor | None, limit: float | None = None) -> Product:
    """Of packed matrices; `limit`: they are gates above ups. Pure."""
    return Product(packed, scale, bias, *tree_of(packed.shape[2], scale.shape[1]), limit is not None, limit or 0.0)


def candidates(pairs: int, matrices: list[tuple[Tensor, Tensor]]) -> list[Pairs]:
    """`schedules` for products of packed matrices and their scales. Pure."""
    trees = [tree_of(packed.shape[2], scale.shape[1]) for packed, scale in matrices]
    hopper = all(experts_w8a8_hopper.usable(m, step) for (m, _), (step, _) in zip(matrices, trees, strict=True))
    return schedules(pairs, len(matrices[0][0]), hopper, any(by_step for _, by_step in trees))


def schedules(pairs: int, experts: int, hopper: bool, by_step: bool) -> list[Pairs]:
    """Schedules for so many pairs, in the order in which they are tried: of many rows with scales for blocks the sums
    and scales of Tiles find no room in registers. Pure."""
    rows = cdiv(pairs, experts)
    tiles = [next(Pairs(s, s) for most, s in HOPPER if rows <= most)] if hopper and (rows <= 48 or not by_step) else []
    return [*tiles, *([FEW] if rows <= FEW_ROWS else []), REFERENCE]


def launch(x: Tensor, w: Product, lists: tuple[Tensor, ...], top_k: int, y: Tensor, s: Schedule | Tiles,
           half: bool) -> None:  # fmt: skip
    """y of all pairs: gated products of tokens x [T, K], or of rows x their products times their weights. `lists` as
    `experts_routing.lists_of` gives them. What lies between the two products is in the order of pairs; of tiles under
    `Tiles`, unless there is one `half`. Modifies: y."""
    packed = w.packed.view(torch.float8_e4m3fn)
    if isinstance(s, Tiles):
        q, x_scale = tiles_of(x, lists, top_k if w.gated else int(half), w.step if w.by_step else 0, s.block_m)
        experts_w8a8_hopper.launch(
            q.view(torch.float8_e4m3fn), x_scale, packed, w.scale, w.bias, y, s, lists, w.by_step, w.gated, w.limit,
            half or not w.gated,
        )  # fmt: skip
        return
    (e, t), (n, k) = lists[0].shape, (y.shape[1], x.shape[1])
    q, x_scale = e4m3.launch(x, w.step if w.by_step else k)
    stages = stages_that_fit(x, s.stages, (s.block_m + s.block_n * (1 + w.gated)) * w.step)
    launcher(w8a8_experts_kernel, (len(lists[2]) * cdiv(n, s.block_n),))(
        q.view(torch.float8_e4m3fn), x_scale, packed, w.scale, w.bias, *lists, y, t, e, n, k, x_scale.shape[1],
        w.limit, top_k, w.gated, w.bias is not None, w.limit > 0, s.block_m, s.block_n, s.swap, w.step, w.by_step,
        k % w.step == 0, num_warps=s.warps, num_stages=stages, **dependent_launch(x.device.index),
    )  # fmt: skip


def tiles_of(x: Tensor, lists: tuple[Tensor, ...], pairs: int, group: int, rows: int) -> e4m3.Pair:
    """Codes and scales of rows, in the order of tiles of so many: x is of tokens with so many `pairs`, or where that
    is 0 in this order already. Pure."""
    rows_ET, count_E, tile_X2, _ = lists
    (experts, tokens), k, lines = rows_ET.shape, x.shape[1], len(tile_X2) * rows
    q_XK, scale_XG = e4m3.room(x.new_empty(lines, 0), k, group or k)
    block, group = e4m3.blocks(k, group or k)
    launcher(quantize_tiles_kernel, (lines, cdiv(k, block)))(
        x, q_XK, scale_XG, rows_ET, count_E, tile_X2, tokens, experts, k, scale_XG.shape[1], pairs, rows, block, group,
        num_warps=row_warps(block), **dependent_launch(x.device.index, MIDDLE),
    )  # fmt: skip
    return q_XK, scale_XG
