"""Which tokens of which row a tile of attention holds: `find_tile` for a program that knows its tile's number, and
`table_kernel`, which lists all tiles for attention_hopper.py. Which keys they see: `limits`.
"""
# pyright: reportInvalidTypeForm=false

from fengine.ops.registration import tl, triton


@triton.jit
def find_tile(q_start_ptr, tile, R, T, limit, BQ: tl.constexpr, WIDTH: tl.constexpr):
    """(row, its first token there) of a tile of BQ tokens, where only rows of more than `limit` tokens have tiles.

    Row R is the padding behind the last row; R + 1 means that there are not so many tiles.
    """
    r = tile * 0 + R + 1
    before = tile * 0
    first = tile * 0
    base = 0
    while (base <= R) & (r > R):
        i = base + tl.arange(0, WIDTH)
        start = tl.load(q_start_ptr + i, mask=i <= R, other=0)
        tokens = tl.load(q_start_ptr + i + 1, mask=i < R, other=T) - start
        tiles = tl.where((i == R) | ((i < R) & (tokens > limit)), (tokens + BQ - 1) // BQ, 0)
        end = before + tl.cumsum(tiles, 0)
        here = (end > tile) & (end - tiles <= tile)
        found = tl.sum(tl.where(here, i + 1, 0), 0)
        if found > 0:
            r = found - 1
            first = (tile - tl.sum(tl.where(here, end - tiles, 0), 0)) * BQ
        before += tl.sum(tiles, 0)
        base += WIDTH
    return r, first


@triton.jit
def limits(front, back, kv_len, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """How many of a row's first keys some token at front .. back - 1 sees, and all do, but for a window's beginning."""
    seen = back
    seen_by_all = front + 1
    if not CAUSAL:
        seen = kv_len
        seen_by_all = kv_len
        if WINDOW:
            seen = tl.minimum(kv_len, back + WINDOW - 1)
            seen_by_all = tl.minimum(kv_len, front + WINDOW)
    return seen, seen_by_all


@triton.jit
def tiles_of(q_start_ptr, i, R, limit, BQ: tl.constexpr):
    """Tokens of rows i, and their tiles of BQ tokens: none of a row of at most `limit` tokens, or behind the last."""
    tokens = tl.load(q_start_ptr + i + 1, mask=i < R, other=0) - tl.load(q_start_ptr + i, mask=i < R, other=0)
    return tokens, tl.where((i < R) & (tokens > limit), (tokens + BQ - 1) // BQ, 0)


@triton.jit
def rank_tile(q_start_ptr, kv_len_ptr, position, r, R, limit, BQ: tl.constexpr, WIDTH: tl.constexpr):
    """How many tiles begin at a later position than row r's at `position`, or at an equal one in an earlier row."""
    rank = r * 0
    for low in range(0, R, WIDTH):
        i = low + tl.arange(0, WIDTH)
        tokens, tiles = tiles_of(q_start_ptr, i, R, limit, BQ)
        ahead = position - (tl.load(kv_len_ptr + i, mask=i < R, other=0) - tokens)  # of the row's first tile
        upto = tl.where(ahead < 0, 0, tl.minimum(tl.maximum(ahead, 0) // BQ + 1, tiles))  # tiles not behind `position`
        equal = (ahead >= 0) & (ahead % BQ == 0) & (ahead // BQ < tiles) & (i < r)
        rank += tl.sum(tiles - upto + equal.to(tl.int32), 0)
    return rank


@triton.jit(do_not_specialize=["T", "R", "limit"])
def table_kernel(q_start_ptr, kv_len_ptr, tiles_ptr, o_ptr, T, R, limit, HK: tl.constexpr, BQ: tl.constexpr,
                 LANES: tl.constexpr):  # fmt: skip
    """The tiles of BQ tokens of rows of more than `limit` tokens, for a kernel whose programs take tile after tile.

    Program 0 writes how many there are to tiles[0], and zero, of how many are taken, to tiles[1]. Each other program
    writes a tile to tiles[4 + 4 n] and on: its first token, the row's tokens from there on, the position of the first,
    the row. Those that see the most keys come first, so that programs end together. Tokens behind the last row get
    zeros.
    """
    n = tl.program_id(0) - 1
    if n < 0:
        count = n * 0
        for base in range(0, R, 512):
            count += tl.sum(tiles_of(q_start_ptr, base + tl.arange(0, 512), R, limit, BQ)[1], 0)
        tl.store(tiles_ptr, count)
        tl.store(tiles_ptr + 1, n * 0)
    else:
        r, first = find_tile(q_start_ptr, n, R, T, limit, BQ, 512)
        if r <= R:
            start = tl.load(q_start_ptr + r)
            tokens = tl.load(q_start_ptr + r + 1, mask=r < R, other=T) - start
            if r < R:
                position = tl.load(kv_len_ptr + r) - tokens + first
                here = tiles_ptr + 4 + rank_tile(q_start_ptr, kv_len_ptr, position, r, R, limit, BQ, 512) * 4
                tl.store(here, start + first)
                tl.store(here + 1, tokens - first)
                tl.store(here + 2, position)
                tl.store(here + 3, r)
            else:
                end = (start + tl.minimum(first + BQ, tokens)).to(tl.int64) * HK
                for low in range((start + first).to(tl.int64) * HK, end, LANES):
                    i = low + tl.arange(0, LANES)
                    tl.store(o_ptr + i, tl.zeros((LANES,), o_ptr.dtype.element_ty), mask=i < end)
