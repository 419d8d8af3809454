"""A linear layer under LoRA: y[t] = x[t] W^T + bias, plus scale * (x[t] A^T) B^T for tokens of rows with an adapter,
each with its own adapter's A and B.

Several linear layers may be fused into one of P parts, as q, k, v are: every part has its own A, B, rank and scale over
the same x, and its own columns of y. Tokens without an adapter are not touched.

Reduction tree: h = x A^T is summed over chunks of CHUNK inputs, each left to right from zero, the chunks' sums left to
right in fp32; h * scale is rounded to B's dtype (fp32 on the CPU, where h is instead four chains of fused multiply-adds
over k mod 4, added as (0 + 1) + (2 + 3)); h B^T is left to right over the rank from zero in fp32; y + that is rounded
once. Ranks are padded with zeros, which add nothing: a sum that began at +0 never is -0.

Schedules: few tokens give every chunk to a program of its own, many walk the chunks in one. The second is used where it
was proved equal (see proof.py). A program of a slot without tokens, or of a part that the adapter leaves alone, ends at
once; only what an adapter of the batch really has is read. In a CUDA graph x A^T runs beside x W^T, on a branch of its
own; otherwise in front of it, since a second stream would cost more launches than it saves.
"""
# pyright: reportInvalidTypeForm=false

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fengine.ops import linear
from fengine.ops.ahead import launcher
from fengine.ops.linear import Dense
from fengine.ops.proof import proofs
from fengine.ops.registration import begin, dependent_launch, plain, register, tl, triton, wait, wide

CHUNK = 2048  # inputs
RANKS = 16  # ranks are padded to a multiple


class Stack(NamedTuple):
    """The adapters of all slots for one fused linear layer; R is the padded largest rank, N all columns of y.

    In x's dtype. On CUDA a slot's a and b are contiguous; on the CPU, whose lanes run over ranks and over columns,
    their last two dimensions are swapped in memory.
    """

    a_SPRK: Tensor
    b_SNR: Tensor
    scale_SP: Tensor  # float32
    rank_SP: Tensor  # int32; 0: the adapter leaves this part alone
    widths: tuple[int, ...]  # columns of each part, at most three


def reference(y_TN: Tensor, x_TK: Tensor, stack: Stack, token_A: Tensor, start_S: Tensor) -> None:
    """The math. Modifies: y_TN."""
    for slot in range(len(start_S) - 1):
        token = token_A[int(start_S[slot]) : int(start_S[slot + 1])].long()
        x_AK, first = wide(x_TK[token]), 0
        for part, width in enumerate(stack.widths):
            columns, first = slice(first, first + width), first + width
            if stack.rank_SP[slot, part]:
                h_AR = x_AK @ stack.a_SPRK[slot, part].to(x_AK.dtype).T * stack.scale_SP[slot, part]
                h_AR = h_AR.to(stack.b_SNR.dtype).to(x_AK.dtype)
                delta_AN = h_AR @ stack.b_SNR[slot, columns].to(x_AK.dtype).T
                y_TN[token, columns] = (wide(y_TN[token, columns]) + delta_AN).to(y_TN.dtype)


@triton.jit
def find_block(start_ptr, slots, BM: tl.constexpr, SLOTS: tl.constexpr):
    """(slot, first, end) of this program's block of at most BM tokens of one slot; behind the last, slot >= `slots`."""
    block = tl.program_id(0)
    s = tl.arange(0, SLOTS)
    first = tl.load(start_ptr + s, mask=s < slots, other=0)
    end = tl.load(start_ptr + s + 1, mask=s < slots, other=0)
    blocks = (end - first + BM - 1) // BM
    behind = tl.cumsum(blocks, 0)
    slot = tl.sum((behind <= block).to(tl.int32), 0)
    mine = s == slot
    return (
        slot,
        tl.sum(tl.where(mine, first + (block - behind + blocks) * BM, 0), 0),
        tl.sum(tl.where(mine, end, 0), 0),
    )


