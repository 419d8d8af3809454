"""From words of int4_words.py in shared memory to the tensor cores' operand in registers, in Gluon.

A code masked out of its word is a bfloat16 without an exponent: code * 2^-133, or 16 times that. A multiplication by a
power of two less the zero is exact, and 2^-6 of it is what the scales were raised by. The scale has 11 bits, the high 8
in one bfloat16 and the rest in another: difference times rest is exact, and the fused multiply-add rounds once, as
quantized.py says.
"""
# pyright: reportInvalidTypeForm=false

from fengine.ops.registration import gl, gluon


def _decode() -> str:
    """Words $8 and $9 to eight pairs of bfloat16: (code - zero) / 64 times a scale that is high $10 + low $12."""
    lines = []
    for i in range(8):
        if i % 4 in (0, 2):
            lines.append(f"shr.b32 w, ${8 + i // 4}, {4 * (i % 4)};")
        mask, power = ("0x00f000f0", "q") if i % 2 else ("0x000f000f", "p")
        lines.append(f"and.b32 t, w, {mask}; fma.rn.bf16x2 ${i}, t, {power}, $14;")
        lines.append(f"mul.rn.bf16x2 t, ${i}, $12; fma.rn.bf16x2 ${i}, ${i}, $10, t;")
    return "{ .reg .b32 t, w, p, q; mov.b32 p, 0x7f007f00; mov.b32 q, 0x7d007d00; " + " ".join(lines) + " }"


DECODE = gl.constexpr(_decode())
DECODE_OPERANDS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 8))
SCALE = gl.constexpr(  # of a float32 whose low byte is the zero: pairs of its high bits, of the rest, of - zero / 64
    "{ .reg .b32 t, u; prmt.b32 $0, $3, 0, 0x3232; and.b32 t, $3, 0xffffe000; and.b32 u, $3, 0xffff0000;"
    " sub.rn.f32 t, t, u; prmt.b32 $1, t, 0, 0x3232; prmt.b32 t, $3, 0, 0x4040; mov.b32 u, 0xff00ff00;"
    " mul.rn.bf16x2 $2, t, u; }"
)
SCALE_OPERANDS = gl.constexpr("=&r,=&r,=&r,r")


@gluon.jit
def halves(t):
    """Words of the first and the last 64 columns."""
    return t.reshape((t.shape[0], 2, 4, 2, 2)).permute((0, 1, 2, 4, 3)).split()


@gluon.jit
def spread(scale, like):
    """[rows, 2] -> [rows, 2, 4, 2]"""
    scale, _ = gl.broadcast(scale[:, :, None], like)
    return halves(scale)[0]


@gluon.jit
def part_of(w_ring, s_ring, at, GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """(words of a chunk of one block a group, raw scales of its halves)"""
    WORDS: gl.constexpr = gl.BlockedLayout([1, 1, 4], [4, 2, 4], [4 * GROUPS, 1, 1], [2, 1, 0])
    UNITS: gl.constexpr = 128 // GROUP
    words = w_ring.index(at).load(gl.BlockedLayout([1, 4], [4, 8], [4 * GROUPS, 1], [1, 0]))
    first = s_ring.index(at * UNITS).load(gl.SliceLayout(2, WORDS))
    last = s_ring.index(at * UNITS + 1).load(gl.SliceLayout(2, WORDS)) if UNITS == 2 else first
    return gl.convert_layout(words.reshape((16 * GROUPS, 2, 16)), WORDS, assert_trivial=True), first, last


@gluon.jit
def fetch(w_ring, s_ring, at, GROUP: gl.constexpr, PARTS: gl.constexpr, GROUPS: gl.constexpr):
    """A chunk of two blocks a group, or twice that of one."""
    one = part_of(w_ring, s_ring, at * PARTS, GROUP, GROUPS)
    two = part_of(w_ring, s_ring, at * 2 + 1, GROUP, GROUPS) if PARTS == 2 else one
    return one, two


@gluon.jit
def decoded(part, HALF: gl.constexpr):
    """Eight tensors of pairs: 64 columns of 32 outputs."""
    PAIRS: gl.constexpr = (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
                           gl.bfloat16)  # fmt: skip
    words, first, last = part
    high, low, zero = gl.inline_asm_elementwise(SCALE, SCALE_OPERANDS, [last if HALF else first],
                                                (gl.int32, gl.int32, gl.int32), True, 1)  # fmt: skip
    return gl.inline_asm_elementwise(
        DECODE, DECODE_OPERANDS,
        [halves(words)[HALF], spread(high, words), spread(low, words), spread(zero, words)], PAIRS, True, 2
    )  # fmt: skip


@gluon.jit
def joined(o):
    """Pairs of four steps side by side."""
    return gl.join(gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3])), gl.join(gl.join(o[4], o[5]), gl.join(o[6], o[7])))


@gluon.jit
def operand(chunk, HALF: gl.constexpr, PARTS: gl.constexpr, like):
    """The left side of products with sums `like` these, [64 groups, 64]: rows r of one block, r + 8 of the next or
    anything."""
    t = joined(decoded(chunk[0], HALF))
    if PARTS == 2:
        t = gl.join(t, joined(decoded(chunk[1], HALF)))
    else:
        t = gl.join(t, gl.inline_asm_elementwise("", "=r,r", [t], gl.bfloat16, True, 2))
    WARPS: gl.constexpr = t.shape[0] // 4
    w = t.reshape((WARPS, 4, 2, 4, 2, 2, 2, 2, 2)).permute((0, 8, 1, 2, 7, 6, 5, 3, 4)).reshape((16 * WARPS, 64))
    return gl.convert_layout(w, gl.DotOperandLayout(0, like.type.layout, 2), assert_trivial=True)
