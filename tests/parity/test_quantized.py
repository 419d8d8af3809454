"""Quantized checkpoints: each reader, packing and odd size gives the bits of the dequantized checkpoint."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints as made
import tiny_checkpoints
import torch
from quantized_checkpoints import Made, Maker
from safetensors.torch import load_file, save_file
from test_columns import logits_of, on_ranks
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fengine import Engine, models
from fengine.config import LoadFormat
from fengine.errors import (
    ConfigError,
    CorruptCheckpointError,
    MemoryReleasedError,
    ModelLoadError,
    UnsupportedFeatureError,
    UnsupportedFormatError,
)
from fengine.models import layers
from fengine.models.kv_pages import init_kv, row_batch
from fengine.models.kv_state import Params
from fengine.models.quantization import chosen, read_quantization
from fengine.models.spec import ModelSpec
from fengine.ops import e4m3, fragments, linear, quantized_hopper, w8a8
from fengine.ops.quantized import Quantized, encoded
from fengine.ops.w8a8 import W8A8
from fengine.worker.loader import load_params, spec_from_config
from fengine.worker.safetensors_file import read_config

KEPT = ("lm_head", "embed_tokens", ".gate")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": False, "lm_head": False,
        "true_sequential": True, "damp_percent": 0.1, "checkpoint_format": "gptq"}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


def compressed(form: str, weights: Any, acts: Any = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": acts, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "format": form,
        "ignore": ["lm_head"], "quantization_status": "compressed", "kv_cache_scheme": None,
        "global_compression_ratio": 1.5, **more,
    }  # fmt: skip


def integers(bits: int, group: int | None, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    strategy = "group" if group else "channel"
    return {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group,
        "dynamic": False, "block_structure": None, "actorder": None, "observer": "minmax", "observer_kwargs": {},
        **more,
    }  # fmt: skip


FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False, "group_size": None}
MICRO = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
HALF, ODD = {"dtype": torch.float16}, {"hidden_size": 60, "intermediate_size": 90, "head_dim": 16}
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
SYM, ACT, EIGHT = {"sym": True, "checkpoint_format": "gptq_v2"}, {"desc_act": True}, {"bits": 8, "group_size": -1}
Case = tuple[dict[str, Any], Callable[[Maker, int, int], Made], dict[str, Any]]


def gptq(changes: dict[str, Any], group: int = 16, options: dict[str, Any] | None = None, **how: Any) -> Case:
    return GPTQ | changes, lambda m, n, k: m.gptq(n, k, group, **how), options or {}


def packed(weights: dict[str, Any], options: dict[str, Any] | None = None, **how: Any) -> Case:
    group, bits = weights["group_size"] or -1, weights["num_bits"]
    how["sym"] = weights["symmetric"]
    return compressed("pack-quantized", weights), lambda m, n, k: m.packed(n, k, group, bits, **how), options or {}


def fp8(rows: int, columns: int, options: dict[str, Any] | None = None) -> Case:
    config = FP8 | {"weight_block_size": [rows, columns]}
    return config, lambda m, n, k: m.fp8(n, k, (rows, columns)), options or {}


def floats(strategy: str, acts: Any, options: dict[str, Any], static: bool, form: str = "float-quantized") -> Case:
    config = compressed(form, FLOAT | {"strategy": strategy}, acts)
    return config, lambda m, n, k: m.fp8(n, k, None, "weight_scale", static), options


CASES: dict[str, Case] = {
    "awq": (AWQ, lambda m, n, k: m.awq(n, k, 32), {}),
    "awq-16-half": (AWQ | {"group_size": 16}, lambda m, n, k: m.awq(n, k, 16), HALF),
    "awq-qwen2-tied": (AWQ, lambda m, n, k: m.awq(n, k, 32), {"family": "qwen2", "tie_word_embeddings": True}),
    "awq-experts": (AWQ, lambda m, n, k: m.awq(n, k, 32), {"family": "mixtral"}),
    "gptq-asym": gptq({}),
    "gptq-sym-v2": gptq(SYM, sym=True, v2=True),
    "gptq-act": gptq(ACT, options=HALF, act=True),
    "gptq-8-channel": gptq(EIGHT, -1, bits=8),
    "gptq-8-act": gptq(ACT | {"bits": 8}, bits=8, act=True),
    "packed-4": packed(integers(4, 16)),
    "packed-4-asym-half": packed(integers(4, 32, False), HALF),
    "packed-4-asym-one-word": packed(integers(4, 16, False), {"head_dim": 8, "num_key_value_heads": 1}),
    "packed-4-act": packed(integers(4, 16, actorder="group"), act=True),
    "packed-4-odd": packed(integers(4, None), ODD),
    "packed-8-odd": packed(integers(8, None, False), ODD),
    "float-dynamic": floats("channel", TOKENS, {}, False),
    "float-static": floats("tensor", {"num_bits": 8, "type": "float"}, HALF, True),
    "float-alone": floats("channel", None, {}, False, "naive-quantized"),
    "micro": (compressed("mxfp4-pack-quantized", MICRO), lambda m, n, k: m.micro(n, k), {}),
    "fp8-blocks": fp8(128, 128, {"hidden_size": 160, "intermediate_size": 200}),
    "fp8-small-blocks-odd": fp8(24, 40),
    "fp8-order-of-heads": fp8(24, 40, {"family": "glm4", "pad_token_id": None}),
}


W8A8_CASES = ("float-dynamic", "float-static", "fp8-blocks")


def load(directory: Path) -> tuple[Params, ModelSpec]:
    spec = spec_from_config(read_config(directory))
    return load_params(directory, spec), spec


def logits(params: Params, spec: ModelSpec, tokens: int) -> Tensor:
    model, ids = models.lookup(spec.architecture), [(7 * i + 3) % spec.vocab_size for i in range(tokens)]
    kv = init_kv(spec, 4, 16, torch.float32, "cpu")
    return model.unembed(params, spec, model.forward(params, spec, kv, row_batch(ids, 0, [1, 2, 3], 16))[1])


def leaves(params: Params) -> list[Quantized]:
    found: list[Quantized] = []
    tree_leaves(params, is_leaf=lambda x: isinstance(x, Quantized) and (found.append(x) or True))
    return found


def same_model(few: Path, dense: Path) -> list[Quantized]:
    """Logits of one token, of a few and of many are those of the dequantized model. Returns the leaves in few bits."""
    params, spec = load(few)
    plain, plain_spec = load(dense)
    for tokens in (1, 3, 23):
        got, want = logits(params, spec, tokens), logits(plain, plain_spec, tokens)
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))
    assert not (want == want[:1, :1]).all()
    return leaves(params)


def keep(make: Any) -> made.Choose:
    return lambda maker, module, n, k: None if module.endswith(KEPT) else make(maker, n, k)


@pytest.mark.parametrize("case", CASES)
def test_each_format_is_its_dequantized_model(case: str, tmp_path: Path) -> None:
    config, make, options = CASES[case]
    found = same_model(*made.write(tmp_path, config, keep(make), **options))
    assert len(found) == (4 if "experts" in case else 8)  # of experts only attention stays in few bits


def test_q_k_and_v_of_unlike_orders_are_joined_dequantized(tmp_path: Path) -> None:
    config, make, options = gptq(ACT, act="own")
    assert len(same_model(*made.write(tmp_path, config, keep(make), **options))) == 4  # of o and down


def test_layers_of_several_precisions(tmp_path: Path) -> None:
    """GPTQ's dynamic rules and compressed-tensors' groups; modules that are kept, and one that only the file keeps."""
    rules = {"+:.*layers\\.1\\..*": {"bits": 8, "group_size": 32}, "-:.*o_proj": {}}

    def choose(maker: Maker, module: str, n: int, k: int) -> Made | None:
        if module.endswith((*KEPT, "o_proj", "layers.0.mlp.down_proj")):
            return None
        return maker.gptq(n, k, 32, bits=8) if "layers.1." in module else maker.gptq(n, k, 16)

    assert len(same_model(*made.write(tmp_path / "a", GPTQ | {"dynamic": rules}, choose))) == 5
    groups = {
        "a": {"targets": ["re:.*mlp.*"], "weights": integers(8, None)},
        "b": {"targets": ["Linear"], "weights": integers(4, 16)},
        "c": {"targets": ["model.layers.0.mlp.down_proj"], "weights": integers(4, 32)},
    }
    config = compressed("pack-quantized", integers(4, 16)) | {
        "config_groups": groups, "ignore": ["re:.*lm_head", "model.layers.1.self_attn.q_proj"],
    }  # fmt: skip

    def by_group(maker: Maker, module: str, n: int, k: int) -> Made | None:
        if module.endswith((*KEPT, "layers.1.self_attn.q_proj")):
            return None
        if module == "model.layers.0.mlp.down_proj":  # a module's name goes before an expression
            return maker.packed(n, k, 32)
        return maker.packed(n, k, -1, 8) if ".mlp." in module else maker.packed(n, k, 16)

    assert len(same_model(*made.write(tmp_path / "b", config, by_group))) == 7  # q, k, v of layer 1 are joined whole


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("v2", [True, False])
def test_zero_points_tell_which_of_both_formats_they_are_in(v2: bool, bits: int, tmp_path: Path) -> None:
    """Where no checkpoint_format is told: symmetric ones."""
    config, make, _ = gptq({"sym": True, "bits": bits, "checkpoint_format": None}, sym=True, v2=v2, bits=bits)
    same_model(*made.write(tmp_path, config, keep(make)))


def test_a_format_that_nothing_tells_is_the_first_and_is_said(tmp_path: Path, caplog: Any) -> None:
    config, make, _ = gptq({"checkpoint_format": None})
    with caplog.at_level("WARNING", "fengine"):
        same_model(*made.write(tmp_path, config, keep(make)))
    assert "no checkpoint_format: read as gptq, not gptq_v2" in caplog.text


def test_a_zero_bias_of_a_layer_without_one_is_left_out(tmp_path: Path) -> None:
    config, make, _ = gptq({})
    few, dense = made.write(tmp_path, config, keep(make))
    tensors = load_file(few / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.bias"
    save_file(tensors | {name: torch.zeros(64)}, few / "model.safetensors", {"format": "pt"})
    same_model(few, dense)
    save_file(tensors | {name: (torch.arange(64) == 7).float()}, few / "model.safetensors", {"format": "pt"})
    with pytest.raises(CorruptCheckpointError, match=f"{name}.*not zero"):
        load(few)


def test_a_bias_of_a_layer_that_is_not_read_changes_nothing(tmp_path: Path) -> None:
    """GLM-4.5's layer behind the last, for speculation."""
    config, make, _ = CASES["float-dynamic"]
    few, dense = made.write(tmp_path, config, keep(make), family="glm4_moe", n_routed_experts=8)
    tensors = load_file(few / "model.safetensors") | {"model.layers.2.self_attn.q_proj.bias": torch.ones(64)}
    save_file(tensors, few / "model.safetensors", {"format": "pt"})
    same_model(few, dense)


