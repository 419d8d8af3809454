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

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fengine.errors import UnsupportedFeatureError
from fengine.ops import linear, linear_launch
from fengine.ops.ahead import launcher
from fengine.ops.cpu import contiguous, schedule
from fengine.ops.linear import Dense
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


def launch(
    x_TK: Tensor, packed: Tensor, n: int, bias_N: Tensor | None, exact: bool, a_SPRK: Tensor, b_SNR: Tensor,
    scale_SP: Tensor, rank_SP: Tensor, widths: Sequence[int], token_A: Tensor, start_S: Tensor,
) -> Tensor:  # fmt: skip
    """Runs the kernels."""
    stack, x_TK = Stack(a_SPRK, b_SNR, scale_SP, rank_SP, tuple(widths)), plain(x_TK)
    product = linear_launch.launch if exact else linear_launch.fast_launch
    if not len(x_TK):
        return product(x_TK, packed, n, bias_N, None)
    many = len(x_TK) > FEW_TOKENS and is_proved(x_TK, stack)
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


def on_cpu(
    x: Tensor, packed: Tensor, n: int, bias: Tensor | None, exact: bool, a: Tensor, b: Tensor, scale: Tensor,
    rank: Tensor, widths: Sequence[int], token: Tensor, start: Tensor,
) -> Tensor:  # fmt: skip
    y = linear.on_cpu(x, packed, n, bias, None)
    a, b, x = a.transpose(2, 3), b.transpose(1, 2), contiguous(x, "lora_linear's x")
    token, start = contiguous(token, "token", torch.int32), contiguous(start, "start", torch.int32)
    if any(t.dtype != torch.float32 or not t.is_contiguous() for t in (a[0], b[0])):
        raise UnsupportedFeatureError("on the CPU A and B of lora_linear must be float32, and lie as Stack says")
    _, parts, k, ranks = a.shape
    library, threads = schedule(token.shape[0] * ranks * (parts * k + n))
    library.fengine_lora_add(
        y.data_ptr(), x.data_ptr(), a.data_ptr(), b.data_ptr(), scale.data_ptr(), rank.data_ptr(),
        (ctypes.c_int64 * parts)(*widths), token.data_ptr(), start.data_ptr(), start.shape[0] - 1, n, k, parts, ranks,
        a.stride(0), b.stride(0), scale.stride(0), rank.stride(0), threads,
    )  # fmt: skip
    return y


_op = register(
    "lora_linear(Tensor x, Tensor packed, int n, Tensor? bias, bool exact, Tensor a, Tensor b, Tensor scale, "
    "Tensor rank, int[] widths, Tensor token, Tensor start) -> Tensor",
    launch, on_cpu, lambda x, packed, n, *_: x.new_empty((x.shape[0], n)),
)  # fmt: skip


class Adapted(NamedTuple):
    """A dense leaf whose tokens may have LoRA adapters: `base`, and the adapters of all slots."""

    base: Dense
    stack: Stack

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    x_group = 0

    def linear(
        self, x_TK: Tensor, bias_N: Tensor | None, adapters: Any, out_dtype: torch.dtype | None, exact: bool
    ) -> Tensor:
        """As `linear.linear`, with every token's adapter added. Pure. adapters: (token_A, start_S) or None. Slot s owns
        tokens token_A[start_S[s] : start_S[s + 1]], each token at most once; int32; what token_A holds behind
        start_S[-1] is not looked at."""
        if adapters is None:
            return self.base.linear(x_TK, bias_N, None, out_dtype, exact)
        return _op(x_TK, self.base.packed, self.base.n, bias_N, exact, *self.stack, *adapters)

    def gated(self, x_TK: Tensor, bias_N: Tensor | None, adapters: Any, exact: bool, act: str, group: int) -> Tensor:
        """As `linear.gated_linear`. Pure."""
        how = (x_TK, bias_N, adapters, exact, act, group)
        return self.base.gated(*how) if adapters is None else linear.in_two(self, *how)

    def plain(self, adapters: Any) -> Dense | None:
        """The base where no row has an adapter."""
        return self.base if adapters is None else None
