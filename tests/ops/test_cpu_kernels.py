"""The C kernels: right to rounding against float64, and with bits that depend on nothing but a row's own inputs."""

import contextlib
import ctypes
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fengine.errors import OutOfMemoryError, UnsupportedFeatureError
from fengine.ops import activations, attention, cpu, linear, logprobs, lora, rms_norm, rope, sampling
from fengine.ops.linear import pack as pack_leaf

WEIGHTS = [torch.float32, torch.bfloat16, torch.float16]
ALWAYS_PARALLEL = 0
EVERY_BLOCK_IS_MAPPED = "MALLOC_MMAP_THRESHOLD_"  # glibc's: a block of more bytes goes back when it is freed


@pytest.fixture(autouse=True)
def one_seed() -> None:
    torch.manual_seed(0)


THREADS = (1, 3)


@pytest.fixture(params=THREADS)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """That many threads, also for the smallest call."""
    before = torch.get_num_threads()
    monkeypatch.setattr(cpu, "SHORT", ALWAYS_PARALLEL)
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def set_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """For a test that goes through THREADS itself, since its oracle takes longer than the kernels."""
    before = torch.get_num_threads()
    monkeypatch.setattr(cpu, "SHORT", ALWAYS_PARALLEL)
    yield torch.set_num_threads
    torch.set_num_threads(before)


