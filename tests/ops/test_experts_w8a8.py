"""Experts that multiply in FP8: the bits of each expert's own dense products, alone, in any batch, over ranks.

The Triton kernels run in Triton's interpreter, in a process of its own (see test_interpreted.py), and on a device.
"""

from typing import Any, NamedTuple

import pytest
import torch
from interpreted import INTERPRETED
from torch import Tensor

from fengine.ops import activations, cpu, e4m3, experts_launch, linear, quantized, w8a8, w8a8_launch
from fengine.ops.experts import Routing, Weights, experts, route_reference, weights_of
from fengine.ops.experts_w8a8_launch import FEW, HOPPER, REFERENCE, Pairs, candidates, schedules
from fengine.ops.proof import captured
from fengine.ops.quantized import Codes

GROUPS = ((0, 0), (128, 128), (32, 64), (0, 32))  # columns that share scales, of gate_up and of down


class Case(NamedTuple):
    x: Tensor
    logits: Tensor
    gate_up: Codes  # of all experts below each other
    down: Codes
    biases: tuple[Tensor, Tensor]


def case(t: int, e: int, f: int, d: int, groups: tuple[int, int]) -> Case:
    g = torch.Generator().manual_seed(t * e + f)

    def codes(n: int, k: int, group: int) -> Codes:
        wide = quantized.encoded(torch.randn(e * n, k + -k % (group or 1), generator=g) / 8, "w8a8", group)
        return wide._replace(code_NK=wide.code_NK[:, :k].contiguous(), group=wide.group if group else k)

    x, logits = torch.randn(t, d, generator=g).bfloat16().float(), torch.randn(t, e, generator=g)
    biases = torch.randn(e, 2 * f, generator=g), torch.randn(e, d, generator=g)
    return Case(x, logits, codes(2 * f, d, groups[0]), codes(d, f, groups[1]), biases)


def packed(one: Case, biases: bool = True) -> Weights:
    e = one.logits.shape[1]
    return weights_of(w8a8.pack(one.gate_up, e), w8a8.pack(one.down, e), *(one.biases if biases else (None, None)),
                      None)[0]  # fmt: skip


def of_expert(codes: Codes, expert: int, count: int) -> Codes:
    n = len(codes.code_NK) // count
    return codes.rows(slice(expert * n, (expert + 1) * n))


