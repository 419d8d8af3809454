"""Attention of an image's patches to those of their window, from the product of their q, k and v.

    q, k, v = rope_kv_write(qkv);  o = attention(q, k, v), not causal

Reduction trees: those of rope.py and attention.py. Where each window fits one page, and so one block of keys, both are
one kernel, whose keys and values never see the memory; it is used where it was proved equal to the two (proof.py).
"""
# pyright: reportInvalidTypeForm=false

import math

import torch
from torch import Tensor

from fengine.ops import attention, rope
from fengine.ops.ahead import launcher
from fengine.ops.attention_kernels import SUMS, halved
from fengine.ops.proof import proved, same_bits
from fengine.ops.registration import begin, dependent_launch, plain, register, tl, triton, wait

BLOCK = 64  # patches of a window at most: the slots of a page


@triton.jit
def turned(row_ptr, angle_ptr, d, inside, K: tl.constexpr, ROPE: tl.constexpr):
    """[BLOCK, columns d] of a head's rows; with ROPE rotated and rounded, as by `rotated` of rope_kernels.py."""
    HALF: tl.constexpr = K // 2
    x = tl.load(row_ptr[:, None] + d[None, :], mask=inside[:, None], other=0.0)
    if ROPE:
        e = tl.where(d < HALF, d, d - HALF)  # eight columns in a row lie in one half
        e = tl.max_contiguous(tl.multiple_of(e, 8), 8)
        far = tl.where(d < HALF, d + HALF, d - HALF)
        far = tl.max_contiguous(tl.multiple_of(far, 8), 8)
        other = tl.load(row_ptr[:, None] + far[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        cos = tl.load(angle_ptr[:, None] + e[None, :], mask=inside[:, None], other=0.0)
        sin = tl.load(angle_ptr[:, None] + HALF + e[None, :], mask=inside[:, None], other=0.0)
        by = other * sin
        x = tl.fma(x.to(tl.float32), cos, tl.where((d < HALF)[None, :], -by, by)).to(x.dtype)
    return x


@triton.jit
def stored(o_ptr, acc, sum, inside):
    tl.store(o_ptr, (acc / sum).to(o_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def window_kernel(
    qkv_ptr, rope_ptr, start_ptr, o_ptr, c, H: tl.constexpr, K: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one window. A head is FIRST columns and REST more, each a power of two."""
    begin(PDL)
    window = tl.program_id(1)
    wait(PDL)
    start = tl.load(start_ptr + window)
    i = tl.arange(0, BLOCK)
    inside = i < tl.load(start_ptr + window + 1) - start
    line = (start + i).to(tl.int64)
    d1 = tl.arange(0, FIRST)
    d2 = FIRST + tl.arange(0, REST) if REST else d1
    angle = rope_ptr + line * K
    head = tl.program_id(0)
    q = qkv_ptr + line * (3 * H * K) + head * K
    o = o_ptr + line * (H * K) + head * K
    k = q + H * K
    v = k + H * K
    s = tl.dot(turned(q, angle, d1, inside, K, True), turned(k, angle, d1, inside, K, True).T,
               input_precision="ieee")  # fmt: skip
    if REST:
        s = tl.dot(turned(q, angle, d2, inside, K, True), turned(k, angle, d2, inside, K, True).T, s,
                   input_precision="ieee")  # fmt: skip
    s = tl.where(inside[None, :], s, float("-inf"))
    m = tl.max(s, 1)
    p = tl.exp2(tl.fma(s, c, (m * -c)[:, None]))
    sum = halved(halved(p, BLOCK, BLOCK, SUMS), BLOCK, SUMS, 1)
    x = turned(v, angle, d1, inside, K, False)
    weights = p.to(x.dtype)
    stored(o[:, None] + d1[None, :], tl.dot(weights, x, input_precision="ieee"), sum, inside)
    if REST:
        x = turned(v, angle, d2, inside, K, False)
        stored(o[:, None] + d2[None, :], tl.dot(weights, x, input_precision="ieee"), sum, inside)


def pieces(width: int) -> tuple[int, int]:
    """The columns of a head as two powers of two; the second may be 0. Pure."""
    first = 1 << (width.bit_length() - 1)
    return first, width - first


def usable(qkv_IC: Tensor, table_RN: Tensor, num_heads: int) -> bool:
    """Whether the kernel is written for these types and shapes. Pure."""
    first, rest = pieces(qkv_IC.shape[1] // (3 * num_heads))
    whole = rest & (rest - 1) == 0 and (rest == 0 or rest >= 16) and first >= 16 and (first + rest) % 16 == 0
    return whole and table_RN.shape[1] == 1 and qkv_IC.dtype in (torch.bfloat16, torch.float16)


def run(qkv_IC: Tensor, rope_IK: Tensor, start_B: Tensor, num_heads: int, scale: float) -> Tensor:
    """The one kernel. With four warps it gives other bits on an H200. Pure."""
    width = qkv_IC.shape[1] // (3 * num_heads)
    o_IHK = qkv_IC.new_empty(len(qkv_IC), num_heads, width)
    launcher(window_kernel, (num_heads, len(start_B) - 1))(
        qkv_IC, rope_IK, start_B, o_IHK, scale * math.log2(math.e), num_heads, width, *pieces(width), BLOCK,
        num_warps=8, num_stages=1, maxnreg=80, **dependent_launch(qkv_IC.device.index)
    )  # fmt: skip
    return o_IHK


def on_cpu(
    qkv: Tensor, rope_table: Tensor, pos: Tensor, slot: Tensor, start: Tensor, length: Tensor, table: Tensor,
    pages: int, num_heads: int, scale: float,
) -> Tensor:  # fmt: skip
    """In two ops, on any device."""
    width = qkv.shape[1] // (3 * num_heads)
    k_PSHK, v_PSHK = (qkv.new_empty(pages, BLOCK, num_heads, width) for _ in "kv")
    q_IHK, k_PSHK, v_PSHK = rope.rope_kv_write(qkv, rope_table, pos, slot, k_PSHK, v_PSHK, num_heads)
    return attention.attention(q_IHK, k_PSHK, v_PSHK, start, length, table, scale, causal=False)


def is_proved(qkv_IC: Tensor, num_heads: int, scale: float) -> bool:
    """Whether the kernel gives the bits of the two ops on this device; compared once, with windows of many lengths."""
    width = qkv_IC.shape[1] // (3 * num_heads)

    def compare() -> bool:
        generator = torch.Generator(qkv_IC.device).manual_seed(width)
        lengths = [BLOCK, 1, 36, 16, BLOCK, 63, 33] * 4
        rows, first = torch.arange(len(lengths)), torch.tensor([0, *lengths]).cumsum(0)
        slot = torch.cat([torch.arange(n) + BLOCK * r for r, n in enumerate(lengths)])
        where = (torch.arange(sum(lengths)), slot, first, torch.tensor(lengths), rows[:, None])
        pos_I, slot_I, start_B, length_R, table_RN = (x.int().to(qkv_IC.device) for x in where)
        shape = (sum(lengths), qkv_IC.shape[1])
        x_IC = torch.randn(shape, device=qkv_IC.device, generator=generator).to(qkv_IC.dtype)
        turn_IK = torch.randn(len(x_IC), width, device=qkv_IC.device, generator=generator)
        indices = (pos_I, slot_I, start_B, length_R, table_RN.contiguous(), len(lengths))
        want_IHK = on_cpu(x_IC, turn_IK, *indices, num_heads, scale)
        return same_bits(want_IHK, lambda: run(x_IC, turn_IK, start_B, num_heads, scale), True)

    return proved(qkv_IC.device, f"windows {qkv_IC.dtype} {num_heads}x{width}", compare)


def launch(
    qkv_IC: Tensor, rope_IK: Tensor, pos_I: Tensor, slot_I: Tensor, start_B: Tensor, length_R: Tensor,
    table_RN: Tensor, pages: int, num_heads: int, scale: float,
) -> Tensor:  # fmt: skip
    """In one kernel where it can be and is proved. Pure."""
    qkv_IC = plain(qkv_IC)
    if usable(qkv_IC, table_RN, num_heads) and is_proved(qkv_IC, num_heads, scale):
        return run(qkv_IC, rope_IK, start_B, num_heads, scale)
    return on_cpu(qkv_IC, rope_IK, pos_I, slot_I, start_B, length_R, table_RN, pages, num_heads, scale)


_op = register(
    "patch_attention", launch, on_cpu,
    lambda qkv, *rest: qkv.new_empty(len(qkv), rest[-2], qkv.shape[1] // (3 * rest[-2])),
)  # fmt: skip


def patch_attention(
    qkv_IC: Tensor, rope_IK: Tensor, pos_I: Tensor, slot_I: Tensor, start_B: Tensor, length_R: Tensor,
    table_RN: Tensor, pages: int, num_heads: int,
) -> Tensor:  # fmt: skip
    """Each patch's attention to all of its window's, as o_IHK in qkv's dtype. Pure.

    Patch i turns by row pos_I[i] = i of the rope's table; windows follow each other, in pages of 64 slots of their own.
    """
    scale = (qkv_IC.shape[1] // (3 * num_heads)) ** -0.5
    return _op(qkv_IC, rope_IK, pos_I, slot_I, start_B, length_R, table_RN, pages, num_heads, scale)
