"""The mixture of experts on the CPU: against the math, against transformers, and bits that know no neighbours."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fengine.errors import UnsupportedFeatureError
from fengine.ops import cpu, experts_schedules, linear
from fengine.ops.experts import Routing, Weights, experts, moe, reference, route_reference

ROUTINGS = [Routing(3), Routing(3, False), Routing(3, True, True, 2.5), Routing(3, False, True)]
KINDS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """That many threads, also for the smallest call."""
    before = torch.get_num_threads()
    monkeypatch.setattr(cpu, "SHORT", 0)
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def case(t: int, e: int, f: int, d: int, dtype: torch.dtype = torch.float32, biases: bool = False
         ) -> tuple[Tensor, Tensor, Weights]:  # fmt: skip
    """(x, logits, unpacked weights)"""
    g = torch.Generator().manual_seed(t * e + f)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g).to(dtype) / 8

    w = Weights(normal(e, 2 * f, d), normal(e, d, f))
    if biases:
        w = w._replace(gate_up_bias=normal(e, 2 * f), down_bias=normal(e, d), correction=normal(e).float())
    return torch.randn(t, d, generator=g), torch.randn(t, e, generator=g), w


def stacked(w_ENK: Tensor) -> Tensor:
    return linear.pack(w_ENK).packed


def packed(w: Weights) -> Weights:
    return w._replace(gate_up=linear.pack(w.gate_up).packed, down=linear.pack(w.down).packed)


def as_double(w: Weights) -> Weights:
    return w._replace(**{name: x.double() for name, x in w._asdict().items() if isinstance(x, Tensor)})


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize(("t", "e", "f", "d"), [(1, 3, 40, 64), (13, 16, 33, 70), (40, 5, 64, 96)])
def test_experts_are_the_math(threads: int, dtype: torch.dtype, routing: Routing, t: int, e: int, f: int, d: int):
    both = torch.randn(t, d), torch.randn(t, 1)
    for limit, biases, shared, gate in ((0.0, True, *both), (1.0, False, None, None), (0.0, False, both[0], None)):
        x, logits, w = case(t, e, f, d, dtype, biases)
        exact = reference(x.double(), logits.double(), as_double(w), routing, shared, gate, limit)
        got = experts(x, logits, packed(w), routing, shared, gate, limit)
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_a_token_alone_has_the_bits_of_the_batch(threads: int, routing: Routing):
    """In any company and any order of rows: grouping is no part of the sum."""
    x, logits, w = case(50, 8, 40, 64, torch.bfloat16, biases=True)
    w, shared, gate = packed(w), torch.randn(50, 64), torch.randn(50, 1)
    whole = experts(x, logits, w, routing, shared, gate)
    alone = [experts(x[t], logits[t], w, routing, shared[t], gate[t]) for t in torch.arange(50).split(1)]
    assert whole.equal(torch.cat(alone))
    order = torch.randperm(50)
    assert whole[order].equal(experts(x[order], logits[order], w, routing, shared[order], gate[order]))
    assert whole[3:20].equal(experts(x[3:20], logits[3:20], w, routing, shared[3:20], gate[3:20]))


def test_columns_of_ranks_side_by_side_are_the_whole(threads: int):
    """Each rank computes its columns of every expert's gate and up, and with all of these its columns of the result."""
    x, logits, w = case(21, 5, 40, 36, torch.bfloat16, biases=True)
    shared, gate = torch.randn(21, 36), torch.randn(21, 1)
    for limit in (0.0, 1.0):
        want = experts(x, logits, packed(w), Routing(3), shared, gate, limit)
        for size in (2, 4):
            f, d = 40 // size, 36 // size
            first = [halves(w, slice(i * f, (i + 1) * f), slice(0)) for i in range(size)]
            last = [halves(w, slice(0), slice(i * d, (i + 1) * d)) for i in range(size)]
            h_PF = torch.cat([experts(x, logits, one, Routing(3), limit=limit, width=f) for one in first], 1)
            parts = [
                experts(h_PF, logits, one, Routing(3), shared[:, i * d : (i + 1) * d], gate, width=d)
                for i, one in enumerate(last)
            ]
            assert torch.equal(torch.cat(parts, 1), want)
    assert experts(x[:0], logits[:0], first[0], Routing(3), width=f).shape == (0, f)