def test_groups_that_nobody_has_set_are_in_their_order(tmp_path: Path) -> None:
    """compressed-tensors leaves -1 there."""
    config, make, _ = packed(integers(4, 16))
    few, dense = made.write(tmp_path, config, keep(make))
    tensors = load_file(few / "model.safetensors")
    for name, shape in [(name, part) for name, part in tensors.items() if name.endswith("weight_shape")]:
        index = torch.full((int(shape[1]),), -1, dtype=torch.int32)
        tensors[name.removesuffix("shape") + "g_idx"] = index
    save_file(tensors, few / "model.safetensors", {"format": "pt"})
    assert len(same_model(few, dense)) == 8


NAMES = [f"model.layers.{i}.{name}" for i in (0, 1, 11) for name in ("self_attn.q_proj", "mlp.gate", "mlp.gate_proj")]
KEPT_NAMES = [["lm_head"], ["q_proj"], ["model.layers.1"], ["layers.1"], ["mlp.gate"], ["model.layers.1.mlp"]]


@pytest.mark.parametrize("kept", KEPT_NAMES, ids=lambda kept: kept[0])
def test_names_of_kept_modules_mean_what_they_mean_to_transformers(kept: list[str]) -> None:
    from transformers.quantizers.quantizers_utils import should_convert_module

    for config in (AWQ, GPTQ, FP8):
        found = read_quantization({"quantization_config": config | {"modules_to_not_convert": kept}})
        assert found is not None
        for name in (*NAMES, "lm_head"):
            assert (found.of(name) is not None) == should_convert_module(name, kept), name
    dynamic = {f"-:{name}": {} for name in kept}
    found = read_quantization({"quantization_config": GPTQ | {"dynamic": dynamic}})
    assert found is not None and [found.of(name) is None for name in NAMES] == [
        name.startswith(kept[0]) for name in NAMES
    ]


