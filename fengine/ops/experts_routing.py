"""Triton kernels that find who goes where in a mixture of experts: each token's experts, each expert's pairs, tiles.

They compute the tree that experts.py states. A pair is one choice of one token: number t A + slot, where a token's
slots are its experts by ascending id.
"""
# pyright: reportInvalidTypeForm=false

from fengine.ops.registration import begin, tl, triton, wait

LEAST = tl.constexpr(-0x80000000)
WHOLE = tl.constexpr(128)  # experts up to which all are compared with all at once
CHUNK = tl.constexpr(32)  # experts of more that every expert is compared with at a time


@triton.jit
def scores(row_ptr, correction_ptr, id, E, SIGMOID: tl.constexpr, CORRECTED: tl.constexpr):
    """(logits of experts `id`, keys that order as what selects them): int32, NaN first, -0 as +0."""
    logit = tl.load(row_ptr + id, mask=id < E, other=float("-inf"))
    by = logit
    if SIGMOID:
        by = 1.0 / (1.0 + tl.exp(-logit))
    if CORRECTED:
        by += tl.load(correction_ptr + id, mask=id < E, other=0.0).to(tl.float32)
    bits = tl.where(by == 0.0, 0.0, by).to(tl.int32, bitcast=True)
    key = tl.where(by != by, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return logit, tl.where(id < E, key, LEAST)


@triton.jit
def halved_sum(x, WIDTH: tl.constexpr):
    """[WIDTH] -> [1]: the later half added to the earlier, again and again. No thread layout changes the order."""
    if WIDTH > 1:
        x = tl.sum(tl.reshape(x, (2, WIDTH // 2)), 0)
        x = halved_sum(x, WIDTH // 2)
    return x


@triton.jit
def slots(row_ptr, correction_ptr, E, A: tl.constexpr, SIGMOID: tl.constexpr, CORRECTED: tl.constexpr,
          BE: tl.constexpr):  # fmt: skip
    """(slot of each of BE experts, or -1; logits) of the token whose logits stand at row_ptr."""
    id = tl.arange(0, BE)
    logit, key = scores(row_ptr, correction_ptr, id, E, SIGMOID, CORRECTED)
    if BE <= WHOLE:
        rank = tl.sum(before(key, id, key, id).to(tl.int32), 0)
    else:
        rank = tl.zeros((BE,), tl.int32)
        for start in range(0, E, CHUNK):
            other = start + tl.arange(0, CHUNK)
            _, rival = scores(row_ptr, correction_ptr, other, E, SIGMOID, CORRECTED)
            rank += tl.sum(before(rival, other, key, id).to(tl.int32), 0)
    selected = (rank < A) & (id < E)
    return tl.where(selected, tl.cumsum(selected.to(tl.int32), 0) - 1, -1), logit


@triton.jit
def before(rival, other, key, id):
    """[others, ids]: whether the other expert comes first."""
    return (rival[:, None] > key[None, :]) | ((rival[:, None] == key[None, :]) & (other[:, None] < id[None, :]))


@triton.jit
def weigh(slot, logit, E, RENORMALISE: tl.constexpr, SIGMOID: tl.constexpr, scale, BE: tl.constexpr):
    """Weights of the experts of one token; they count where there is a slot."""
    if SIGMOID:
        weight = 1.0 / (1.0 + tl.exp(-logit))
        if RENORMALISE:
            weight = weight / (halved_sum(tl.where(slot >= 0, weight, 0.0), BE) + 1e-20)
    else:
        weight = tl.exp(logit - tl.max(logit, 0))
        counted = slot >= 0 if RENORMALISE else tl.arange(0, BE) < E
        weight = weight / halved_sum(tl.where(counted, weight, 0.0), BE)
    return weight * scale


@triton.jit(do_not_specialize=["T"])
def route_kernel(logits_ptr, correction_ptr, id_ptr, weight_ptr, rows_ptr, count_ptr, index_ptr, T, E, A: tl.constexpr,
                 RENORMALISE: tl.constexpr, SIGMOID: tl.constexpr, CORRECTED: tl.constexpr, scale, LISTS: tl.constexpr,
                 BE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """The experts of one token, by ascending id, and their weights. One warp: A times the first of those left.

    LISTS: also adds its pairs to the experts' lists, as members_kernel does but in any order; count is zero before.
    """
    begin(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    id = tl.arange(0, BE)
    logit, key = scores(logits_ptr + token * E, correction_ptr, id, E, SIGMOID, CORRECTED)
    selected = id < 0
    for _ in tl.static_range(A):
        left = (key == tl.max(tl.where(selected, LEAST, key), 0)) & (id < E) & (selected == 0)
        selected = selected | (id == tl.min(tl.where(left, id, BE), 0))
    slot = tl.where(selected, tl.cumsum(selected.to(tl.int32), 0) - 1, -1)
    pair = token * A + slot
    if LISTS:
        index = tl.atomic_add(count_ptr + id, 1, mask=selected, sem="relaxed")
        tl.store(rows_ptr + id.to(tl.int64) * T + index, pair.to(tl.int32), mask=selected)
        tl.store(index_ptr + pair, index, mask=selected)
    tl.store(id_ptr + pair, id, mask=selected)
    tl.store(weight_ptr + pair, weigh(slot, logit, E, RENORMALISE, SIGMOID, scale, BE), mask=selected)


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
