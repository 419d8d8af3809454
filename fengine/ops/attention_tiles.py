"""Which tokens of which row a tile of attention holds: `find_tile` for a program that knows its tile's number, and
`table_kernel`, which lists all tiles for attention_hopper.py. Which keys they see: `limits`; where these lie: `fetch`,
and `copy_items`, the warp that copies them for attention_hopper.py.
"""
# pyright: reportInvalidTypeForm=false

from fengine.ops.fp8_kernels import power_of_two
from fengine.ops.registration import HAS_REINTERPRET, async_load, gl, gluon, mbarrier, tl, triton


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
def reach(last_ptr, tokens, position, token):
    """The last key of each of a tile's tokens, and how many keys some token sees, and all do: as `limits`."""
    last = tl.load(last_ptr + token, mask=token < tokens, other=0)
    seen = tl.max(last, 0) + 1
    return tl.where(token < tokens, last, position), seen, tl.min(tl.where(token < tokens, last, seen), 0) + 1


@triton.jit
def fetch(ptr, table_ptr, start, kv_len, S: tl.constexpr, STRIDE: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
          BLOCK: tl.constexpr, EDGE: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    """[BLOCK, KP] keys or values of positions start ..; EDGE: zeros at kv_len and behind, whatever the slots hold.

    STRIDE and PAGE: elements from slot to slot and from page to page.
    """
    key = start + tl.arange(0, BLOCK)
    d = tl.arange(0, KP)
    if S % BLOCK == 0:  # one page
        here = table_ptr + start // S
        page = tl.load(here, mask=start < kv_len, other=0) if EDGE else tl.load(here)
        at = ptr + page.to(tl.int64) * PAGE + start % S * STRIDE + (tl.arange(0, BLOCK)[:, None] * STRIDE + d[None, :])
    elif BLOCK % S == 0 and BLOCK // S == 2:
        here = table_ptr + start // S
        page = tl.load(here, mask=start < kv_len, other=0) if EDGE else tl.load(here)
        next = tl.load(here + 1, mask=start + S < kv_len, other=0) if EDGE else tl.load(here + 1)
        line = tl.where(key - start < S, page, next).to(tl.int64) * PAGE + key % S * STRIDE
        at = ptr + line[:, None] + d[None, :]
    else:
        page = tl.load(table_ptr + key // S, mask=key < kv_len, other=0) if EDGE else tl.load(table_ptr + key // S)
        at = ptr + (page.to(tl.int64) * PAGE + key % S * STRIDE)[:, None] + d[None, :]
    if EDGE:
        x = tl.load(at, mask=(key < kv_len)[:, None] & (d < K)[None, :], other=0.0)
    elif K < KP:
        x = tl.load(at, mask=(d < K)[None, :], other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def powers(ptr, table_ptr, start, kv_len, S: tl.constexpr, BLOCK: tl.constexpr, EDGE: tl.constexpr,
           PAGE: tl.constexpr):  # fmt: skip
    """[BLOCK] powers of two of a kv head's codes, as `fetch`; `ptr`: the head's first exponent of page 0."""
    key = start + tl.arange(0, BLOCK)
    inside = key < kv_len
    page = tl.load(table_ptr + key // S, mask=inside, other=0) if EDGE else tl.load(table_ptr + key // S)
    at = ptr + page.to(tl.int64) * PAGE + key % S
    exponent = tl.load(at, mask=inside, other=0) if EDGE else tl.load(at)
    return power_of_two(exponent)


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


@gluon.jit
def find_item(tiles_ptr, item, tiles, PER: gl.constexpr):
    """(first token, tokens from there, position of the first, row, which heads) of an item: a tile with PACK heads.

    Many tiles keep the programs busy with the same heads, whose keys stay in the L2 cache; of few tiles, all heads are
    under way at once.
    """
    many = 2 * tiles >= 3 * gl.num_programs(0)
    tile = gl.where(many, item % tiles, item // PER)
    here = tiles_ptr + 4 + tile * 4
    part = gl.where(many, item // tiles, item % PER)
    return gl.load(here), gl.load(here + 1), gl.load(here + 2), gl.load(here + 3), part


@gluon.jit
def first_block(position, BLOCK: gl.constexpr, WINDOW: gl.constexpr):
    """The first block of keys that a token at `position` sees; 0 without a window."""
    return gl.maximum(position + 1 - WINDOW, 0) // BLOCK if WINDOW else 0


@gluon.jit
def item_at(item_ring, j, TILES: gl.constexpr, WARPS: gl.constexpr):
    """The number that the copying warp has handed on."""
    return gl.max(item_ring.index(j % TILES).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def copy_block(desc, table, ring, full, empty, n, start, kv_len, column, BLOCK: gl.constexpr, K: gl.constexpr,
               S: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The n-th block of keys or values, when its place is free. Pages behind kv_len are page 0."""
    slot = n % STAGES
    mbarrier.wait(empty.index(slot), ((n // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(slot), BLOCK * K * 2)
    for piece in gl.static_range(BLOCK // 64):
        key = start + piece * 64
        line = gl.load(table + key // S, mask=key < kv_len, other=0) * S + key % S
        async_load(desc, [line, column], full.index(slot), ring.index(slot).slice(piece * 64, 64))


@gluon.jit
def copy_items(q_desc, k_desc, v_desc, tiles_ptr, table_ptr, N, item_ring, q_ring, k_ring, v_ring, q_full, q_empty,
               k_full, k_empty, v_full, v_empty, H: gl.constexpr, G: gl.constexpr, K: gl.constexpr, S: gl.constexpr,
               PACK: gl.constexpr, BLOCK: gl.constexpr, WINDOW: gl.constexpr, TILES: gl.constexpr, KEYS: gl.constexpr,
               VALUES: gl.constexpr, COPIES: gl.constexpr):  # fmt: skip
    """The copying warp: item after item, block after block, as the rings have room. Behind the last item it hands on a
    number that is none. Of two warps, the second copies the values."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    if HAS_REINTERPRET:
        q_tiles = q_ring.reinterpret(q_desc.dtype, [2 * TILES, 64 // PACK, PACK, K], q_desc.layout)
    else:
        q_tiles = q_ring._reinterpret(q_desc.dtype, [2 * TILES, 64 // PACK, PACK, K], q_desc.layout)
    tiles = gl.load(tiles_ptr)
    items = tiles * (H // PACK)
    n = 0
    j = 0
    item = gl.atomic_add(tiles_ptr + 1, 1, sem="relaxed")
    while item < items:
        line, left, position, row, part = find_item(tiles_ptr, item, tiles, H // PACK)
        table = table_ptr + row.to(gl.int64) * N
        if gl.load(table) >= 0:  # else the row's turn is another launch
            mbarrier.wait(q_empty.index(j % TILES), ((j // TILES) & 1) ^ 1)
            item_ring.index(j % TILES).store(gl.full([1], item, gl.int32, ONE))
            mbarrier.expect(q_full.index(j % TILES), 128 * K * 2)
            for who in gl.static_range(2):
                async_load(q_desc, [line + who * (64 // PACK), part * PACK, 0], q_full.index(j % TILES),
                           q_tiles.index((j % TILES) * 2 + who))  # fmt: skip
            kv_len = position + left
            column = part // (H // G // PACK) * K
            end = gl.cdiv(gl.minimum(kv_len, position + 128 // PACK), BLOCK)
            for block in range(first_block(position, BLOCK, WINDOW), end):
                start = block * BLOCK
                copy_block(k_desc, table, k_ring, k_full, k_empty, n, start, kv_len, column, BLOCK, K, S, KEYS)
                if COPIES == 1:
                    copy_block(v_desc, table, v_ring, v_full, v_empty, n, start, kv_len, column, BLOCK, K, S, VALUES)
                n += 1
            j += 1
        item = gl.atomic_add(tiles_ptr + 1, 1, sem="relaxed")
    mbarrier.wait(q_empty.index(j % TILES), ((j // TILES) & 1) ^ 1)
    item_ring.index(j % TILES).store(gl.full([1], item, gl.int32, ONE))
    mbarrier.arrive(q_full.index(j % TILES))


@gluon.jit
def copy_values(v_desc, tiles_ptr, table_ptr, N, item_ring, v_ring, q_full, q_empty, v_full, v_empty, H: gl.constexpr,
                G: gl.constexpr, K: gl.constexpr, S: gl.constexpr, PACK: gl.constexpr, BLOCK: gl.constexpr,
                WINDOW: gl.constexpr, TILES: gl.constexpr, VALUES: gl.constexpr):  # fmt: skip
    """The warp that copies the values of the items that `copy_items` hands on."""
    tiles = gl.load(tiles_ptr)
    items = tiles * (H // PACK)
    n = 0
    j = 0
    mbarrier.wait(q_full.index(0), 0)
    item = item_at(item_ring, 0, TILES, 1)
    while item < items:
        _, left, position, row, part = find_item(tiles_ptr, item, tiles, H // PACK)
        table = table_ptr + row.to(gl.int64) * N
        kv_len = position + left
        column = part // (H // G // PACK) * K
        end = gl.cdiv(gl.minimum(kv_len, position + 128 // PACK), BLOCK)
        for block in range(first_block(position, BLOCK, WINDOW), end):
            copy_block(v_desc, table, v_ring, v_full, v_empty, n, block * BLOCK, kv_len, column, BLOCK, K, S, VALUES)
            n += 1
        mbarrier.arrive(q_empty.index(j % TILES))
        j += 1
        mbarrier.wait(q_full.index(j % TILES), (j // TILES) & 1)
        item = item_at(item_ring, j, TILES, 1)