def mxfp4(tmp_path: Path, **config: Any) -> tuple[Path, Path]:
    """gpt-oss: blocks [E, N, K/32, 16] of what its bfloat16 checkpoint, the second, holds as [E, K, N]."""
    config = {"intermediate_size": 64} | config
    plain = tiny_checkpoints.write(tmp_path / "plain", "gpt_oss", dtype=torch.bfloat16, **config)
    dense, maker = load_file(plain / "model.safetensors"), Maker(0, torch.bfloat16)
    few = dict(dense)
    for name in [name for name in dense if name.endswith(("gate_up_proj", "down_proj"))]:
        e, k, n = few.pop(name).shape
        parts, matrix = maker.micro(e * n, k)
        few[f"{name}_blocks"] = parts["weight_packed"].view(e, n, k // 32, 16)
        few[f"{name}_scales"] = parts["weight_scale"].view(e, n, k // 32)
        dense[name] = matrix.view(e, n, k).transpose(1, 2).contiguous()
    save_file(dense, plain / "model.safetensors", {"format": "pt"})
    target = tmp_path / "few"
    target.mkdir()
    save_file(few, target / "model.safetensors", {"format": "pt"})
    told = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": told}
    (target / "config.json").write_text(json.dumps(config))
    return target, plain


def test_experts_of_mxfp4_are_the_dequantized_ones(tmp_path: Path) -> None:
    target, plain = mxfp4(tmp_path)
    same_model(target, plain)
    for path, got in [(path, got) for path, got in load(plain)[0]["layers"][0].items() if path.startswith("wexperts")]:
        with pytest.MonkeyPatch.context() as patch:  # as a GPU would hold them
            patch.setattr(quantized_hopper, "serves", lambda device: True)
            leaf = load(target)[0]["layers"][0][path]
        code, scale, _ = made.from_fragments(leaf.packed, leaf.scale, 32)
        matrix = torch.from_numpy(made.E2M1[code] * scale.repeat(32, 1)).bfloat16()
        want = linear.unpack(got).flatten(0, 1)
        order = fragments.alternated(want, len(got.packed)) if path.endswith("gate_up") else want
        assert torch.equal(matrix, order)


def test_released_weights_that_a_cpu_holds_dequantized_come_back(tmp_path: Path) -> None:
    """No matrix of the model is in few bits there, and its file's tensors are not those that run."""
    with Engine(model_path=str(mxfp4(tmp_path)[0]), skip_tokenizer_init=True, device="cpu") as engine:
        want = engine.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 4, "temperature": 0})
        engine.release_memory_occupation()
        engine.resume_memory_occupation()
        got = engine.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 4, "temperature": 0})
    assert got["output_ids"] == want["output_ids"]


