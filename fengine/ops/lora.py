"""A linear layer under LoRA: y[t] = x[t] W^T + bias, plus scale * (x[t] A^T) B^T for tokens of rows with an adapter,
each with its own adapter's A and B. W is a leaf of any kind, with the tree of its kind; the adapter reads x as it was
before a product in FP8 rounds it.

Several linear layers may be fused into one of P parts, as q, k, v are: every part has its own A, B, rank and scale over
the same x, and its own columns of y. Tokens without an adapter are not touched.

Reduction tree: h = x A^T is summed over chunks of CHUNK inputs, each left to right from zero, the chunks' sums left to
right in fp32; h * scale is rounded to B's dtype (fp32 on the CPU, where h is instead four chains of fused multiply-adds
over k mod 4, added as (0 + 1) + (2 + 3)); h B^T is left to right over the rank from zero in fp32; y + that is rounded
once. Ranks are padded with zeros, which add nothing: a sum that began at +0 never is -0.

Schedules: few tokens give every chunk to a program of its own, many walk the chunks in one. The second is used where it
was proved equal (see proof.py). A program of a slot without tokens, or of a part that the adapter leaves alone, ends at
once; only what an adapter of the batch really has is read. In a CUDA graph x A^T (`lora_ahead`) runs beside x W^T, on a
branch of its own that `lora_add_` joins; otherwise in front of it, since a second stream would cost more launches than
it saves.
"""

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fengine.errors import UnsupportedFeatureError
from fengine.ops import linear
from fengine.ops.ahead import launcher
from fengine.ops.cpu import contiguous, integers, schedule
from fengine.ops.linear import Leaf
from fengine.ops.lora_kernels import expand_kernel, shrink_kernel
from fengine.ops.proof import proved
from fengine.ops.registration import dependent_launch, plain, register, triton, wide

CHUNK = 2048  # inputs
RANKS = 16  # ranks are padded to a multiple


