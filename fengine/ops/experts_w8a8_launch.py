"""One product of experts in FP8 on a CUDA device, under a schedule: see experts_w8a8_kernels.py."""

from typing import NamedTuple

import torch
from torch import Tensor

from fengine.ops import e4m3, experts_w8a8_hopper
from fengine.ops.ahead import launcher
from fengine.ops.experts_routing import Routing, power
from fengine.ops.experts_w8a8_hopper import quantize_tiles_kernel
from fengine.ops.experts_w8a8_kernels import w8a8_experts_kernel
from fengine.ops.linear_launch import cdiv
from fengine.ops.registration import MIDDLE, dependent_launch, row_warps, shared_memory
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
    """How both products are cut, with as many rows in a tile, and both or none as `Tiles` of experts_w8a8_hopper.py;
    `few`: no lists, a program a pair."""

    few: bool
    gate: Schedule | Tiles
    down: Schedule | Tiles

    @property
    def tiled(self) -> bool:
        return isinstance(self.gate, Tiles)


REFERENCE = Pairs(False, Schedule(64, 64, False, 4, 3), Schedule(64, 64, False, 4, 3))
FEW = Pairs(True, Schedule(16, 64, True, 4, 6), Schedule(16, 64, True, 4, 6))
FEW_PAIRS = 16
GROUPED = (  # largest number of rows that an expert has on average
    (8, Pairs(False, Schedule(16, 64, True, 4, 5), Schedule(16, 64, True, 4, 6))),
    (20, Pairs(False, Schedule(32, 64, True, 4, 5), Schedule(32, 64, True, 4, 6))),
    (40, Pairs(False, Schedule(64, 64, True, 4, 4), Schedule(64, 64, True, 4, 5))),
    (1 << 30, Pairs(False, Schedule(128, 64, True, 4, 4), Schedule(128, 128, False, 8, 3))),
)
HOPPER = (  # likewise
    (4, Pairs(False, Tiles(8, 1, 10, 2), Tiles(8, 1, 10, 2))),
    (8, Pairs(False, Tiles(16, 1, 9, 2), Tiles(16, 1, 9, 2))),
    (20, Pairs(False, Tiles(32, 1, 8, 2), Tiles(32, 1, 8, 2))),
    (48, Pairs(False, Tiles(64, 1, 6, 2), Tiles(64, 1, 6, 2))),
    (1 << 30, Pairs(False, Tiles(128, 2, 6, 1), Tiles(128, 2, 6, 1))),
)


def product(packed: Tensor, scale: Tensor, bias: Tensor | None, limit: float | None = None) -> Product:
    """Of packed matrices; `limit`: they are gates above ups. Pure."""
    return Product(packed, scale, bias, *tree_of(packed.shape[2], scale.shape[1]), limit is not None, limit or 0.0)


def on_hopper(packed: Tensor | None, scale: Tensor | None) -> bool:
    """Whether `Tiles` are for such matrices, or there are none. Pure."""
    if packed is None or scale is None:
        return True
    return experts_w8a8_hopper.usable(packed, tree_of(packed.shape[2], scale.shape[1])[0])


def schedules(pairs: int, experts: int, hopper: bool) -> list[Pairs]:
    """Schedules for so many pairs, in the order in which they are tried. Pure."""
    rows = cdiv(pairs, experts)
    few = [FEW] if pairs <= FEW_PAIRS else []
    many = [next(s for most, s in table if rows <= most) for table in ((HOPPER, GROUPED) if hopper else (GROUPED,))]
    return [*few, *many, REFERENCE]


def launch(x: Tensor, logits_TE: Tensor, correction_E: Tensor | None, routing: Routing, w: Product,
           lists: tuple[Tensor, ...] | None, y: Tensor, s: Schedule | Tiles, half: bool) -> None:  # fmt: skip
    """y of all pairs: gated products of tokens x [T, K], or of rows x their products times their weights. `lists` as
    `experts_routing.lists_of` gives them; None: every pair by itself. What lies between the two products is in the
    order of pairs; of tiles under `Tiles`, unless there is one `half`. Modifies: y."""
    if isinstance(s, Tiles) and lists is not None:
        pairs = routing.top_k if w.gated else int(half)
        q, x_scale = tiles_of(x, lists, pairs, w.step if w.by_step else 0, s.block_m)
        experts_w8a8_hopper.launch(
            q.view(torch.float8_e4m3fn), x_scale, w.packed.view(torch.float8_e4m3fn), w.scale, w.bias, y, s, lists,
            w.by_step, w.gated, w.limit, half or not w.gated,
        )  # fmt: skip
        return
    assert isinstance(s, Schedule)
    (t, e), (n, k), device = logits_TE.shape, (y.shape[1], x.shape[1]), x.device.index
    q, x_scale = e4m3.launch(x, w.step if w.by_step else k)
    tiles, stages = len(y) if lists is None else len(lists[2]), s.stages
    if x.is_cuda:
        per_stage = (s.block_m + s.block_n * (1 + w.gated)) * w.step
        stages = max(1, min(stages, shared_memory(device) // per_stage))
    launcher(w8a8_experts_kernel, (tiles * cdiv(n, s.block_n),))(
        logits_TE, correction_E, q.view(torch.float8_e4m3fn), x_scale, w.packed.view(torch.float8_e4m3fn), w.scale,
        w.bias, *(lists or (None, None, None, None)), y, t, e, n, k, x_scale.shape[1], w.limit, routing.scale,
        routing.top_k, routing.renormalise, routing.sigmoid, correction_E is not None, lists is not None, w.gated,
        w.bias is not None, w.limit > 0, s.block_m, s.block_n, s.swap, w.step, w.by_step, k % w.step == 0, power(e),
        num_warps=s.warps, num_stages=stages, **dependent_launch(device),
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
