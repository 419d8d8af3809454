"""Checkpoints of mixtures whose experts multiply in FP8: read as their formats say, and bits that no layout changes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints as made
import tiny_checkpoints
import torch
from safetensors.torch import load_file
from test_columns import logits_of, on_ranks
from test_quantized import TOKENS, floats, fp8, keep, load, logits
from torch import Tensor

from fengine import Engine
from fengine.config import LoadFormat
from fengine.errors import UnsupportedFeatureError
from fengine.models.quantization import chosen
from fengine.models.spec import ModelSpec
from fengine.ops import linear, w8a8
from fengine.ops.quantized import Codes, encoded
from fengine.ops.w8a8 import W8A8
from fengine.worker.loader import load_params

MOE: dict[str, Any] = {
    "family": "qwen3_moe", "hidden_size": 160, "moe_intermediate_size": 144, "num_experts": 4,
    "num_experts_per_tok": 2, "norm_topk_prob": True, "num_hidden_layers": 2, "mlp_only_layers": [1],
}  # fmt: skip
STORED = {  # as Qwen3-30B-A3B-FP8, as llm-compressor's FP8-dynamic, and blocks with odd edges
    "blocks": fp8(128, 128, MOE),
    "channels": floats("channel", TOKENS, MOE, False),
    "blocks-odd": fp8(48, 32, MOE),
}


def few_bits(spec: ModelSpec) -> ModelSpec:
    return replace(spec, quantization=chosen(spec.quantization, "w8a8_fp8"))


def scales(tensors: dict[str, Tensor], module: str, n: int, k: int) -> Tensor:
    """Of each row, and of blocks of columns, [N, G], from the file's own."""
    if f"{module}.weight_scale" in tensors:
        return tensors[f"{module}.weight_scale"].view(n, 1)
    blocks = tensors[f"{module}.weight_scale_inv"]
    rows = next(rows for rows in (128, 48) if -(-n // rows) == len(blocks))
    return blocks.repeat_interleave(rows, 0)[:n]


def packed(tensors: dict[str, Tensor], modules: list[str], group: int) -> tuple[Tensor, Tensor]:
    """As a dense matrix of these modules below each other is packed."""
    codes = [tensors[f"{module}.weight"] for module in modules]
    scale_NG = torch.cat([scales(tensors, module, *code.shape) for module, code in zip(modules, codes, strict=True)])
    group = group if scale_NG.shape[1] > 1 else codes[0].shape[1]
    leaf = w8a8.pack(Codes("w8a8", torch.cat(codes).view(torch.uint8), scale_NG, None, group))
    assert isinstance(leaf, W8A8)
    return leaf.packed, leaf.scale


@pytest.mark.parametrize("case", STORED)
def test_experts_are_read_as_their_format_says(case: str, tmp_path: Path) -> None:
    config, make, options = STORED[case]
    few, _ = made.write(tmp_path, config, keep(make), **options)
    tensors, spec = load_file(few / "model.safetensors"), few_bits(load(few)[1])
    layer = load_params(few, spec)["layers"][0]
    for name, ends in (("wexperts_gate_up", ("gate_proj", "up_proj")), ("wexperts_down", ("down_proj",))):
        leaf = layer[name]
        assert isinstance(leaf, W8A8) and leaf.by_step == ("blocks" in case)
        for expert in range(4):
            modules = [f"model.layers.0.mlp.experts.{expert}.{end}" for end in ends]
            code, scale = packed(tensors, modules, 32 if "odd" in case else 128)
            assert torch.equal(leaf.packed[expert], code) and torch.equal(leaf.scale[expert], scale)
    assert isinstance(layer["wrouter"], linear.Dense)


def mixture(kind: str, folder: Path) -> tuple[Path, ModelSpec, dict[str, Any]]:
    """(a checkpoint, the spec that multiplies in FP8, how it is loaded)"""
    if kind in STORED:
        config, make, options = STORED[kind]
        directory, _ = made.write(folder, config, keep(make), **options)
    elif kind == "stacks":
        directory = tiny_checkpoints.write(folder / "plain", "gpt_oss", dtype=torch.bfloat16, intermediate_size=64)
    else:
        directory = tiny_checkpoints.write(folder / "plain", dtype=torch.bfloat16, **MOE)
    how = {"load_format": LoadFormat.dummy} if kind == "dummy" else {}
    return directory, few_bits(load(directory)[1]), how


@pytest.mark.parametrize("kind", [*STORED, "at load", "stacks", "dummy"])
def test_bits_are_those_of_one_token_alone_and_of_ranks(kind: str, tmp_path: Path) -> None:
    directory, spec, how = mixture(kind, tmp_path)
    params = load_params(directory, spec, **how)
    assert isinstance(params["layers"][0]["wexperts_down"], W8A8)
    whole = logits(params, spec, 23)
    for tokens in (1, 2, 5):
        assert torch.equal(logits(params, spec, tokens), whole[:tokens])
    want = logits_of(directory, spec, None, spec, **how)
    for got in on_ranks(2, tmp_path, lambda group: logits_of(directory, spec, group, spec.part(2), **how)):
        assert torch.equal(got, want)


def test_at_load_each_row_of_an_expert_has_its_own_scale(tmp_path: Path) -> None:
    directory, spec, _ = mixture("at load", tmp_path)
    stored, plain = load(directory)
    params = load_params(directory, spec)
    name = "model.layers.0.mlp.experts.2.down_proj.weight"
    want = w8a8.pack(encoded(load_file(directory / "model.safetensors")[name], "w8a8", 0))
    got = params["layers"][0]["wexperts_down"]
    assert isinstance(want, W8A8) and torch.equal(got.packed[2], want.packed) and torch.equal(got.scale[2], want.scale)
    gap = (logits(params, spec, 9).log_softmax(-1) - logits(stored, plain, 9).log_softmax(-1)).abs().mean()
    assert 0 < gap < 0.5


@pytest.mark.parametrize("case", ["blocks", "channels"])
def test_weights_alone_in_fp8_are_the_dequantized_model(case: str, tmp_path: Path) -> None:
    config, make, options = STORED[case]
    few, dense = made.write(tmp_path, config, keep(make), **options)
    (params, spec), (plain, plain_spec) = load(few), load(dense)
    for tokens in (1, 23):
        assert torch.equal(logits(params, spec, tokens), logits(plain, plain_spec, tokens))


def test_experts_in_few_bits_are_not_told_as_absent(tmp_path: Path) -> None:
    """Those of gpt-oss have a name without an end."""
    path, name = tiny_checkpoints.write(tmp_path, "gpt_oss", dtype=torch.bfloat16), "model.layers.0.mlp.experts.{}"
    facts: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_total_tokens": 64}
    with Engine(model_path=str(path), quantization="w8a8_fp8", **facts) as engine:
        assert engine.get_weights_by_name(name.format("down_proj_bias")) and not engine.get_weights_by_name("no")
        with pytest.raises(UnsupportedFeatureError, match="in few bits"):
            engine.get_weights_by_name(name.format("down_proj"))


def test_what_a_router_says_stays_in_16_bits(tmp_path: Path) -> None:
    for family in ("gpt_oss", "granitemoe", "mixtral", "qwen2_moe"):
        directory = tiny_checkpoints.write(tmp_path / family, family, dtype=torch.bfloat16)
        _, plain = load(directory)
        for asked in ("fp8", "w8a8_fp8"):
            spec = replace(plain, quantization=chosen(None, asked))
            assert isinstance(load_params(directory, spec)["layers"][0]["wrouter"], linear.Dense), (family, asked)