def pack(w: torch.Tensor) -> torch.Tensor:
    return pack_leaf(w).packed


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Also tells -0 from +0, and takes equal NaNs for equal."""
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


# -- linear ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize("k", [1, 15, 96, 257])
@pytest.mark.parametrize("n", [1, 31, 32, 95, 320])
def test_linear_is_the_product(threads: int, dtype: torch.dtype, n: int, k: int) -> None:
    for m in (1, 2, 5, 12, 13, 40):
        x, w, bias = torch.randn(m, k), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
        exact = x.double() @ w.double().T
        torch.testing.assert_close(
            linear.on_cpu(x, pack(w), n, None, None).double(), exact, rtol=1e-5, atol=1e-5 * k**0.5
        )
        with_bias = linear.on_cpu(x, pack(w), n, bias, None).double()
        torch.testing.assert_close(with_bias, exact + bias.double(), rtol=1e-5, atol=1e-5 * k**0.5)


def chain(x_K: Tensor, w_K: Tensor, fused: bool) -> float:
    """The declared tree, step by step: a product of floats is exact in double; one rounding if fused, else two."""
    total = 0.0
    for a, b in zip(x_K.tolist(), w_K.tolist(), strict=True):
        total = float(np.float32((a * b if fused else float(np.float32(a * b))) + total))
    return total


def test_linear_is_one_chain_from_left_to_right() -> None:
    x, w, bias = torch.randn(3, 200), torch.randn(40, 200), torch.randn(40)
    y = linear.on_cpu(x, pack(w), 40, None, None)
    fused, split = (torch.tensor([[chain(r, c, fused) for c in w] for r in x]) for fused in (True, False))
    assert same_bits(y, fused) or same_bits(y, split)  # the second on CPUs without fused multiply-add
    assert same_bits(linear.on_cpu(x, pack(w), 40, bias, None), y + bias)


@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize("k", [37, 1024])
def test_linear_row_alone_has_the_bits_of_the_batch(threads: int, dtype: torch.dtype, k: int) -> None:
    n = 290
    x, w, bias = torch.randn(100, k), pack(torch.randn(n, k).to(dtype)), torch.randn(n)
    alone = torch.cat([linear.on_cpu(x[i : i + 1], w, n, bias, None) for i in range(100)])
    for m in (*range(1, 34), 64, 100):
        assert same_bits(linear.on_cpu(x[:m], w, n, bias, None), alone[:m]), m
    assert same_bits(linear.on_cpu(x[50:], w, n, bias, None), alone[50:])


def test_negative_control_a_split_sum_is_seen() -> None:
    x, w = torch.randn(4, 256), torch.randn(64, 256)
    whole = linear.on_cpu(x, pack(w), 64, None, None)
    left, right = (linear.on_cpu(x[:, s], pack(w[:, s]), 64, None, None) for s in (slice(0, 128), slice(128, 256)))
    torch.testing.assert_close(left + right, whole, rtol=1e-4, atol=1e-4)
    assert not same_bits(left + right, whole)


def test_linear_takes_what_it_is_given() -> None:
    w = pack(torch.randn(8, 6))
    assert linear.on_cpu(torch.empty(0, 6), w, 8, None, None).shape == (0, 8)
    assert linear.on_cpu(torch.randn(3, 6), w, 8, None, torch.bfloat16).dtype == torch.bfloat16
    strided = torch.randn(6, 3).T
    assert same_bits(linear.on_cpu(strided, w, 8, None, None), linear.on_cpu(strided.contiguous(), w, 8, None, None))
    with pytest.raises(UnsupportedFeatureError, match="bfloat16"):
        linear.on_cpu(torch.randn(3, 6).bfloat16(), w, 8, None, None)
    with pytest.raises(UnsupportedFeatureError, match="int8"):
        linear.on_cpu(torch.randn(3, 6), w.to(torch.int8), 8, None, None)


def test_every_half_is_widened_exactly() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
        every = every[every.float().isfinite()]
        y = linear.on_cpu(torch.ones(1, 1), pack(every[:, None]), len(every), None, None)[0]
        assert torch.equal(y, every.float())


# -- norms, rope, silu -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize("d", [1, 16, 64, 77, 896])
def test_norms(threads: int, dtype: torch.dtype, d: int) -> None:
    x, residual, weight = torch.randn(70, d) * 3, torch.randn(70, d), torch.randn(d).to(dtype)

    def norm(x: Tensor) -> Tensor:
        return weight.double() * x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)

    y = rms_norm.on_cpu(x, weight, 1e-6)
    torch.testing.assert_close(y.double(), norm(x), rtol=2e-6, atol=1e-6)
    summed, total = rms_norm.add_on_cpu(x, residual, weight, 1e-6)
    assert same_bits(total, residual + x)
    assert same_bits(summed, rms_norm.on_cpu(residual + x, weight, 1e-6))
    for i in range(0, 70, 7):
        assert same_bits(rms_norm.on_cpu(x[i : i + 1], weight, 1e-6), y[i : i + 1])
    assert rms_norm.on_cpu(x[:0], weight, 1e-6).shape == (0, d)
    table, index = torch.randn(45, d).to(dtype), torch.randint(0, 45, (70,), dtype=torch.int32)
    normed, rows = rms_norm.rows_rms_norm(pack(table), index, weight, 1e-6)
    assert same_bits(rows, table[index].float()) and same_bits(normed, rms_norm.on_cpu(rows, weight, 1e-6))


@pytest.mark.parametrize("f", [1, 16, 19, 768])
def test_silu_mul(threads: int, f: int) -> None:
    x = torch.cat([torch.randn(40, 2 * f) * 4, torch.full((1, 2 * f), -200.0), torch.full((1, 2 * f), 200.0)])
    y = activations.on_cpu(x)
    exact = torch.nn.functional.silu(x[:, :f].double()) * x[:, f:].double()
    torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=1e-30)
    assert same_bits(torch.cat([activations.on_cpu(x[i : i + 1]) for i in range(42)]), y)
    assert same_bits(
        activations.on_cpu(x[:, [f - 1, 2 * f - 1]]), y[:, -1:]
    )  # the place within a vector does not matter
    assert activations.on_cpu(torch.tensor([[math.nan, 1.0]])).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "n", "k"), [(0, 5, 3), (1, 33, 70), (17, 96, 64), (70, 9000, 5)])
def test_the_gated_product_has_the_bits_of_its_parts(
    threads: int, dtype: torch.dtype, rows: int, n: int, k: int
) -> None:
    """Also where gate and up are large."""
    x, packed, bias = torch.randn(rows, k), pack(torch.randn(2 * n, k).to(dtype)), torch.randn(2 * n)
    for added in (None, bias):
        want = activations.on_cpu(linear.on_cpu(x, packed, 2 * n, added, None))
        assert same_bits(linear.gated_on_cpu(x, packed, n, added), want)


@pytest.mark.parametrize(("heads", "groups", "width"), [(1, 1, 2), (4, 2, 16), (7, 1, 64), (6, 3, 80), (3, 3, 10)])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_kv_write(threads: int, heads: int, groups: int, width: int, normed: bool) -> None:
    tokens, size = 23, 4
    qkv, half = torch.randn(tokens, (heads + 2 * groups) * width), width // 2
    angle = torch.randn(50, half)
    table = torch.cat([angle.cos(), angle.sin()], 1)
    pos, slot = torch.randint(0, 50, (tokens,)).int(), (torch.randperm(36)[:tokens] + size).int()
    norms = [torch.randn(width).bfloat16() for _ in range(2)] if normed else [None, None]
    k, v = torch.full((10, size, groups, width), math.nan), torch.full((10, size, groups, width), math.nan)
    q = rope.on_cpu(qkv, table, pos, slot, k, v, heads, norms[0], norms[1], 1e-6)

    def rotated(x: Tensor, norm: Tensor | None) -> Tensor:
        x = x if norm is None else rms_norm.on_cpu(x.contiguous(), norm, 1e-6)
        c, s = table[pos.long()][:, None, :half], table[pos.long()][:, None, half:]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    parts = qkv.reshape(tokens, -1, width).split([heads, groups, groups], 1)
    assert same_bits(q, rotated(parts[0], norms[0]))
    flat_k, flat_v = k.reshape(-1, groups, width), v.reshape(-1, groups, width)
    assert same_bits(flat_k[slot.long()], rotated(parts[1], norms[1]))
    assert same_bits(flat_v[slot.long()], parts[2].contiguous())
    others = torch.ones(40, dtype=torch.bool)
    others[slot.long()] = False
    assert flat_k[others].isnan().all() and flat_v[others].isnan().all()


# -- attention ---------------------------------------------------------------------------------------------------------


class Past:
    """Rows of given lengths with keys and values in shuffled pages; every slot that no row owns holds `filler`."""

    def __init__(
        self, lengths: list[int], heads: int, groups: int, width: int, size: int,
        causal: bool = True, window: int = 0, cap: float = 0.0, sinks: bool = False,
        images: Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        self.sinks, self.images = torch.randn(heads) * 3 if sinks else None, images
        self.lengths, self.scale, self.causal, self.window, self.cap = lengths, width**-0.5, causal, window, cap
        self.q = [torch.randn(n, heads, width) for n in lengths]
        self.k = [torch.randn(n, groups, width) for n in lengths]
        self.v = [torch.randn(n, groups, width) for n in lengths]
        counts = [-(-n // size) for n in lengths]
        order = (torch.randperm(sum(counts)) + 1).int().split(counts)
        self.shape = (sum(counts) + 1, size, groups, width)
        self.table = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
        for r, pages in enumerate(order):
            self.table[r, : len(pages)] = pages

    def pages(self, filler: float) -> tuple[Tensor, Tensor]:
        size = self.shape[1]
        out = torch.full(self.shape, filler), torch.full(self.shape, filler)
        for r, n in enumerate(self.lengths):
            at = self.table[r].repeat_interleave(size)[:n] * size + torch.arange(n) % size
            out[0].reshape(-1, *self.shape[2:])[at], out[1].reshape(-1, *self.shape[2:])[at] = self.k[r], self.v[r]
        return out

    def attend(self, spans: list[tuple[int, int, int]], filler: float = math.nan, padding: int = 0) -> list[Tensor]:
        """Output of tokens begin .. end-1 of row r, for each (r, begin, end), all in one call."""
        q = torch.cat([self.q[r][b:e] for r, b, e in spans] + [torch.randn(padding, *self.q[0].shape[1:])])
        counts = [e - b for _, b, e in spans]
        start = torch.tensor([0, *counts]).cumsum(0).int()
        ends = torch.tensor([e if self.causal else self.lengths[r] for r, _, e in spans]).int()
        table = self.table[[r for r, _, _ in spans]]
        last = torch.cat([self.last(r)[b:e] for r, b, e in spans]).int() if self.images else None
        o = attention.on_cpu(
            q, *self.pages(filler), start, ends, table, self.scale, self.causal, self.window, self.cap, self.sinks, last
        )
        assert (o[sum(counts) :] == 0).all() and len(o) == sum(counts) + padding
        return list(o[: sum(counts)].split(counts))

    def last(self, r: int) -> Tensor:
        """The last key of each token: an image's tokens see each other."""
        found = torch.arange(self.lengths[r])
        for begin, end in self.images:
            found[begin:end] = min(end, len(found)) - 1
        return found

    def exact(self, r: int) -> Tensor:
        share = self.q[r].shape[1] // self.k[r].shape[1]
        k, v = (x.double().repeat_interleave(share, 1) for x in (self.k[r], self.v[r]))
        score = torch.einsum("nhk,mhk->hnm", self.q[r].double(), k) * self.scale
        if self.cap:
            score = self.cap * torch.tanh(score / self.cap)
        behind = (torch.arange(score.shape[2]) > self.last(r)[:, None]) & self.causal
        if self.window:
            behind |= torch.ones(score.shape[1:], dtype=torch.bool).tril(-self.window)
            behind |= torch.ones(score.shape[1:], dtype=torch.bool).triu(self.window)
        score = score.masked_fill(behind, -math.inf)
        if self.sinks is not None:
            score = torch.cat((score, self.sinks.double()[:, None, None].expand(-1, score.shape[1], 1)), -1)
        return torch.einsum("hnm,mhk->nhk", score.softmax(-1)[..., : len(v)], v)