def test_ranks_of_gpus_hold_their_columns_in_few_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, plain = mxfp4(tmp_path)
    _, spec = load(target)
    monkeypatch.setattr(quantized_hopper, "serves", lambda device: True)
    few, dense = (
        on_ranks(2, tmp_path, lambda group, of=of, spec=spec: load_params(of, spec, group=group)["layers"][0])
        for of, spec in ((target, spec), (plain, load(plain)[1]))
    )
    for rank, name in itertools.product(range(2), ("wexperts_gate_up", "wexperts_down")):
        leaf, want = few[rank][name].leaf, linear.unpack(dense[rank][name].leaf)  # [E, N, K]
        assert isinstance(leaf, Quantized) and leaf.n == want.shape[1]
        code, scale, _ = made.from_fragments(leaf.packed, leaf.scale, 32)
        matrix = torch.from_numpy(made.E2M1[code] * scale.repeat(32, 1)).bfloat16().unflatten(0, (len(want), -1))
        if name.endswith("gate_up"):
            want = fragments.alternated(want.flatten(0, 1), len(want)).view(want.shape)
        assert torch.equal(matrix[:, : leaf.n], want)


@pytest.mark.parametrize("kind", ["mxfp4", "awq", "at load", "dummy"])
def test_quantized_experts_over_ranks(kind: str, tmp_path: Path) -> None:
    """Also those that are encoded at load, and random ones."""
    if kind == "awq":
        config, make, options = CASES["awq-experts"]
        directory, _ = made.write(tmp_path, config, keep(make), **options)
    else:
        directory, plain = mxfp4(tmp_path)
        directory = plain if kind == "at load" else directory
    _, spec = load(directory)
    spec = replace(spec, quantization=chosen(spec.quantization, "fp8")) if kind == "at load" else spec
    how = {"load_format": LoadFormat.dummy} if kind == "dummy" else {}
    want = logits_of(directory, spec, None, spec, **how)
    for got in on_ranks(2, tmp_path, lambda group: logits_of(directory, spec, group, spec.part(2), **how)):
        assert torch.equal(got, want)


