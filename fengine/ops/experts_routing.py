"""Who goes where in a mixture of experts: Triton kernels that find each token's experts, each expert's pairs, tiles.

They compute the tree that experts.py states. A pair is one choice of one token: number t A + slot, where a token's
slots are its experts by ascending id.
"""
# pyright: reportInvalidTypeForm=false

from typing import NamedTuple

import torch
from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.registration import begin, dependent_launch, tl, triton, wait

AT_ONCE = 1 << 12  # pairs of a token and an expert, or of a tile and one, that one program looks at
LEAST = tl.constexpr(-0x80000000)


class Routing(NamedTuple):
    """How a token chooses its experts and weighs them; the fields stand in experts.py."""

    top_k: int
    renormalise: bool = True
    sigmoid: bool = False
    scale: float = 1.0


class Routed(NamedTuple):
    """What route_kernel and members_kernel find."""

    id_P: Tensor
    weight_P: Tensor
    rows_ET: Tensor
    count_E: Tensor
    index_P: Tensor  # of a pair among those of its expert


@triton.jit
def ordered(by):
    """int32 in the order of float32: NaN first, -0 as +0."""
    bits = tl.where(by == 0.0, 0.0, by).to(tl.int32, bitcast=True)
    return tl.where(by != by, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def scores(row_ptr, correction_ptr, id, E, SIGMOID: tl.constexpr, CORRECTED: tl.constexpr):
    """(logits of experts `id`, keys that order as what selects them): int32, NaN first, -0 as +0."""
    logit = tl.load(row_ptr + id, mask=id < E, other=float("-inf"))
    by = logit
    if SIGMOID:
        by = 1.0 / (1.0 + tl.exp(-logit))
    if CORRECTED:
        by += tl.load(correction_ptr + id, mask=id < E, other=0.0).to(tl.float32)
    return logit, tl.where(id < E, ordered(by), LEAST)


@triton.jit
def halved_sums(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, WIDTH] -> [ROWS, 1]: the sum of `halved_sum` for each row."""
    if WIDTH > 1:
        x = tl.sum(tl.reshape(x, (ROWS, 2, WIDTH // 2)), 1)
        x = halved_sums(x, ROWS, WIDTH // 2)
    return x


@triton.jit
def halved_sum(x, WIDTH: tl.constexpr):
    """Of [WIDTH]: the later half added to the earlier, again and again. No thread layout changes the order."""
    if WIDTH > 1:
        x = halved_sum(tl.sum(tl.reshape(x, (2, WIDTH // 2)), 0), WIDTH // 2)
    else:
        x = tl.sum(x, 0)  # of one number
    return x


@triton.jit
def choose(key, id, E, A: tl.constexpr, BE: tl.constexpr):
    """Whether each of BE experts is one of the A first, by keys of `scores`: A times the first of those left. It suits
    one warp."""
    selected = id < 0
    for _ in tl.static_range(A):
        left = (key == tl.max(tl.where(selected, LEAST, key), 0)) & (id < E) & (selected == 0)
        selected = selected | (id == tl.min(tl.where(left, id, BE), 0))
    return selected


@triton.jit
def weigh(selected, id, logit, E, RENORMALISE: tl.constexpr, SIGMOID: tl.constexpr, scale, BE: tl.constexpr):
    """Weights of the experts `id` of one token; they count where one is selected."""
    if SIGMOID:
        weight = 1.0 / (1.0 + tl.exp(-logit))
        if RENORMALISE:
            weight = weight / (halved_sum(tl.where(selected, weight, 0.0), BE) + 1e-20)
    else:
        weight = tl.exp(logit - tl.max(logit, 0))
        counted = selected if RENORMALISE else id < E
        weight = weight / halved_sum(tl.where(counted, weight, 0.0), BE)
    return weight * scale


@triton.jit(do_not_specialize=["T"])
def route_kernel(logits_ptr, correction_ptr, id_ptr, weight_ptr, rows_ptr, count_ptr, index_ptr, T, E, A: tl.constexpr,
                 RENORMALISE: tl.constexpr, SIGMOID: tl.constexpr, CORRECTED: tl.constexpr, scale, LISTS: tl.constexpr,
                 BE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """The experts of one token, by ascending id, and their weights.

    LISTS: also adds its pairs to the experts' lists, as members_kernel does but in any order; count is zero before.
    """
    begin(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    id = tl.arange(0, BE)
    logit, key = scores(logits_ptr + token * E, correction_ptr, id, E, SIGMOID, CORRECTED)
    selected = choose(key, id, E, A, BE)
    slot = tl.where(selected, tl.cumsum(selected.to(tl.int32), 0) - 1, -1)
    pair = token * A + slot
    if LISTS:
        index = tl.atomic_add(count_ptr + id, 1, mask=selected, sem="relaxed")
        tl.store(rows_ptr + id.to(tl.int64) * T + index, pair.to(tl.int32), mask=selected)
        tl.store(index_ptr + pair, index, mask=selected)
    tl.store(id_ptr + pair, id, mask=selected)
    tl.store(weight_ptr + pair, weigh(selected, id, logit, E, RENORMALISE, SIGMOID, scale, BE), mask=selected)


@triton.jit(do_not_specialize=["T"])
def members_kernel(id_ptr, rows_ptr, count_ptr, T, A: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The pairs of one expert, in order: rows [E, T], count [E]."""
    begin(PDL)
    wait(PDL)
    expert = tl.program_id(0)
    found = 0
    for start in range(0, T * A, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        mine = tl.load(id_ptr + pair, mask=pair < T * A, other=-1) == expert
        place = found + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(rows_ptr + expert.to(tl.int64) * T + place, pair, mask=mine)
        found += tl.sum(mine.to(tl.int32), 0)
    tl.store(count_ptr + expert, found)


@triton.jit
def find_tile(count_ptr, tile, E, BM: tl.constexpr, BE: tl.constexpr):
    """(expert, first of its rows) of a tile of BM rows; an expert >= E behind the last tile."""
    id = tl.arange(0, BE)
    tiles = (tl.load(count_ptr + id, mask=id < E, other=0) + BM - 1) // BM
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    return expert, (tile - tl.sum(tl.where(id < expert, tiles, 0), 0)) * BM


@triton.jit
def tiles_kernel(count_ptr, tile_ptr, base_ptr, E, BM: tl.constexpr, BE: tl.constexpr, PDL: tl.constexpr):
    """A tile's (expert, first of its rows), an expert >= E behind the last; and where its expert's rows begin."""
    begin(PDL)
    wait(PDL)
    tile = tl.program_id(0)
    expert, first = find_tile(count_ptr, tile, E, BM, BE)
    tl.store(tile_ptr + tile * 2, expert)
    tl.store(tile_ptr + tile * 2 + 1, first)
    tl.store(base_ptr + expert, tile * BM, mask=(expert < E) & (first == 0))


@triton.jit(do_not_specialize=["T", "TILES"])
def lists_kernel(logits_ptr, correction_ptr, weight_ptr, rows_ptr, count_ptr, tile_ptr, T, E, TILES, A: tl.constexpr,
                 RENORMALISE: tl.constexpr, SIGMOID: tl.constexpr, CORRECTED: tl.constexpr, scale, BT: tl.constexpr,
                 BE: tl.constexpr, BX: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """What route_kernel and tiles_kernel find, for few tokens at once: one program, nothing is zero before."""
    begin(PDL)
    wait(PDL)
    token = tl.arange(0, BT)[:, None]
    id = tl.arange(0, BE)[None, :]
    logit, key = scores(logits_ptr + tl.minimum(token, T - 1) * E, correction_ptr, id, E, SIGMOID, CORRECTED)
    selected = token < 0
    for _ in tl.static_range(A):
        left = (key == tl.max(tl.where(selected, LEAST, key), 1)[:, None]) & (id < E) & (selected == 0)
        selected = selected | (id == tl.min(tl.where(left, id, BE), 1)[:, None])
    slot = tl.where(selected, tl.cumsum(selected.to(tl.int32), 1) - 1, -1)
    chosen = selected & (token < T)
    pair = token * A + slot
    index = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(rows_ptr + id.to(tl.int64) * T + index, pair, mask=chosen)
    if SIGMOID:
        weight = 1.0 / (1.0 + tl.exp(-logit))
        if RENORMALISE:
            weight = weight / (halved_sums(tl.where(selected, weight, 0.0), BT, BE) + 1e-20)
    else:
        weight = tl.exp(logit - tl.max(logit, 1)[:, None])
        counted = selected if RENORMALISE else id < E
        weight = weight / halved_sums(tl.where(counted, weight, 0.0), BT, BE)
    tl.store(weight_ptr + pair, weight * scale, mask=chosen)
    count = tl.sum(chosen.to(tl.int32), 0)
    expert = tl.arange(0, BE)
    tl.store(count_ptr + expert, count, mask=expert < E)
    tiles = (count + BM - 1) // BM
    ends = tl.cumsum(tiles, 0)
    tile = tl.arange(0, BX)
    before_it = ends[None, :] <= tile[:, None]
    own = tl.sum(before_it.to(tl.int32), 1)
    first = (tile - tl.sum(tl.where(before_it, tiles[None, :], 0), 1)) * BM
    tl.store(tile_ptr + tile * 2, own, mask=tile < TILES)
    tl.store(tile_ptr + tile * 2 + 1, first, mask=tile < TILES)


def power(n: int) -> int:
    """The next power of two. Pure."""
    return 1 << (n - 1).bit_length()


def routed(logits_TE: Tensor, correction_E: Tensor | None, r: Routing, at_once: bool) -> Routed:
    """Each token's experts and each expert's pairs; `at_once`: in any order, which is faster than in theirs. Pure."""
    (t, e), a, pdl = logits_TE.shape, r.top_k, dependent_launch(logits_TE.device.index)
    id_P, index_P = (torch.empty(t * a, dtype=torch.int32, device=logits_TE.device) for _ in range(2))
    rows_ET, weight_P = id_P.new_empty(e, t), logits_TE.new_empty(t * a)
    count_E = id_P.new_zeros(e) if at_once else id_P.new_empty(e)
    launcher(route_kernel, (t,))(
        logits_TE, correction_E, id_P, weight_P, rows_ET, count_E, index_P, t, e, a, r.renormalise, r.sigmoid,
        correction_E is not None, r.scale, at_once, power(e), num_warps=1, **pdl
    )  # fmt: skip
    if not at_once:
        launcher(members_kernel, (e,))(
            id_P, rows_ET, count_E, t, a, 1024 if t * a <= 8192 else 4096, num_warps=4, **pdl
        )
    return Routed(id_P, weight_P, rows_ET, count_E, index_P)


def tiled(count_E: Tensor, tiles: int, rows: int) -> tuple[Tensor, Tensor]:
    """(tiles of so many rows, where each expert's rows begin). Pure."""
    tile_X2, base_E = count_E.new_empty(tiles, 2), torch.empty_like(count_E)
    launcher(tiles_kernel, (tiles,))(
        count_E, tile_X2, base_E, len(count_E), rows, power(len(count_E)), num_warps=1,
        **dependent_launch(count_E.device.index),
    )  # fmt: skip
    return tile_X2, base_E


def lists_of(logits_TE: Tensor, correction_E: Tensor | None, r: Routing, tiles: int,
             rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(rows_ET, count_E, tile_X2, weight_P) for tiles of so many rows; of few tokens by one program. Pure."""
    (t, e), a = logits_TE.shape, r.top_k
    if power(max(t, tiles)) * power(e) > AT_ONCE:
        found = routed(logits_TE, correction_E, r, True)
        return found.rows_ET, found.count_E, tiled(found.count_E, tiles, rows)[0], found.weight_P
    rows_ET, count_E, tile_X2 = (
        torch.empty(size, dtype=torch.int32, device=logits_TE.device) for size in ((e, t), (e,), (tiles, 2))
    )
    weight_P = logits_TE.new_empty(t * a)
    launcher(lists_kernel, (1,))(
        logits_TE, correction_E, weight_P, rows_ET, count_E, tile_X2, t, e, tiles, a, r.renormalise, r.sigmoid,
        correction_E is not None, r.scale, power(t), power(e), power(tiles), rows, num_warps=1 if t <= 2 else 4,
        **dependent_launch(logits_TE.device.index),
    )  # fmt: skip
    return rows_ET, count_E, tile_X2, weight_P