SHAPES = [(1, 1, 8, 1), (4, 4, 16, 4), (4, 2, 80, 16), (8, 2, 20, 4), (7, 1, 64, 16), (14, 2, 64, 16), (12, 3, 128, 1)]


@pytest.mark.parametrize(("heads", "groups", "width", "size"), SHAPES)
def test_attention_is_softmax(threads: int, heads: int, groups: int, width: int, size: int) -> None:
    past = Past([5, 1, 40, 16, 33, 70], heads, groups, width, size)
    whole = past.attend([(r, 0, n) for r, n in enumerate(past.lengths)], padding=3)
    for r, o in enumerate(whole):
        torch.testing.assert_close(o.double(), past.exact(r), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "groups", "width", "size"), [(1, 1, 8, 1), (8, 2, 20, 4), (14, 2, 64, 16)])
def test_attention_has_the_bits_of_decoding_alone(threads: int, heads: int, groups: int, width: int, size: int) -> None:
    past = Past([1200, 530, 47], heads, groups, width, size)
    whole = past.attend([(r, 0, n) for r, n in enumerate(past.lengths)])
    for r, n in enumerate(past.lengths):
        for t in {0, 1, 14, 15, 16, 17, n // 2, *(x for x in (511, 512, 513, 1023, 1024, 1025) if x < n), n - 1}:
            assert same_bits(past.attend([(r, t, t + 1)])[0], whole[r][t : t + 1]), (r, t)
    chunks = past.attend([(0, 700, 1111), (2, 3, 29), (1, 500, 530)])
    for (r, b, e), o in zip([(0, 700, 1111), (2, 3, 29), (1, 500, 530)], chunks, strict=True):
        assert same_bits(o, whole[r][b:e])


BOUNDS: list[dict[str, Any]] = [
    {"window": 1}, {"window": 32}, {"window": 33}, {"window": 500}, {"cap": 2.0}, {"window": 45, "cap": 5.0},
    {"causal": False}, {"causal": False, "cap": 1.5}, {"sinks": True}, {"window": 128, "sinks": True},
    {"causal": False, "window": 65}, {"causal": False, "window": 600, "sinks": True},
]  # fmt: skip


@pytest.mark.parametrize(("heads", "groups", "width", "size"), [(1, 1, 8, 1), (8, 2, 20, 4), (7, 1, 64, 16)])
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_bounded_attention(
    set_threads: Callable[[int], None], heads: int, groups: int, width: int, size: int, bounds: dict[str, Any]
) -> None:
    """Against the definition; and a token's bits do not know in which call, span or chunk it is computed."""
    past = Past([1200, 530, 47, 1], heads, groups, width, size, **bounds)
    exact = [past.exact(r) for r in range(4)]
    for threads in THREADS:
        set_threads(threads)
        whole = past.attend([(r, 0, n) for r, n in enumerate(past.lengths)], padding=2)
        for o, want in zip(whole, exact, strict=True):
            torch.testing.assert_close(o.double(), want, rtol=2e-5, atol=2e-5)
        if not past.causal:  # a row is one call, but not its neighbours
            assert same_bits(past.attend([(1, 0, 530)])[0], whole[1])
            continue
        for r, n in enumerate(past.lengths):
            for t in {0, n // 2, *(x for x in (31, 32, 511, 512, 513, 544, 599, 600, 1024, 1111) if x < n), n - 1}:
                assert same_bits(past.attend([(r, t, t + 1)])[0], whole[r][t : t + 1]), (threads, r, t)
        spans = [(0, 700, 1111), (2, 3, 29), (1, 500, 530), (0, 1111, 1190)]
        for (r, b, e), o in zip(spans, past.attend(spans), strict=True):
            assert same_bits(o, whole[r][b:e]), threads


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize(("heads", "groups", "width", "size"), [(8, 2, 20, 4), (7, 1, 64, 16)])
def test_tokens_that_see_each_other(
    set_threads: Callable[[int], None], heads: int, groups: int, width: int, size: int, window: int
) -> None:
    """A token sees up to its last key, and its bits do not know where the call begins, or ends behind that key."""
    past = Past([1200, 530, 47], heads, groups, width, size, window=window, images=[(30, 47), (500, 530), (1000, 1060)])
    exact = [past.exact(r) for r in range(3)]
    spans = [(0, 511, 530), (1, 3, 500), (1, 500, 530), (0, 530, 1060), (2, 40, 47), (0, 1059, 1060), (0, 1060, 1061)]
    for threads in THREADS:
        set_threads(threads)
        whole = past.attend([(r, 0, n) for r, n in enumerate(past.lengths)], padding=2)
        for o, want in zip(whole, exact, strict=True):
            torch.testing.assert_close(o.double(), want, rtol=2e-5, atol=2e-5)
        for (r, b, e), o in zip(spans, past.attend(spans), strict=True):
            assert same_bits(o, whole[r][b:e]), threads
        cut = past.attend([(0, 500, 512)])[0][:1]
        assert not same_bits(cut, whole[0][500:501])  # an image that is cut has other bits


@pytest.mark.parametrize(("heads", "groups", "width", "size"), SHAPES)
def test_attention_never_sees_slots_that_the_row_does_not_own(heads: int, groups: int, width: int, size: int) -> None:
    past = Past([5, 1, 40, 17], heads, groups, width, size)
    rows = [(r, max(0, n - 3), n) for r, n in enumerate(past.lengths)]
    clean = torch.cat(past.attend(rows, 0.0))
    assert clean.isfinite().all()
    for filler in (math.nan, 1e30, -math.inf):
        assert same_bits(torch.cat(past.attend(rows, filler)), clean)
    past.k[2][-1] = past.v[2][-1] = math.nan  # a row's own future is out of sight too
    earlier = past.attend([(2, 30, 40)])[0]
    assert earlier[:-1].isfinite().all() and earlier[-1].isnan().all()


def test_attention_without_rows_or_tokens() -> None:
    k = torch.zeros(2, 4, 1, 8)
    none, table = torch.zeros(0, dtype=torch.int32), torch.zeros(0, 3, dtype=torch.int32)
    start = torch.zeros(1, dtype=torch.int32)
    assert (attention.on_cpu(torch.randn(3, 2, 8), k, k, start, none, table, 1.0) == 0).all()
    assert attention.on_cpu(torch.randn(0, 2, 8), k, k, start, none, table, 1.0).shape == (0, 2, 8)
    two = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    assert (attention.on_cpu(torch.randn(3, 2, 8), k, k, *two, 1.0) == 0).all()


# -- sampling ----------------------------------------------------------------------------------------------------------


def draw(logits: Tensor, temperature: float = 1.0, top_k: int = 1 << 30, top_p: float = 1.0, min_p: float = 0.0,
         seed: Tensor | None = None, pos: Tensor | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows = len(logits)
    return sampling.draw(
        logits, torch.full((rows,), temperature), torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p), torch.full((rows,), min_p), torch.arange(rows) if seed is None else seed,
        torch.zeros(rows, dtype=torch.int32) if pos is None else pos,
    )  # fmt: skip


def test_philox_known_answers() -> None:
    """philox4x32-10 of Random123's kat_vectors: counter, key, first word."""
    keeping, _ = cpu.kernels()
    pi = ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], 0x299F31D0A4093822)
    for counter, key, word in (([0] * 4, 0, 0x6627E8D5), ([2**32 - 1] * 4, -1, 0x408F276D), (*pi, 0xD16CFE09)):
        counters, out = (ctypes.c_uint32 * 4)(*counter), ctypes.c_uint32()
        keeping.fengine_philox(counters, key, ctypes.byref(out), 1)
        assert out.value == word