class Stack(NamedTuple):
    """The adapters of all slots for one fused linear layer; R is the padded largest rank, N all columns of y. In x's
    dtype. On CUDA a slot's a and b are contiguous; on the CPU, whose lanes run over ranks and over columns, their last
    two dimensions are swapped in memory."""

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
    """x A^T of every token with an adapter, under schedule `s`: for `expand` under the same. Pure."""
    a, b, _, rank, widths = stack
    (tokens, k), slots, parts, ranks = x_TK.shape, len(start_S) - 1, len(widths), b.shape[2]
    assert a[0].is_contiguous() and len(token_A) <= tokens
    h = room(x_TK, a, b)
    stored = len(h) if s.split else 1
    launcher(shrink_kernel, (_blocks(tokens, slots, s), parts * ranks // RANKS, stored))(
        x_TK, a, rank, token_A, start_S, h, tokens, k, slots, a.stride(0), rank.stride(0), parts, ranks, CHUNK,
        len(h) // stored, s.block_m, RANKS, s.block_k, triton.next_power_of_2(slots), k % CHUNK == 0,
        num_warps=2 if s.split else 4, num_stages=4,
    )  # fmt: skip
    return h


def room(x_TK: Tensor, a_SPRK: Tensor, b_SNR: Tensor) -> Tensor:
    """An empty h: of each chunk, or where one program walks them all, their sum in the first. Pure."""
    chunks, parts, ranks = -(-a_SPRK.shape[3] // CHUNK), a_SPRK.shape[1], b_SNR.shape[2]
    return x_TK.new_empty((chunks, x_TK.shape[0], parts, ranks), dtype=torch.float32)


def expand(y_TN: Tensor, h: Tensor, stack: Stack, token_A: Tensor, start_S: Tensor, s: Schedule) -> None:
    """Adds scale * h B^T to every token with an adapter. Modifies: y_TN."""
    _, b, scale, rank, widths = stack
    (tokens, n), slots, ranks = y_TN.shape, len(start_S) - 1, b.shape[2]
    assert b[0].is_contiguous() and y_TN.is_contiguous()
    tiles = sum(triton.cdiv(width, s.block_n) for width in widths)
    launcher(expand_kernel, (_blocks(tokens, slots, s), tiles))(
        y_TN, h, b, scale, rank, token_A, start_S, tokens, n, slots, b.stride(0), scale.stride(0), rank.stride(0),
        *(*widths, 0, 0)[:3], len(widths), ranks, len(h) if s.split else 1, s.block_m, s.block_n, largest_tile(ranks),
        triton.next_power_of_2(slots), num_warps=4, **dependent_launch(y_TN.device.index),
    )  # fmt: skip


def _blocks(tokens: int, slots: int, s: Schedule) -> int:
    """Enough blocks of tokens, however they fall into slots. Pure."""
    return tokens // s.block_m + min(slots, tokens)


def largest_tile(ranks: int) -> int:
    """The largest power of two up to 64 that divides the padded rank. Pure."""
    return min(ranks & -ranks, 64)


def is_proved(x_TK: Tensor, stack: Stack) -> bool:
    """Whether MANY gives the bits of FEW for these shapes on this device; compared once, with random data."""
    key = f"lora {x_TK.dtype} {x_TK.shape[1]} {list(stack.widths)} {stack.b_SNR.shape[2]} {tuple(FEW)} {tuple(MANY)}"
    return x_TK.is_cuda and proved(x_TK.device, key, lambda: _compare(x_TK, stack))


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


def choose(x_TK: Tensor, stack: Stack) -> Schedule:
    """The schedule of these tokens: the fastest that is proved."""
    if x_TK.dtype == torch.float32:
        return FLOAT32
    return MANY if len(x_TK) > FEW_TOKENS and is_proved(x_TK, stack) else FEW


def ahead_launch(x: Tensor, *stack_and_adapters: Any) -> Tensor:
    """x A^T, in a CUDA graph on a branch of its own, which `add_launch` joins: h of `expand`."""
    *parts, token, start = stack_and_adapters
    stack, beside = Stack(*parts), nullcontext()
    if not len(x):
        return room(x, stack.a_SPRK, stack.b_SNR)
    if is_captured(x):
        stream = side_stream(x.device)
        stream.wait_stream(torch.cuda.current_stream())
        beside = torch.cuda.stream(stream)
    with beside:
        x = plain(x)
        return shrink(x, stack, token, start, choose(x, stack))


def add_launch(y: Tensor, x: Tensor, h: Tensor, *stack_and_adapters: Any) -> None:
    """Takes x, too, which so outlives the branch that reads it."""
    *parts, token, start = stack_and_adapters
    stack = Stack(*parts)
    if not len(x):
        return
    if is_captured(x):
        torch.cuda.current_stream().wait_stream(side_stream(x.device))
    expand(y, h, stack, token, start, choose(x, stack))


def is_captured(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def add_on_cpu(
    y: Tensor, x: Tensor, h: Tensor, a: Tensor, b: Tensor, scale: Tensor, rank: Tensor, widths: Sequence[int],
    token: Tensor, start: Tensor,
) -> None:  # fmt: skip
    a, b, x, n = a.transpose(2, 3), b.transpose(1, 2), contiguous(x, "lora_add's x"), y.shape[1]
    token, start = integers(token, "token"), integers(start, "start")
    if any(t.dtype != torch.float32 or not t.is_contiguous() for t in (a[0], b[0], y)):
        raise UnsupportedFeatureError("on the CPU A, B and y of lora_add must be float32, and lie as Stack says")
    _, parts, k, ranks = a.shape
    library, threads = schedule(token.shape[0] * ranks * (parts * k + n))
    library.fengine_lora_add(
        y.data_ptr(), x.data_ptr(), a.data_ptr(), b.data_ptr(), scale.data_ptr(), rank.data_ptr(),
        (ctypes.c_int64 * parts)(*widths), token.data_ptr(), start.data_ptr(), start.shape[0] - 1, n, k, parts, ranks,
        a.stride(0), b.stride(0), scale.stride(0), rank.stride(0), threads,
    )  # fmt: skip


def ahead_fake(x: Tensor, a: Tensor, b: Tensor, *_: Any) -> Tensor:
    return room(x, a, b)


REST = "Tensor a, Tensor b, Tensor scale, Tensor rank, int[] widths, Tensor token, Tensor start"
_ahead_op = register(f"lora_ahead(Tensor x, {REST}) -> Tensor", ahead_launch, ahead_fake, ahead_fake)
_add_op = register(f"lora_add_(Tensor(a!) y, Tensor x, Tensor h, {REST}) -> ()", add_launch, add_on_cpu)


class Adapted(NamedTuple):
    """A leaf whose tokens may have LoRA adapters: `base`, of any kind, and the adapters of all slots."""

    base: Leaf
    stack: Stack

    @property
    def x_group(self) -> int:
        return self.base.x_group

    def linear(
        self, x_TK: Any, bias_N: Tensor | None, adapters: Any, out_dtype: torch.dtype | None, exact: bool
    ) -> Tensor:
        """As `linear.linear`, with every token's adapter added, which reads x itself: no `e4m3.Rows`. Pure. adapters:
        (token_A, start_S) or None. Slot s owns tokens token_A[start_S[s] : start_S[s + 1]], each token at most once;
        int32; what token_A holds behind start_S[-1] is not looked at."""
        if adapters is None:
            return self.base.linear(x_TK, bias_N, None, out_dtype, exact)
        h = _ahead_op(x_TK, *self.stack, *adapters) if x_TK.is_cuda else x_TK  # a CPU has one kernel for both
        y_TN = self.base.linear(x_TK, bias_N, None, out_dtype, exact)
        _add_op(y_TN, x_TK, h, *self.stack, *adapters)
        return y_TN

    def gated(self, x_TK: Any, bias_N: Tensor | None, adapters: Any, exact: bool, act: str, group: int) -> Any:
        how = (x_TK, bias_N, adapters, exact, act, group)
        return self.base.gated(*how) if adapters is None else linear.in_two(self, *how)
