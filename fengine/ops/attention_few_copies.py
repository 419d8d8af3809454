"""The copying warp of attention_few_hopper.py: keys and values by the copy engine (TMA) to a ring in shared memory.

A row that is alone has those of earlier steps copied while the kernels in front run, for the first kernel of a forward
pass begins when all in front of the pass has ended (norm_kernels.py); those of this step when they are there.
"""
# pyright: reportInvalidTypeForm=false

from fengine.ops.registration import async_load, gl, gluon, mbarrier, wait

BOX = gl.constexpr(64)  # keys of one page that are copied together


@gluon.jit
def first_chunk(front, CHUNK: gl.constexpr, WINDOW: gl.constexpr):
    """The first chunk that a token at `front` sees some of."""
    chunk = front * 0
    if WINDOW:
        chunk = gl.maximum(front + 1 - WINDOW, 0) // CHUNK
    return chunk


@gluon.jit
def span(chunk, front, seen, CHUNK: gl.constexpr, BLOCK: gl.constexpr, WINDOW: gl.constexpr):
    """(first, end) of the keys of a chunk that tokens from `front` on see, the first of a block."""
    low = chunk * CHUNK
    high = gl.minimum(low + CHUNK, seen)
    if WINDOW:
        low += gl.maximum(front + 1 - WINDOW - low, 0) // BLOCK * BLOCK
    return low, high


@gluon.jit
def copy_boxes(desc, table, ring, place, full, at, high, column, COLUMNS: gl.constexpr, S: gl.constexpr,
               BLOCK: gl.constexpr, WIDE: gl.constexpr):  # fmt: skip
    """Keys or values of WIDE blocks from `at` on to the ring's places from `place` on, but for boxes from `high` on."""
    for n in gl.static_range(WIDE * BLOCK // BOX):
        key = at + n * BOX
        if key < high:
            line = gl.load(table + key // S) * S + key % S
            mbarrier.expect(full, BOX * COLUMNS * 2)
            async_load(desc, [line, column], full, ring.index(place + n * BOX // BLOCK).slice(n * BOX % BLOCK, BOX))
        else:
            mbarrier.arrive(full)


@gluon.jit
def copy_rows(k_desc, v_desc, q_start_ptr, kv_len_ptr, table_ptr, k_ring, v_ring, k_full, v_full, empty, N, limit,
              K: gl.constexpr, S: gl.constexpr, GP: gl.constexpr, CHUNK: gl.constexpr, BLOCK: gl.constexpr,
              WIDE: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
              PDL: gl.constexpr):  # fmt: skip
    """The copying warp: WIDE blocks after WIDE blocks, as the ring has room."""
    BQ: gl.constexpr = 16 // GP
    ALL: gl.constexpr = WIDE * BLOCK
    column = gl.program_id(0) // PARTS * K
    v_column = column + gl.program_id(0) % PARTS * (K // PARTS)
    r = gl.program_id(1)
    if gl.num_programs(1) > 1:
        wait(PDL)  # rows may share pages that one of them writes in this step
    tokens = gl.load(q_start_ptr + r + 1) - gl.load(q_start_ptr + r)
    kv_len = gl.load(kv_len_ptr + r)
    table = table_ptr + r.to(gl.int64) * N
    n = 0
    if (tokens <= limit) | (limit == 0):
        for first in range(0, tokens, BQ):
            front = kv_len - tokens + first
            seen = gl.minimum(kv_len, front + BQ)
            begin_chunk = first_chunk(front, CHUNK, WINDOW)
            for chunk in range(begin_chunk + gl.program_id(2), gl.cdiv(seen, CHUNK), gl.num_programs(2)):
                low, high = span(chunk, front, seen, CHUNK, BLOCK, WINDOW)
                for at in range(low, high, ALL):
                    slot = n % STAGES
                    mbarrier.wait(empty.index(slot), ((n // STAGES) & 1) ^ 1)
                    if at + ALL > kv_len - tokens:
                        wait(PDL)  # for keys of this step
                    copy_boxes(k_desc, table, k_ring, slot * WIDE, k_full.index(slot), at, high, column, K, S,
                               BLOCK, WIDE)  # fmt: skip
                    copy_boxes(v_desc, table, v_ring, slot * WIDE, v_full.index(slot), at, high, v_column, K // PARTS,
                               S, BLOCK, WIDE)  # fmt: skip
                    n += 1
