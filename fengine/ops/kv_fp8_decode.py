"""From words of codes in shared memory to operands of mma.sync in registers, in Gluon: pages of kv_fp8.py.

A word of a key is what one thread gives one product of 16 columns, where the order of columns is free if queries have
the same. A word of values holds two columns of two keys; even and odd columns are operands of their own.
"""
# pyright: reportInvalidTypeForm=false

from typing import Any

from fengine.ops.fp8_kernels import decoding
from fengine.ops.registration import gl, gluon

PICKS = ("0xa280", "0xb391")  # (c0, c2) and (c1, c3)
OF_TWO = gl.constexpr(decoding(2, *PICKS))
OF_ONE = gl.constexpr(decoding(1, *PICKS))


def layouts(warps: int, block: int) -> tuple[Any, Any, Any]:
    """Of [16, 128] queries and [block, 32] words of keys, so that a thread has its parts of a product's sides; of
    [16, warps] largest scores, so that it has all of its rows. Pure."""
    rows, none, sharing = [[1, 0], [2, 0], [4, 0]], [0, 0], warps.bit_length() - 1
    queries = [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]]
    words = [[0, 4], [0, 8], [0, 16], *([8 * warps << n, 0] for n in range((block // (8 * warps)).bit_length() - 1))]
    maxima = [[8, 0], *([0, 1 << n] for n in range(sharing))]
    keys = [[8 << n, 0] for n in range(sharing)]
    return (
        gl.DistributedLinearLayout(queries, [[0, 4], [0, 8], *rows], [none] * sharing, [], [16, 128]),
        gl.DistributedLinearLayout(words, [[0, 1], [0, 2], *rows], keys, [], [block, 32]),
        gl.DistributedLinearLayout(maxima, [none, none, *rows], [none] * sharing, [], [16, warps]),
    )


@gluon.jit
def keys_of(words, OPERAND: gl.constexpr):
    """[BLOCK, 32] words of four codes -> [128, BLOCK] keys, columns permuted within groups of 16 as by `permuted`."""
    BLOCK: gl.constexpr = words.shape[0]
    PAIRS: gl.constexpr = (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16)
    a, b, c, d = gl.inline_asm_elementwise(OF_TWO, "=&r,=&r,=&r,=&r,r,r", [words], PAIRS, True, 2)
    k = gl.join(gl.join(a, b), gl.join(c, d)).reshape((BLOCK, 4, 2, 4, 2, 2))
    k = k.permute((1, 5, 4, 3, 2, 0)).reshape((128, BLOCK))
    return gl.convert_layout(k, OPERAND, assert_trivial=True)


@gluon.jit
def permuted(q, OPERAND: gl.constexpr):
    """[16, 128] queries in the order of columns that `keys_of` gives."""
    q = q.reshape((16, 8, 4, 2, 2)).permute((0, 1, 4, 2, 3)).reshape((16, 128))
    return gl.convert_layout(q, OPERAND, assert_trivial=True)


@gluon.jit
def power(exponent):
    return (exponent.to(gl.int32) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def values_of(pairs):
    """[BLOCK, 64] pairs of codes as the right side of a product -> even and odd columns of values, each such a side."""
    TWICE: gl.constexpr = (gl.bfloat16, gl.bfloat16)
    return gl.inline_asm_elementwise(OF_ONE, "=&r,=&r,r", [pairs], TWICE, True, 2)
