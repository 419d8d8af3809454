"""The LoRA op: its reference, the C kernel, and the promise that a token's bits are its own."""

import random

import pytest
import torch
from torch import Tensor

from fengine.ops import linear, lora
from fengine.ops.lora import Stack

Case = tuple[Tensor, Tensor, Stack, Tensor, Tensor]


def lora_case(
    tokens: int, k: int, widths: tuple[int, ...], padded: int, ranks: list[int], seed: int = 0, swapped: bool = True
) -> Case:
    """(y, x, stack, token_A, start_S); slot s has rank ranks[(s + part) % len] in each part. A sixth has no adapter."""
    draw = torch.Generator().manual_seed(seed)
    slots, n = 5, sum(widths)
    a, b = torch.zeros(slots, len(widths), padded, k), torch.zeros(slots, n, padded)
    rank = torch.tensor([[ranks[(s + p) % len(ranks)] for p in range(len(widths))] for s in range(slots)])
    for s in range(slots):
        for p, width in enumerate(widths):
            r, first = int(rank[s, p]), sum(widths[:p])
            a[s, p, :r] = torch.randn(r, k, generator=draw) * k**-0.5
            b[s, first : first + width, :r] = torch.randn(width, r, generator=draw)
    if swapped:  # as the CPU has them
        a, b = a.transpose(2, 3).contiguous().transpose(2, 3), b.transpose(1, 2).contiguous().transpose(1, 2)
    slot_T = torch.randint(0, slots + 1, (tokens,), generator=draw)
    token_A = torch.argsort(slot_T, stable=True)[: int((slot_T < slots).sum())].int()
    start_S = torch.searchsorted(slot_T[token_A.long()], torch.arange(slots + 1)).int()
    stack = Stack(a, b, torch.rand(slots, len(widths), generator=draw), rank.int(), widths)
    return torch.randn(tokens, n, generator=draw), torch.randn(tokens, k, generator=draw), stack, token_A, start_S


def layer(x: Tensor, stack: Stack, token_A: Tensor, start_S: Tensor, adapted: bool = True) -> Tensor:
    """A linear layer of random weights, the same for every x of a width, with its adapters or without."""
    n, draw = sum(stack.widths), torch.Generator().manual_seed(3)
    leaf = linear.pack(torch.randn(n, x.shape[1], generator=draw) * x.shape[1] ** -0.5)
    bias = torch.randn(n, generator=draw)
    if not adapted:
        return linear.linear(x, leaf, bias)
    return linear.linear(x, lora.Adapted(leaf, stack), bias, (token_A, start_S))


CASES = [(1, 7, (5,), 16, [3]), (37, 130, (40, 17, 33), 32, [16, 0, 32, 7]), (70, 64, (96, 96), 64, [64, 8, 1])]


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_computes_the_reference(case: tuple) -> None:
    _, x, stack, token_A, start_S = lora_case(*case)
    plain = layer(x, stack, token_A, start_S, adapted=False)
    want = plain.double()
    wide = Stack(*(t.double() if t.is_floating_point() else t for t in stack[:4]), stack.widths)  # type: ignore[arg-type]
    lora.reference(want, x.double(), wide, token_A, start_S)
    got = layer(x, stack, token_A, start_S)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    none = torch.ones(len(x), dtype=torch.bool)
    none[token_A.long()] = False
    assert torch.equal(got[none], plain[none])  # not touched


@pytest.mark.parametrize("threads", [1, 3])
def test_the_bits_of_a_token_are_its_own(threads: int) -> None:
    """Alone, among others, in another order, in another slot, with larger padding: the same bits."""
    _, x, stack, token_A, start_S = lora_case(53, 130, (40, 17, 33), 32, [16, 0, 32, 7], seed=1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        want = layer(x, stack, token_A, start_S)
        order = torch.tensor(random.Random(2).sample(range(len(x)), len(x)))
        place = torch.argsort(order).int()
        moved = torch.cat([place[part.long()] for part in token_A.split(start_S.diff().tolist())])
        got = layer(x[order].contiguous(), stack, moved, start_S)
        assert torch.equal(got, want[order])
    finally:
        torch.set_num_threads(before)
    padded = lora_case(53, 130, (40, 17, 33), 64, [16, 0, 32, 7], seed=1)
    padded[2].a_SPRK[..., :32, :], padded[2].b_SNR[..., :32] = stack.a_SPRK, stack.b_SNR
    assert torch.equal(layer(x, padded[2]._replace(scale_SP=stack.scale_SP), token_A, start_S), want)
    for at, token in enumerate(token_A.tolist()):
        slot = int((start_S <= at).sum()) - 1
        one = stack._replace(**{f: getattr(stack, f).roll(2, 0) for f in ("a_SPRK", "b_SNR", "scale_SP", "rank_SP")})
        alone = torch.zeros_like(start_S)
        alone[(slot + 2) % 5 + 1 :] = 1
        one = one._replace(a_SPRK=relaid(one.a_SPRK), b_SNR=relaid(one.b_SNR))
        got = layer(x[token : token + 1].clone(), one, torch.zeros(1).int(), alone)
        assert torch.equal(got[0], want[token])


def relaid(t: Tensor) -> Tensor:
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def test_opcheck() -> None:
    y, x, stack, token_A, start_S = lora_case(*CASES[1])
    torch.library.opcheck(torch.ops.fengine.lora_add_.default, (y, x, x, *stack, token_A, start_S))
