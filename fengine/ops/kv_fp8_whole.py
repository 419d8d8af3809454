"""Keys and values in FP8 for a kernel that reads no codes: copies of what rows of many tokens see, in q's dtype.

How much that is, the device alone knows. So memory is bounded: rows are decoded one after another while there is room
for one's first page. In the tables of the others stands -1: `rest_kernel` of attention_many.py, slower, reads codes.
"""
# pyright: reportInvalidTypeForm=false

import torch
from torch import Tensor

from fengine.ops import kv_fp8
from fengine.ops.ahead import launcher
from fengine.ops.fp8_kernels import from_e4m3, power_of_two
from fengine.ops.registration import multiprocessors, tl, triton

MOST = 1 << 30  # bytes of keys and values, and of the last row what is behind them
CODES = 128 * 128  # that a program decodes at once


def room_of(q_THK: Tensor, k_PSGK: Tensor, most: int) -> int:
    """Pages in `most` bytes, or the first one. Pure."""
    return max(most // (4 * k_PSGK.shape[1] * k_PSGK.shape[2] * q_THK.shape[2]), 1)


def copies(q_THK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, q_start_B: Tensor, kv_len_R: Tensor, page_table_RN: Tensor,
           limit: int, most: int) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Keys, values and page table for rows of more than `limit` tokens; those given, where pages hold numbers."""
    if not kv_fp8.is_few(k_PSGK):
        return k_PSGK, v_PSGK, page_table_RN
    (size, groups), width, (rows, table_width) = k_PSGK.shape[1:3], q_THK.shape[2], page_table_RN.shape
    room = room_of(q_THK, k_PSGK, most)
    pages = min(max(1, min(rows, len(q_THK) // (limit + 1))) * table_width, room + table_width)
    k, v = (q_THK.new_empty((pages, size, groups, width)) for _ in "kv")
    padded = triton.next_power_of_2(width)
    lines = min(128, CODES // padded)
    parts = triton.cdiv(size * groups, lines)
    table = torch.full_like(page_table_RN, -1)
    launcher(whole_kernel, (parts * triton.cdiv(8 * multiprocessors(q_THK.device.index), parts),))(
        k_PSGK, v_PSGK, q_start_B, kv_len_R, page_table_RN, k, v, table, rows, table_width, limit, room, groups, width,
        padded, size, lines, num_warps=4,
    )  # fmt: skip
    return k, v, table


@triton.jit
def find_page(q_start_ptr, kv_len_ptr, n, R, limit, S: tl.constexpr, WIDTH: tl.constexpr):
    """(row, how many pages the rows before it have) of page n of all that rows of more than `limit` tokens see, one row
    after another; row R if there are not so many."""
    r = n * 0 + R
    before = n * 0
    first = n * 0
    base = 0
    while (base < R) & (r == R):
        i = base + tl.arange(0, WIDTH)
        tokens = tl.load(q_start_ptr + i + 1, mask=i < R, other=0) - tl.load(q_start_ptr + i, mask=i < R, other=0)
        pages = tl.where((i < R) & (tokens > limit), (tl.load(kv_len_ptr + i, mask=i < R, other=0) + S - 1) // S, 0)
        end = before + tl.cumsum(pages, 0)
        here = (end > n) & (end - pages <= n)
        found = tl.sum(tl.where(here, i + 1, 0), 0)
        if found > 0:
            r = found - 1
            first = tl.sum(tl.where(here, end - pages, 0), 0)
        before += tl.sum(pages, 0)
        base += WIDTH
    return r, first


@triton.jit
def decode_lines(few_ptr, whole_ptr, page, to, part, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
                 S: tl.constexpr, LINES: tl.constexpr):  # fmt: skip
    """LINES heads, slot after slot, from the page of codes to page `to` of numbers."""
    line = part * LINES + tl.arange(0, LINES)
    d = tl.arange(0, KP)
    inside = (line < S * G)[:, None] & (d < K)[None, :]
    at = line[:, None] * K + d[None, :]
    own = line % G * S + line // G
    few = few_ptr + page.to(tl.int64) * (S * G * (K + 1))
    code = tl.load(few + own[:, None] * K + d[None, :], mask=inside, other=0)
    exponent = tl.load(few + S * G * K + own, mask=line < S * G, other=0)
    x = from_e4m3(code, whole_ptr.dtype.element_ty).to(tl.float32) * power_of_two(exponent)[:, None]
    tl.store(whole_ptr + to.to(tl.int64) * (S * G * K) + at, x.to(whole_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["R", "N", "limit", "room"])
def whole_kernel(
    k_ptr, v_ptr, q_start_ptr, kv_len_ptr, table_ptr, k_out_ptr, v_out_ptr, table_out_ptr, R, N, limit, room,
    G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, S: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """What rows of more than `limit` tokens see, decoded, if their first page is one of the first `room` of all (see
    `find_page`): page n of all to page n, with their new tables."""
    PARTS: tl.constexpr = (S * G + LINES - 1) // LINES
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    n = pid // PARTS
    r, first = find_page(q_start_ptr, kv_len_ptr, n, R, limit, S, 512)
    while (r < R) & (first < room):
        page = tl.load(table_ptr + r * N + n - first)
        decode_lines(k_ptr, k_out_ptr, page, n, pid % PARTS, G, K, KP, S, LINES)
        decode_lines(v_ptr, v_out_ptr, page, n, pid % PARTS, G, K, KP, S, LINES)
        tl.store(table_out_ptr + r * N + n - first, n)
        n += programs // PARTS
        r, first = find_page(q_start_ptr, kv_len_ptr, n, R, limit, S, 512)