@triton.jit(do_not_specialize=["T"])
def shrink_kernel(x_ptr, a_ptr, rank_ptr, token_ptr, start_ptr, h_ptr, T, K, slots, a_stride, rank_stride,
                  P: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BM: tl.constexpr,
                  BR: tl.constexpr, BK: tl.constexpr, SLOTS: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """h[chunk, i, part, r] of BM tokens and BR ranks: CHUNKS chunks of K, summed left to right, by each program."""
    slot, first, end = find_block(start_ptr, slots, BM, SLOTS)
    part = tl.program_id(1) // (R // BR)
    first_r = tl.program_id(1) % (R // BR) * BR
    rank = tl.load(rank_ptr + slot * rank_stride + part, mask=slot < slots, other=0)
    i = first + tl.arange(0, BM)
    token = tl.load(token_ptr + i, mask=i < end, other=0).to(tl.int64)
    r = first_r + tl.arange(0, BR)
    start = tl.program_id(2) * CHUNKS * CHUNK
    a_rows = a_ptr + slot.to(tl.int64) * a_stride + (part * R + r).to(tl.int64) * K + start
    if first_r >= rank:
        return
    k = start + tl.arange(0, BK)
    x_tile = x_ptr + token[:, None] * K + k[None, :]
    a_tile = a_rows[:, None] + tl.arange(0, BK)[None, :]
    total = tl.zeros((BM, BR), tl.float32)
    for _ in range(CHUNKS):
        acc = tl.zeros((BM, BR), tl.float32)
        for _ in range(0, CHUNK, BK):
            if EVEN:
                x = tl.load(x_tile, mask=(i < end)[:, None], other=0.0)
                a = tl.load(a_tile)
            else:
                x = tl.load(x_tile, mask=(i < end)[:, None] & (k < K)[None, :], other=0.0)
                a = tl.load(a_tile, mask=(k < K)[None, :], other=0.0)
            acc = tl.dot(x, a.T, acc, input_precision="ieee")
            x_tile += BK
            a_tile += BK
            k += BK
        total += acc
    h_tile = h_ptr + ((tl.program_id(2).to(tl.int64) * T + i[:, None]) * P + part) * R + r[None, :]
    tl.store(h_tile, total, mask=(i < end)[:, None])


@triton.jit(do_not_specialize=["T"])
def expand_kernel(y_ptr, h_ptr, b_ptr, scale_ptr, rank_ptr, token_ptr, start_ptr, T, N, slots, b_stride, scale_stride,
                  rank_stride, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
                  CHUNKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, SLOTS: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    """y += scale * h B^T for BM tokens and BN columns of one part; the parts have W0, W1 and W2 columns."""
    begin(PDL)
    slot, first, end = find_block(start_ptr, slots, BM, SLOTS)
    tile = tl.program_id(1)
    part = (tile >= tl.cdiv(W0, BN)).to(tl.int32) + (tile >= tl.cdiv(W0, BN) + tl.cdiv(W1, BN)).to(tl.int32)
    if part > 0:
        tile -= tl.cdiv(W0, BN)
    if part > 1:
        tile -= tl.cdiv(W1, BN)
    before = tl.where(part > 1, W0 + W1, tl.where(part > 0, W0, 0))
    width = tl.where(part > 1, W2, tl.where(part > 0, W1, W0))
    live = slot < slots
    rank = tl.load(rank_ptr + slot * rank_stride + part, mask=live, other=0)
    scale = tl.load(scale_ptr + slot * scale_stride + part, mask=live, other=0.0)
    i = first + tl.arange(0, BM)
    token = tl.load(token_ptr + i, mask=i < end, other=0).to(tl.int64)
    n = tile * BN + tl.arange(0, BN)
    r = tl.arange(0, BR)
    b_tile = b_ptr + slot.to(tl.int64) * b_stride + (before + n).to(tl.int64)[:, None] * R + r[None, :]
    inside = (n < width)[:, None]
    b = tl.load(b_tile, mask=inside & (r < rank)[None, :], other=0.0)
    wait(PDL)
    if rank == 0:
        return
    y_tile = y_ptr + token[:, None] * N + (before + n)[None, :]
    y_mask = (i < end)[:, None] & (n < width)[None, :]
    y = tl.load(y_tile, mask=y_mask, other=0.0).to(tl.float32)
    acc = tl.zeros((BM, BN), tl.float32)
    for block in tl.static_range(R // BR):
        h = tl.zeros((BM, BR), tl.float32)
        h_tile = h_ptr + (i.to(tl.int64)[:, None] * P + part) * R + block * BR + r[None, :]
        mask = (i < end)[:, None] & (block * BR + r < rank)[None, :]
        for chunk in tl.static_range(CHUNKS):
            h += tl.load(h_tile + tl.cast(chunk, tl.int64) * T * P * R, mask=mask, other=0.0)
        if block > 0:
            b = tl.load(b_tile + block * BR, mask=inside & (block * BR + r < rank)[None, :], other=0.0)
        acc = tl.dot((h * scale).to(b.dtype), b.T, acc, input_precision="ieee")
    tl.store(y_tile, (y + acc).to(y_ptr.dtype.element_ty), mask=y_mask)


class Schedule(NamedTuple):
    """How the tree is computed. `split`: each chunk of K by a program of its own."""

    split: bool
    block_m: int
    block_n: int
    block_k: int


FEW, MANY = Schedule(True, 16, 256, 128), Schedule(False, 64, 128, 64)
FLOAT32 = Schedule(True, 16, 64, 32)
FEW_TOKENS = 512


def shrink(x_TK: Tensor, stack: Stack, token_A: Tensor, start_S: Tensor, s: Schedule) -> Tensor:
    """x A^T of every token with an adapter, under schedule `s`: for `expand`. Pure."""
    a, b, _, rank, widths = stack
    (tokens, k), slots, parts, ranks = x_TK.shape, len(start_S) - 1, len(widths), b.shape[2]
    assert a[0].is_contiguous() and len(token_A) <= tokens
    chunks = triton.cdiv(k, CHUNK)
    stored = chunks if s.split else 1
    h = torch.empty(stored, tokens, parts, ranks, dtype=torch.float32, device=x_TK.device)
    launcher(shrink_kernel, (_blocks(tokens, slots, s), parts * ranks // RANKS, stored))(
        x_TK, a, rank, token_A, start_S, h, tokens, k, slots, a.stride(0), rank.stride(0), parts, ranks, CHUNK,
        1 if s.split else chunks, s.block_m, RANKS, s.block_k, triton.next_power_of_2(slots), k % CHUNK == 0,
        num_warps=2 if s.split else 4, num_stages=4,
    )  # fmt: skip
    return h


def expand(y_TN: Tensor, h: Tensor, stack: Stack, token_A: Tensor, start_S: Tensor, s: Schedule) -> None:
    """Adds scale * h B^T to every token with an adapter. Modifies: y_TN."""
    _, b, scale, rank, widths = stack
    (tokens, n), slots, ranks = y_TN.shape, len(start_S) - 1, b.shape[2]
    assert b[0].is_contiguous() and y_TN.is_contiguous()
    tiles = sum(triton.cdiv(width, s.block_n) for width in widths)
    launcher(expand_kernel, (_blocks(tokens, slots, s), tiles))(
        y_TN, h, b, scale, rank, token_A, start_S, tokens, n, slots, b.stride(0), scale.stride(0), rank.stride(0),
        *(*widths, 0, 0)[:3], len(widths), ranks, len(h), s.block_m, s.block_n, largest_tile(ranks),
        triton.next_power_of_2(slots), num_warps=4, **dependent_launch(y_TN.device.index),
    )  # fmt: skip


def _blocks(tokens: int, slots: int, s: Schedule) -> int:
    """Enough blocks of tokens, however they fall into slots. Pure."""
    return tokens // s.block_m + min(slots, tokens)


def largest_tile(ranks: int) -> int:
    """The largest power of two up to 64 that divides the padded rank. Pure."""
    return min(ranks & -ranks, 64)


def proved(x_TK: Tensor, stack: Stack) -> bool:
    """Whether MANY gives the bits of FEW for these shapes on this device; compared once, with random data."""
    if not x_TK.is_cuda:
        return False
    known = proofs(x_TK.device.index)
    key = f"lora {x_TK.dtype} {x_TK.shape[1]} {list(stack.widths)} {stack.b_SNR.shape[2]} {tuple(FEW)} {tuple(MANY)}"
    if torch.cuda.is_current_stream_capturing():  # no time to compare; warm-up has asked before
        return known.known.get(key, False)
    return known.holds(key, lambda: _compare(x_TK, stack))


def _compare(x_TK: Tensor, stack: Stack) -> bool:
    """Random tokens of two random adapters, one of the full rank, under both schedules."""
    device, dtype, k = x_TK.device, x_TK.dtype, x_TK.shape[1]
    ranks, parts, n, tokens = stack.b_SNR.shape[2], len(stack.widths), sum(stack.widths), 3 * FEW_TOKENS // 4
    generator = torch.Generator(device).manual_seed(ranks)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    a, b = normal(2, parts, ranks, k), normal(2, n, ranks)
    a[1, :, 1:], b[1, :, 1:] = 0, 0
    scale = torch.rand(2, parts, device=device, generator=generator)
    rank = torch.tensor([[ranks], [1]], dtype=torch.int32, device=device).expand(2, parts).contiguous()
    own, x_TK = Stack(a, b, scale, rank, stack.widths), normal(tokens, k)
    token_A = torch.randperm(tokens, device=device, generator=generator).int()
    start_S = torch.tensor([0, tokens // 2 + 5, tokens - 7], dtype=torch.int32, device=device)
    want_TN = normal(tokens, n)
    before_TN, got_TN = want_TN.clone(), want_TN.clone()
    for y_TN, s in ((want_TN, FEW), (got_TN, MANY)):
        expand(y_TN, shrink(x_TK, own, token_A, start_S, s), own, token_A, start_S, s)
    return torch.equal(got_TN, want_TN) and not torch.equal(want_TN, before_TN)


def launch(
    x_TK: Tensor, packed: Tensor, n: int, bias_N: Tensor | None, exact: bool, a_SPRK: Tensor, b_SNR: Tensor,
    scale_SP: Tensor, rank_SP: Tensor, widths: Sequence[int], token_A: Tensor, start_S: Tensor,
) -> Tensor:  # fmt: skip
    """Runs the kernels."""
    stack, x_TK = Stack(a_SPRK, b_SNR, scale_SP, rank_SP, tuple(widths)), plain(x_TK)
    product = linear.launch if exact else linear.fast_launch
    if not len(x_TK):
        return product(x_TK, packed, n, bias_N, None)
    many = len(x_TK) > FEW_TOKENS and proved(x_TK, stack)
    few = FLOAT32 if x_TK.dtype == torch.float32 else FEW
    s = MANY if many and few is FEW else few
    if torch.cuda.is_current_stream_capturing():
        here, beside = torch.cuda.current_stream(), side_stream(x_TK.device)
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            h = shrink(x_TK, stack, token_A, start_S, s)
        y_TN = product(x_TK, packed, n, bias_N, None)
        here.wait_stream(beside)
    else:
        h = shrink(x_TK, stack, token_A, start_S, s)
        y_TN = product(x_TK, packed, n, bias_N, None)
    expand(y_TN, h, stack, token_A, start_S, s)
    return y_TN


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """A second stream of `device`, the same for all calls."""
    return torch.cuda.Stream(device)


def fake(x_TK: Tensor, packed: Tensor, n: int, *rest: object) -> Tensor:
    return x_TK.new_empty((x_TK.shape[0], n))


_op = register(
    "lora_linear(Tensor x, Tensor packed, int n, Tensor? bias, bool exact, Tensor a, Tensor b, Tensor scale, "
    "Tensor rank, int[] widths, Tensor token, Tensor start) -> Tensor",
    launch, fake,
)  # fmt: skip


class Adapted(NamedTuple):
    """A dense leaf whose tokens may have LoRA adapters: `base`, and the adapters of all slots."""

    base: Dense
    stack: Stack

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    def linear(
        self, x_TK: Tensor, bias_N: Tensor | None, adapters: Any, out_dtype: torch.dtype | None, exact: bool
    ) -> Tensor:
        """As `linear.linear`, with every token's adapter added. Pure.

        adapters: (token_A, start_S) or None. Slot s owns tokens token_A[start_S[s] : start_S[s + 1]], each token at
        most once; int32; what token_A holds behind start_S[-1] is not looked at.
        """
        if adapters is None:
            return self.base.linear(x_TK, bias_N, None, out_dtype, exact)
        return _op(x_TK, self.base.packed, self.base.n, bias_N, exact, *self.stack, *adapters)

    def plain(self, adapters: Any) -> Dense | None:
        """The base where no row has an adapter."""
        return self.base if adapters is None else None
