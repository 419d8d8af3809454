"""Ops on the CPU: references against oracles, faces against references, registrations, compilation."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.decorators import mark_dynamic, mark_unbacked
from torch._inductor.utils import run_and_get_code
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from fengine.models.reader import ConfigReader, rope_spec
from fengine.models.rope import rope_table
from fengine.models.spec import RopeSpec
from fengine.ops import (
    activations,
    attention,
    e4m3,
    edges,
    go_on,
    layer_norm,
    linear,
    quantized,
    rms_norm,
    rope,
    sampling,
    w8a8,
)

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def paged_case(
    lengths: list[int], tokens: list[int], heads: int, groups: int, width: int, size: int, padding: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float]:
    """Arguments of `attention`: shuffled pages, a padding row, padding tokens, NaN in every slot that no row owns."""
    pages = [-(-n // size) for n in lengths]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(7)) + 1
    table = torch.zeros(len(lengths) + 1, max(pages) + 2, dtype=torch.int32)
    k, v = (normal(sum(pages) + 1, size, groups, width, seed=s) for s in (1, 2))
    k[0] = v[0] = math.nan
    for r, own in enumerate(order.split(pages)):
        table[r, : len(own)] = own
        used = lengths[r] - (len(own) - 1) * size
        k[own[-1], used:] = v[own[-1], used:] = math.nan
    start = torch.tensor([0, *tokens, 0]).cumsum(0).int()
    q = normal(sum(tokens) + padding, heads, width)
    return q, k, v, start, torch.tensor([*lengths, 0]).int(), table, width**-0.5


def draw_case(rows: int, vocab: int, **changes: Tensor) -> dict[str, Tensor]:
    """Arguments of `draw`, unfiltered unless `changes` says so."""
    case = {
        "logits_RV": normal(rows, vocab) * 3,
        "temperature_R": torch.linspace(0.5, 1.5, rows),
        "top_k_R": torch.full((rows,), vocab),
        "top_p_R": torch.ones(rows),
        "min_p_R": torch.zeros(rows),
        "seed_R": torch.arange(rows) * 7919 - (1 << 40),
        "pos_R": torch.arange(rows) + 3,
    }
    case |= changes
    return case | {"top_k_R": case["top_k_R"].int(), "pos_R": case["pos_R"].int()}


# -- references against oracles ---------------------------------------------------------------------------------------


def test_norm_is_transformers_norm():
    x, weight = normal(5, 48), normal(48)
    norm = LlamaRMSNorm(48, 1e-5)
    norm.weight.data = weight
    torch.testing.assert_close(rms_norm.reference(x, weight, 1e-5), norm(x), **CLOSE)
    torch.testing.assert_close(rms_norm.reference(x.bfloat16(), weight.bfloat16(), 1e-5), norm.bfloat16()(x.bfloat16()))


LONG = {"short_factor": [1.0 + i / 40 for i in range(32)], "long_factor": [2.0 + i / 4 for i in range(32)]}
YARN = {"factor": 8.0, "original_max_position_embeddings": 64}
ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": YARN | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": YARN,
    "yarn, other bounds": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn, other scales": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, a factor": YARN | {"attention_factor": 1.5},
    "longrope": LONG | {"original_max_position_embeddings": 512, "factor": 4.0},
    "longrope, beyond": LONG | {"original_max_position_embeddings": 128},
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_table_has_the_bits_of_transformers(name: str):
    kind = name.partition(",")[0]
    parameters = {"rope_type": kind, "rope_theta": 5e3} | ROPES[name]
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, max_position_embeddings=512, rope_parameters=parameters)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(512)[None])
    read = ConfigReader(config.to_dict())
    table = rope_spec(read, 64, 512)
    assert not read.problems and table.kind == ("default" if kind == "dynamic" else kind)
    assert rope_table(table, 64, 512).equal(torch.cat((cos[0, :, :32], sin[0, :, :32]), -1))


def test_rotation_is_transformers_rotation():
    table, x = rope_table(RopeSpec(1e4), 16, 40), normal(6, (4 + 2 * 2) * 16)
    position = torch.tensor([0, 3, 39, 7, 7, 1], dtype=torch.int32)
    pages = torch.zeros(4, 2, 2, 16)
    q, k, v = rope.reference(x, table, position, torch.arange(2, 8), pages, pages, 4, None, None, 0.0)
    cos, sin = (half[position][None].repeat(1, 1, 2) for half in table.chunk(2, -1))
    heads = x.unflatten(1, (-1, 16)).transpose(0, 1)[None]
    want_q, want_k = apply_rotary_pos_emb(heads[:, :4], heads[:, 4:6], cos, sin)
    torch.testing.assert_close(q, want_q[0].transpose(0, 1), **CLOSE)
    torch.testing.assert_close(k.flatten(0, 1)[2:], want_k[0].transpose(0, 1), **CLOSE)
    assert v.flatten(0, 1)[2:].equal(x.unflatten(1, (-1, 16))[:, 6:])


def test_attention_reference_is_sdpa():
    lengths, tokens = [9, 30], [9, 4]
    args = paged_case(lengths, tokens, 6, 2, 16, 4, padding=2)
    out = attention.reference(*args)
    q, k, v, start, _, table, scale = args
    for r, (length, new) in enumerate(zip(lengths, tokens, strict=True)):
        keys, values = (
            x[table[r].long()].flatten(0, 1)[:length].repeat_interleave(3, 1).transpose(0, 1) for x in (k, v)
        )
        mask = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        rows = slice(int(start[r]), int(start[r + 1]))
        want = torch.nn.functional.scaled_dot_product_attention(
            q[rows].transpose(0, 1), keys, values, mask, scale=scale
        )
        torch.testing.assert_close(out[rows], want.transpose(0, 1), **CLOSE)
    assert out[sum(tokens) :].eq(0).all()


def test_philox_known_answers():
    """The vectors of Random123's kat_vectors with counter words 2 and 3 zero, and their published all-zero case."""
    assert sampling.philox(torch.tensor([0]), torch.tensor([0]), 1).tolist() == [[0x6627E8D5]]
    assert sampling.philox(torch.tensor([0x0123456789ABCDEF]), torch.tensor([5]), 3)[0, 2] == scalar_philox(2, 5)


