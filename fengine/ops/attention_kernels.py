"""Triton kernel of attention of rows of few tokens (decode), and what it shares with that of many, attention_many.py.

Both compute the reduction tree that attention.py states; its constants come in as CHUNK and BLOCK.
"""
# pyright: reportInvalidTypeForm=false

from fengine.ops.attention_tiles import fetch, limits, powers, reach
from fengine.ops.fp8_kernels import from_e4m3
from fengine.ops.registration import begin, tl, triton, wait

SUMS = tl.constexpr(32)  # sums of weights that a row has within a chunk


@triton.jit
def halved(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, LEFT: tl.constexpr):
    """[ROWS, WIDTH] -> [ROWS, LEFT]: the later half added to the earlier, again and again. Sums of two, so that no
    thread layout can change the order; what lies SUMS apart is mostly in one thread."""
    if WIDTH > LEFT:
        x = tl.sum(tl.reshape(x, (ROWS, 2, WIDTH // 2)), 1)
        x = halved(x, ROWS, WIDTH // 2, LEFT)
    return x


@triton.jit
def merge(m, sum, acc, m2, sum2, acc2, c, WINDOW: tl.constexpr = 0):
    """The next chunk (m2, sum2, acc2) joined to the running (m, sum, acc): [rows], [rows, 1], [rows, KP].

    WINDOW: a chunk of which a row sees nothing leaves it as it is, its signs of zero too.
    """
    m_new = tl.maximum(m, m2)
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    a = tl.exp2((m - safe) * c)[:, None]
    b = tl.exp2((m2 - safe) * c)[:, None]
    new_sum = tl.fma(sum2, b, sum * a)
    new_acc = tl.fma(acc2, b, acc * a)
    if WINDOW:
        unseen = (m2 == float("-inf"))[:, None]
        new_sum = tl.where(unseen, sum, new_sum)
        new_acc = tl.where(unseen, acc, new_acc)
    return m_new, new_sum, new_acc


@triton.jit
def nothing(ROWS: tl.constexpr, KP: tl.constexpr):
    """What `merge` starts from: -0.0, so that the first chunk comes out as it went in, its signs of zero too."""
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    return m, tl.full((ROWS, 1), -0.0, tl.float32), tl.full((ROWS, KP), -0.0, tl.float32)


@triton.jit
def attend_block(q, m, sums, acc, start, kv_len, position, last, table_ptr, k_ptr, v_ptr, c, g, S: tl.constexpr,
                 STRIDE: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                 EDGE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
                 SCALE: tl.constexpr, FEW: tl.constexpr):  # fmt: skip
    """One online-softmax step over keys start .. start + BLOCK. EDGE: some key may be unowned or unseen by some row.

    FEW: number of kv heads where pages are in few bits (kv_fp8.py), else 0. Scores and weights take the powers of two.
    """
    PAGE: tl.constexpr = S * FEW * (K + 1) if FEW else S * STRIDE
    k = fetch(k_ptr, table_ptr, start, kv_len, S, STRIDE, K, KP, BLOCK, EDGE, PAGE)
    if FEW:
        k = from_e4m3(k, q.dtype)
    s = tl.dot(q, k.T, input_precision="ieee")
    if FEW:
        behind = S * FEW * K + g * (S - S * K)  # from a head's first code to its first exponent
        s *= powers(k_ptr + behind, table_ptr, start, kv_len, S, BLOCK, EDGE, PAGE)[None, :]
    if CAP > 0:
        s = CAP * (1.0 - 2.0 / (tl.exp2(s * (SCALE / CAP * 2.8853900817779268)) + 1.0))  # tanh
    if EDGE:
        key = start + tl.arange(0, BLOCK)
        if CAUSAL:
            s = tl.where(key[None, :] <= last[:, None], s, float("-inf"))
        else:
            s = tl.where((key < kv_len)[None, :], s, float("-inf"))
            if WINDOW:
                s = tl.where(key[None, :] < position[:, None] + WINDOW, s, float("-inf"))
        if WINDOW:
            s = tl.where(key[None, :] > position[:, None] - WINDOW, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(tl.fma(s, c, (safe * -c)[:, None]))
    alpha = tl.exp2((m - safe) * c)[:, None]
    v = fetch(v_ptr, table_ptr, start, kv_len, S, STRIDE, K, KP, BLOCK, EDGE, PAGE)
    sums = tl.fma(sums, alpha, halved(p, ROWS, BLOCK, SUMS))
    if FEW:
        v = from_e4m3(v, q.dtype)
        p *= powers(v_ptr + behind, table_ptr, start, kv_len, S, BLOCK, EDGE, PAGE)[None, :]
    acc = tl.dot(p.to(v.dtype), v, acc * alpha, input_precision="ieee")
    return m_new, sums, acc


@triton.jit
def attend_chunk(q, low, seen, seen_by_all, first, end, kv_len, position, last, table_ptr, k_ptr, v_ptr, c, g,
                 S: tl.constexpr, STRIDE: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr,
                 CHUNK: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
                 CAP: tl.constexpr, SCALE: tl.constexpr, FEW: tl.constexpr, SHORT: tl.constexpr):  # fmt: skip
    """(m, sum, acc) of the chunk at `low`, from scratch: blocks that every row sees whole, then the others.

    WINDOW: blocks that no row sees are left out; those that some row sees not from their first key on come first. Rows
    stand at positions first .. end - 1. SHORT: loads run ahead of the last blocks, too; so many keys are all there, as
    masks cost less than loops of their own.
    """
    LAST: tl.constexpr = None if SHORT else 1
    FITS: tl.constexpr = 0 < WINDOW and WINDOW + ROWS + BLOCK <= SHORT  # what a window shows is always so short
    high = tl.minimum(low + CHUNK, seen)
    inner = low + tl.maximum(tl.minimum(high, seen_by_all) - low, 0) // BLOCK * BLOCK
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    sums = tl.zeros((ROWS, SUMS), tl.float32)
    acc = tl.zeros((ROWS, KP), tl.float32)
    outer = low + tl.maximum(first + 1 - WINDOW - low, 0) // BLOCK * BLOCK if WINDOW else low
    if FITS:
        inner = outer
    else:
        clear = outer
        if WINDOW:
            clear = low + tl.maximum(end - WINDOW - low + BLOCK - 1, 0) // BLOCK * BLOCK
            clear = tl.minimum(clear, tl.maximum(inner, outer))
            clear = tl.where(high - outer <= SHORT, outer, clear)
            for n in tl.range(outer, clear, BLOCK, num_stages=1):
                m, sums, acc = attend_block(q, m, sums, acc, n, kv_len, position, last, table_ptr, k_ptr, v_ptr, c, g,
                                            S, STRIDE, K, KP, ROWS, BLOCK, True, CAUSAL, WINDOW, CAP, SCALE,
                                            FEW)  # fmt: skip
            inner = tl.maximum(inner, clear)
        inner = tl.where(high - clear <= SHORT, clear, inner)
        for n in tl.range(clear, inner, BLOCK):
            m, sums, acc = attend_block(q, m, sums, acc, n, kv_len, position, last, table_ptr, k_ptr, v_ptr, c, g, S,
                                        STRIDE, K, KP, ROWS, BLOCK, False, CAUSAL, 0, CAP, SCALE, FEW)  # fmt: skip
    for n in tl.range(inner, high, BLOCK, num_stages=LAST):
        m, sums, acc = attend_block(q, m, sums, acc, n, kv_len, position, last, table_ptr, k_ptr, v_ptr, c, g, S,
                                    STRIDE, K, KP, ROWS, BLOCK, True, CAUSAL, WINDOW, CAP, SCALE, FEW)  # fmt: skip
    return m, halved(sums, ROWS, SUMS, 1), acc


@triton.jit
def store_rows(m, sum, acc, sink_ptr, head, o_ptr, line, mask, c, K: tl.constexpr, KP: tl.constexpr,
               SINKS: tl.constexpr):  # fmt: skip
    """acc / sum of each row, its head's sink merged last: a score of its own, without a value."""
    if SINKS:
        sink = tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(m * c, sink)
        kept = tl.exp2(tl.fma(m, c, -top))[:, None]
        sum = tl.fma(sum, kept, tl.exp2(sink - top)[:, None])
        acc = acc * kept
    tl.store(o_ptr + line[:, None] * K + tl.arange(0, KP)[None, :], (acc / sum).to(o_ptr.dtype.element_ty), mask=mask)


@triton.jit
def merge_stored(m_part_ptr, sum_part_ptr, acc_part_ptr, part, begin, count, real, sink_ptr, head, o_ptr, line, mask, c,
                 K: tl.constexpr, KP: tl.constexpr, BM: tl.constexpr, AHEAD: tl.constexpr, WINDOW: tl.constexpr,
                 SINKS: tl.constexpr):  # fmt: skip
    """Merges the stored results of a tile's chunks and stores the outcome.

    The sums here meet no MMA: they keep the layout in which results are loaded, so that nothing stands between the
    loads of AHEAD chunks. (Were they those of the attending loop, each load would wait for the one before.)
    """
    d = tl.arange(0, KP)
    m, sum, acc = nothing(BM, KP)
    for chunk in range(begin, count, AHEAD):
        for ahead in tl.static_range(AHEAD):
            more = real & (chunk + ahead + tl.arange(0, BM) * 0 < count)
            at = part + chunk + ahead
            m2 = tl.load(m_part_ptr + at, mask=more, other=float("-inf"), cache_modifier=".cg")
            sum2 = tl.load(sum_part_ptr + at, mask=more, other=0.0, cache_modifier=".cg")
            acc2 = tl.load(acc_part_ptr + at[:, None] * KP + d[None, :], mask=more[:, None], other=0.0,
                           cache_modifier=".cg")  # fmt: skip
            m, sum, acc = merge(m, sum, acc, m2, sum2[:, None], acc2, c, WINDOW)
    store_rows(m, sum, acc, sink_ptr, head, o_ptr, line, mask, c, K, KP, SINKS)


@triton.jit(do_not_specialize=["T", "R", "N", "chunks", "limit"])
def rows_kernel(
    q_ptr, k_ptr, v_ptr, q_start_ptr, kv_len_ptr, table_ptr, o_ptr, m_part_ptr, sum_part_ptr, acc_part_ptr, arrived_ptr,
    sink_ptr, last_ptr, c, T, R, N, chunks, limit, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    S: tl.constexpr, GP: tl.constexpr, BM: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
    AHEAD: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    REACH: tl.constexpr, SCALE: tl.constexpr, FEW: tl.constexpr, SHORT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of 1 .. limit tokens; limit 0: every row, and zeros behind the last one.

    Program (kv head, row, split) takes the row's chunks split, split + splits, ... With SPLIT the program that arrives
    last merges the stored chunks, left to right, and leaves the counter at zero; a row of one chunk stores nothing.
    """
    BQ: tl.constexpr = BM // GP
    J: tl.constexpr = H // G  # query heads per kv head, padded to GP rows
    HEAD: tl.constexpr = S * K if FEW else K  # from a kv head to the next, and from a slot
    STRIDE: tl.constexpr = K if FEW else G * K
    g = tl.program_id(0)
    r = tl.program_id(1)
    split = tl.program_id(2)
    begin(PDL)
    start = tl.load(q_start_ptr + r)
    tokens = tl.load(q_start_ptr + r + 1) - start
    kv_len = tl.load(kv_len_ptr + r)
    wait(PDL)
    i = tl.arange(0, BM)
    d = tl.arange(0, KP)
    table = table_ptr + r.to(tl.int64) * N
    if (tokens <= limit) | (limit == 0):
        for first in range(0, tokens, BQ):
            line = (start + first + i // GP).to(tl.int64) * H + g * J + i % GP  # row of q and o, both [T * H, K]
            real = (first + i // GP < tokens) & (i % GP < J)
            mask = real[:, None] & (d < K)[None, :]
            head = g * J + tl.minimum(i % GP, J - 1)
            front = kv_len - tokens + first  # position of the first token, and behind that of the last
            back = tl.minimum(kv_len, front + BQ)
            position = front + i // GP
            begin_chunk = tl.maximum(front + 1 - WINDOW, 0) // CHUNK if WINDOW else 0
            seen, seen_by_all = limits(front, back, kv_len, CAUSAL, WINDOW)
            last = position
            if REACH:
                last, seen, seen_by_all = reach(last_ptr + start + first, tokens - first, position, i // GP)
            count = tl.cdiv(seen, CHUNK)
            if begin_chunk + split < count:
                q = tl.load(q_ptr + line[:, None] * K + d[None, :], mask=mask, other=0.0)
                home = tl.where(limit == 0, start + first, r * BQ)
                part = ((home + i // GP).to(tl.int64) * H + g * J + i % GP) * chunks
                m, sum, acc = nothing(BM, KP)
                for chunk in range(begin_chunk + split, count, tl.num_programs(2)):
                    m2, sum2, acc2 = attend_chunk(q, chunk * CHUNK, seen, seen_by_all, front, back, kv_len, position,
                                                  last, table, k_ptr + g * HEAD, v_ptr + g * HEAD, c, g, S, STRIDE, K,
                                                  KP, BM, CHUNK, BLOCK, CAUSAL, WINDOW, CAP, SCALE, FEW,
                                                  SHORT)  # fmt: skip
                    if SPLIT:
                        if count - begin_chunk == 1:
                            m, sum, acc = merge(m, sum, acc, m2, sum2, acc2, c, WINDOW)
                        else:
                            tl.store(m_part_ptr + part + chunk, m2, mask=real)
                            tl.store(sum_part_ptr + (part + chunk)[:, None], sum2, mask=real[:, None])
                            tl.store(acc_part_ptr + (part + chunk)[:, None] * KP + d[None, :], acc2,
                                     mask=real[:, None])  # fmt: skip
                    else:
                        m, sum, acc = merge(m, sum, acc, m2, sum2, acc2, c, WINDOW)
                if SPLIT:
                    if count - begin_chunk > 1:
                        tile = tl.where(limit == 0, start // BQ, 0) + r + first // BQ
                        slot = arrived_ptr + tile * G + g
                        tl.debug_barrier()  # every thread's stores stand before the arrival
                        programs = tl.minimum(count - begin_chunk, tl.num_programs(2))
                        if tl.atomic_add(slot, 1, sem="acq_rel", scope="gpu") == programs - 1:
                            tl.store(slot, 0)
                            merge_stored(m_part_ptr, sum_part_ptr, acc_part_ptr, part, begin_chunk, count, real,
                                         sink_ptr, head, o_ptr, line, mask, c, K, KP, BM, AHEAD, WINDOW,
                                         SINKS)  # fmt: skip
                if (not SPLIT) | (count - begin_chunk == 1):
                    store_rows(m, sum, acc, sink_ptr, head, o_ptr, line, mask, c, K, KP, SINKS)
    if (limit == 0) & (split == 0):
        for t in range(tl.load(q_start_ptr + R) + r, T, R):
            j = tl.arange(0, GP)
            at = ((t + j * 0).to(tl.int64) * H + g * J + j)[:, None] * K + d[None, :]
            zero = tl.zeros((GP, KP), o_ptr.dtype.element_ty)
            tl.store(o_ptr + at, zero, mask=(j < J)[:, None] & (d < K)[None, :])
