"""The Triton kernels against the references: on a CUDA device, and in Triton's interpreter where there is none.

The interpreter must be chosen before Triton is imported, so these tests run a second time in a process of their own
(see test_interpreted.py). It multiplies with numpy, which knows no bfloat16 and adds in its own order: tests of bits
need a device.
"""

import random
from typing import Any

import pytest
import torch
from interpreted import INTERPRETED
from test_lora_ops import lora_case
from test_ops import mixed_rows, normal, paged_case
from torch import Tensor

from fengine.core.window_pages import Windows
from fengine.models.rope import rope_table
from fengine.models.spec import RopeSpec
from fengine.ops import (
    activations,
    attention,
    attention_hopper,
    attention_launch,
    attention_tiles,
    attention_whole_hopper,
    edges,
    go_on,
    layer_norm,
    linear,
    linear_few_hopper,
    linear_hopper,
    linear_launch,
    lora,
    patch_attention,
    quantized,
    rms_norm,
    rope,
    rope_kernels,
    sampling,
    sampling_rows,
    w8a8,
)
from fengine.ops.proof import captured

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)
SPACING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

on_device = [] if INTERPRETED else [pytest.mark.gpu]
kernel_test, slow_kernel_test = (  # the interpreter takes long: there some have only the dtype that is rounded to
    pytest.mark.parametrize("dtype", [pytest.param(d, marks=on_device, id=str(d)[6:]) for d in dtypes])
    for dtypes in (DTYPES, DTYPES[INTERPRETED:])
)