def scalar_philox(id: int, position: int, seed: int = 0x0123456789ABCDEF) -> int:
    """Philox4x32-10 in Python's integers, straight from the paper."""
    c, k, low = [id, position, 0, 0], [seed & 0xFFFFFFFF, seed >> 32], 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & low, (a >> 32) ^ c[3] ^ k[1], a & low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    return c[0]


@pytest.mark.parametrize("top_k,top_p,min_p", [(3, 1.0, 0.0), (40, 0.5, 0.0), (40, 1.0, 0.2), (6, 0.8, 0.05)])
def test_keep_set_by_the_definition(top_k: int, top_p: float, min_p: float):
    z = (normal(4, 40) * 4).round() / 2  # many ties
    kept = sampling.keep(z, *(torch.tensor([value] * 4) for value in (top_k, top_p, min_p)))
    for row, keep in zip(z.double(), kept, strict=True):
        prob = row.softmax(-1)
        for i in range(40):
            in_top_k = sum(bool(other > row[i]) for other in row) < top_k
            in_top_p = top_p >= 1 or prob[row > row[i]].sum() < top_p
            assert keep[i] == (in_top_k and in_top_p and bool(prob[i] >= min_p * prob.max()))


# -- faces against references -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows,n,k", [(1, 70, 96), (17, 33, 40), (0, 8, 8)])
def test_linear(dtype: torch.dtype, rows: int, n: int, k: int):
    x, w, bias = normal(rows, k), normal(n, k).to(dtype), normal(n).to(dtype)
    leaf = linear.pack(w)
    assert linear.unpack(leaf).equal(w) and leaf.n == n
    torch.testing.assert_close(linear.linear(x, leaf, bias), x @ w.float().T + bias.float(), **CLOSE)
    torch.testing.assert_close(linear.linear(x, leaf), linear.reference(x, w, n, None, None), **CLOSE)
    assert linear.linear(x, leaf, out_dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_packed_weight(dtype: torch.dtype):
    w = normal(70, 24).to(dtype)
    index = torch.tensor([0, 69, 31, 32, 5, 5], dtype=torch.int32)
    weight = normal(24, seed=1)
    normed, rows = rms_norm.rows_rms_norm(linear.pack(w).packed, index, weight, 1e-6)
    assert rows.equal(w[index].float()) and normed.equal(rms_norm.rms_norm(rows, weight, 1e-6))


def test_what_enters_and_leaves_a_step():
    token, last = torch.tensor([5, 6, 7, 8]).int(), torch.tensor([50, 60, 70]).int()
    index, fed = torch.tensor([0, 2, 0, 1]).int(), torch.tensor([False, True, True, False])
    assert edges.feed(token, last, index, fed).tolist() == [5, 70, 50, 8]
    x = normal(5, 9)
    assert edges.take(x, torch.tensor([4, 0, 4]).int()).equal(x[[4, 0, 4]])
    out = torch.zeros(2, 2).int()
    edges.hand_on(token[:2], torch.tensor([-0.5, -2.0]), last, out)
    assert out[0].tolist() == [5, 6] and out[1].view(torch.float32).tolist() == [-0.5, -2.0]
    assert last.tolist() == [5, 6, 70]
    guess, going = torch.full((2, 3), 9).int(), torch.zeros(5, 4).int()[:, :2]
    table = torch.tensor([[3, 8, 1], [4, 6, 2]]).int()
    go_on.go_on(token[:2], torch.tensor([-0.5, torch.nan]), last[:2], table, guess, going, 1, 4, 6, 1)
    assert guess.tolist() == [[9, 5, 9], [9, -1, 9]]
    assert going.tolist() == [[5, 0], [6, 6], [34, 26], [7, 8], [8, 9]]


@pytest.mark.parametrize("width", [8, 36, 896])
def test_norms(width: int):
    x, delta, weight = normal(7, width), normal(7, width, seed=1), normal(width)
    torch.testing.assert_close(rms_norm.rms_norm(x, weight, 1e-6), rms_norm.reference(x, weight, 1e-6), **CLOSE)
    got = rms_norm.add_rms_norm(delta, x, weight, 1e-6)
    torch.testing.assert_close(got, rms_norm.add_reference(delta, x, weight, 1e-6), **CLOSE)


def test_gelu_mul_and_soft_cap():
    x = normal(9, 2 * 37) * 3
    gate, up = x.chunk(2, -1)
    for act, how in (("gelu", "none"), ("gelu_tanh", "tanh")):
        torch.testing.assert_close(activations.silu_mul(x, act), activations.reference(x, act), **CLOSE)
        want = torch.nn.functional.gelu(gate, approximate=how)
        torch.testing.assert_close(activations.reference(x, act), want * up, **CLOSE)
        torch.testing.assert_close(activations.activate(gate, act), want, **CLOSE)
        torch.testing.assert_close(activations.reference(gate, act, gated=False), want, **CLOSE)
        assert activations.activate(gate[3:4], act).equal(activations.activate(gate, act)[3:4])
    wide = torch.cat((normal(5, 50) * 20, torch.tensor([[torch.inf, -torch.inf, 1e30, -1e30] + [0.0] * 46])))
    torch.testing.assert_close(activations.soft_cap(wide, 30.0), activations.cap_reference(wide, 30.0), **CLOSE)
    parts = torch.cat([activations.soft_cap(row[None], 30.0) for row in wide])
    assert activations.soft_cap(wide, 30.0).equal(parts)


@pytest.mark.parametrize("width", [16, 37, 100, 256])
def test_layer_norm(width: int):
    x, weight = normal(7, width) + 3, normal(width)
    want = torch.nn.functional.layer_norm(x, (width,), weight, None, 1e-5)
    torch.testing.assert_close(layer_norm.reference(x, weight, 1e-5), want, **CLOSE)
    torch.testing.assert_close(layer_norm.layer_norm(x, weight, 1e-5), want, **CLOSE)
    assert layer_norm.layer_norm(x[3:4], weight, 1e-5).equal(layer_norm.layer_norm(x, weight, 1e-5)[3:4])
    bias = normal(width, seed=1)
    want, both = torch.nn.functional.layer_norm(x, (width,), weight, bias, 1e-5), torch.cat((weight, bias))
    torch.testing.assert_close(layer_norm.reference(x, both, 1e-5), want, **CLOSE)
    torch.testing.assert_close(layer_norm.layer_norm(x, both, 1e-5), want, **CLOSE)


def test_norms_with_a_shift():
    x, weight = normal(5, 37), normal(37)
    want = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + weight)
    torch.testing.assert_close(rms_norm.reference(x, weight, 1e-6, 1.0), want, **CLOSE)
    torch.testing.assert_close(rms_norm.rms_norm(x, weight, 1e-6, 1.0), want, **CLOSE)
    for post in (None, normal(37, seed=1)):
        got = rms_norm.add_rms_norm(x, x, weight, 1e-6, 1.0, post)
        torch.testing.assert_close(got, rms_norm.add_reference(x, x, weight, 1e-6, 1.0, post), **CLOSE)
    got = rms_norm.add_rms_norm(x, x, weight, 1e-6, 1.0)
    torch.testing.assert_close(got, rms_norm.add_reference(x, x, weight, 1e-6, 1.0), **CLOSE)