def halves(w: Weights, f: slice, d: slice) -> Weights:
    """Packed columns of gate and up, or of down; None for no columns."""
    found = w._replace(gate_up=None, down=None, gate_up_bias=None, down_bias=None)
    if f.stop:
        assert w.gate_up is not None and w.gate_up_bias is not None
        cut = [torch.cat([half[:, f] for half in x.chunk(2, 1)], 1) for x in (w.gate_up, w.gate_up_bias)]
        return found._replace(gate_up=stacked(cut[0]), gate_up_bias=cut[1])
    assert w.down is not None and w.down_bias is not None
    return found._replace(down=stacked(w.down[:, d]), down_bias=w.down_bias[:, d].contiguous())


def test_grouped_is_ungrouped_in_order_of_ids():
    """Bit for bit: each expert's rows through `linear` by themselves, added by ascending id. Controls: another order,
    and a sum over F in two halves."""
    x, logits, w = case(60, 8, 96, 64, torch.bfloat16)
    whole = experts(x, logits, packed(w), Routing(4))
    id_TA, weight_TA = route_reference(logits, Routing(4))
    parts = torch.zeros(8, 60, 64)
    halves = torch.zeros(8, 60, 64)
    for expert in range(8):
        token, slot = (id_TA == expert).nonzero(as_tuple=True)
        h = linear.gated_linear(x[token], linear.pack(w.gate_up[expert]))
        weight = weight_TA[token, slot, None]
        parts[expert, token] = linear.linear(h, linear.pack(w.down[expert])) * weight
        left, right = (linear.linear(h[:, half], linear.pack(w.down[expert][:, half]))
                       for half in (slice(48), slice(48, 96)))  # fmt: skip
        halves[expert, token] = (left + right) * weight

    def added(parts: Tensor, order: Any) -> Tensor:
        total = torch.zeros(60, 64)
        for expert in order:
            total = total + parts[expert]
        return total

    torch.testing.assert_close(whole, added(parts, range(8)), rtol=1e-6, atol=1e-6)  # torch's exp in the weights
    same_weights = experts(x, logits.round(), packed(w), Routing(1))  # one expert: its weight is 1, nothing is added
    one = logits.round().argmax(-1)
    want = torch.stack([
        linear.linear(linear.gated_linear(x[t : t + 1], linear.pack(w.gate_up[e])), linear.pack(w.down[e]))[0]
        for t, e in enumerate(one.tolist())])  # fmt: skip
    assert same_weights.equal(want)
    assert not added(parts, range(8)).equal(added(parts, reversed(range(8))))
    assert not added(parts, range(8)).equal(added(halves, range(8)))


