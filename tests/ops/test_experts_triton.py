"""The Triton kernels of the mixture of experts: in Triton's interpreter, and bits over all schedules on a device.

As test_ops_triton.py, they run a second time in a process that chooses the interpreter.
"""

import itertools
from typing import Any

import pytest
import torch
from interpreted import INTERPRETED
from torch import Tensor

from fengine.ops import (
    activations,
    experts_hopper,
    experts_launch,
    experts_routing,
    linear_launch,
    quantized,
    quantized_hopper,
)
from fengine.ops import experts as op
from fengine.ops.experts_schedules import (
    FEW_BITS,
    FLOAT32,
    GROUPED,
    HOPPER,
    MANY,
    NARROW,
    REFERENCE,
    Schedule,
    of_whole_groups,
    tiles_at_most,
)
from fengine.ops.linear import Dense
from fengine.ops.proof import captured

DEVICE = "cpu" if INTERPRETED else "cuda"
ROUTINGS = [op.Routing(3), op.Routing(3, False), op.Routing(3, True, True, 2.5)]
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter")
gpu = pytest.mark.gpu


def case(t: int, e: int, f: int, d: int, dtype: torch.dtype, routing: op.Routing, full: bool, limit: float = 0.0
         ) -> experts_launch.Call:  # fmt: skip
    """`full`: with biases, a correction and a shared expert."""
    g = torch.Generator().manual_seed(t * e + f)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g).to(DEVICE, dtype)

    w = op.Weights(
        normal(e, 2 * f, d) / d**0.5, normal(e, d, f) / f**0.5, normal(e, 2 * f) if full else None,
        normal(e, d) if full else None, normal(e).float() / 9 if full else None,
    )  # fmt: skip
    return experts_launch.Call(
        normal(t, d),
        normal(t, e).float(),
        w,
        routing,
        normal(t, d) if full else None,
        normal(t, 1).float() if full else None,
        limit,
    )


TOKENS = ("_TD", "_TE", "_T1")


def some(call: experts_launch.Call, rows: Any) -> experts_launch.Call:
    """The call of some of its tokens."""
    taken = {name: x[rows].contiguous() for name, x in call._asdict().items() if name[-3:] in TOKENS and x is not None}
    return call._replace(**taken)


def want(call: experts_launch.Call) -> Tensor:
    return op.reference(*call[:-1])


@interpreted
@pytest.mark.parametrize(
    ("dtype", "routing", "full"),
    [((torch.float32, torch.float16)[(i + full) % 2], ROUTINGS[i], full) for i in range(3) for full in (True, False)],
    ids=str,
)
def test_experts_by_kernels(dtype: torch.dtype, routing: op.Routing, full: bool):
    close = 1e-5 if dtype == torch.float32 else 4e-3
    for t, e, f, d in ((2, 8, 40, 64), (30, 5, 64, 96)):
        call = case(t, e, f, d, dtype, routing, full, 0.0 if full else 1.0)
        torch.testing.assert_close(experts_launch.run(call, FLOAT32), want(call), rtol=close, atol=close)


@interpreted
def test_every_schedule_and_many_experts():
    call = case(3, 7, 33, 70, torch.float16, op.Routing(3), True)
    for s in (REFERENCE, *(s for _, s in GROUPED)):
        torch.testing.assert_close(experts_launch.run(call, s), want(call), rtol=4e-3, atol=4e-3)
    call = case(2, 150, 8, 16, torch.float32, op.Routing(6), True)
    torch.testing.assert_close(experts_launch.run(call, FLOAT32), want(call), rtol=1e-5, atol=1e-5)