@pytest.mark.parametrize("shift", [0.0, 1.0])
@pytest.mark.parametrize("width", [8, 36, 896])
def test_a_norm_the_sum_and_the_next_norm_are_one_op_with_the_bits_of_three(width: int, shift: float):
    delta, residual, weight, post = normal(7, width), normal(7, width, seed=1), normal(width), normal(width, seed=2)
    for kind in (torch.float32, torch.bfloat16):
        weights = (weight.to(kind), post.to(kind))
        after = rms_norm.rms_norm(delta, weights[1], 1e-6, shift)
        want = rms_norm.add_rms_norm(after, residual, weights[0], 1e-6, shift)
        got = rms_norm.add_rms_norm(delta, residual, weights[0], 1e-6, shift, weights[1])
        assert all(a.equal(b) for a, b in zip(got, want, strict=True)) and not got[1].equal(delta + residual)
        alone = rms_norm.add_rms_norm(delta, residual, None, 1e-6, shift, weights[1])
        assert alone[0] is alone[1] and alone[0].equal(after + residual)


def test_a_gated_product_has_the_bits_of_its_two_ops():
    x, leaf, bias = normal(5, 24), linear.pack(normal(74, 24)), normal(74)
    for act in activations.ACTS:
        want = activations.silu_mul(linear.linear(x, leaf, bias), act)
        assert linear.gated_linear(x, leaf, bias, act=act).equal(want)
        torch.testing.assert_close(want, activations.reference(linear.linear(x, leaf, bias), act), **CLOSE)