def by_dense(one: Case, routing: Routing) -> Tensor:
    """Each expert's rows through dense products in FP8 by themselves, added by ascending id."""
    (t, e), d = one.logits.shape, one.x.shape[1]
    id_TA, weight_TA = route_reference(one.logits, routing)
    total = torch.zeros(t, d)
    for expert in range(e):
        token, slot = (id_TA == expert).nonzero(as_tuple=True)
        gate_up, down = (w8a8.pack(of_expert(codes, expert, e)) for codes in (one.gate_up, one.down))
        h = linear.gated_linear(one.x[token], gate_up, one.biases[0][expert])
        total[token] += linear.linear(h, down, one.biases[1][expert]) * weight_TA[token, slot, None]
    return total


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_experts_have_the_bits_of_their_dense_products(groups: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu, "SHORT", 0)  # as many threads as there are
    one = case(21, 5, 136, 200, groups)
    got = experts(one.x, one.logits, packed(one), Routing(3))
    torch.testing.assert_close(got, by_dense(one, Routing(3)), rtol=1e-6, atol=1e-6)  # torch's exp in the weights
    single = one._replace(logits=one.logits.round())  # one expert: its weight is 1
    assert torch.equal(experts(*single[:2], packed(single), Routing(1)), by_dense(single, Routing(1)))
    assert not torch.equal(got, experts(one.x, one.logits, packed(one, False), Routing(3)))


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_a_token_alone_has_the_bits_of_the_batch(groups: tuple[int, int]):
    one = case(30, 5, 136, 200, groups)
    w, routing = packed(one), Routing(3, True, True, 2.5)
    whole = experts(one.x, one.logits, w, routing)
    assert torch.equal(
        whole, torch.cat([experts(*row, w, routing) for row in zip(one.x.split(1), one.logits.split(1), strict=True)])
    )
    order = torch.randperm(30)
    assert torch.equal(whole[order], experts(one.x[order], one.logits[order], w, routing))


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_columns_of_ranks_side_by_side_are_the_whole(groups: tuple[int, int]):
    """And one matrix may be in FP8, the other not."""
    one, e, f, d = case(21, 5, 128, 192, groups), 5, 128, 192
    w = packed(one)
    want = experts(one.x, one.logits, w, Routing(3), limit=1.0)

    def part(codes: Codes, lines: Tensor) -> Codes:
        return codes.rows((torch.arange(e)[:, None] * (len(codes.code_NK) // e) + lines).flatten())

    first, last = [], []
    for i in range(2):
        own = torch.arange(i * f // 2, (i + 1) * f // 2)
        lines = torch.cat((own, own + f))
        leaf: Any = w8a8.pack(part(one.gate_up, lines), e)
        half = Weights(leaf.packed, None, one.biases[0][:, lines].contiguous(), gate_up_scale=leaf.scale)
        first.append(experts(one.x, one.logits, half, Routing(3), limit=1.0, width=f // 2))
    for i in range(2):
        own = torch.arange(i * d // 2, (i + 1) * d // 2)
        leaf = w8a8.pack(part(one.down, own), e)
        half = Weights(None, leaf.packed, None, one.biases[1][:, own].contiguous(), down_scale=leaf.scale)
        last.append(experts(torch.cat(first, 1), one.logits, half, Routing(3), width=d // 2))
    assert torch.equal(torch.cat(last, 1), want)


def test_one_matrix_in_fp8_beside_one_in_16_bits():
    one, e = case(21, 5, 128, 192, (0, 0)), 5
    dense = linear.pack(quantized.dequantized(one.down, torch.bfloat16).view(e, 192, 128))
    w = weights_of(w8a8.pack(one.gate_up, e), dense, *one.biases, None)[0]
    got = experts(one.x, one.logits, w, Routing(3))
    half = w._replace(down=None, down_bias=None), w._replace(gate_up=None, gate_up_bias=None, gate_up_scale=None)
    h = experts(one.x, one.logits, half[0], Routing(3), width=128)
    assert torch.equal(got, experts(h, one.logits, half[1], Routing(3), width=192))
    assert torch.equal(h, experts(one.x, one.logits, packed(one)._replace(down=None), Routing(3), width=128))


# -- Triton's kernels --------------------------------------------------------------------------------------------------


def as_on_cuda(one: Case, device: str, dtype: torch.dtype, routing: Routing, biases: bool) -> experts_launch.Call:
    e = one.logits.shape[1]

    def matrices(codes: Codes) -> tuple[Tensor, Tensor]:
        code, scale = (part.unflatten(0, (e, -1)) for part in (codes.code_NK, codes.scale_NG.float()))
        return code.to(device), scale.mT.contiguous().to(device)

    (gate_up, gate_up_scale), (down, down_scale) = matrices(one.gate_up), matrices(one.down)
    both = [bias.to(device, dtype) for bias in one.biases] if biases else (None, None)
    w = Weights(gate_up, down, *both, None, gate_up_scale, down_scale)
    return experts_launch.Call(one.x.to(device, dtype), one.logits.to(device), w, routing, None, None, 0.0)


def some(call: experts_launch.Call, rows: Any) -> experts_launch.Call:
    return call._replace(x_TD=call.x_TD[rows].contiguous(), logits_TE=call.logits_TE[rows].contiguous())


def test_schedules_follow_the_rows_of_an_expert():
    def tried(pairs: int, hopper: bool, by_step: bool = False) -> list[int]:
        return [s.gate.block_m for s in schedules(pairs, 128, hopper, by_step)]

    assert tried(8, True) == [8, 16, 64] and tried(8, False) == [16, 64] and tried(1024, True) == [16, 16, 64]
    assert tried(65536, True) == [128, 64] and tried(65536, True, True) == tried(65536, False) == [64]


@pytest.mark.skipif(not INTERPRETED, reason="in the interpreter")
@pytest.mark.parametrize("groups", [(0, 0), (64, 32)], ids=str)
def test_triton_kernels_are_the_op(groups: tuple[int, int]):
    one, routing = case(3, 3, 40, 136, groups), Routing(2, not groups[0], bool(groups[0]), 2.5)
    call = as_on_cuda(one, "cpu", torch.float32, routing, True)
    want = experts(one.x, one.logits, packed(one), routing)
    for s in (REFERENCE, FEW):
        torch.testing.assert_close(experts_launch.run(call, s), want, rtol=1e-3, atol=1e-3)
        alone = torch.cat([experts_launch.run(some(call, [t]), s) for t in (2, 0)])
        assert torch.equal(alone, experts_launch.run(call, s)[[2, 0]])
    first, last = call.weights.halves()
    h_PF = experts_launch.best(call._replace(weights=first, width=40))
    assert torch.equal(
        experts_launch.best(call._replace(weights=last, x_TD=h_PF, width=136)), experts_launch.best(call)
    )


def by_dense_kernels(call: experts_launch.Call) -> Tensor:
    """As `by_dense`, by the dense products' reference on the device; for the routing of one expert a token."""
    w, expert_T = call.weights, call.logits_TE.argmax(-1)
    assert w.gate_up is not None and w.down is not None and w.gate_up_scale is not None and w.down_scale is not None

    def product(x_TK: Tensor, code_ENK: Tensor, scale_EGN: Tensor, expert: int, dtype: torch.dtype) -> Tensor:
        step, by_step = w8a8.tree_of(code_ENK.shape[2], scale_EGN.shape[1])
        matrix = w8a8_launch.Matrix(code_ENK[expert], scale_EGN[expert], code_ENK.shape[1], step, by_step)
        q = e4m3.launch(x_TK, step if by_step else x_TK.shape[1])
        return w8a8_launch.run(*q, matrix, None, dtype, w8a8_launch.REFERENCE)

    y_TD = torch.empty_like(call.x_TD)
    for t, expert in enumerate(expert_T.tolist()):
        h = activations.launch(product(call.x_TD[t : t + 1], w.gate_up, w.gate_up_scale, expert, call.x_TD.dtype))
        y_TD[t] = product(h, w.down, w.down_scale, expert, torch.float32)[0].to(call.x_TD.dtype)
    return y_TD


@pytest.mark.gpu
@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize(("t", "e", "f", "d"), [(70, 12, 384, 640), (300, 6, 208, 272)])
def test_on_a_device_all_schedules_have_the_bits_of_the_dense_products(
    groups: tuple[int, int], t: int, e: int, f: int, d: int
):
    one = case(t, e, f, d, groups)
    call = as_on_cuda(one, "cuda", torch.bfloat16, Routing(1), False)
    got = experts_launch.run(call, REFERENCE)
    assert torch.equal(got, by_dense_kernels(call))
    exact = experts(one.x, one.logits, packed(one, False), Routing(1))
    assert (got.cpu().float() - exact).norm() / exact.norm() < 0.02
    call = as_on_cuda(one, "cuda", torch.bfloat16, Routing(3), True)
    want = experts_launch.run(call, REFERENCE)
    w: Any = call.weights
    found = [candidates(pairs, [(w.gate_up, w.gate_up_scale), (w.down, w.down_scale)]) for pairs in (1, 40 * e)]
    hopper = [Pairs(tiles, tiles) for _, tiles in HOPPER] if any(s[0] not in (FEW, REFERENCE) for s in found) else []
    for s in (FEW, *hopper):
        assert torch.equal(experts_launch.run(call, s), want), s
        assert torch.equal(captured(lambda s=s: experts_launch.run(call, s)), want), s
        assert torch.equal(experts_launch.run(some(call, [3]), s), want[3:4]), s
        assert experts_launch.is_proved(call, s), s
    for s in {FEW, *found[0], *found[1]} - {REFERENCE}:  # of ranks
        first, last = (call._replace(weights=half) for half in w.halves())
        h_PF = experts_launch.run(first._replace(width=f), s)
        assert torch.equal(experts_launch.run(last._replace(x_TD=h_PF, width=d), s), want), s
    assert torch.equal(experts_launch.best(call), want)
