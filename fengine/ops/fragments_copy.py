"""The copying warps of quantized_hopper.py, in Gluon: codes and scales of weights, and rows of x, into one ring."""
# pyright: reportInvalidTypeForm=false

from fengine.ops.registration import async_copy, async_load, gdc_launch_dependents, gdc_wait, gl, gluon, mbarrier


@gluon.jit
def find(tile, tile_ptr, blocks, MT, BM: gl.constexpr, GROUPED: gl.constexpr):
    """(expert, block of outputs, first row in its list, first row of x and y) of a tile."""
    if GROUPED:
        expert = gl.load(tile_ptr + tile // blocks * 2)
        first = gl.load(tile_ptr + tile // blocks * 2 + 1)
        return expert, tile % blocks, first, tile // blocks * BM
    else:
        return tile * 0, tile // MT, 0, tile % MT * BM


@gluon.jit
def copy_weights(w_desc, scale_ptr, w_ring, s_ring, full, empty, tile_ptr, TILES, MT, E, blocks, chunks, words,
                 KS: gl.constexpr, WORDS: gl.constexpr, PIECE: gl.constexpr, BM: gl.constexpr, PARTS: gl.constexpr,
                 GROUPED: gl.constexpr, GATHER: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The warp that copies codes and scales: all tiles of this program, piece after piece, as the ring has room. words:
    of scales a block of 64 outputs; WORDS of them a piece of KS chunks, PIECE with room."""
    LINE: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    if GATHER:
        gdc_wait()
        gdc_launch_dependents()
    i = gl.arange(0, PIECE * PARTS, layout=LINE)
    part_of = i // 32 % PARTS
    word = i // (32 * PARTS) * 32 + i % 32
    n = 0
    for tile in range(gl.program_id(0), TILES, gl.num_programs(0)):
        expert, block, _, _ = find(tile, tile_ptr, gl.cdiv(blocks, PARTS), MT, BM, GROUPED)
        if expert < E:
            for piece in range(0, gl.cdiv(chunks, KS)):
                slot = n % STAGES
                mbarrier.wait(empty.index(slot), ((n // STAGES) & 1) ^ 1)
                first = expert * blocks + block * PARTS
                there = (word < WORDS) & (word < words - piece * WORDS) & (block * PARTS + part_of < blocks)
                at = scale_ptr + first.to(gl.int64) * words + piece * WORDS
                async_copy.async_copy_global_to_shared(s_ring.index(slot), at + part_of * words + word, mask=there)
                async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
                mbarrier.expect(full.index(slot), PARTS * KS * 2048)
                if PARTS == 1:
                    async_load(w_desc, [(first * chunks + piece * KS) * 16, 0], full.index(slot), w_ring.index(slot))
                else:
                    for part in gl.static_range(PARTS):
                        for c in gl.static_range(KS):
                            async_load(w_desc, [((first + part) * chunks + piece * KS + c) * 16, 0], full.index(slot),
                                       w_ring.index(slot * KS + c).slice(part * 16, 16))  # fmt: skip
                n += 1


@gluon.jit
def copy_x(x, x_ring, full, empty, tile_ptr, rows_ptr, count_ptr, TILES, MT, T, E, blocks, chunks, K, A: gl.constexpr,
           KS: gl.constexpr, BM: gl.constexpr, PARTS: gl.constexpr, GROUPED: gl.constexpr, GATHER: gl.constexpr,
           WARPS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The warps that copy rows of x: boxes of a descriptor, or rows that a list names."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    gdc_wait()
    n = 0
    for tile in range(gl.program_id(0), TILES, gl.num_programs(0)):
        expert, _, first, row = find(tile, tile_ptr, gl.cdiv(blocks, PARTS), MT, BM, GROUPED)
        if expert < E:
            if GATHER:
                at = first + gl.arange(0, BM, layout=gl.SliceLayout(1, LINES))
                real = at < gl.load(count_ptr + expert)  # the others are zeros, and cost no reads
                token = gl.load(rows_ptr + expert.to(gl.int64) * T + at, mask=real, other=0) // A
                col = gl.arange(0, 64, layout=gl.SliceLayout(0, LINES))
                lines = x + (token.to(gl.int64) * K)[:, None] + col[None, :]
            for piece in range(0, gl.cdiv(chunks, KS)):
                slot = n % STAGES
                mbarrier.wait(empty.index(slot), ((n // STAGES) & 1) ^ 1)
                if GATHER:
                    for c in gl.static_range(KS):
                        k = (piece * KS + c) * 64
                        async_copy.async_copy_global_to_shared(x_ring.index(slot * KS + c), lines + k,
                                                               mask=real[:, None] & (col + k < K)[None, :])  # fmt: skip
                    async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
                else:
                    mbarrier.expect(full.index(slot), BM * KS * 128)
                    for c in gl.static_range(KS):
                        async_load(x, [row, (piece * KS + c) * 64], full.index(slot), x_ring.index(slot * KS + c))
                n += 1