def test_silu_mul():
    x = normal(5, 2 * 37) * 4
    torch.testing.assert_close(activations.silu_mul(x), activations.reference(x), **CLOSE)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("heads,groups,width", [(4, 2, 16), (7, 1, 64), (3, 3, 80)])
def test_rope_kv_write(heads: int, groups: int, width: int, norm: bool):
    table = rope_table(RopeSpec(1e4), width, 50)
    x, pages = normal(5, (heads + 2 * groups) * width), normal(4, 3, groups, width)
    position, slot = torch.tensor([4, 49, 0, 7, 8]).int(), torch.tensor([3, 11, 6, 5, 10]).int()
    norms = (normal(width), normal(width, seed=1), 1e-6) if norm else (None, None, 0.0)
    want = rope.reference(x, table, position, slot, pages, pages, heads, *norms)
    k, v = pages.clone(), pages.clone()
    got = rope.rope_kv_write(x, table, position, slot, k, v, heads, *norms)
    torch.testing.assert_close(got, want, **CLOSE)
    assert got[1] is k and got[2] is v


@pytest.mark.parametrize("size", [1, 4, 16, 64])
@pytest.mark.parametrize("heads,groups,width", [(2, 2, 64), (4, 2, 80), (7, 1, 16)])
def test_attention(heads: int, groups: int, width: int, size: int):
    args = paged_case([70, 5, 300, 1], [3, 5, 1, 1], heads, groups, width, size, padding=3)
    torch.testing.assert_close(attention.attention(*args), attention.reference(*args), **CLOSE)


def mixed_rows(rows: int, vocab: int) -> dict[str, Tensor]:
    """Rows that cycle through greedy, unfiltered, top-k, top-p, min-p and all filters at once."""
    kinds = torch.arange(rows) % 6
    return draw_case(
        rows, vocab,
        top_k_R=torch.tensor([1, vocab, 20, vocab, vocab, 50])[kinds],
        top_p_R=torch.tensor([1.0, 1.0, 1.0, 0.9, 1.0, 0.7])[kinds],
        min_p_R=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.05, 0.01])[kinds],
    )  # fmt: skip


def test_draw():
    case = mixed_rows(48, 1000)
    token, logprob = sampling.draw(**case)
    want_token, want_logprob = sampling.reference(**case)
    assert token.tolist() == want_token.tolist()
    torch.testing.assert_close(logprob, want_logprob, **CLOSE)
    assert token.dtype == torch.int32 and logprob.dtype == torch.float32


