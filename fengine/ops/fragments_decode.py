"""From words of fragments.py to weights in registers, in Gluon: the rounding that quantized.py states, by exact steps.

int4: code + 128 and zero + 128 are bfloat16s whose bits are those of code and zero, and their difference is exact. The
scale has 11 bits, the high 8 in one bfloat16 and the rest in another: difference times rest is exact, and the fused
multiply-add rounds once. fp4: its three bits are a bfloat16 that is 2^126 times too small, the scale is as much larger.
"""
# pyright: reportInvalidTypeForm=false

from fengine.ops.registration import gl, gluon


def _int4() -> str:
    """Words $8 and $9 to eight pairs of bfloat16: code + 128, - (zero + 128), times a scale that is high + low."""
    lines = []
    for i in range(8):
        word, shift, row = f"${8 + i // 4}", 4 * (i % 4), 6 * (i // 2 % 2)
        lines.append(f"shr.b32 t, {word}, {shift}; lop3.b32 ${i}, t, 0x000f000f, c, 0xea;")
        lines.append(f"sub.rn.bf16x2 ${i}, ${i}, ${14 + row}; mul.rn.bf16x2 t, ${i}, ${12 + row};")
        lines.append(f"fma.rn.bf16x2 ${i}, ${i}, ${10 + row}, t;")
    return "{ .reg .b32 t, c; mov.b32 c, 0x43004300; " + " ".join(lines) + " }"


def _fp4() -> str:
    """Words $8 and $9 to eight pairs of bfloat16: numbers 2^126 times too small, times scales as much larger."""
    lines, bits = [], "0x81c081c0"
    for i in range(8):
        word, scale = f"${8 + i // 4}", 10 + 4 * (i // 2 % 2) + 2 * (i // 4)
        lines += [(
            f"and.b32 ${i}, {word}, {bits};",
            f"shl.b32 t, {word}, 6; and.b32 ${i}, t, {bits};",
            f"shf.r.wrap.b32 t, {word}, {word}, 4; and.b32 ${i}, t, {bits};",
            f"shf.l.wrap.b32 t, {word}, {word}, 10; and.b32 t, t, 0x81808180; shl.b32 u, {word}, 2;"
            f" lop3.b32 ${i}, u, 0x00400040, t, 0xea;",
        )[i % 4], f"mul.rn.bf16x2 ${i}, ${i}, ${scale};"]  # fmt: skip
    return "{ .reg .b32 t, u; " + " ".join(lines) + " }"


INT4 = gl.constexpr(_int4())
FP4 = gl.constexpr(_fp4())
INT4_OPERANDS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 14))
FP4_OPERANDS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 10))
SCALE = gl.constexpr(  # of a float32 whose low byte is the zero: pairs of its high bits, of the rest, of zero + 128
    "{ .reg .b32 t, u; prmt.b32 $0, $3, 0, 0x3232; and.b32 t, $3, 0xffffe000; and.b32 u, $3, 0xffff0000;"
    " sub.rn.f32 t, t, u; prmt.b32 $1, t, 0, 0x3232; prmt.b32 $2, $3, 0x43, 0x4040; }"
)
POWERS = gl.constexpr(  # of four exponents in a word: pairs of bfloat16
    "{ prmt.b32 $0, $4, 0, 0x4040; prmt.b32 $1, $4, 0, 0x4141; prmt.b32 $2, $4, 0, 0x4242;"
    " prmt.b32 $3, $4, 0, 0x4343; shl.b32 $0, $0, 7; shl.b32 $1, $1, 7; shl.b32 $2, $2, 7; shl.b32 $3, $3, 7; }"
)
POWERS_OPERANDS = gl.constexpr("=&r,=&r,=&r,=&r,r")
SCALE_OPERANDS = gl.constexpr("=&r,=&r,=&r,r")


@gluon.jit
def spread(scale, like):
    """[rows, 2] -> [rows, 2, 16]"""
    scale, _ = gl.broadcast(scale[:, :, None], like)
    return scale


@gluon.jit
def decoded(words, scales, FP: gl.constexpr, SUMS: gl.constexpr, PARTS: gl.constexpr):
    """The weights [64 PARTS, 64] of a chunk's words [16 PARTS, 2, 16], as the left side of a product."""
    PAIRS: gl.constexpr = (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
                           gl.bfloat16)  # fmt: skip
    if FP:
        a, b, c, d = scales
        o = gl.inline_asm_elementwise(
            FP4, FP4_OPERANDS, [words, spread(a, words), spread(b, words), spread(c, words), spread(d, words)], PAIRS,
            True, 2
        )  # fmt: skip
    else:
        a, b, c, d, e, f = scales
        o = gl.inline_asm_elementwise(
            INT4, INT4_OPERANDS, [words, spread(a, words), spread(b, words), spread(c, words), spread(d, words),
                                  spread(e, words), spread(f, words)], PAIRS, True, 2
        )  # fmt: skip
    low = gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3]))
    high = gl.join(gl.join(o[4], o[5]), gl.join(o[6], o[7]))
    w = gl.join(low, high).reshape((4 * PARTS, 4, 2, 4, 2, 2, 2, 2, 2)).permute((0, 7, 1, 2, 8, 4, 6, 3, 5))
    return gl.convert_layout(w.reshape((64 * PARTS, 64)), gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)


@gluon.jit
def scales_of(s_ring, at, FP: gl.constexpr, LAYOUT: gl.constexpr):
    """What `decoded` takes: of int4 for the rows 0-7 and 8-15 of each warp, of fp4 also for both halves of a chunk."""
    WORD: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    if FP:
        return gl.inline_asm_elementwise(POWERS, POWERS_OPERANDS, [s_ring.index(at).load(WORD)],
                                         (gl.int32, gl.int32, gl.int32, gl.int32), True, 1)  # fmt: skip
    else:
        a, b, c = gl.inline_asm_elementwise(SCALE, SCALE_OPERANDS, [s_ring.index(at).load(WORD)],
                                            (gl.int32, gl.int32, gl.int32), True, 1)  # fmt: skip
        d, e, f = gl.inline_asm_elementwise(SCALE, SCALE_OPERANDS, [s_ring.index(at + 1).load(WORD)],
                                            (gl.int32, gl.int32, gl.int32), True, 1)  # fmt: skip
        return a, b, c, d, e, f
