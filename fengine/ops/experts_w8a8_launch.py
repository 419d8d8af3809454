"""One product of experts in FP8 on a CUDA device, under a schedule: see experts_w8a8_kernels.py."""

from typing import NamedTuple

import torch
from torch import Tensor

from fengine.ops import e4m3
from fengine.ops.ahead import launcher
from fengine.ops.experts_routing import Routing, power
from fengine.ops.experts_w8a8_kernels import w8a8_experts_kernel
from fengine.ops.linear_launch import cdiv
from fengine.ops.registration import dependent_launch, shared_memory
from fengine.ops.w8a8 import tree_of
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
    """How both products are cut, with as many rows in a tile; `few`: no lists, a program a pair."""

    few: bool
    gate: Schedule
    down: Schedule


REFERENCE = Pairs(False, Schedule(64, 64, False, 4, 3), Schedule(64, 64, False, 4, 3))
FEW = Pairs(True, Schedule(16, 64, True, 4, 6), Schedule(16, 64, True, 4, 6))
FEW_PAIRS = 16
GROUPED = (  # largest number of rows that an expert has on average
    (8, Pairs(False, Schedule(16, 64, True, 4, 5), Schedule(16, 64, True, 4, 6))),
    (20, Pairs(False, Schedule(32, 64, True, 4, 5), Schedule(32, 64, True, 4, 6))),
    (40, Pairs(False, Schedule(64, 64, True, 4, 4), Schedule(64, 64, True, 4, 5))),
    (1 << 30, Pairs(False, Schedule(128, 64, True, 4, 4), Schedule(128, 128, False, 8, 3))),
)


def product(packed: Tensor, scale: Tensor, bias: Tensor | None, limit: float | None = None) -> Product:
    """Of packed matrices; `limit`: they are gates above ups. Pure."""
    return Product(packed, scale, bias, *tree_of(packed.shape[2], scale.shape[1]), limit is not None, limit or 0.0)


def schedules(pairs: int, experts: int) -> list[Pairs]:
    """Schedules for so many pairs, in the order in which they are tried. Pure."""
    rows = cdiv(pairs, experts)
    return [*([FEW] if pairs <= FEW_PAIRS else []), next(s for most, s in GROUPED if rows <= most), REFERENCE]


def launch(x: Tensor, logits_TE: Tensor, correction_E: Tensor | None, routing: Routing, w: Product,
           lists: tuple[Tensor, ...] | None, y_PN: Tensor, s: Schedule) -> None:  # fmt: skip
    """y of all pairs: gated products of tokens x [T, K], or of pairs x [T A, K] their products times their weights.

    `lists` as `experts_routing.lists_of` gives them; None: every pair by itself. Modifies: y_PN.
    """
    (t, e), (n, k), device = logits_TE.shape, (y_PN.shape[1], x.shape[1]), x.device.index
    q, x_scale = e4m3.launch(x, w.step if w.by_step else k)
    tiles, stages = len(y_PN) if lists is None else len(lists[2]), s.stages
    if x.is_cuda:
        per_stage = (s.block_m + s.block_n * (1 + w.gated)) * w.step
        stages = max(1, min(stages, shared_memory(device) // per_stage))
    launcher(w8a8_experts_kernel, (tiles * cdiv(n, s.block_n),))(
        logits_TE, correction_E, q.view(torch.float8_e4m3fn), x_scale, w.packed.view(torch.float8_e4m3fn), w.scale,
        w.bias, *(lists or (None, None, None, None)), y_PN, t, e, n, k, x_scale.shape[1], w.limit, routing.scale,
        routing.top_k, routing.renormalise, routing.sigmoid, correction_E is not None, lists is not None, w.gated,
        w.bias is not None, w.limit > 0, s.block_m, s.block_n, s.swap, w.step, w.by_step, k % w.step == 0, power(e),
        num_warps=s.warps, num_stages=stages, **dependent_launch(device),
    )  # fmt: skip
