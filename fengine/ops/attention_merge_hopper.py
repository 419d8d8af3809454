"""How results of a row's chunks become its output, in Gluon, for the kernels of rows of few tokens: `merge`,
`store_rows` and `merge_stored` of attention_kernels.py, with threads that share a line of 16 rows."""
# pyright: reportInvalidTypeForm=false

from fengine.ops.registration import gl, gluon


@gluon.jit
def merge(m, sum, acc, m2, sum2, acc2, c, WINDOW: gl.constexpr):
    """As `merge` of attention_kernels.py: [rows] each, but acc."""
    m_new = gl.maximum(m, m2)
    safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    a = gl.exp2((m - safe) * c)
    b = gl.exp2((m2 - safe) * c)
    b_acc = b[:, None] + gl.zeros_like(acc)
    new_sum = gl.fma(sum2, b, sum * a)
    new_acc = gl.fma(acc2, b_acc, acc * a[:, None])
    if WINDOW:
        unseen = m2 == float("-inf")
        new_sum = gl.where(unseen, sum, new_sum)
        new_acc = gl.where(unseen[:, None], acc, new_acc)
    return m_new, new_sum, new_acc


@gluon.jit
def sinks_of(sink_ptr, head, SINKS: gl.constexpr):
    """The sinks of heads, if there are any: read early, as they are weights."""
    sink = head
    if SINKS:
        sink = gl.load(sink_ptr + head)
    return sink


@gluon.jit
def store_rows(m, sum, acc, sink, o_ptr, at, real, c, SINKS: gl.constexpr):
    """As `store_rows` of attention_kernels.py."""
    if SINKS:
        sink = sink.to(gl.float32) * 1.4426950408889634
        top = gl.maximum(m * c, sink)
        kept = gl.exp2(gl.fma(m, c + gl.zeros_like(m), -top))
        sum = gl.fma(sum, kept, gl.exp2(sink - top))
        acc = acc * kept[:, None]
    gl.store(o_ptr + at, (acc / sum[:, None]).to(o_ptr.dtype.element_ty), mask=real[:, None])


@gluon.jit
def merge_stored(m_part_ptr, sum_part_ptr, acc_part_ptr, home, begin_chunk, count, first_head, tokens, sink_ptr, o_ptr,
                 line, chunks, c, column, H: gl.constexpr, J: gl.constexpr, K: gl.constexpr, KV: gl.constexpr,
                 GP: gl.constexpr, MERGED: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr):  # fmt: skip
    """Merges the stored results of a tile's chunks, MERGED at a time, and stores the outcome: KV columns."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    i = gl.arange(0, 16, layout=gl.SliceLayout(1, LINES))
    d = column + gl.arange(0, KV, layout=gl.SliceLayout(0, LINES))
    real = (i // GP < tokens) & (i % GP < J)
    sink = sinks_of(sink_ptr, first_head + gl.minimum(i % GP, J - 1), SINKS)
    row = (i // GP).to(gl.int64) * H + first_head + i % GP
    part = (home * H + row) * chunks
    m = gl.full([16], float("-inf"), gl.float32, gl.SliceLayout(1, LINES))
    sum = gl.full([16], -0.0, gl.float32, gl.SliceLayout(1, LINES))
    acc = gl.full([16, KV], -0.0, gl.float32, LINES)
    for chunk in range(begin_chunk, count, MERGED):
        for ahead in gl.static_range(MERGED):
            more = real & (chunk + ahead < count)
            at = part + chunk + ahead
            m2 = gl.load(m_part_ptr + at, mask=more, other=float("-inf"), cache_modifier=".cg")
            sum2 = gl.load(sum_part_ptr + at, mask=more, other=0.0, cache_modifier=".cg")
            acc2 = gl.load(acc_part_ptr + at[:, None] * K + d[None, :], mask=more[:, None], other=0.0,
                           cache_modifier=".cg")  # fmt: skip
            m, sum, acc = merge(m, sum, acc, m2, sum2, acc2, c, WINDOW)
    store_rows(m, sum, acc, sink, o_ptr, (line * H + row)[:, None] * K + d[None, :], real, c, SINKS)
