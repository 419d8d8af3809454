"""One product of experts in FP8 on a CUDA device, under a schedule; and its Triton kernel, with the trees of w8a8.py
over each expert's own rows."""
# pyright: reportInvalidTypeForm=false

from typing import NamedTuple

import torch
from torch import Tensor

from fengine.ops import e4m3, experts_w8a8_hopper
from fengine.ops.ahead import launcher
from fengine.ops.experts_kernels import gated
from fengine.ops.experts_w8a8_hopper import quantize_tiles_kernel
from fengine.ops.linear_launch import cdiv
from fengine.ops.registration import MIDDLE, begin, dependent_launch, row_warps, stages_that_fit, tl, triton, wait
from fengine.ops.w8a8 import tree_of
from fengine.ops.w8a8_hopper import Tiles
from fengine.ops.w8a8_launch import Schedule


@triton.jit
def joined(acc, part, of_x, of_w, BY_STEP: tl.constexpr, SWAP: tl.constexpr):
    """The sum with one more part."""
    if BY_STEP:
        scale = of_w[:, None] * of_x[None, :] if SWAP else of_x[:, None] * of_w[None, :]
        acc = tl.fma(part, scale, acc)
    else:
        acc += part
    return acc


@triton.jit
def products(x_rows, scale_rows, real, w_ptr, scale_ptr, col, N, K, BM: tl.constexpr, BN: tl.constexpr,
             STEP: tl.constexpr, BY_STEP: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr,
             GATED: tl.constexpr):  # fmt: skip
    """x @ w.T for codes at x_rows and columns `col` of w [N or 2N, K]: [BM, BN] twice, the second for w's later half if
    GATED. SWAP makes the weights the M side, which has 64 rows or more."""
    WIDTH = 2 * N if GATED else N
    k = tl.arange(0, STEP)
    col = col % N
    x_tile = x_rows[:, None] + k[None, :]
    w_tile = w_ptr + col.to(tl.int64)[:, None] * K + k[None, :]
    up_tile = w_tile + N.to(tl.int64) * K
    scale_tile = scale_ptr + col
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    up_acc = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    of_x = tl.load(scale_rows, mask=real, other=0.0)
    of_w = tl.load(scale_tile)
    of_up = tl.load(scale_tile + N) if GATED else of_w
    for start in range(0, K, STEP):
        inside = (start + k < K)[None, :]
        x = tl.load(x_tile, mask=real[:, None] if EVEN else real[:, None] & inside, other=0.0)
        w = tl.load(w_tile) if EVEN else tl.load(w_tile, mask=inside, other=0.0)
        if BY_STEP:
            of_x = tl.load(scale_rows, mask=real, other=0.0)
            of_w = tl.load(scale_tile)
            of_up = tl.load(scale_tile + N) if GATED else of_w
        part = tl.dot(w, x.T) if SWAP else tl.dot(x, w.T)
        acc = joined(acc, part, of_x, of_w, BY_STEP, SWAP)
        if GATED:
            w = tl.load(up_tile) if EVEN else tl.load(up_tile, mask=inside, other=0.0)
            part = tl.dot(w, x.T) if SWAP else tl.dot(x, w.T)
            up_acc = joined(up_acc, part, of_x, of_up, BY_STEP, SWAP)
            up_tile += STEP
        x_tile += STEP
        w_tile += STEP
        scale_rows += 1
        scale_tile += WIDTH
    if SWAP:
        acc = acc.T
        up_acc = up_acc.T
    if not BY_STEP:
        acc *= of_x[:, None] * of_w[None, :]
        up_acc *= of_x[:, None] * of_up[None, :]
    return acc, up_acc


@triton.jit(do_not_specialize=["T"])
def w8a8_experts_kernel(q_ptr, x_scale_ptr, w_ptr, scale_ptr, bias_ptr, rows_ptr, count_ptr, tile_ptr, weight_ptr,
                        y_ptr, T, E, N, K, steps, limit, A: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
                        LIMITED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SWAP: tl.constexpr,
                        STEP: tl.constexpr, BY_STEP: tl.constexpr, EVEN: tl.constexpr,
                        PDL: tl.constexpr):  # fmt: skip
    """BN columns of BM pairs of one expert: y[pair] is the gated product of x[token], or weight * x[pair] w.T; x has
    `steps` scales a row."""
    begin(PDL)
    blocks = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    wait(PDL)
    expert = tl.load(tile_ptr + pid // blocks * 2)
    if expert >= E:
        return
    row = tl.load(tile_ptr + pid // blocks * 2 + 1) + tl.arange(0, BM)
    real = row < tl.load(count_ptr + expert)
    pair = tl.load(rows_ptr + expert.to(tl.int64) * T + row, mask=real, other=0)
    col = pid % blocks * BN + tl.arange(0, BN)
    WIDTH = 2 * N if GATED else N
    line = (pair // A if GATED else pair).to(tl.int64)
    expert = expert.to(tl.int64)
    acc, up_acc = products(q_ptr + line * K, x_scale_ptr + line * steps, real, w_ptr + expert * WIDTH * K,
                           scale_ptr + expert * WIDTH * (steps if BY_STEP else 1), col, N, K, BM, BN, STEP, BY_STEP,
                           SWAP, EVEN, GATED)  # fmt: skip
    if BIAS:
        acc += tl.load(bias_ptr + expert * WIDTH + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            up_acc += tl.load(bias_ptr + expert * WIDTH + N + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        out = gated(acc, up_acc, limit, LIMITED, y_ptr.dtype.element_ty)
    else:
        weight = tl.load(weight_ptr + pair, mask=real, other=0.0)
        out = (acc * weight[:, None]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + pair.to(tl.int64)[:, None] * N + col[None, :], out, mask=real[:, None] & (col < N)[None, :])


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