def test_fp8_at_load_rounds_each_row_to_its_own_scale(tmp_path: Path) -> None:
    plain = tiny_checkpoints.write(tmp_path, dtype=torch.bfloat16)
    stored, spec = load(plain)
    spec = replace(spec, quantization=chosen(None, "fp8"))
    params = load_params(plain, spec)
    assert len(leaves(params)) == 8 and not isinstance(params["unembed"], Quantized)
    matrix = load_file(plain / "model.safetensors")["model.layers.0.mlp.down_proj.weight"].float()
    scale = matrix.abs().amax(1, keepdim=True) / 448
    want = ((matrix / scale).to(torch.float8_e4m3fn).float() * scale).to(torch.bfloat16)
    x = torch.randn(3, matrix.shape[1])
    got = params["layers"][0]["wdown"].linear(x, None, None, None, True)
    torch.testing.assert_close(got, x @ want.float().T)
    gap = (logits(params, spec, 9).log_softmax(-1) - logits(stored, spec, 9).log_softmax(-1)).abs().mean()
    assert 0 < gap < 0.5


def w8a8_leaves(path: Path, params: dict[str, Any], spec: Any) -> dict[str, Any]:
    """The leaves of layer 0 that multiply in FP8, after a look at the logits beside those of the weights alone."""
    few = replace(spec, quantization=chosen(spec.quantization, "w8a8_fp8"))
    got = load_params(path, few)
    gap = (logits(got, few, 9).log_softmax(-1) - logits(params, spec, 9).log_softmax(-1)).abs().mean()
    assert 0 < gap < 0.5
    return {name: leaf for name, leaf in got["layers"][0].items() if isinstance(leaf, W8A8)}