@pytest.mark.parametrize("vocab", [1, 15, 333, 20011])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_draw_is_the_reference(threads: int, vocab: int, spread: float) -> None:
    rows = 24
    logits = torch.randn(rows, vocab) * spread
    logits[::3] = logits[::3].round()  # ties
    arguments = (
        logits, torch.linspace(0.3, 2.0, rows), torch.tensor([1, 2, 40, vocab, 1000, 1 << 30] * 4, dtype=torch.int32),
        torch.tensor([1.0, 0.9, 0.5, 0.999, 1e-6] * 5)[:rows], torch.tensor([0.0, 0.0, 0.05, 1.0] * 6),
        torch.randint(-(2**62), 2**62, (rows,)), torch.randint(0, 2**31 - 1, (rows,), dtype=torch.int32),
    )  # fmt: skip
    token, logprob = sampling.draw(*arguments)
    expected, expected_logprob = sampling.reference(*arguments)
    assert torch.equal(token, expected)
    torch.testing.assert_close(logprob, expected_logprob, rtol=2e-6, atol=2e-6)
    for r in range(rows):
        alone = sampling.draw(*(a[r : r + 1] for a in arguments))
        assert torch.equal(alone[0], token[r : r + 1]) and same_bits(alone[1], logprob[r : r + 1])