def by_ranks(call: experts_launch.Call, s: Schedule, size: int) -> Tensor:
    """The result of ranks, each of which has columns of every expert, side by side."""
    _, _, _, f, d = call.sizes
    w, first, last = call.weights, [], []

    def cut(x: Tensor | None, parts: int, rank: int) -> Any:
        return x if x is None else torch.cat([half.chunk(size, 1)[rank] for half in x.chunk(parts, 1)], 1).contiguous()

    for rank in range(size):
        own = w._replace(gate_up=cut(w.gate_up, 2, rank), gate_up_bias=cut(w.gate_up_bias, 2, rank))
        half = call._replace(weights=own._replace(down=None, down_bias=None), width=f // size)
        first.append(experts_launch.run(half, s))
    for rank in range(size):
        own = w._replace(down=cut(w.down, 1, rank), down_bias=cut(w.down_bias, 1, rank))
        own = own._replace(gate_up=None, gate_up_bias=None)
        part = call._replace(x_TD=torch.cat(first, 1), weights=own, limit=0.0, width=d // size)
        shared = call.shared_TD
        last.append(experts_launch.run(part._replace(shared_TD=shared if shared is None else cut(shared, 1, rank)), s))
    assert first[0].shape == (call.sizes[0] * call.routing.top_k, f // size) and last[0].shape[1] == d // size
    return torch.cat(last, 1)


@interpreted
@pytest.mark.parametrize("full", [True, False])
def test_columns_of_ranks_are_those_of_one_device(full: bool):
    """As near as products of the interpreter are, whose sums depend on the shape."""
    for t, dtype, s in ((5, torch.float32, FLOAT32), (3, torch.float16, REFERENCE), (2, torch.float16, GROUPED[0][1])):
        call, close = case(t, 5, 40, 64, dtype, op.Routing(3), full, 0.0 if full else 1.0), 4e-3
        close = 1e-5 if dtype == torch.float32 else close
        torch.testing.assert_close(by_ranks(call, s, 2), experts_launch.run(call, s), rtol=close, atol=close)


@gpu
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("t", "size"), [(1, 2), (7, 4), (700, 2)])
def test_columns_of_ranks_have_the_bits_of_one_gpu(t: int, size: int, full: bool):
    call = case(t, 32, 768, 2048, torch.bfloat16, op.Routing(8), full)
    for s in (REFERENCE, *(s for _, s in GROUPED), MANY):
        assert torch.equal(by_ranks(call, s, size), experts_launch.run(call, REFERENCE)), s


@interpreted
def test_a_shared_expert_without_a_gate():
    call = case(3, 6, 16, 32, torch.float32, op.Routing(2, sigmoid=True, scale=1.5), True)._replace(gate_T1=None)
    torch.testing.assert_close(experts_launch.run(call, FLOAT32), want(call), rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("full", [True, False])
def test_lists_of_few_tokens_are_those_of_many(routing: op.Routing, full: bool, monkeypatch: pytest.MonkeyPatch):
    for t, e, rows in ((1, 7, 8), (5, 8, 2), (16, 32, 8)):
        call = case(t, e, 4, 8, torch.float32, routing, full)
        call.logits_TE[0, :4] = torch.tensor([0.0, -0.0, 0.0, 1.0])
        how = (call.logits_TE, call.weights.correction, routing, tiles_at_most(3 * t, e, rows), rows)
        rows_ET, count_E, tile_X2, weight_P = experts_routing.lists_of(*how)
        with monkeypatch.context() as patch:
            patch.setattr(experts_routing, "AT_ONCE", 0)
            want_ET, *wanted = experts_routing.lists_of(*how)
        wanted[1], tile_X2 = (x.where(x[:, :1] < e, e) for x in (wanted[1], tile_X2))
        assert all(x.equal(y) for x, y in zip((count_E, tile_X2, weight_P), wanted, strict=True))
        for own, other, count in zip(rows_ET, want_ET, count_E.tolist(), strict=True):
            assert own[:count].equal(other[:count].sort().values)


@interpreted
def test_ties_and_nan():
    call = case(3, 6, 16, 32, torch.float32, op.Routing(4), False)
    logits = torch.tensor([[-0.0, 1.0, 0.0, 1.0, 0.0, 1.0], [1.0, 2.0, torch.nan, 0.0, 5.0, 4.0], [0.0] * 6])
    call = call._replace(logits_TE=logits)
    got = experts_launch.run(call, FLOAT32)
    assert got[1].isnan().all()
    torch.testing.assert_close(got[[0, 2]], want(call)[[0, 2]], rtol=1e-5, atol=1e-5)


# -- bits, on a device -------------------------------------------------------------------------------------------------


def usable(call: experts_launch.Call) -> tuple[Schedule, ...]:
    hopper = experts_hopper.usable(call.x_TD, call.weights.gate_up, call.weights.down)
    return (*(s for _, s in GROUPED), MANY, *((HOPPER,) if hopper else ()))


@gpu
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("e", "a", "f", "d"), [(16, 4, 192, 512), (60, 6, 88, 200), (128, 8, 768, 2048)])
def test_bits_follow_no_schedule_and_no_neighbour(e: int, a: int, f: int, d: int, full: bool):
    whole = case(700, e, f, d, torch.bfloat16, op.Routing(a), full, 7.0 if full else 0.0)
    bits = experts_launch.run(whole, REFERENCE)
    torch.testing.assert_close(bits.float(), want(some(whole, slice(0, 700))).float(), rtol=4e-2, atol=4e-2)
    for rows in (slice(0, 1), slice(5, 7), slice(3, 20), slice(0, 129), slice(0, 700), torch.randperm(700)):
        part = some(whole, rows)
        others = usable(whole)
        few = [s for _, s in NARROW if HOPPER in others and len(part.x_TD) < 20]
        for s in (*few, *others):
            assert experts_launch.run(part, s).equal(bits[rows]), s
        assert captured(lambda part=part: experts_launch.run(part, usable(whole)[0])).equal(bits[rows])
        assert op.experts(*part).equal(bits[rows])


@gpu
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("full", [False, True])
def test_few_pairs_on_hopper_have_the_bits_of_the_lists(routing: op.Routing, full: bool):
    """Sizes that are no multiples of a piece or a program; experts that do not fill 64 lines, or do."""
    sizes = ((6, 96, 160, 3), (9, 96, 160, 8), (40, 200, 336, 5), (150, 768, 2048, 8))
    for (e, f, d, a), dtype, t in itertools.product(sizes, (torch.bfloat16, torch.float16), (1, 2)):
        call = case(t, e, f, d, dtype, routing._replace(top_k=a), full, 7.0 if full else 0.0)
        if HOPPER not in usable(call):
            pytest.skip("needs NVIDIA Hopper")
        call.logits_TE[:, 3] = call.logits_TE[:, 1]
        first = experts_launch._candidates(call)[0]
        assert isinstance(first, Schedule) and first.kind == "narrow"
        got, bits = experts_launch.run(call, first), experts_launch.run(call, REFERENCE)
        assert got.view(torch.int16).equal(bits.view(torch.int16)), (e, f, d, a, dtype, t)
        assert experts_launch.is_proved(call, first)
        call.x_TD[1:, 0] = torch.inf  # it stays in its token
        assert experts_launch.run(call, first)[0].equal(bits[0])


def ungrouped(call: experts_launch.Call) -> tuple[Tensor, Tensor, Tensor]:
    """(ids [T, A], parts [E, T, D], parts whose sum over F is two sums), each expert's rows through `linear`'s own
    reference."""
    t, e, a, f, d = call.sizes
    id_P, index_P = (torch.empty(t * a, dtype=torch.int32, device=DEVICE) for _ in range(2))
    weight_P, lists = torch.empty(t * a, device=DEVICE), torch.zeros(e, t, dtype=torch.int32, device=DEVICE)
    experts_routing.route_kernel[(t,)](
        call.logits_TE, None, id_P, weight_P, lists, lists, index_P, t, e, a, True, False, False, 1.0, False, e,
        num_warps=1, PDL=0
    )  # fmt: skip
    id_TA, weight_TA = id_P.view(t, a), weight_P.view(t, a)
    parts, halves = (torch.zeros(e, t, d, device=DEVICE) for _ in range(2))

    def product(x: Tensor, w: Tensor, dtype: torch.dtype | None) -> Tensor:
        return linear_launch.run(x.contiguous(), w.contiguous(), len(w), None, dtype, linear_launch.REFERENCE)

    for expert in range(e):
        token, slot = (id_TA == expert).nonzero(as_tuple=True)
        weight, down = weight_TA[token, slot, None], call.weights.down[expert]
        h = activations.launch(product(call.x_TD[token], call.weights.gate_up[expert], None))
        parts[expert, token] = (product(h, down, torch.float32) * weight).bfloat16().float()
        two = [product(h[:, k], down[:, k], torch.float32) for k in (slice(f // 2), slice(f // 2, f))]
        halves[expert, token] = ((two[0] + two[1]) * weight).bfloat16().float()
    return id_TA, parts, halves


def in_few_bits(call: experts_launch.Call, kind: str, group: int) -> tuple[experts_launch.Call, experts_launch.Call]:
    """(the call in few bits, the same dequantized)"""
    w, dense, few = call.weights, [], []
    for matrix, gated in ((w.gate_up, True), (w.down, False)):
        codes = quantized.encoded(matrix.flatten(0, 1), kind, group)
        dense.append(Dense(quantized.dequantized(codes, torch.bfloat16).view(matrix.shape), matrix.shape[1]))
        few.append(quantized.pack_experts(codes, len(matrix), gated, torch.bfloat16) or dense[-1])
    here = call._replace(weights=op.weights_of(few[0], few[1], *w[2:5])[0])
    return here, call._replace(weights=op.weights_of(dense[0], dense[1], *w[2:5])[0])


@interpreted
def test_weights_in_few_bits_are_dequantized_where_no_kernel_reads_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quantized_hopper, "serves", lambda device: True)
    call, whole = in_few_bits(case(3, 3, 64, 128, torch.bfloat16, op.Routing(2), True, 7.0), "fp4", 32)
    assert call.weights.group == 32
    assert call.sizes == whole.sizes
    got = call.weights.whole(call.sizes)
    assert torch.equal(got.gate_up, whole.weights.gate_up)
    assert torch.equal(got.down, whole.weights.down)
    assert experts_launch.run(call, REFERENCE).equal(experts_launch.run(whole, REFERENCE))


@gpu
@pytest.mark.parametrize(("kind", "group"), [("fp4", 32), ("int4", 64), ("int4", 128)])
@pytest.mark.parametrize("full", [False, True])
def test_weights_in_few_bits_give_the_bits_of_the_dequantized_ones(kind: str, group: int, full: bool):
    e, a, f, d = 16, 4, 256, 512
    call = case(700, e, f, d, torch.bfloat16, op.Routing(a), full, 7.0 if full else 0.0)
    call, whole = in_few_bits(call, kind, group)
    bits = experts_launch.run(whole, REFERENCE)
    assert experts_launch.run(call, REFERENCE).equal(bits)
    for rows in (slice(0, 1), slice(3, 20), slice(0, 129), slice(0, 700), torch.randperm(700)):
        part = some(call, rows)
        assert op.experts(*part).equal(bits[rows])
        for s in [of_whole_groups(s, group) for _, s in FEW_BITS] if call.weights.group else ():
            assert experts_launch.run(part, s).equal(bits[rows]), s
            assert experts_launch.is_proved(part, s), s


def of_ranks(call: experts_launch.Call, kind: str, group: int, size: int) -> list[tuple[Any, Any]]:
    """Of each rank the leaves of its columns of gate_up and of down: [(in few bits, dequantized)] of both."""
    found, w = [], call.weights
    for rank in range(size):
        both = []
        for matrix, gated in ((w.gate_up, True), (w.down, False)):
            own = torch.cat([half.chunk(size, 1)[rank] for half in matrix.chunk(1 + gated, 1)], 1)
            codes = quantized.encoded(own.flatten(0, 1), kind, group)
            dense = Dense(quantized.dequantized(codes, torch.bfloat16).view(own.shape), own.shape[1])
            both.append((quantized.pack_experts(codes, len(own), gated, torch.bfloat16), dense))
        found.append(tuple(both))
    return found


def half_of(call: experts_launch.Call, leaf: Any, gated: bool, x: Tensor | None = None) -> experts_launch.Call:
    """A rank's half of a call, over what all ranks' first halves gave."""
    none = Dense(torch.empty(0), 0)
    first, last = op.weights_of(leaf, none, None, None, None)[0], op.weights_of(none, leaf, None, None, None)[0]
    width = leaf.n // (1 + gated)
    w = first.halves()[0] if gated else last.halves()[1]
    return call._replace(weights=w, width=width, limit=call.limit * gated, x_TD=call.x_TD if x is None else x)


@interpreted
def test_columns_of_ranks_in_few_bits_are_packed_by_whole_blocks(monkeypatch: pytest.MonkeyPatch):
    """Of each expert; what fills the last one is not part of a matrix."""
    monkeypatch.setattr(quantized_hopper, "serves", lambda device: True)
    call = case(3, 3, 128, 192, torch.bfloat16, op.Routing(2), False)
    for kind, group, size in (("fp4", 32, 2), ("int4", 64, 4)):
        for gate_up, down in of_ranks(call, kind, group, size):
            part = half_of(call, gate_up[0], True)
            assert gate_up[0].packed.dim() == 4 and part.sizes[3:] == (128 // size, 192)
            near(part.weights.whole(part.sizes).gate_up, gate_up[1].packed)
            part = half_of(call, down[0], False, torch.empty(6, 128))
            assert down[0].packed.shape[0] == 3 * -(-192 // size // 64) and part.sizes[3:] == (128, 192 // size)
            near(part.weights.whole(part.sizes).down, down[1].packed)


def near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=2**-7, atol=0)  # the interpreter does not round to the nearest


@gpu
@pytest.mark.parametrize(("kind", "group", "f", "d"), [("fp4", 32, 320, 448), ("int4", 64, 256, 512)])
@pytest.mark.parametrize("size", [2, 4])
def test_columns_of_ranks_in_few_bits_have_the_bits_of_the_dequantized_ones(
    kind: str, group: int, f: int, d: int, size: int
):
    call = case(300, 12, f, d, torch.bfloat16, op.Routing(4), False, 7.0)
    for gate_up, down in of_ranks(call, kind, group, size):
        h = torch.randn(300 * 4, f, device=DEVICE).bfloat16()
        for rows in (slice(0, 1), slice(3, 20), slice(0, 129), slice(0, 300)):
            pairs = slice(rows.start * 4, rows.stop * 4)
            for leaf, gated, x in ((gate_up, True, call.x_TD[rows]), (down, False, h[pairs])):
                part, whole = (half_of(some(call, rows), one, gated, x.contiguous()) for one in leaf)
                bits = experts_launch.run(whole, REFERENCE)
                for s in [of_whole_groups(s, group) for _, s in FEW_BITS]:
                    assert experts_launch.run(part, s).equal(bits), (rows, gated, s)
                    assert experts_launch.is_proved(part, s), s
                assert experts_launch.best(part).equal(bits)


@gpu
def test_grouped_is_ungrouped_in_order_of_ids():
    """Bit for bit. Controls: the order of the router's choice, and the sum over F in two halves.

    Experts 0 and 2 tie in front and cancel; the others are so small that they are rounded beside them.
    """
    call = case(300, 16, 192, 512, torch.bfloat16, op.Routing(4), False)
    gate_up, down = call.weights.gate_up.clone(), call.weights.down * 2**-18
    gate_up[2], down[0] = gate_up[0], call.weights.down[0]
    down[2] = -down[0]
    logits = call.logits_TE.clamp(max=3.0)
    logits[:, [0, 2]] = 4.0
    logits[:, 1] = 3.5
    call = call._replace(weights=op.Weights(gate_up, down), logits_TE=logits)
    id_TA, parts, halves = ungrouped(call)

    def added(parts: Tensor, order_TA: Tensor) -> Tensor:
        total = torch.zeros(300, 512, device=DEVICE)
        for expert_T in order_TA.long().T:
            total = total + parts[expert_T, torch.arange(300, device=DEVICE)]
        return total.bfloat16()

    bits = experts_launch.run(call, REFERENCE)
    assert bits.equal(added(parts, id_TA))
    assert not bits.equal(added(halves, id_TA))
    chosen_TA = logits.sort(dim=-1, descending=True, stable=True).indices[:, :4]
    assert not bits.equal(added(parts, chosen_TA))


@gpu
def test_a_schedule_of_another_tree_is_not_proved(monkeypatch: pytest.MonkeyPatch):
    """The negative control of the proof: one schedule adds the later half of D first."""
    call = case(40, 16, 192, 512, torch.bfloat16, op.Routing(4), False)
    assert experts_launch._compare(call, GROUPED[0][1])
    run = experts_launch.run

    def later_first(call: experts_launch.Call, s: Schedule) -> Tensor:
        if s == REFERENCE:
            return run(call, s)
        w = call.weights._replace(gate_up=call.weights.gate_up.roll(256, 2))
        return run(call._replace(weights=w, x_TD=call.x_TD.roll(256, 1)), s)

    monkeypatch.setattr(experts_launch, "run", later_first)
    assert not experts_launch._compare(call, GROUPED[0][1])