def test_draw_ties_and_filters_that_leave_one():
    logits = torch.zeros(3, 100)
    logits[:, 40] = logits[:, 60] = 5.0
    case = draw_case(3, 100, logits_RV=logits, top_k_R=torch.tensor([1, 1, 2]), top_p_R=torch.tensor([1, 1, 1e-6]))
    token, _ = sampling.draw(**case)
    assert token[:2].tolist() == [40, 40] and int(token[2]) in (40, 60)


def test_draw_rows_do_not_know_each_other():
    case = mixed_rows(12, 700)
    token, logprob = sampling.draw(**case)
    for r in (0, 3, 11):
        alone = sampling.draw(**{name: value[r : r + 1] for name, value in case.items()})
        assert alone[0][0] == token[r] and alone[1][0] == logprob[r]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("top_k", [1, 500])
def test_draw_names_a_bad_row_and_spares_the_others(bad: float, top_k: int):
    case = draw_case(3, 500, top_k_R=torch.full((3,), top_k))
    clean = sampling.draw(**case)
    case["logits_RV"][1, 417] = bad
    token, logprob = sampling.draw(**case)
    assert token[1] == 0 and logprob[1].isnan()
    assert token[[0, 2]].equal(clean[0][[0, 2]]) and logprob[[0, 2]].equal(clean[1][[0, 2]])


def test_draw_frequencies_follow_the_distribution():
    rows, vocab = 20000, 6
    case = draw_case(
        rows, vocab, logits_RV=torch.arange(vocab).float().div(2).repeat(rows, 1), seed_R=torch.full((rows,), 9)
    )
    case["temperature_R"] = torch.ones(rows)
    token, _ = sampling.draw(**case)
    prob = case["logits_RV"][0].softmax(-1)
    error = token.long().bincount(minlength=vocab) / rows - prob
    assert (error.abs() < 5 * (prob * (1 - prob) / rows).sqrt()).all()


# -- registration and compilation -------------------------------------------------------------------------------------


def op_samples() -> dict[str, tuple]:
    x, pages = normal(5, 32), normal(4, 3, 2, 16)
    slot = torch.tensor([3, 11, 6, 5, 10]).int()
    write = (normal(5, 8 * 16), rope_table(RopeSpec(1e4), 16, 16), slot, slot, pages, pages.clone(), 4)
    return {
        "linear": (x, linear.pack(normal(40, 32)).packed, 40, None, torch.float32),
        "rms_norm": (x, normal(32), 1e-5),
        "add_rms_norm": (x, normal(5, 32), normal(32), 1e-5),
        "add_rms_norm with a norm behind": (x, normal(5, 32), None, 1e-5, 1.0, normal(32)),
        "add_rms_norm_e4m3": (x, normal(5, 32), normal(32), 1e-5, 0.0, normal(32), 32),
        "silu_mul_e4m3": (x, 0, 16),
        "e4m3_rows": (x, 32),
        "w8a8_linear": (*e4m3.on_cpu(x, 32), *w8a8.pack(quantized.encoded(normal(40, 32), "w8a8", 0)), None, x.dtype),
        "w8a8_gated": (
            *e4m3.on_cpu(x, 32),
            *w8a8.pack(quantized.encoded(normal(40, 32), "w8a8", 0)),
            None,
            x.dtype,
            0,
            20,
        ),
        "rows_rms_norm": (linear.pack(normal(40, 32)).packed, slot, normal(32), 1e-5),
        "silu_mul": (x, True),
        "soft_cap": (x, 3.0),
        "layer_norm": (x, normal(32), 1e-5),
        "gated_linear": (x, linear.pack(normal(40, 32)).packed, 20, None),
        "gated_linear of gelu": (x, linear.pack(normal(40, 32)).packed, 20, None, 1),
        "rope_kv_write_": (*write, normal(16), normal(16), 1e-5),
        "feed": (slot, slot, slot % 5, slot > 5),
        "take": (x, slot % 5),
        "go_on_": (
            slot,
            normal(5),
            slot,
            (slot % 3)[:, None].repeat(1, 9),
            torch.zeros(5, 4).int(),
            torch.zeros(5, 5).int(),
            2,
            4,
            30,
            1,
        ),
        "catch_up_": (
            slot,
            slot,
            slot[:1],
            torch.tensor([[3], [2], [0], [1], [1], [4], [6]]).int(),
            slot[None, :2] % 3,
            *(torch.zeros(n).int() for n in (9, 9, 9, 2, 1, 1, 1)),
            1,
            2,
            4,
            0,
        ),
        "hand_on_": (slot, normal(5), torch.zeros(8).int(), torch.zeros(2, 5).int()),
        "attention": paged_case([7, 4], [3, 1], 4, 2, 16, 4),
        "bounded_attention": (*paged_case([7, 4], [3, 1], 4, 2, 16, 4), True, 2, 3.0, normal(4)),
        "draw": tuple(draw_case(3, 50).values()),
    }