def put(args: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors of `args` as dtype, everything on the device."""
    if isinstance(args, Tensor):
        return args.to(DEVICE, dtype if args.is_floating_point() else None)
    return tuple(put(arg, dtype) for arg in args) if isinstance(args, tuple) else args


def assert_close(got: Any, want: Any, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got, want, rtol=SPACING[dtype], atol=SPACING[dtype], equal_nan=True)


@kernel_test
@pytest.mark.parametrize("rows,n,k", [(1, 70, 96), (17, 130, 40), (40, 33, 256), (129, 40, 64)])
def test_linear(dtype: torch.dtype, rows: int, n: int, k: int):
    x, w, bias = put((normal(rows, k) / k**0.5, normal(n, k), normal(n)), dtype)
    for out_dtype in (None, torch.float32):
        assert_close(linear_launch.launch(x, w, n, bias, out_dtype), linear.reference(x, w, n, bias, out_dtype), dtype)
    assert_close(linear_launch.launch(x, w, n, None, None), linear.reference(x, w, n, None, None), dtype)


def test_every_schedule_of_linear():
    if not INTERPRETED:
        pytest.skip("on a device the schedules are compared bit by bit, below")
    x, w = put((normal(130, 200), normal(136, 200)), torch.float32)
    want = linear.reference(x, w, 136, None, None)
    few, gated = ((entry[-1] for entry in table) for table in (linear_launch.FEW_ROWS, linear_launch.GATED))

    def distinct(*schedules: Any) -> list[Any]:  # here: what only a device does, such as pipelines, is left out
        return list(dict.fromkeys(s._replace(warps=4, stages=2, ahead=min(s.ahead, 256), trigger=0) for s in schedules))

    for schedule in distinct(*few, *linear_launch.MANY_ROWS, *linear_launch.FLOAT32):
        rows = min(130, schedule.block_m + 2)  # two tiles, of which one is not full
        got = linear_launch.run(x[:rows], w, 136, None, None, schedule)
        assert_close(got, want[:rows], torch.float16)
    both = linear_launch.run(x, w, 136, None, None, linear_launch.REFERENCE)
    for i, schedule in enumerate(distinct(*gated)):
        act = i % len(activations.ACTS)
        rows = min(130, schedule.block_m + 2)
        fused = linear_launch.run(x[:rows], w, 68, None, None, schedule, True, act)
        assert_close(fused, activations.launch(both[:rows].contiguous(), act), torch.float16)


@kernel_test
@pytest.mark.parametrize("rows,n,k", [(1, 35, 96), (17, 65, 40), (70, 16, 256)])
def test_gated_linear(dtype: torch.dtype, rows: int, n: int, k: int):
    x, w, bias = put((normal(rows, k) / k**0.5, normal(2 * n, k), normal(2 * n)), dtype)
    for added, number in ((None, 0), (bias, 1)):
        want = activations.reference(linear.reference(x, w, 2 * n, added, None), activations.ACTS[number])
        assert_close(linear_launch.gated_launch(x, w, n, added, number), want, dtype)


@kernel_test
@pytest.mark.parametrize("width", [8, 36, 896])
def test_norms(dtype: torch.dtype, width: int):
    x, delta, weight = put((normal(7, width), normal(7, width, seed=1), normal(width)), dtype)
    for both in (weight, torch.cat((weight, weight + 1))):
        assert_close(layer_norm.launch(x, both, 1e-6), layer_norm.reference(x, both, 1e-6), dtype)
    for shift in (0.0, 1.0):
        assert_close(rms_norm.launch(x, weight, 1e-6, shift), rms_norm.reference(x, weight, 1e-6, shift), dtype)
    assert_close(rms_norm.add_launch(delta, x, weight, 1e-6), rms_norm.add_reference(delta, x, weight, 1e-6), dtype)
    post = put(normal(width, seed=2), dtype)
    for shift in (0.0, 1.0):  # a norm, the sum and the next norm in one kernel: the bits of three
        after = rms_norm.launch(delta, post, 1e-6, shift)
        want = rms_norm.add_launch(after, x, weight, 1e-6, shift)
        for got in (rms_norm.add_launch(delta, x, weight, 1e-6, shift, post), want):
            assert all(a.equal(b) for a, b in zip(got, want, strict=True))
            assert_close(got, rms_norm.add_reference(delta, x, weight, 1e-6, shift, post), dtype)
        assert rms_norm.add_launch(delta, x, None, 1e-6, shift, post)[1].equal(want[1])
    index = torch.tensor([6, 0, 6]).int().to(DEVICE)
    normed, rows = rms_norm.rows_launch(x, index, weight, 1e-6)
    assert rows.equal(x[index]) and normed.equal(rms_norm.launch(x, weight, 1e-6)[index])


@kernel_test
def test_edges(dtype: torch.dtype):
    token, last, index = (normal(1500, seed=s).mul(50).abs().int().to(DEVICE) for s in range(3))
    fed = token % 3 == 0
    assert edges.feed_launch(token, last, index, fed).equal(torch.where(fed, last[index], token))
    x = put(normal(200, 1030), dtype)
    assert edges.take_launch(x, index[:9]).equal(x[index[:9]])
    logprob, before = normal(1500).to(DEVICE), torch.cat((last, last))
    out = torch.zeros(2, 1500).int().to(DEVICE)
    edges.hand_on_launch(token, logprob, before, out)
    assert out[0].equal(token) and out[1].view(torch.float32).equal(logprob)
    assert before[:1500].equal(token) and before[1500:].equal(last)
    table, gaps = (
        (last[:, None] + index[:, None] * torch.arange(9, device=DEVICE)).int(),
        logprob.masked_fill(fed, torch.nan),
    )
    told = [(torch.zeros(1500, 6).int().to(DEVICE), torch.zeros(5, 1504).int().to(DEVICE)[:, :1500]) for _ in range(2)]
    for noted, (guess, going) in zip((go_on.launch, go_on.go_on), told, strict=True):
        noted(token, gaps, last, table, guess, going, 3, 16, 100, 1)
    assert all(a.equal(b) for a, b in zip(*told, strict=True)) and (told[0][0][:, 3] == -1).equal(fed)


def catch_up_case(rows: int, most: int, size: int, behind: int, seed: int) -> tuple[Any, Any]:
    """What `catch_up` reads and writes, of few ids, so that any number of guesses is right; padded rows and tokens."""
    draw = random.Random(seed)
    tries, at = [], rows
    for row in range(rows):
        known, tried = draw.randrange(2, 40), draw.randrange(1, most + 1)
        room = min(-(-(known - 1) // size) * size, known - 1 + size)
        tries.append((known, tried, row, at, 0 if behind else draw.randrange(tried - 1, most), room, draw.randrange(9)))
        at += tried
    drawn = [draw.choice([-1, 0, 1, 1, 1, 1]) for _ in range(at)]
    slots = draw.sample(range(rows + 3), rows)
    guesses = [draw.choice([0, 1, 1, 1]) for _ in range((rows + 3) * most)]
    table = [[draw.randrange(1, 99) for _ in range(48 // size + 2)] for _ in range(rows + 2)]
    reads = (drawn, guesses, [*slots, 0, 0], [[*x, 0, 0] for x in zip(*tries, strict=True)], table)
    tokens = rows * (most + 2)
    writes = [torch.zeros(n).int().to(DEVICE) for n in (tokens, tokens, tokens, rows + 3, rows + 2, rows + 2, rows + 2)]
    return [torch.tensor(x).int().to(DEVICE) for x in reads], writes


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize(("rows", "most", "size"), [(1, 1, 8), (1, 5, 16), (9, 4, 8), (40, 7, 16)])
@pytest.mark.parametrize("seed", [pytest.param(s, marks=on_device) for s in (0, 1, 2)])
def test_what_a_chain_catches_up_with(rows: int, most: int, size: int, behind: int, seed: int):
    reads, ours = catch_up_case(rows, most, size, behind, seed)
    sizes: Any = (rows, most, size, behind)
    host: Any = [x.cpu() for x in [*reads, *ours]]
    for run, tensors in ((go_on.catch_up_launch, [*reads, *ours]), (go_on.catch_up, host)):
        run(*[*tensors, *sizes])
    assert all(a.cpu().equal(b) for a, b in zip(ours, host[5:], strict=True)) and host[8].diff()[:rows].min() > 0


@kernel_test
def test_silu_mul(dtype: torch.dtype):
    x = put(normal(5, 2 * 1037) * 4, dtype)
    assert_close(activations.launch(x), activations.reference(x), dtype)
    for number, act in enumerate(activations.ACTS):
        assert_close(activations.launch(x, number), activations.reference(x, act), dtype)
        assert_close(activations.launch(x, number, gated=False), activations.reference(x, act, gated=False), dtype)
    logits = x.float() * 9
    assert_close(activations.cap_launch(logits, 5.0), activations.cap_reference(logits, 5.0), torch.float32)


@kernel_test
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("heads,groups,width", [(4, 2, 16), (14, 2, 64), (3, 3, 80)])
def test_rope_kv_write(dtype: torch.dtype, heads: int, groups: int, width: int, norm: bool):
    table = rope_table(RopeSpec(1e4), width, 50).to(DEVICE)
    x, k, v, q_norm, k_norm = put(
        (normal(5, (heads + 2 * groups) * width), *(normal(4, 3, groups, width) for _ in "kv"), normal(width),
         normal(width, seed=1)), dtype,
    )  # fmt: skip
    position, slot = (torch.tensor(index).int().to(DEVICE) for index in ([4, 49, 0, 7, 8], [3, 11, 6, 5, 10]))
    given: list[Any] = [(q_norm, k_norm, 1e-6), (q_norm, k_norm, 1e-6, 1.0)] if norm else [(None, None, 0.0)]
    for norms in given:
        want = rope.reference(x, table, position, slot, k, v, heads, *norms)
        got = rope.launch(x, table, position, slot, k, v, heads, *norms)
        assert_close((got, k, v), want, dtype)


@kernel_test
def test_rope_kv_write_of_many_tokens(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Several tokens a program, and a last program that is not full, give the bits of one token a program."""
    table = rope_table(RopeSpec(1e4), 64, 50).to(DEVICE)
    x, k, v = put((normal(9, 10 * 64), normal(5, 4, 2, 64), normal(5, 4, 2, 64)), dtype)
    position, slot = torch.arange(9).int().to(DEVICE), torch.randperm(16).int()[:9].to(DEVICE) + 4
    found = []
    for many in (100, 9):
        monkeypatch.setattr(rope_kernels, "MANY", many)
        pages = k.clone(), v.clone()
        found.append((rope.launch(x, table, position, slot, *pages, 6, None, None, 0.0), *pages))
    assert all(a.equal(b) for a, b in zip(*found, strict=True))


ATTENTIONS = [(2, 2, 64, 4), (4, 2, 80, 1), (7, 1, 96, 16), (8, 1, 128, 64), (4, 1, 64, 64)]


@pytest.mark.parametrize(
    "dtype,heads,groups,width,size",
    [  # in the interpreter each with one dtype, in turn
        pytest.param(dtype, *case, marks=on_device, id="-".join(map(str, (*case, str(dtype)[6:]))))
        for i, case in enumerate(ATTENTIONS)
        for dtype in (DTYPES[i % 2 :][:1] if INTERPRETED else DTYPES)
    ],
)
def test_attention(dtype: torch.dtype, heads: int, groups: int, width: int, size: int, monkeypatch: pytest.MonkeyPatch):
    """Every GQA ratio, head width and page size, rows of few and of many tokens, chunks in one program or more."""
    monkeypatch.setattr(attention_launch, "CHUNK", 128)
    for lengths, tokens, rows, tiles in (
        ([70, 5, 130, 1], [30, 5, 1, 1], attention_launch.Rows(16, 4, 1, 1), None),
        ([270, 40, 5], [2, 40, 5], attention_launch.Rows(16, 4, 1, 2), attention_launch.Tiles(False, 32, 4, 1)),
        ([300, 33], [1, 1], attention_launch.Rows(16, 4, 1, 2, short=512), None),
        ([300, 129], [20, 3], attention_launch.Rows(32, 4, 1, 3), None),
    ):
        args = put(paged_case(lengths, tokens, heads, groups, width, size, padding=2), dtype)
        for _ in range(1 + (rows.splits > 1 and tiles is None)):  # the counters are back at zero
            got = attention.launch(*args, chosen=attention_launch.Schedule(rows, tiles))
            assert_close(got, attention.reference(*args), dtype)


@kernel_test
@pytest.mark.parametrize("heads,width", [(2, 80), (3, 64), (2, 32), (1, 96)])
def test_attention_within_windows(dtype: torch.dtype, heads: int, width: int):
    """Rope and attention in one kernel: windows of one patch to a page; on a GPU with the bits of the two ops."""
    lengths = [64, 1, 36]
    count, start = sum(lengths), torch.tensor([0, *lengths]).cumsum(0).int()
    slot = torch.cat([torch.arange(n) + 64 * r for r, n in enumerate(lengths)]).int()
    x, table = put(normal(count, 3 * heads * width, seed=1), dtype), normal(count, width, seed=2).to(DEVICE)
    where = put(
        (torch.arange(count).int(), slot, start, torch.tensor(lengths).int(), torch.arange(3)[:, None].int()), dtype
    )
    pages = torch.zeros(3, 64, heads, width, device=DEVICE, dtype=dtype)
    pos, slots, begin, length, rows = where
    q, k, v = rope.reference(x, table, pos, slots, pages, pages, heads, None, None, 0.0)
    got = patch_attention.run(x, table, begin, heads, width**-0.5)
    want = attention.reference(q, k, v, begin, length, rows, width**-0.5, attention_launch.WHOLE)
    assert_close(got, want, dtype)
    if patch_attention.usable(x, rows, heads) and not INTERPRETED:
        assert patch_attention.is_proved(x, heads, width**-0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [72, 80, 96])
def test_attention_of_whole_rows_on_hopper(width: int):
    q = torch.randn(700, 2, width, device=DEVICE, dtype=torch.bfloat16)
    k = torch.randn(11, 64, 2, width, device=DEVICE, dtype=torch.bfloat16)
    found = attention_launch.schedules(q, k, 1, 704, 132, attention_launch.WHOLE)
    if not attention_whole_hopper.usable(q, k):
        pytest.skip("needs an NVIDIA GPU of compute capability 9")
    assert found[0].tiles == attention_launch.WHOLE_HOPPER
    assert attention_launch.is_proved(q, k, found[0], attention_launch.WHOLE)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("bounds", [(True, 0), (True, 100), (True, 1500, 0.0, True)])
@pytest.mark.parametrize("heads,groups,size", [(8, 4, 64), (7, 1, 128)])
def test_attention_of_many_tokens_on_hopper(width: int, bounds: Any, heads: int, groups: int, size: int):
    q = torch.randn(700, heads, width, device=DEVICE, dtype=torch.bfloat16)
    k = torch.randn(2, size, groups, width, device=DEVICE, dtype=torch.bfloat16)
    found = attention_launch.schedules(q, k, 1, 704, 132, attention_launch.Bounds(*bounds))
    if not attention_hopper.usable(q, k):
        pytest.skip("needs an NVIDIA GPU of compute capability 9")
    assert found[0].tiles == attention_launch.HOPPER
    assert attention_launch.is_proved(q, k, found[0], attention_launch.Bounds(*bounds))


@slow_kernel_test
@pytest.mark.parametrize(
    "bounds",
    [
        (True, 1, 0.0, False), (True, 40, 0.0, True), (True, 150, 0.0, False), (True, 0, 3.0, False),
        (True, 33, 2.0, True), (False, 0, 0.0, False), (False, 40, 0.0, True), (True, 0, 0.0, False, True),
        (True, 40, 0.0, False, True),
    ],
)  # fmt: skip
def test_bounded_attention(dtype: torch.dtype, bounds: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch):
    """A window, a cap, sinks, both ways, a last key of each token; rows of few and of many tokens; bits alike."""
    monkeypatch.setattr(attention_launch, "CHUNK", 128)
    rows, one = attention_launch.Rows(16, 4, 1, 2), attention_launch.Rows(16, 4, 1, 1, short=512)
    for lengths, tokens, tiles in (
        ([270, 40], [20, 9], attention_launch.Tiles(False, 32, 4, 1)),
        ([300, 33], [1, 1], None),
    ):
        if not bounds[0]:
            if tiles is None:
                continue  # every row has many tokens
            lengths = tokens = [132, 9]
        args: Any = put(paged_case(lengths, tokens, 4, 2, 48, 16, padding=2), dtype)
        sinks = put(normal(4, seed=3) * 3, dtype) if bounds[3] else None
        ends = [n - t + max(t // 2 - 1, at) for n, t in zip(lengths, tokens, strict=True) for at in range(t)]
        last = torch.tensor([*ends, 0, 0], device=args[0].device).int() if bounds[4:] else None
        reference: Any = attention.reference
        want = reference(*args, attention_launch.Bounds(*bounds), sinks, last)
        launch: Any = attention.launch
        got = [
            launch(*args, *bounds[:3], sinks, last, chosen=attention_launch.Schedule(r, t))
            for r in (rows, one)
            for t in dict.fromkeys((tiles, None))
        ]
        for each in got:
            assert_close(each, want, dtype)
            assert INTERPRETED or each.equal(got[0])  # there a product is NumPy's
        if bounds[0] and bounds[1]:  # what a row has left behind is another's, who may have written NaN
            windows = Windows(bounds[1], attention_launch.block_of(48), 16, 0, 1, True)
            for row, (length, count) in enumerate(zip(lengths, tokens, strict=True)):
                left = args[5][row, : windows.window_start(length - count)].long()
                args[1][left] = args[2][left] = torch.nan
            assert launch(*args, *bounds[:3], sinks, last, chosen=attention_launch.Schedule(rows, tiles)).equal(got[0])


@pytest.mark.parametrize("empty", [pytest.param(600, marks=on_device)])
def test_attention_finds_a_long_row_behind_many(empty: int):
    """Rows are searched 512 at a time: many without tokens, then one of more than a tile, then padding."""
    q, k, v, start, kv_len, table, scale = put(paged_case([90], [90], 2, 2, 16, 4, padding=70), torch.float32)
    start, kv_len = (torch.cat((x.new_zeros(empty), x)) for x in (start, kv_len))
    table = torch.cat((table.new_zeros(empty, table.shape[1]), table))
    args = (q, k, v, start, kv_len, table, scale)
    chosen = attention_launch.Schedule(attention_launch.Rows(16, 4, 1, 1), attention_launch.Tiles(False, 64, 4, 1))
    assert_close(attention.launch(*args, chosen=chosen), attention.reference(*args), torch.float32)


@pytest.mark.parametrize("most", [pytest.param(most, marks=on_device) for most in (sampling_rows.MOST, 8)])
def test_draw(most: int, monkeypatch: pytest.MonkeyPatch):
    """With room for every candidate, and with so little that rows are searched whole."""
    monkeypatch.setattr(sampling_rows, "MOST", most)
    monkeypatch.setattr(sampling_rows, "BLOCK", 512)
    monkeypatch.setattr(sampling_rows, "ROW_BLOCK", 256)
    rows, vocab = 12, 1100
    case = {name: value.to(DEVICE) for name, value in mixed_rows(rows, vocab).items()}
    case["temperature_R"][::2] = 1.0
    case["logits_RV"][[9, 10, 11], [700, 3, 1099]] = torch.tensor([torch.inf, -torch.inf, torch.nan], device=DEVICE)
    case["logits_RV"][0, [30, 1070]] = 50.0
    token, logprob = sampling.launch(**case)
    want_token, want_logprob = sampling.reference(**case)
    assert token.equal(want_token) and token[0] == 30 and not token[9:].any() and logprob[9:].isnan().all()
    torch.testing.assert_close(logprob, want_logprob, rtol=1e-5, atol=1e-5, equal_nan=True)


# -- bits, on a device ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_linear_bits_follow_no_schedule():
    x, w = put((normal(300, 896), normal(1152, 896) / 30), torch.bfloat16)
    whole = linear_launch.launch(x, w, 1152, None, None)
    for rows in (1, 7, 16, 17, 33, 64, 65, 128, 129, 299):
        assert linear_launch.launch(x[:rows], w, 1152, None, None).equal(whole[:rows])
    for schedule in (*(entry[-1] for entry in linear_launch.FEW_ROWS), *linear_launch.MANY_ROWS):
        assert linear_launch.run(x, w, 1152, None, None, schedule).equal(whole)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 128, 200, 640])
def test_linear_for_hopper_has_the_bits_of_the_reference(rows: int):
    """Ragged rows, columns and K; every kind of tile; with a bias and gated."""
    x, w, bias = put((normal(rows, 200), normal(2 * 1192, 200) / 14, normal(2 * 1192)), torch.bfloat16)
    if not linear_hopper.usable(x, w):
        pytest.skip("the kernel is for compute capability 9")
    for added in (None, bias):
        want = linear_launch.run(x, w, 2384, added, None, linear_launch.REFERENCE)
        for m, n, stages, _ in linear_launch.HOPPER:
            s = linear_launch.Schedule(m, n, 64, False, 4, stages, hopper=True)
            assert linear_launch.run(x, w, 2384, added, None, s).equal(want)
        for m, n, stages, _ in linear_launch.HOPPER_GATED:
            s = linear_launch.Schedule(m, n, 64, False, 4, stages, hopper=True)
            for act in range(len(activations.ACTS)):
                fused = linear_launch.run(x, w, 1192, added, None, s, True, act)
                assert fused.equal(activations.launch(want, act)), (s, act)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 27, 33, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_few_rows_for_hopper_have_the_bits_of_the_reference(rows: int, dtype: torch.dtype):
    """Ragged rows, columns and K; every way to cut them; with a bias, gated, and in float32."""
    x, w, bias = put((normal(rows, 200), normal(2 * 1192, 200) / 14, normal(2 * 1192)), dtype)
    if not linear_hopper.usable(x, w):
        pytest.skip("the kernel is for compute capability 9")
    cut = {s for *_, s in linear_few_hopper.PLAIN if s is not None and s.block_m >= rows}
    halves = {s for *_, s in linear_few_hopper.GATED if s is not None and s.block_m >= rows}
    for added in (None, bias):
        want = linear_launch.run(x, w, 2384, added, None, linear_launch.REFERENCE)
        for s in cut:
            assert linear_launch.run(x, w, 2384, added, None, s).equal(want), s
        for s in halves:
            for act in range(len(activations.ACTS)):
                fused = linear_launch.run(x, w, 1192, added, None, s, True, act)
                assert fused.equal(activations.launch(want, act)), (s, act)
    want = linear_launch.run(x, w[:33], 33, None, torch.float32, linear_launch.REFERENCE)
    for s in cut:
        assert linear_launch.run(x, w[:33], 33, None, torch.float32, s).equal(want), s


@pytest.mark.gpu
@pytest.mark.parametrize("heads,groups,width,size", [(8, 2, 128, 64), (7, 1, 64, 64), (8, 2, 64, 16), (4, 4, 96, 4)])
def test_attention_bits_of_prefill_chunks_and_decode_agree(heads: int, groups: int, width: int, size: int):
    length = 2100
    q, k, v, _, _, table, scale = put(paged_case([length], [length], heads, groups, width, size), torch.bfloat16)
    start = torch.tensor([0, length, length], device=DEVICE).int()
    whole = attention.launch(q, k, v, start, torch.tensor([length, 0], device=DEVICE).int(), table, scale)
    reference = attention_launch.reference_schedule(q, k)
    some = ((q, 1), (q[:1], 1), (q[:1], 600))  # as many tokens, and rows beside
    schedules = [s for tokens, rows in some for s in attention_launch.schedules(tokens, k, rows, 4096, 132)]
    assert all(attention_launch.is_proved(q, k, s) for s in schedules)
    for first, last in ((0, 1), (63, 64), (64, 65), (1023, 1024), (1024, 1025), (700, 2100), (2099, 2100)):
        start = torch.tensor([0, last - first, last - first], device=DEVICE).int()
        kv_len = torch.tensor([last, 0], device=DEVICE).int()
        for chosen in (None, reference, *schedules):
            part = attention.launch(q[first:last], k, v, start, kv_len, table, scale, chosen=chosen)
            assert part.equal(whole[first:last])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads,groups,width,window,sinks",
    [(32, 4, 128, 0, False), (4, 1, 256, 512, False), (64, 8, 64, 128, True), (14, 2, 64, 0, False),
     (32, 2, 128, 40, True)],
)  # fmt: skip
def test_attention_of_blocks_at_once_is_proved(heads: int, groups: int, width: int, window: int, sinks: bool):
    q, k = put((normal(1, heads, width), normal(2, 64, groups, width)), torch.bfloat16)
    bounds = attention_launch.Bounds(True, window, 0.0, sinks)
    for wide, parts, splits in ((2, 1, 1), (2, width // 64, 3), (1, 1, 17)):
        rows = attention_launch.Rows(16, 4, 0, splits, at_once=wide, parts=parts)
        assert attention_launch._compare(q, k, attention_launch.Schedule(rows, None), bounds)
    chosen = attention_launch.schedules(q, k, 1, 17408, 132, bounds)[0]
    assert chosen.rows.at_once and attention_launch.is_proved(q, k, chosen, bounds)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads,groups,width,window,sinks",
    [(32, 8, 128, 0, True), (8, 2, 128, 40, False), (6, 2, 128, 64, True), (4, 4, 128, 1500, False),
     (64, 8, 64, 0, True), (64, 8, 64, 128, True), (14, 2, 64, 129, False), (3, 1, 64, 1, True),
     (8, 2, 64, 1024, False)],
)  # fmt: skip
def test_prompts_within_windows_and_with_sinks_on_hopper(heads: int, groups: int, width: int, window: int, sinks: bool):
    """Windows below, at and beyond a block and a chunk, from the middle of a row; pages that nobody sees hold NaN."""
    lengths, tokens = [2900, 17, 1024, 700, 3300, 1], [900, 17, 1024, 33, 1200, 1]
    args: Any = put(paged_case(lengths, tokens, heads, groups, width, 64, padding=3), torch.bfloat16)
    bounds = attention_launch.Bounds(True, window, 0.0, sinks)
    found = attention_launch.schedules(*args[:2], len(lengths), 4096, 132, bounds)
    if found[0].tiles != attention_launch.HOPPER:
        pytest.skip("needs an NVIDIA GPU of compute capability 9")
    sink = put(normal(heads, seed=3) * 3, torch.bfloat16) if sinks else None
    call = attention_launch.Paged(*args[:6], sink)
    want = attention_launch.run(call, args[6], attention_launch.reference_schedule(*args[:2]), bounds)
    for row, (length, count) in enumerate(zip(lengths, tokens, strict=True)):
        windows = Windows(window or length, attention_launch.block_of(width), 64, 0, 1, True)
        left = args[5][row, : windows.window_start(length - count)].long()
        args[1][left] = args[2][left] = torch.nan
    assert want.isfinite().all() and attention_launch.run(call, args[6], found[0], bounds).equal(want)
    assert attention_launch.is_proved(*args[:2], found[0], bounds)


@pytest.mark.gpu
def test_a_schedule_of_another_tree_is_not_proved(monkeypatch: pytest.MonkeyPatch):
    """The negative control: chunks of another length under the schedule that is compared."""
    q, k, v, _, _, table, scale = put(paged_case([64], [64], 8, 2, 128, 64), torch.bfloat16)
    few = attention_launch.schedules(q, k, 1, 4096, 132)[0]
    run = attention_launch.run

    def other_chunks(call: Any, scale: float, s: Any, bounds: Any) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(attention_launch, "CHUNK", 1024 if s == attention_launch.reference_schedule(q, k) else 512)
            return run(call, scale, s, bounds)

    assert attention_launch._compare(q, k, few, attention_launch.CAUSAL)
    monkeypatch.setattr(attention_launch, "run", other_chunks)
    assert not attention_launch._compare(q, k, few, attention_launch.CAUSAL)


@slow_kernel_test
@pytest.mark.parametrize(
    ("tokens", "k", "widths", "padded", "ranks"), [(1, 70, (5,), 16, [3]), (19, 4500, (40, 17, 33), 48, [16, 0, 48, 7])]
)
def test_lora(
    dtype: torch.dtype, tokens: int, k: int, widths: tuple[int, ...], padded: int, ranks: list[int],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    if INTERPRETED:  # as many chunks, of fewer inputs
        monkeypatch.setattr(lora, "CHUNK", 256)
        k = k * 256 // 2048
    y, x, stack, token, start = lora_case(tokens, k, widths, padded, ranks, swapped=False)
    y, x, a, b = put((y, x, stack.a_SPRK, stack.b_SNR), dtype)
    stack = lora.Stack(a, b, stack.scale_SP.to(DEVICE), stack.rank_SP.to(DEVICE), widths)
    token, start = token.to(DEVICE), start.to(DEVICE)
    want = y.clone()
    lora.reference(want, x, stack, token, start)
    for schedule in (lora.FLOAT32,) if dtype == torch.float32 else (lora.FEW, lora.MANY):
        got = y.clone()
        lora.expand(got, lora.shrink(x, stack, token, start, schedule), stack, token, start, schedule)
        assert_close(got, want, dtype)
    got, h = y.clone(), lora.ahead_launch(x, *stack, token, start)
    lora.add_launch(got, x, h, *stack, token, start)
    assert_close(got, want, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [3, 64, 900])
@pytest.mark.parametrize("kind", ["dense", "int4", "fp4", "fp8", "w8a8"])
def test_lora_in_a_graph_has_the_same_bits(kind: str, tokens: int):
    """There x A^T runs beside x W^T. Of weights in few bits: those of the dequantized matrix."""
    y, x, stack, token, start = lora_case(tokens, 14336, (1024, 128, 128), 16, [16, 0, 7], swapped=False)
    x, w, a, b = put((x, torch.randn(1280, 14336) / 128, stack.a_SPRK, stack.b_SNR), torch.bfloat16)
    stack = lora.Stack(a, b, stack.scale_SP.to(DEVICE), stack.rank_SP.to(DEVICE), stack.widths)
    token, start, base = token.to(DEVICE), start.to(DEVICE), linear.pack(w)
    if kind != "dense":
        codes = quantized.encoded(w, kind, {"int4": 128, "fp4": 32}.get(kind, 0))
        base = w8a8.pack(codes) if kind == "w8a8" else quantized.pack(codes, torch.bfloat16)
        if kind != "w8a8":
            dense = linear.pack(quantized.dequantized(codes, torch.bfloat16))
            want, got = (linear.linear(x, lora.Adapted(one, stack), None, (token, start)) for one in (dense, base))
            assert torch.equal(got, want)
    leaf = lora.Adapted(base, stack)

    def layers() -> Tensor:
        return torch.cat([linear.linear(x * n, leaf, None, (token, start)) for n in range(1, 30)])

    want = layers()
    assert not torch.equal(want[:tokens], linear.linear(x, leaf.base))
    for _ in range(5):
        assert torch.equal(captured(layers), want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lora_bits_do_not_depend_on_neighbours_or_schedule(dtype: torch.dtype):
    y, x, stack, token, start = lora_case(900, 4200, (512, 128, 128), 32, [16, 0, 32, 7], swapped=False)
    y, x, a, b = put((y, x, stack.a_SPRK, stack.b_SNR), dtype)
    stack = lora.Stack(a, b, stack.scale_SP.to(DEVICE), stack.rank_SP.to(DEVICE), stack.widths)

    def added(y: torch.Tensor, x: torch.Tensor, token: torch.Tensor, start: torch.Tensor, s: lora.Schedule):
        h = lora.shrink(x, stack, token.to(DEVICE), start.to(DEVICE), s)
        lora.expand(y, h, stack, token.to(DEVICE), start.to(DEVICE), s)
        return y

    want = added(y.clone(), x, token, start, lora.FEW)
    assert lora.is_proved(x, stack)
    assert torch.equal(added(y.clone(), x, token, start, lora.MANY), want)
    for at in range(0, len(token), 97):
        one, alone = int(token[at]), (start > at).int()
        got = added(y[one : one + 1].clone(), x[one : one + 1].clone(), torch.zeros(1).int(), alone, lora.FEW)
        assert torch.equal(got[0], want[one])


@pytest.mark.parametrize("seed", range(6))
def test_tiles_are_found_for_every_row_most_keys_first_and_the_padding_is_cleared(seed: int):
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device or the interpreter")
    rng = random.Random(seed)
    bq, limit, pad, width = rng.choice([16, 128]), rng.choice([2, 16]), rng.choice([0, 3, 200]), 64
    few, many = [1, 2, 5, 16, 17, 130, 300], [1] * 20 + [17, 40]  # the kernels look at 512 rows at a time
    tokens = [rng.choice(few if seed < 5 else many) for _ in range(rng.randint(1, 9) if seed < 5 else 530)]
    seen = [t + rng.choice([0, 0, 16, 128, rng.randint(0, 100)]) for t in tokens]
    starts, total = [sum(tokens[:r]) for r in range(len(tokens) + 1)], sum(tokens) + pad
    most = total // bq + min(len(tokens), total // (limit + 1)) + 1
    tiles = torch.full((4 + 4 * most,), -7, dtype=torch.int32, device=DEVICE)
    out = torch.full((total, width), 9.0, device=DEVICE)
    q_start, kv_len = (torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in (starts, seen))
    attention_tiles.table_kernel[(most + 1,)](
        q_start, kv_len, tiles, out, total, len(tokens), limit, width, bq, 4096
    )  # fmt: skip
    want = [
        [starts[r] + first, count - first, seen[r] - count + first, r]
        for r, count in enumerate(tokens)
        if count > limit
        for first in range(0, count, bq)
    ]
    want.sort(key=lambda tile: (-tile[2], tile[3]))  # the most keys first
    assert tiles[:2].tolist() == [len(want), 0] and tiles[4 : 4 + 4 * len(want)].view(-1, 4).tolist() == want
    assert (out[starts[-1] :] == 0).all() and (out[: starts[-1]] == 9).all()
