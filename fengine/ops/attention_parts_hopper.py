"""Parts of the kernels of attention of many tokens a row on NVIDIA Hopper: masks and weights of a block of scores, and
what becomes of the sums of a chunk."""
# pyright: reportInvalidTypeForm=false

from fengine.ops.registration import fence_async_shared, gl, gluon


@gluon.jit
def halved(x, WIDTH: gl.constexpr, LEFT: gl.constexpr):
    """[rows, WIDTH] -> [rows, LEFT], as `halved` of attention_kernels.py."""
    if WIDTH > LEFT:
        x = gl.sum(x.reshape((x.shape[0], 2, WIDTH // 2)), 1)
        x = halved(x, WIDTH // 2, LEFT)
    return x


@gluon.jit
def hide(s, start, position, seen_by_all, BLOCK: gl.constexpr, LAYOUT: gl.constexpr, WINDOW: gl.constexpr = 0,
         TOKENS: gl.constexpr = 1):  # fmt: skip
    """Scores of keys that a row does not see become -inf; the ends of the block tell whether there are any. TOKENS:
    positions from the first row's to the last one's."""
    edge = start + BLOCK > seen_by_all
    if WINDOW:
        edge = edge | (start + WINDOW < seen_by_all + TOKENS - 1)
    if edge:
        key = start + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LAYOUT))
        s = gl.where(key[None, :] <= position[:, None], s, float("-inf"))
        if WINDOW:
            s = gl.where(key[None, :] > (position - WINDOW)[:, None], s, float("-inf"))
    return s


@gluon.jit
def clear_unowned(values, start, kv_len, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """Zeros in the slots at kv_len and behind, whatever they held: 0 * NaN would be NaN. Both groups of warps do so,
    and none waits for the other: they write the same, and what is owned as it is."""
    x = values.load(LAYOUT)
    key = start + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LAYOUT))
    values.store(gl.where((key < kv_len)[:, None], x, 0.0))
    fence_async_shared()


@gluon.jit
def weights_of(s, m, c, none):
    """exp2(s * c - m * c), where m is the largest score, or any above -inf if all are hidden."""
    safe = gl.where(m == float("-inf"), 0.0, m)
    return gl.exp2(gl.fma(s, c + none, (safe * -c)[:, None] + none)), safe


@gluon.jit
def store_rows(o_ptr, o, WHO: gl.constexpr, line, left, part, H: gl.constexpr, K: gl.constexpr, PACK: gl.constexpr,
               LINES: gl.constexpr, FIRST: gl.constexpr = 0):  # fmt: skip
    """Columns FIRST and on of a group's rows."""
    i = WHO * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    d = FIRST + gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, LINES))
    at = (line + i // PACK).to(gl.int64) * H + part * PACK + i % PACK
    gl.store(o_ptr + at[:, None] * K + d[None, :], gl.convert_layout(o, LINES),
             mask=(i // PACK < left)[:, None] & (d < K)[None, :])  # fmt: skip


@gluon.jit
def with_sink(m, sum, sink, c):
    """(sums with a sink of each row merged last, what the row's numbers are to be multiplied by)."""
    sink = sink.to(gl.float32) * 1.4426950408889634
    top = gl.maximum(m * c, sink)
    kept = gl.exp2(gl.fma(m, c + gl.zeros_like(m), -top))
    return gl.fma(sum, kept, gl.exp2(sink - top)), kept


@gluon.jit
def end_chunk(acc2, a, b, sum, kept, parked_ptr, o_ptr, line, left, part, some, last, WHO: gl.constexpr,
              FIRST: gl.constexpr, H: gl.constexpr, K: gl.constexpr, PACK: gl.constexpr):  # fmt: skip
    """Joins sums [64, WIDTH] of a chunk, columns FIRST and on, to those parked of the chunks before, if there are
    `some`, and parks them again, or behind the last chunk stores the outcome. A few columns at a time: registers hold
    the sums of one chunk. Each number is parked and read by one thread."""
    WIDTH: gl.constexpr = acc2.shape[1]
    if WIDTH > 64:
        one, two = acc2.reshape((64, 2, WIDTH // 2)).permute((0, 2, 1)).split()
        end_chunk(one, a, b, sum, kept, parked_ptr, o_ptr, line, left, part, some, last, WHO, FIRST, H, K, PACK)
        end_chunk(two, a, b, sum, kept, parked_ptr, o_ptr, line, left, part, some, last, WHO, FIRST + WIDTH // 2, H, K,
                  PACK)  # fmt: skip
    else:
        OWN: gl.constexpr = acc2.type.layout
        ROW: gl.constexpr = gl.SliceLayout(1, OWN)
        i = WHO * 64 + gl.arange(0, 64, layout=ROW)
        d = FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, OWN))
        at = parked_ptr + (gl.program_id(0) * 128 + i)[:, None] * K + d[None, :]
        acc = gl.full([64, WIDTH], -0.0, gl.float32, OWN)
        if some:
            acc = gl.load(at)
        acc *= gl.convert_layout(a, ROW)[:, None]
        acc = gl.fma(acc2, gl.convert_layout(b, ROW)[:, None] + gl.zeros_like(acc2), acc)
        if last:
            o = acc * gl.convert_layout(kept, ROW)[:, None] / gl.convert_layout(sum, ROW)[:, None]
            store_rows(o_ptr, o.to(o_ptr.dtype.element_ty), WHO, line, left, part, H, K, PACK, OWN, FIRST)
        else:
            gl.store(at, acc)