def test_draw_edges() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, -1.0], [math.nan, 0, 0, 0], [0, math.inf, 0, 0], [0, -math.inf, 0, 0]])
    token, logprob = draw(logits, top_k=1)
    assert token.tolist() == [1, 0, 0, 0]
    assert logprob.isnan().tolist() == [False, True, True, True]
    assert logprob[0] == pytest.approx(logits[0].log_softmax(0)[1].item(), abs=1e-6)
    assert draw(torch.tensor([[-0.0, 0.0]]), top_k=1)[0].item() == 0
    assert [x.shape[0] for x in draw(torch.zeros(0, 7))] == [0, 0]


def test_draw_takes_the_only_kept_id_whatever_its_noise() -> None:
    """20,000 positions: the noise of some is far below zero."""
    logits = torch.randn(1, 40).expand(20000, 40).contiguous()
    token, _ = draw(logits, min_p=1.0, seed=torch.zeros(20000, dtype=torch.int64), pos=torch.arange(20000).int())
    assert (token == logits[0].argmax()).all()


@pytest.mark.parametrize(
    ("options", "kept"),
    [({}, 8), ({"top_k": 3}, 3), ({"top_p": 0.6}, None), ({"min_p": 0.2}, None), ({"top_k": 5, "min_p": 0.1}, None)],
)
def test_draw_frequencies_follow_the_distribution(options: dict, kept: int | None) -> None:
    """Chi-square over 20,000 positions of one request, 8 ids; 99.99 % quantiles, fixed seed."""
    z, draws = torch.tensor([1.5, 0.1, -0.7, 2.0, 0.9, -2.0, 1.2, 0.0]) / 0.8, 20000
    options = {"top_k": 1 << 30, "top_p": 1.0, "min_p": 0.0} | options
    mask = sampling.keep(
        z[None], torch.tensor([options["top_k"]]), torch.tensor([options["top_p"]]), torch.tensor([options["min_p"]])
    )[0]
    assert kept in (None, int(mask.sum()))
    logits = (z * 0.8).expand(draws, 8).contiguous()
    seed, pos = torch.full((draws,), 1234), torch.arange(draws, dtype=torch.int32)
    token, _ = draw(logits, temperature=0.8, seed=seed, pos=pos, **options)
    count = torch.bincount(token.long(), minlength=8)
    assert (count[~mask] == 0).all()
    expected = z[mask].softmax(0) * draws
    chi_square = ((count[mask] - expected) ** 2 / expected).sum().item()
    limits = [0, 0.0, 15.14, 18.42, 21.11, 23.51, 25.74, 27.86, 29.88]  # of that many ids
    assert chi_square < limits[int(mask.sum())]
    assert not torch.equal(token[:1000], draw(logits, seed=seed + 1, pos=pos, temperature=0.8, **options)[0][:1000])