def test_w8a8_at_load_has_a_scale_for_each_output(tmp_path: Path) -> None:
    plain = tiny_checkpoints.write(tmp_path, dtype=torch.bfloat16)
    found = w8a8_leaves(plain, *load(plain))
    assert found.keys() == {"wqkv", "wo", "wgate_up", "wdown"} and not any(leaf.by_step for leaf in found.values())
    matrix = load_file(plain / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    x = torch.randn(3, matrix.shape[1])
    want = w8a8.reference(x, encoded(matrix, "w8a8", 0))
    assert torch.equal(found["wdown"].linear(x, None, None, None, True), want)


def test_only_attention_is_quantized_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and gated products give rows in FP8 where every reader takes them, with the same bits."""
    plain = tiny_checkpoints.write(tmp_path, dtype=torch.bfloat16)
    spec = load(plain)[1]
    few = replace(spec, quantization=chosen(spec.quantization, "w8a8_fp8"))
    params, calls, rows = load_params(plain, few), [], e4m3.rows
    monkeypatch.setattr(e4m3, "rows", lambda x, group: calls.append(x.shape) or rows(x, group))
    got = logits(params, few, 9)
    assert len(calls) == 1 + few.num_layers  # the embeddings, and each layer's attention
    monkeypatch.setattr(layers, "norm_of", lambda layer, name, *_: (layer[name], 0))
    gated = linear.gated_linear
    monkeypatch.setattr(linear, "gated_linear", lambda *call: gated(*call[:-1], 0))
    assert torch.equal(logits(params, few, 9), got) and len(calls) == 1 + 5 * few.num_layers


@pytest.mark.parametrize("case", W8A8_CASES)
def test_fp8_checkpoints_multiply_in_fp8_if_asked(case: str, tmp_path: Path) -> None:
    config, make, options = CASES[case]
    few, _ = made.write(tmp_path, config, keep(make), **options)
    found = w8a8_leaves(few, *load(few))
    assert found.keys() == {"wqkv", "wo", "wgate_up", "wdown"}
    assert all(leaf.by_step == ("block" in case and leaf.scale.shape[1] > 1) for leaf in found.values())


def test_dummy_weights_have_the_checkpoints_form(tmp_path: Path) -> None:
    few, _ = made.write(tmp_path, AWQ | {"modules_to_not_convert": ["lm_head"]}, keep(CASES["awq"][1]))
    spec = spec_from_config(read_config(few))
    params = load_params(few, spec, load_format=LoadFormat.dummy)
    read = [(leaf.n, leaf.kind, leaf.group, leaf.packed.shape) for leaf in leaves(load(few)[0])]
    assert [(leaf.n, leaf.kind, leaf.group, leaf.packed.shape) for leaf in leaves(params)] == read


def broken(few: Path, name: str, change: Callable[[Tensor], Tensor | None]) -> None:
    tensors = load_file(few / "model.safetensors")
    found = change(tensors.pop(name))
    tensors |= {} if found is None else {name: found}
    save_file(tensors, few / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("case", "end", "change", "message"),
    [
        ("awq", "qzeros", lambda t: None, "o_proj.qzeros' of shape .* is missing"),
        ("awq", "scales", lambda t: t[:1].contiguous(), "o_proj.scales': expected shape"),
        ("awq", "scales", lambda t: t * torch.inf, "scales of .*o_proj' are not finite"),
        ("gptq-act", "g_idx", lambda t: None, "g_idx.* is missing"),
        ("gptq-act", "g_idx", lambda t: t + 1, "g_idx' names groups beyond"),
        ("packed-4", "weight_packed", lambda t: t.float(), "weight_packed' is F32"),
        ("packed-4-asym-half", "weight_zero_point", lambda t: t.to(torch.int8), "torch.int8 has 8 rows, expected 64"),
        ("packed-4-asym-half", "weight_zero_point", lambda t: t.repeat(8, 1), "torch.int32 has 64 rows, expected 8"),
        ("fp8-blocks", "weight_scale_inv", lambda t: None, "weight_scale' is missing"),
        ("fp8-blocks", "weight", lambda t: (t.float() * torch.nan).to(t.dtype), "o_proj.weight' holds NaN"),
    ],
)
def test_what_does_not_fit_is_named(case: str, end: str, change: Any, message: str, tmp_path: Path) -> None:
    config, make, options = CASES[case]
    few, _ = made.write(tmp_path, config, keep(make), **options)
    broken(few, f"model.layers.0.self_attn.o_proj.{end}", change)
    with pytest.raises(ModelLoadError, match=message):
        load(few)


@pytest.mark.parametrize(
    ("method", "name", "change", "message"),
    [
        (FP8, "mlp.experts.down_proj", lambda t: t.to(torch.float8_e4m3fn), "is F8_E4M3; supported: F32"),
        (AWQ, "mlp.experts.down_proj", lambda t: None, "is missing"),
        ({"quant_method": "mxfp4"}, "self_attn.o_proj.weight", lambda t: None, "is missing"),
    ],
)
def test_what_a_method_has_no_form_for_is_named(
    method: Any, name: str, change: Any, message: str, tmp_path: Path
) -> None:
    """Experts in one tensor in any but MXFP4, and all else in it."""
    plain = tiny_checkpoints.write(tmp_path, "gpt_oss", dtype=torch.bfloat16)
    broken(plain, name := f"model.layers.0.{name}", change)
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": method}
    (plain / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=f"tensor '{name}'.*{message}"):
        load(plain)


def test_sizes_that_groups_do_not_divide_are_refused_by_name(tmp_path: Path) -> None:
    few, _ = made.write(tmp_path, AWQ | {"group_size": 40}, keep(CASES["awq"][1]))
    with pytest.raises(CorruptCheckpointError, match="q_proj.qweight': its 64 inputs are not a multiple of 40"):
        load(few)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "quant_method 'bitsandbytes' is not built; built are AWQ",
        ),
        ("squeezellm", "quant_method 'squeezellm'"),
        (AWQ | {"quant_method": ["awq"]}, r"quant_method \['awq'\]"),
        (AWQ | {"version": "gemv"}, "version 'gemv'"),
        (AWQ | {"bits": 3}, "bits 3"),
        (AWQ | {"zero_point": False}, "zero_point False"),
        (AWQ | {"rotation": "hadamard"}, "rotation = 'hadamard'"),
        (GPTQ | {"bits": 2}, "bits 2"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (GPTQ | {"checkpoint_format": ["gptq"]}, r"checkpoint_format \['gptq'\]"),
        (GPTQ | {"dynamic": {"+:.*up.*": {"bits": 3}}}, "bits 3"),
        (GPTQ | {"dynamic": {"+:.*up.*": {"rotation": "h"}}}, "rotation = 'h'"),
        (GPTQ | {"format": "gptq_v2"}, "checkpoint_format 'gptq' and 'gptq_v2'"),
        (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2'"),
        (FP8 | {"expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        (GPTQ | {"data_type": "mx_fp"}, "data_type 'mx_fp'"),
        (GPTQ | {"method": "qqq"}, "method 'qqq'"),
        (AWQ | {"act_bits": 8}, "act_bits 8"),
        (compressed("pack-quantized", integers(4, 16)) | {"transform_config": {"format": "dense"}}, "transform_config"),
        (compressed("marlin-24", integers(4, 16)), "format 'marlin-24'"),
        (compressed("pack-quantized", integers(4, 16, rotation="h")), "rotation = 'h'"),
        (compressed("int-quantized", integers(8, None)), "format 'int-quantized'"),
        (compressed("pack-quantized", integers(4, 16), kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (compressed("pack-quantized", integers(4, 16), sparsity_config={"format": "sparse-24"}), "sparsity_config"),
        (compressed("nvfp4-pack-quantized", MICRO | {"group_size": 16}), "nvfp4-pack-quantized"),
        (
            compressed("pack-quantized", integers(4, 16)) | {"format": ["pack-quantized"]},
            r"format \['pack-quantized'\]",
        ),
    ],
)
def test_what_is_not_built_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(UnsupportedFormatError, match=message):
        read_quantization({"quantization_config": config})


AUTO_ROUND = {  # Intel/Qwen3-14B-int4-AutoRound-gptq-inc
    "act_bits": 16, "act_data_type": "int", "act_dynamic": True, "act_group_size": 128, "act_sym": True, "amp": True,
    "autoround_version": "0.5.1", "batch_size": 8, "data_type": "int", "enable_minmax_tuning": True,
    "enable_norm_bias_tuning": False, "enable_quanted_input": True, "gradient_accumulate_steps": 1, "iters": 1000,
    "low_gpu_mem_usage": True, "lr": 0.001, "minmax_lr": 0.001, "nsamples": 512, "scale_dtype": "torch.float16",
    "seqlen": 2048, "super_bits": None, "super_group_size": None, "to_quant_block_names": None,
}  # fmt: skip


def test_what_tools_write_of_how_they_came_to_it_changes_nothing() -> None:
    dense = {"format": "dense", "global_sparsity": 0.14, "registry_requires_subclass": False}
    for config, more in (
        (compressed("pack-quantized", integers(4, 16)), {"sparsity_config": dense}),
        (FP8, {"expert_dtype": "fp8", "scale_fmt": "float", "dequantize": False}),
        (GPTQ, AUTO_ROUND),
        (GPTQ, {"method": "gptq", "format": "gptq"}),
        (AWQ, AUTO_ROUND),
        (AWQ, {"method": "awq", "format": "gemm", "checkpoint_format": "gemm"}),
    ):
        assert read_quantization({"quantization_config": config | more}) == read_quantization(
            {"quantization_config": config}
        )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AWQ | {"group_size": "x"}, "group_size must be a whole number"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list"),
        (AWQ | {"modules_to_not_convert": ["(("]}, "no regular expression"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size must be two whole numbers"),
        (GPTQ | {"dynamic": [1]}, "dynamic must be an object"),
        (compressed("pack-quantized", integers(4, 16)) | {"config_groups": []}, "config_groups must be an object"),
        (compressed("pack-quantized", 4), "config_groups must be an object of objects"),
        (
            compressed("pack-quantized", 0)
            | {"config_groups": {"a": {"targets": "Linear", "weights": integers(4, 16)}}},
            "targets must be a list of names, got 'Linear'",
        ),
        (AWQ | {"modules_to_not_convert": ["(a+)+$"]}, "may take years"),
        (AWQ | {"modules_to_not_convert": ["((a|a)|b)*c"]}, "may take years"),
        (GPTQ | {"dynamic": {"-:" + "(.*)" * 7: {}}}, "may take years"),
        (GPTQ | {"dynamic": {"-:" + "a?" * 26 + "x": {}}}, "may take years"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_quantization({"quantization_config": config})


def test_ways_of_a_pattern_that_are_tried_one_after_another_are_quick() -> None:
    names = "q k v o gate up down".split()
    pattern = "-:(" + "|".join(f".*{name}_proj" for name in names) + ")"
    assert read_quantization({"quantization_config": GPTQ | {"dynamic": {pattern: {}}}}) is not None


def test_the_engine_checks_quantization_against_the_file(tmp_path: Path) -> None:
    few, dense = made.write(tmp_path, AWQ, keep(CASES["awq"][1]))
    facts: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "max_total_tokens": 64}
    for path, asked, message in (
        (few, "gptq", "quantization='gptq', but the checkpoint is quantized by 'awq'"),
        (few, "fp8", "quantized by 'awq'"),
        (few, "w8a8_fp8", "quantized by 'awq' without weights in FP8"),
        (dense, "awq", "quantization='awq', but the checkpoint is not quantized"),
    ):
        with pytest.raises(ConfigError, match=message):
            Engine(model_path=str(path), quantization=asked, **facts)
    with pytest.raises(UnsupportedFeatureError, match="quantization='gguf' .*awq, gptq"):
        Engine(model_path=str(few), quantization="gguf", **facts)
    asked = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 6, "temperature": 0}, "return_logprob": True}
    with Engine(model_path=str(dense), **facts) as engine:
        want = engine.generate(**asked)
    with Engine(model_path=str(few), quantization="awq_marlin", **facts) as engine:
        got = engine.generate(**asked)
        assert got["output_ids"] == want["output_ids"]
        assert got["meta_info"]["output_token_logprobs"] == want["meta_info"]["output_token_logprobs"]
        for call in (
            lambda: engine.update_weights_from_disk(str(few)),
            lambda: engine.update_weights_from_tensor([("model.norm.weight", torch.ones(64))]),
            lambda: engine.save_sharded_model(path=str(tmp_path / "saved")),
            lambda: engine.get_weights_by_name("model.layers.0.self_attn.qkv_proj.weight"),
            lambda: engine.get_weights_by_name("model.layers.1.mlp.down_proj.qweight"),
        ):
            with pytest.raises(UnsupportedFeatureError, match="quantized weights cannot be|is in few bits"):
                call()
        engine.release_memory_occupation()
        with pytest.raises(MemoryReleasedError):
            engine.generate(**asked)
        engine.resume_memory_occupation()
        assert engine.generate(**asked)["output_ids"] == want["output_ids"]