@pytest.mark.parametrize("name", op_samples())
def test_registration(name: str):
    op = getattr(torch.ops.fengine, name.split()[0]).default
    torch.library.opcheck(op, op_samples()[name])
    assert "SymInt" not in str(op._schema)  # a number of an op is known where it is compiled


def small_model(
    x: Tensor, w: dict[str, Tensor], pos: Tensor, slot: Tensor, k: Tensor, v: Tensor, start: Tensor, kv_len: Tensor,
    table: Tensor, last: Tensor, drawing: dict[str, Tensor],
) -> tuple[Tensor, ...]:  # fmt: skip
    """One layer and a draw, through every face."""
    y = rms_norm.rms_norm(x, w["norm"], 1e-5)
    q, k, v = rope.rope_kv_write(linear.linear(y, w["qkv"], w["bias"]), w["rope"], pos, slot, k, v, 4)
    o = attention.attention(q, k, v, start, kv_len, table, 0.25)
    y, x = rms_norm.add_rms_norm(linear.linear(o.flatten(1), w["o"]), x, w["norm"], 1e-5)
    x = x + linear.linear(activations.silu_mul(linear.linear(y, w["gate_up"])), w["down"])
    logits = linear.linear(x[last], w["embed"], out_dtype=torch.float32)
    return *sampling.draw(logits, **drawing), edges.take(x, last), k


def small_model_case(lengths: list[int], tokens: list[int]) -> tuple:
    shapes = {"qkv": (128, 64), "o": (64, 64), "gate_up": (48, 64), "down": (64, 24), "embed": (96, 64)}
    w = {name: linear.pack(normal(*shape)) for name, shape in shapes.items()}
    w |= {"norm": normal(64), "bias": normal(128), "rope": rope_table(RopeSpec(1e4), 16, 64)}
    _, k, v, start, kv_len, table, _ = paged_case(lengths, tokens, 4, 2, 16, 4)
    k, v = (torch.cat((pages, torch.zeros(40 - len(pages), 4, 2, 16))) for pages in (k, v))  # one pool for all cases
    rows = zip(lengths, tokens, table, strict=False)
    pairs = [(p, int(pages[p // 4]) * 4 + p % 4) for n, t, pages in rows for p in range(n - t, n)]
    pos, slot = torch.tensor(pairs).int().unbind(1)
    drawing = draw_case(len(kv_len), 96)
    del drawing["logits_RV"]
    last = (start[1:] - 1).clamp(min=0)
    return normal(len(pos), 64), w, pos.clone(), slot.clone(), k, v, start, kv_len, table, last, drawing


WIDTH: Any = {"cpp.vec_isa_ok": True}  # as engines: from the CPU's flags, not from programs that are built to try it


@pytest.mark.parametrize("mark", [mark_dynamic, mark_unbacked])
def test_one_graph_serves_every_size(mark: Callable[[Tensor, int], None]):
    """No graph break, no recompile, and the bits of the eager ops."""
    torch._dynamo.reset()
    compiled = torch.compile(small_model, fullgraph=True, options=WIDTH)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths, tokens in (([9, 30], [9, 4]), ([5, 8, 61, 17], [5, 8, 1, 2]), ([21, 2, 3], [1, 1, 1])):
            args, fresh = small_model_case(lengths, tokens), small_model_case(lengths, tokens)
            for tensor in (args[0], *args[2:4], *args[6:10], *args[10].values()):
                for dim in range(2 if tensor is args[8] else 1):
                    mark(tensor, dim)
            for got, want in zip(compiled(*args), small_model(*fresh), strict=True):
                assert got.equal(want) or torch.allclose(got, want, 0, 0, equal_nan=True)


def test_compiled_code_copies_no_pages():
    torch._dynamo.reset()
    args = small_model_case([9, 30], [9, 4])
    _, code = run_and_get_code(torch.compile(small_model, fullgraph=True, options=WIDTH), *args)
    shapes = re.findall(r"= empty_strided\w*\(\(([\d, ]+)\)", "".join(code))
    assert shapes and max(math.prod(map(int, shape.strip(", ").split(","))) for shape in shapes) < args[4].numel()