# -- threads ----------------------------------------------------------------------------------------------------------


LOADED = """
import re, torch
from fengine.ops import activations, cpu
def state():
    names = {line.split()[-1] for line in open("/proc/self/maps")}
    threads = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("Threads"))
    return sorted(name for name in names if re.search(r"/lib(gomp|omp|iomp5)[^/]*$", name)), threads
torch.set_num_threads(3)
torch.randn(1 << 22).sum()
before = state()
cpu.SHORT = 0
activations.on_cpu(torch.randn(512, 512))
assert before[0] and state() == before, (before, state())
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_kernels_run_on_the_threads_that_torch_has() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(cpu.__file__).parents[2]), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", LOADED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def little_memory(free: int) -> Iterator[None]:
    """This process gets no more than so many bytes beside what it has mapped."""
    resource = pytest.importorskip("resource")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_too_little_memory_in_a_process_of_its_own() -> None:
    """What earlier tests freed, but malloc kept, would serve as memory beside the limit."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-k",
        "is_an_error_and_not_the_end",
    ]
    env = os.environ | {EVERY_BLOCK_IS_MAPPED: str(1 << 20), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, __file__], capture_output=True, text=True, env=env, cwd=Path(__file__).parents[2], timeout=900
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.skipif(EVERY_BLOCK_IS_MAPPED not in os.environ, reason="runs in the process that it starts")
def test_too_little_memory_is_an_error_and_not_the_end(threads: int) -> None:
    """The inputs are large, and never touched."""
    ints = partial(torch.tensor, dtype=torch.int32)
    x, logits = torch.empty(100_000, 1), torch.empty(1, 48_000_000)
    q, k = torch.empty(1, 4096, 4096), torch.zeros(514, 1, 1, 4096)
    stack = (torch.zeros(1, 1, 512, 1), torch.zeros(1, 1, 512), torch.zeros(1, 1), ints([[512]]), [1])
    calls: dict[str, Callable[[], Any]] = {
        "linear": partial(linear.on_cpu, torch.empty(50_000, 1024), pack(torch.zeros(1, 1024)), 1, None, None),
        "gated_linear": partial(linear.gated_on_cpu, x, pack(torch.zeros(512, 1)), 256, None),
        "lora_add": partial(
            lora.add_on_cpu, torch.empty(100_000, 1), x, x, *stack, torch.arange(100_000).int(), ints([0, 100_000]),
        ),
        "attention": partial(attention.on_cpu, q, k, k, ints([0, 1]), ints([1]), ints([[0]]), 1.0),
        "attention in parts": partial(
            attention.on_cpu, q, k, k, ints([0, 1]), ints([513]), ints([list(range(513))]), 1.0
        ),
        "draw": partial(draw, logits),
        "logprobs": partial(logprobs.logprobs, logits, torch.ones(1), ints([[0]])),
        "top_ids": partial(logprobs.top_on_cpu, logits, 24_000_000),
    }  # fmt: skip
    scores = torch.randn(9, 50)
    want = draw(scores)[0]  # the threads are there now
    for name, call in calls.items():
        with little_memory(150 << 20), pytest.raises(OutOfMemoryError, match=name.split()[0]):
            call()
        assert torch.equal(draw(scores)[0], want)