def test_ties_go_to_the_smaller_id_and_zeros_are_one_number():
    x, _, w = case(1, 6, 16, 32)
    logits = torch.tensor([[-0.0, 1.0, 0.0, 1.0, 0.0, 1.0]])
    for top_k, ids in ((2, [1, 3]), (4, [0, 1, 3, 5]), (5, [0, 1, 2, 3, 5])):
        id_TA, _ = route_reference(logits, Routing(top_k))
        assert id_TA.tolist() == [ids]
        torch.testing.assert_close(
            experts(x, logits, packed(w), Routing(top_k)), reference(x, logits, w, Routing(top_k)), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_a_row_of_nan_is_nan_and_leaves_its_neighbours(routing: Routing):
    x, logits, w = case(4, 8, 16, 32)
    want = experts(x, logits, packed(w), routing)
    logits[1, 5] = torch.nan
    logits[3] = torch.full((8,), -torch.inf)
    got = experts(x, logits, packed(w), routing)
    assert got[1].isnan().all() and got[[0, 2]].equal(want[[0, 2]])


def test_what_it_does_not_take():
    x, logits, w = case(2, 4, 16, 32)
    with pytest.raises(UnsupportedFeatureError, match="float64"):
        experts(x, logits.double(), packed(w), Routing(2))
    assert experts(x[:0], logits[:0], packed(w), Routing(2)).shape == (0, 32)


def test_schedules_follow_the_rows_of_an_expert():
    def kinds(t: int, hopper: bool, dtype: torch.dtype = torch.bfloat16) -> list[tuple[str, int]]:
        found = experts_schedules.schedules(t, 128, 8, 768, 2048, dtype, hopper)
        return [(s.kind, s.gate.block_m) for s in found if isinstance(s, experts_schedules.Schedule)]

    assert kinds(1, False) == [("grouped", 16)] and kinds(1, True) == [("narrow", 8), ("grouped", 16)]
    assert kinds(32, True) == [("grouped", 16)] and kinds(512, True) == [("grouped", 64)]
    assert kinds(8192, True)[0] == ("hopper", 128) and kinds(8192, False) == [("grouped", 128)]
    assert kinds(8192, True, torch.float32) == [("grouped", 16)]
    odd = experts_schedules.schedules(1, 32, 4, 2880, 2880, torch.bfloat16, True)[0]
    assert isinstance(odd, experts_schedules.Schedule)
    assert 2880 % odd.gate.block_k == 0 == 2880 % odd.down.block_k
    for tokens, group in itertools.product((1, 32, 128, 512, 8192), (32, 64, 128)):
        first = experts_schedules.schedules(tokens, 32, 4, 2880, 2880, torch.bfloat16, True, group)[0]
        assert isinstance(first, experts_schedules.FewBits)
        assert all(tiles.chunks * 64 % group == 0 for tiles in first)  # a piece has whole groups
        assert first.gate.block_m == first.down.block_m
    assert experts_schedules.tiles_at_most(8, 128, 16) == 8 and experts_schedules.tiles_at_most(4096, 128, 64) == 192


# -- against transformers, in float32 ----------------------------------------------------------------------------------


def close(got: Tensor, want: Tensor) -> None:
    assert (got - want).abs().max() <= 1e-4


@pytest.mark.parametrize("renormalise", [True, False])
def test_qwen3_moe_and_olmoe_block(renormalise: bool):
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = modeling.Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=48, num_experts=16, num_experts_per_tok=4, norm_topk_prob=renormalise,
        num_hidden_layers=1,
    )  # fmt: skip
    block = modeling.Qwen3MoeSparseMoeBlock(config).eval()
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.2)
    x = torch.randn(30, 64)
    w = Weights(stacked(block.experts.gate_up_proj.data), stacked(block.experts.down_proj.data))
    got = moe(x, linear.pack(block.gate.weight.data), w, Routing(4, renormalise))
    with torch.no_grad():
        close(got, block(x[None])[0])


def test_qwen2_moe_block_with_its_shared_expert():
    modeling = pytest.importorskip("transformers.models.qwen2_moe.modeling_qwen2_moe")
    config = modeling.Qwen2MoeConfig(
        hidden_size=64, moe_intermediate_size=48, shared_expert_intermediate_size=96, num_experts=8,
        num_experts_per_tok=2, num_hidden_layers=1,
    )  # fmt: skip
    block = modeling.Qwen2MoeSparseMoeBlock(config).eval()
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.2)
    x = torch.randn(20, 64)
    w = Weights(stacked(block.experts.gate_up_proj.data), stacked(block.experts.down_proj.data))
    with torch.no_grad():
        shared, gate = block.shared_expert(x), block.shared_expert_gate(x)
        want = block(x[None])[0]
    close(moe(x, linear.pack(block.gate.weight.data), w, Routing(2, False), shared_TD=shared, gate_T1=gate), want)


def test_gpt_oss_block():
    """Biases everywhere, clamped gates; its gate and up columns alternate and its weights are transposed."""
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = modeling.GptOssConfig(
        hidden_size=64, intermediate_size=48, num_local_experts=8, num_experts_per_tok=3, num_hidden_layers=1
    )
    block = modeling.GptOssMLP(config).eval()
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.5)
    x = torch.randn(20, 64)
    ours, routed = block.experts, block.router

    def apart(w: Tensor) -> Tensor:
        return torch.cat((w[..., ::2], w[..., 1::2]), -1)

    w = Weights(
        stacked(apart(ours.gate_up_proj.data).transpose(1, 2)), stacked(ours.down_proj.data.transpose(1, 2)),
        apart(ours.gate_up_proj_bias.data), ours.down_proj_bias.data,
    )  # fmt: skip
    got = moe(x, linear.pack(routed.weight.data), w, Routing(3), router_bias_E=routed.bias.data, limit=7.0)
    with torch.no_grad():
        out = block(x[None])
    want = (out[0] if isinstance(out, tuple) else out)[0]
    assert (got - want).abs().max() <= 1e-5 * want.abs().max().clamp(min=10)
