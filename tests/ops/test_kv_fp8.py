"""Keys and values in FP8: what is stored is what kv_fp8.py defines, and attention is that over the stored numbers.

The Triton kernels run in Triton's interpreter, in a process of its own (see test_interpreted.py), and on a device.
"""

import math
from functools import cache

import pytest
import torch
from interpreted import INTERPRETED
from torch import Tensor

from fengine.ops import attention, attention_launch, attention_many, fp8_kernels, kv_fp8, kv_fp8_whole, rope
from fengine.ops.attention_launch import CAUSAL, Bounds, Paged, Rows, Schedule, Tiles, schedules

NEW, LENGTHS = (3, 1, 40, 1), (70, 33, 40, 600)  # tokens of a row in this step, and all of its tokens


def inputs(
    width: int, heads: int, groups: int, dtype: torch.dtype, device: str = "cpu", size: int = 16,
    lengths: tuple[int, ...] = LENGTHS,
) -> list[Tensor]:  # fmt: skip
    """q, and pages of `size` slots in FP8 whose unowned slots are NaN; row bounds, lengths and page table."""
    torch.manual_seed(width)
    pages = [-(-length // size) for length in lengths]
    x = torch.randn(2, sum(pages) + 1, size, groups, width) * torch.exp2(torch.randn(groups, 1) * 2)
    order, at = (torch.randperm(sum(pages)) + 1).int(), 0
    table = torch.zeros(len(pages), max(pages) + 1, dtype=torch.int32)
    x[:, 0] = math.nan
    for row, count in enumerate(pages):
        table[row, :count], at = order[at : at + count], at + count
        x[:, table[row, count - 1].long(), lengths[row] - size * (count - 1) :] = math.nan
    k, v = (kv_fp8.stored_as(torch.empty(0, dtype=torch.uint8), part.to(dtype)) for part in x)
    q = torch.randn(sum(NEW) + 2, heads, width).to(dtype)
    start = torch.tensor([0, *NEW]).cumsum(0).int()
    return [t.to(device) for t in (q, k, v, start, torch.tensor(lengths, dtype=torch.int32), table)]


def whole(arguments: list[Tensor]) -> list[Tensor]:
    """The same with pages that hold the stored numbers."""
    q, k, v, *rest = arguments
    return [q, kv_fp8.values(k).to(q.dtype), kv_fp8.values(v).to(q.dtype), *rest]


def rope_inputs(width: int, groups: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, ...]:
    torch.manual_seed(width)
    qkv = torch.randn(9, (4 + 2 * groups) * width) * torch.exp2(torch.randn(9, 1) * 9)
    qkv[3] = 0
    table, pages = torch.randn(20, width), torch.zeros(2, 5, 4, groups, width + 1, dtype=torch.uint8)
    at = (torch.arange(9, dtype=torch.int32) + 7, torch.randperm(16)[:9].int() + 4)
    return tuple(t.to(device) for t in (qkv.to(dtype), table, *at, *pages))


def test_encoding_is_nearest_under_the_smallest_power_of_two() -> None:
    top = torch.tensor([448.0, 448.1, 447.9, 1.0, 0.0, 1e-38, 3.3e38, 7e-5])
    x = top[:, None] * torch.linspace(-1, 1, 129)
    code, exponent = kv_fp8.encoded(x)
    scale = torch.exp2(exponent.double() - 127)[:, None]
    got, fits = code.view(torch.float8_e4m3fn).double() * scale, exponent[:, None] > 1
    assert bool((x.abs().double().amax(1, keepdim=True) <= 448 * scale).all())
    assert bool((~fits | (x.abs().double().amax(1, keepdim=True) > 224 * scale)).all())
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    nearest = (x.double()[..., None] - every[every == every] * scale[..., None]).abs().amin(-1)
    assert torch.equal((x.double() - got).abs(), nearest)


@pytest.mark.parametrize(("width", "groups"), [(64, 2), (20, 1), (128, 3)])
def test_keys_and_values_are_stored_as_defined(width: int, groups: int) -> None:
    qkv, table, pos, slot, k, v = rope_inputs(width, groups, torch.float32)
    rest = (4, None, None, 0.0)
    floats = torch.zeros(2, *k.shape[:3], width)
    want = rope.rope_kv_write(qkv, table, pos, slot, *floats, *rest)
    got = rope.rope_kv_write(qkv, table, pos, slot, k, v, *rest)
    assert torch.equal(got[0], want[0])
    for pages, numbers in zip(got[1:], want[1:], strict=True):
        written = torch.zeros_like(pages)
        kv_fp8.write(written, slot, numbers.flatten(0, 1)[slot.long()])
        assert torch.equal(pages, written) and pages.any()


@pytest.mark.parametrize(("words", "picks"), [(1, ("0x9180", "0xb3a2")), (2, ("0xa280", "0xb391"))])
def test_assembler_decodes_every_code(words: int, picks: tuple[str, ...]) -> None:
    """Each instruction of `decoding` on all words of four codes that count up, as the manual of PTX defines it."""
    codes = torch.arange(256 + 3, dtype=torch.uint8)
    registers = {f"${2 * words + n}": torch.stack([codes[i + n : 256 + i - 1] for i in range(4)], 1) for n in (0, 1)}
    registers = {name: value[:252].clone().view(torch.int32)[:, 0] for name, value in registers.items()}
    for line in fp8_kernels.decoding(words, *picks)[1:-1].split(";")[2:-1]:
        name, out, a, *rest = line.replace(",", "").split()
        x = registers[a]
        if name == "prmt.b32":
            picked = [(x >> 8 * (int(rest[1], 16) >> 4 * i & 3) & 255, int(rest[1], 16) >> 4 * i & 8) for i in range(4)]
            parts = [(byte >> 7) * 255 if sign else byte for byte, sign in picked]
            registers[out] = sum(part << 8 * i for i, part in enumerate(parts))
        elif name == "mul.rn.bf16x2":
            registers[out] = (x.view(torch.bfloat16) * 2.0**120).view(torch.int32)
        else:
            registers[out] = x << 4 if name == "shl.b32" else x & (int(rest[0], 16) - (1 << 32))
    for word in range(words):
        want = registers[f"${2 * words + word}"].view(torch.float8_e4m3fn).view(-1, 4).float()
        for n, pick in enumerate(picks):
            columns = [int(pick, 16) & 3, int(pick, 16) >> 8 & 3]
            got = registers[f"${word * 2 + n}"].view(torch.bfloat16).view(-1, 2).float()
            number = ~want[:, columns].isnan()
            assert torch.equal(got[number], want[:, columns][number]) and number.sum() > 490


@pytest.mark.parametrize(("width", "heads", "groups"), [(64, 4, 2), (20, 3, 1), (128, 8, 8)])
def test_attention_is_that_over_the_stored_numbers(width: int, heads: int, groups: int) -> None:
    arguments = inputs(width, heads, groups, torch.float32)
    for bounds in ((), (True, 24, 3.0), (False, 0, 0.0)):
        got = attention.attention(*arguments, 0.3, *bounds)
        assert got.isfinite().all() and got[: sum(NEW)].any()
        assert torch.equal(got, attention.attention(*whole(arguments), 0.3, *bounds))
    want = attention.reference(*arguments, 0.01)
    torch.testing.assert_close(attention.attention(*arguments, 0.01), want, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not INTERPRETED, reason="in the interpreter")
@pytest.mark.parametrize(("width", "groups"), [(32, 2), (20, 1)])
def test_triton_stores_what_is_defined(width: int, groups: int) -> None:
    qkv, table, pos, slot, k, v = rope_inputs(width, groups, torch.float16)
    qkv = qkv.clamp(-3000, 3000)
    floats = torch.zeros(2, *k.shape[:3], width, dtype=qkv.dtype)
    want = rope.launch(qkv, table, pos, slot, *floats, 4, None, None, 0.0)
    got = rope.launch(qkv, table, pos, slot, k, v, 4, None, None, 0.0)
    assert torch.equal(got, want)
    for pages, numbers in zip((k, v), floats, strict=True):
        written = torch.zeros_like(pages)
        kv_fp8.write(written, slot, numbers.flatten(0, 1)[slot.long()])
        assert torch.equal(pages, written)


@pytest.mark.skipif(not INTERPRETED, reason="in the interpreter")
def test_triton_attends_to_the_stored_numbers() -> None:
    few = inputs(32, 4, 2, torch.float32)
    for s in (Schedule(Rows(16, 4, 1, 1), None), Schedule(Rows(16, 4, 1, 2), Tiles(False, 16, 4, 1))):
        got, want = (attention_launch.run(Paged(*arguments), 0.2, s, CAUSAL) for arguments in (few, whole(few)))
        assert torch.equal(got[: sum(NEW)], want[: sum(NEW)])


@cache
def by_rows() -> Tensor:
    return attention_launch.run(Paged(*inputs(20, 3, 3, torch.float32)), 0.3, Schedule(Rows(16, 4, 1, 1), None))


@pytest.mark.skipif(not INTERPRETED, reason="in the interpreter")
@pytest.mark.parametrize(("room", "decoded"), [(1, [0]), (5, [0]), (6, [0, 2]), (99, [0, 2])])
def test_triton_decodes_what_rows_of_many_tokens_see_and_reads_codes_where_there_is_no_room(
    room: int, decoded: list[int]
) -> None:
    few = inputs(20, 3, 3, torch.float32)
    q, k, v, start, lengths, table = few
    pages = torch.zeros(2, 50, *k.shape[1:3], 20)
    new = torch.full_like(table, -1)
    kv_fp8_whole.whole_kernel[(4,)](
        k, v, start, lengths, table, *pages, new, len(NEW), table.shape[1], 2, room, 3, 20, 32, 16, 32,
    )  # fmt: skip
    for row, length in enumerate(LENGTHS):
        own = list({0: range(5), 2: range(5, 8)}[row] if row in decoded else ())
        assert new[row, : len(own)].tolist() == own and (new[row, len(own) :] == -1).all()
        for got, want in zip(pages, (k, v), strict=True):
            stored = kv_fp8.values(want)[table[row, : len(own)].long()]
            assert torch.equal(got[own].flatten(0, 1)[:length], stored.flatten(0, 1)[:length])
    left, plain = torch.full_like(q, 7.0), Tiles(False, 16, 4, 1)
    shape = attention_launch._shape(Paged(*few), plain.tile)
    most = room * 4 * 16 * 3 * 20
    attention_many.launch(Paged(*few), left, 0.3 * math.log2(math.e), 2, shape, (*CAUSAL, 0.0, 3), plain, most)
    want = by_rows()
    for row in range(len(NEW)):
        tokens = slice(int(start[row]), int(start[row + 1]))
        rest = NEW[row] > 2 and row not in decoded
        torch.testing.assert_close(left[tokens], want[tokens] if rest else torch.full_like(want[tokens], 7.0))
    assert (left[sum(NEW) :] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("width,groups,size", [(256, 1, 64), (128, 8, 64), (128, 2, 16), (64, 2, 64), (80, 1, 16)])
def test_on_a_device_bits_are_those_of_the_stored_numbers(width: int, groups: int, size: int) -> None:
    # Long rows: sums of other columns differ in one of some 10,000 numbers.
    few = inputs(width, 4 * groups, groups, torch.bfloat16, "cuda", size, (3000, 2500, 2040, 5000))
    sinks = torch.randn(4 * groups).to(few[0])
    for bounds, more in ((CAUSAL, ()), (Bounds(True, 700, 0.0, True), (sinks,))):
        reference = attention_launch.reference_schedule(few[0], whole(few)[1])
        want = attention_launch.run(Paged(*whole(few), *more), 0.1, reference, bounds)
        for s in schedules(few[0], few[1], len(NEW), 5120, 132, bounds):
            got = attention_launch.run(Paged(*few, *more), 0.1, s, bounds)
            assert torch.equal(got[: sum(NEW)], want[: sum(NEW)]), s
            assert attention_launch._compare(*few[:2], s, bounds), s  # without room for all copies, too
    qkv, table, pos, slot, k, v = rope_inputs(width, groups, torch.bfloat16, "cuda")
    floats = torch.zeros(2, *k.shape[:3], width, dtype=qkv.dtype, device="cuda")
    want = rope.launch(qkv, table, pos, slot, *floats, 4, None, None, 0.0)
    assert torch.equal(rope.launch(qkv, table, pos, slot, k, v, 4, None, None, 0.0), want)
    for pages, numbers in zip((k, v), floats, strict=True):
        written = torch.zeros_like(pages)
        kv_fp8.write(written, slot, numbers.flatten(0, 1)[slot.long()])
        assert torch.equal(pages, written)
