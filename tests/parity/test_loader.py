"""The loader: what good checkpoints become, and the error that each kind of bad one gives."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import json
import os
import random
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from fengine import models
from fengine.config import Dtype, LoadFormat
from fengine.errors import (
    ConfigError,
    CorruptCheckpointError,
    FengineError,
    ModelLoadError,
    UnsupportedArchitectureError,
    UnsupportedFormatError,
)
from fengine.models import layers
from fengine.models.kv_pages import init_kv
from fengine.models.kv_state import BATCH, Params
from fengine.models.spec import RopeSpec
from fengine.ops import linear
from fengine.worker.generation_config import read_eos_ids
from fengine.worker.hub import BOX, resolve_model
from fengine.worker.loader import load_params, spec_from_config
from fengine.worker.safetensors_file import INDEX, SINGLE, read_config, read_header


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny_checkpoints.write(tmp_path / "model")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny_checkpoints.write(tmp_path / "model", shards=True)


def load(directory: Path, **options: Any) -> Params:
    return load_params(directory, spec_from_config(read_config(directory)), **options)


def edit_json(path: Path, **changes: Any) -> None:
    """Sets keys of a JSON file; ... (Ellipsis) removes one."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not ...}))


def edit_tensors(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrites a safetensors header and leaves the data as they are."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


# -- good checkpoints -------------------------------------------------------------------------------------------------


def test_shards_give_the_same_parameters_as_one_file(tmp_path: Path) -> None:
    one = load(tiny_checkpoints.write(tmp_path / "one", "qwen3", head_dim=16))
    many = load(tiny_checkpoints.write(tmp_path / "many", "qwen3", head_dim=16, shards=True))
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert len(leaves(one)) == len(leaves(many))
    assert all(torch.equal(a, b) for a, b in zip(leaves(one), leaves(many), strict=True))


def test_fusing_and_packing(tmp_path: Path) -> None:
    directory = tiny_checkpoints.write(tmp_path, "qwen2", num_attention_heads=4, num_key_value_heads=2)
    layer, stored = load(directory)["layers"][1], load_file(directory / SINGLE)
    prefix = "model.layers.1"
    q, k, v = (stored[f"{prefix}.self_attn.{part}_proj.weight"] for part in "qkv")
    gate, up = (stored[f"{prefix}.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    assert torch.equal(linear.unpack(layer["wqkv"]), torch.cat([q, k, v]))
    assert torch.equal(linear.unpack(layer["wgate_up"]), torch.cat([gate, up]))
    assert torch.equal(layer["bqkv_C"], torch.cat([stored[f"{prefix}.self_attn.{part}_proj.bias"] for part in "qkv"]))
    assert set(layer) == {"attn_norm_D", "wqkv", "bqkv_C", "wo", "mlp_norm_D", "wgate_up", "wdown", "kind"}


def test_dtypes_on_the_cpu(tmp_path: Path) -> None:
    directory = tiny_checkpoints.write(tmp_path, dtype=torch.bfloat16)
    stored, asked = load(directory), load(directory, dtype=Dtype.float32)
    assert stored["layers"][0]["wo"].dtype == stored["embed"].dtype == torch.bfloat16
    assert stored["final_norm_D"].dtype == stored["rope_MK"].dtype == torch.float32
    assert {leaf.dtype for leaf in leaves(asked)} == {torch.float32}
    assert torch.equal(stored["layers"][0]["wo"].packed.float(), asked["layers"][0]["wo"].packed)


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    directory = tiny_checkpoints.write(tmp_path, tie_word_embeddings=True)
    params = load(directory)
    assert params["unembed"] is params["embed"]
    edit_tensors(directory / SINGLE, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    again = load(directory)
    assert again["unembed"] is again["embed"] and torch.equal(again["embed"].packed, params["embed"].packed)
    edit_tensors(directory / SINGLE, lambda t: t["lm_head.weight"][130].add_(1.0))
    with pytest.raises(CorruptCheckpointError, match=r"'lm_head.weight' is stored and differs.*tie_word_embeddings"):
        load(directory)


def test_context_length_bounds_the_rope_table(checkpoint: Path) -> None:
    assert load(checkpoint, context_length=77)["rope_MK"].shape == (77, 16)
    assert load(checkpoint)["rope_MK"].shape[0] == 1024
    for length in (0, 1025):
        with pytest.raises(ConfigError, match=f"context_length must be from 1 to 1024.* got {length}"):
            load(checkpoint, context_length=length)


def test_links_into_a_cache_and_harmless_extras(checkpoint: Path) -> None:
    edit_tensors(
        checkpoint / SINGLE, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    )
    blob = checkpoint.parent / "blob"
    (checkpoint / SINGLE).rename(blob)
    (checkpoint / SINGLE).symlink_to(blob)
    assert len(load(checkpoint)["layers"]) == 2


def test_code_in_a_checkpoint_is_never_imported(checkpoint: Path) -> None:
    (checkpoint / "canary_module.py").write_text("raise SystemExit('imported')")
    edit_json(checkpoint / "config.json", auto_map={"AutoConfig": "canary_module.Config"})
    load(checkpoint)
    assert not any("canary_module" in name for name in sys.modules)


def test_ids_that_end_a_text(checkpoint: Path) -> None:
    path = checkpoint / "generation_config.json"
    edit_json(path, eos_token_id=[9, 7])
    assert read_eos_ids(checkpoint) == {2, 7, 9}
    path.unlink()
    assert read_eos_ids(checkpoint) == {2}
    edit_json(checkpoint / "config.json", eos_token_id=None)
    assert read_eos_ids(checkpoint) == frozenset()
    for bad in ("</s>", [3, None], True, -1, 2.0):
        edit_json(checkpoint / "config.json", eos_token_id=bad)
        with pytest.raises(ModelLoadError, match="eos_token_id must be a token id"):
            read_eos_ids(checkpoint)


# -- dummy weights ----------------------------------------------------------------------------------------------------


def dummy(tmp_path: Path, **options: Any) -> tuple[Params, Any]:
    tiny_checkpoints.write(
        tmp_path, hidden_size=96, num_hidden_layers=32, num_attention_heads=6, tie_word_embeddings=True
    )
    (tmp_path / SINGLE).unlink()
    spec = spec_from_config(read_config(tmp_path))
    return load_params(tmp_path, spec, load_format=LoadFormat.dummy, **options), spec


def test_dummy_weights_are_a_function_of_the_seed(tmp_path: Path) -> None:
    (first, _), (again, _), (other, _) = (dummy(tmp_path, seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(leaves(first), leaves(again), strict=True))
    assert not torch.equal(first["layers"][0]["wo"].packed, other["layers"][0]["wo"].packed)
    assert not torch.equal(first["layers"][0]["wo"].packed, first["layers"][1]["wo"].packed)
    assert dummy(tmp_path, dtype=Dtype.bfloat16)[0]["layers"][0]["wo"].dtype == torch.bfloat16


def prefill(params: Params, spec: Any, prompt: list[int]) -> Tensor:
    """Logits of a prompt's last token."""
    count = len(prompt)
    fields = (prompt, range(count), range(16, 16 + count), [0, count], [count], [list(range(1, 9))], [count - 1])
    batch = dict(zip(BATCH, (torch.tensor(list(field), dtype=torch.int32) for field in fields), strict=True))
    model = models.lookup(spec.architecture)
    _, hidden_TD = model.forward(params, spec, init_kv(spec, 9, 16, torch.float32, "cpu"), batch)
    return model.unembed(params, spec, hidden_TD[-1:])[0]


def test_dummy_logits_react_to_the_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params, spec = dummy(tmp_path, dtype=Dtype.bfloat16)
    stream: list[float] = []
    add = layers.rms_norm.add_rms_norm

    def watched(*args: Any) -> Any:
        out = add(*args)
        stream.append(float(out[1].square().mean().sqrt()))
        return out

    monkeypatch.setattr(layers.rms_norm, "add_rms_norm", watched)
    rng = random.Random(0)
    last, first = [], []
    for _ in range(4):
        prompt = [rng.randrange(131) for _ in range(100)]
        base = prefill(params, spec, prompt)
        assert 0.5 < float(base.std()) < 3
        for ends, changed in (
            (last, prompt[:-1] + [(prompt[-1] + 1) % 131]),
            (first, [(prompt[0] + 1) % 131] + prompt[1:]),
        ):
            ends.append(float(torch.corrcoef(torch.stack((base, prefill(params, spec, changed))))[0, 1]))
    assert 0.3 < stream[-1] < 3 and max(stream) < 3  # after 32 layers the residual stream is of order one
    assert sum(last) / 4 < 0.9  # another last token, another distribution
    assert sum(first) / 4 < 0.99  # and a token 99 positions back is still heard


# -- config.json ------------------------------------------------------------------------------------------------------

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


def spec_of(family: str = "llama", **changes: Any) -> Any:
    config = tiny_checkpoints.config_of(family) | changes
    return spec_from_config({key: value for key, value in config.items() if value is not ...})


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [..., None, 0, -1, 1 << 40, "64", 64.0, True, [64]])
def test_bad_sizes_name_the_field(name: str, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=f"{name} (is missing|must be a whole number)"):
        spec_of(**{name: value})


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"num_attention_heads": 5, "head_dim": 16},
            "num_attention_heads .5. is not a multiple of num_key_value_heads",
        ),
        ({"num_attention_heads": 6, "head_dim": None}, "hidden_size .64. is no multiple of num_attention_heads .6."),
        ({"num_key_value_heads": 8}, "is not a multiple of num_key_value_heads .8."),
        ({"head_dim": 15}, "head_dim .15. must be even"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be above"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be above"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"attention_bias": 1}, "attention_bias must be true or false"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor is missing"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta must be above"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1, "factor": 2.0}}, "rope_theta must be above 1.0"),
        ({"rope_parameters": 3}, "must be objects or null"),
        ({"rope_scaling": tiny_checkpoints.LLAMA3_ROPE}, "rope_scaling .* contradicts rope_parameters"),
        (
            {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
            "contradicts rope_parameters",
        ),
        ({"hidden_size": 0, "vocab_size": 0}, "hidden_size must.*\n.*vocab_size must"),  # all problems at once
    ],
)
def test_bad_config_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        spec_of(**changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "'MambaForCausalLM' is not supported; supported: Llama.*Qwen2.*Qwen3",
        ),
        ({"architectures": None}, "architectures must name one class.*supported: Llama"),
        ({"architectures": []}, "architectures must name one class"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"model_type": "qwen2"}, "model_type = 'qwen2', but architectures = ..LlamaForCausalLM.., .* 'llama'"),
        ({"some_new_switch": 3, "hidden_width": 0}, "may change the result.*\n  some_new_switch = 3$"),
        ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 3]}}, "mrope_section"),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "rope_type = 'proportional'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per layer type"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = "),
    ],
)
def test_unsupported_features_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedArchitectureError, match=message):
        spec_of(**changes)


def test_qwen_features() -> None:
    for family in ("qwen2", "qwen3"):
        assert spec_of(family, sliding_window=4096, head_dim=16).head_dim == 16  # a window that is switched off
        sliding = {"use_sliding_window": True, "layer_types": None, "sliding_window": 16, "head_dim": 16}
        assert not spec_of(family, **sliding).kinds  # from layer 28 on
        assert not spec_of(family, **sliding | {"max_window_layers": 0, "sliding_window": 1024}).kinds
        windows = [kind.window for kind in spec_of(family, **sliding, max_window_layers=1).kinds]
        assert windows == [0, 16]
        with pytest.raises(UnsupportedArchitectureError, match="is_causal = false with sliding windows"):
            spec_of(family, **sliding, max_window_layers=1, is_causal=False)
    with pytest.raises(ModelLoadError, match="head_dim is missing"):
        spec_of("qwen3", head_dim=...)
    with pytest.raises(UnsupportedFormatError, match="quant_method 'bitsandbytes'"):
        spec_of("qwen2", quantization_config={"quant_method": "bitsandbytes"})


def test_a_file_that_names_a_quantization_is_refused(checkpoint: Path) -> None:
    quantization = checkpoint / "hf_quant_config.json"
    quantization.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": None}}))
    load(checkpoint)
    quantization.write_text(json.dumps({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}))
    with pytest.raises(UnsupportedFormatError, match="hf_quant_config.json names quant_algo 'FP8'"):
        load(checkpoint)


def test_old_and_new_rope_keys_mean_the_same() -> None:
    rope = tiny_checkpoints.LLAMA3_ROPE
    new = spec_of(rope_parameters=rope | {"rope_theta": 500.0})
    old = spec_of(rope_parameters=..., rope_theta=500.0, rope_scaling=rope)
    assert new == old and new.rope == RopeSpec(500.0, "llama3", 8.0, 1.0, 4.0, 64)
    assert spec_of(rope_parameters=..., rope_theta=...).rope == RopeSpec(10000.0)


@pytest.mark.parametrize(
    "text, message",
    [
        (b"", "config.json is empty"),
        (b'{\n  "hidden_size": 64,\n  "hi', "config.json: not usable JSON, Unterminated string .* line 3 column 3"),
        (b"[1]", "config.json: expected a JSON object, got list"),
        (b'\xef\xbb\xbf{"a": 1}', "config.json: not usable JSON, Expecting value: line 1 column 1"),
        (b'{"a": 1,\n "b": {"a": 2}, "a": "x"}', "config.json: not usable JSON, key 'a' occurs twice"),
        (b'{"a": "NaN {",\n "b": [1, NaN]}', "config.json: not usable JSON, NaN is not JSON"),
        (b'{"a": "\xff"}', "not usable JSON, 'utf-8' codec can't decode byte 0xff in position 7"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not usable JSON, it is nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not usable JSON, Exceeds the limit"),
    ],
)
def test_malformed_config_json(checkpoint: Path, text: bytes, message: str) -> None:
    (checkpoint / "config.json").write_bytes(text)
    with pytest.raises(CorruptCheckpointError, match=message):
        read_config(checkpoint)


# -- files ------------------------------------------------------------------------------------------------------------


def test_missing_directories_and_files(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere does not exist"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match="is not a directory"):
        read_config(checkpoint / "config.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match="empty holds no files; .* needs config.json and model.safetensors"):
        read_config(tmp_path / "empty")
    (tmp_path / "empty" / "adapter_config.json").touch()
    with pytest.raises(ModelLoadError, match="is a LoRA adapter: load its base model, and this one by lora_paths"):
        read_config(tmp_path / "empty")
    (checkpoint / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(ModelLoadError, match="is a pointer of Git LFS, not the file itself: run git lfs pull"):
        load(checkpoint)
    (checkpoint / SINGLE).unlink()
    with pytest.raises(ModelLoadError, match="looked for model.safetensors and .*it holds config.json"):
        load(checkpoint)


OPENED: list[str] = []


def test_pickles_are_refused_and_never_opened(checkpoint: Path) -> None:
    watching = [True]

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and watching:
            OPENED.append(str(args[0]))

    sys.addaudithook(watch)
    (checkpoint / SINGLE).rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(UnsupportedFormatError, match="only as pytorch_model.bin.*save_pretrained"):
        load(checkpoint)
    (checkpoint / "config.json").rename(checkpoint / "model.gguf")
    with pytest.raises(UnsupportedFormatError, match="model.gguf"):
        read_config(checkpoint)
    watching.clear()
    assert any(name.endswith("config.json") for name in OPENED)
    assert not any(name.endswith((".bin", ".gguf")) for name in OPENED)


def test_fifo_dangling_link_and_unreadable_file(checkpoint: Path) -> None:
    weights = checkpoint / SINGLE
    if os.geteuid():  # root may read everything
        weights.chmod(0)
        with pytest.raises(ModelLoadError, match="permissions"):
            load(checkpoint)
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(ModelLoadError, match="not a regular file"):
        load(checkpoint)
    weights.unlink()
    weights.symlink_to("../blobs/gone")
    with pytest.raises(ModelLoadError, match="a link to ../blobs/gone, which does not exist"):
        load(checkpoint)
    weights.unlink()
    weights.symlink_to(SINGLE)
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load(checkpoint)


def no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("memory was allocated before the checks were through")

    monkeypatch.setattr("fengine.worker.safetensors_file.read_tensor", refuse)


def test_bad_shards(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_allocation(monkeypatch)
    good = json.loads((sharded / INDEX).read_text())["weight_map"]
    name, file = next((n, f) for n, f in good.items() if list(good.values()).count(f) > 1)
    other = next(f for f in good.values() if f != file)
    cases: list[tuple[dict[str, Any], str]] = [
        (good | {"lm_head.extra": file}, f"places tensor 'lm_head.extra' in '{file}', which does not hold it"),
        ({k: v for k, v in good.items() if k != name}, f"holds tensor '{name}', which .* places in no file"),
        (good | {name: other}, f"'{name}'"),
        (good | {name: f"../model/{file}"}, "is not a .safetensors file beside it"),
        (good | {name: "/etc/passwd"}, "is not a .safetensors file beside it"),
        (good | {name: 3}, "is not a .safetensors file beside it"),
        ({}, "weight_map must be an object"),
    ]
    for weight_map, message in cases:
        (sharded / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CorruptCheckpointError, match=message):
            load(sharded)
    (sharded / INDEX).write_text(json.dumps({"weight_map": good}))
    (sharded / other).unlink()
    with pytest.raises(ModelLoadError, match=rf"lacks 1 of \d+ shards named by .*{other}"):
        load(sharded)


TENSOR_FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], type[FengineError], str]] = {
    "missing": (
        lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
        CorruptCheckpointError,
        r"tensor 'model.layers.1.mlp.up_proj.weight' of shape \[96, 64\] is missing",
    ),
    "leftover": (
        lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(96, 64)}),
        CorruptCheckpointError,
        "tensor 'model.layers.2.mlp.up_proj.weight' is not part of LlamaForCausalLM",
    ),
    "transposed": (
        lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(64, 96)}),
        CorruptCheckpointError,
        r"'model.layers.0.mlp.up_proj.weight': expected shape \[96, 64\], got \[64, 96\]",
    ),
    "int8": (
        lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(96, 64, dtype=torch.int8)}),
        UnsupportedFormatError,
        "'model.layers.0.mlp.up_proj.weight' is I8; supported: F32, BF16, F16",
    ),
    "mixed": (
        lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(96, 64, dtype=torch.bfloat16)}),
        CorruptCheckpointError,
        r"several dtypes: BF16 \(model.layers.0.mlp.up_proj.weight\), F32 .*set model.dtype",
    ),
    "no head": (
        lambda t: t.pop("lm_head.weight"),
        CorruptCheckpointError,
        "'lm_head.weight' of shape .* is missing\n.*tie_word_embeddings = true",
    ),
}


EXPERT = "model.layers.1.mlp.experts"
EXPERT_FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "an expert less": (
        lambda t: t.pop(f"{EXPERT}.3.up_proj.weight"),
        rf"tensor '{EXPERT}.3.up_proj.weight' of shape \[32, 64\] is missing",
    ),
    "an expert more": (
        lambda t: t.update({f"{EXPERT}.4.up_proj.weight": torch.zeros(32, 64)}),
        f"tensor '{EXPERT}.4.up_proj.weight' is not part of Qwen3MoeForCausalLM",
    ),
    "fused beside unfused": (
        lambda t: t.update({f"{EXPERT}.gate_up_proj": torch.zeros(4, 64, 64)}),
        f"tensor '{EXPERT}.gate_up_proj' is not part of Qwen3MoeForCausalLM",
    ),
    "another router": (
        lambda t: t.update({"model.layers.1.mlp.gate.weight": torch.zeros(5, 64)}),
        r"'model.layers.1.mlp.gate.weight': expected shape \[4, 64\], got \[5, 64\]",
    ),
}


@pytest.mark.parametrize("fault", EXPERT_FAULTS)
def test_experts_that_contradict_the_config(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    no_allocation(monkeypatch)
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    directory = tiny_checkpoints.write(tmp_path, "qwen3_moe", **sizes)
    change, message = EXPERT_FAULTS[fault]
    edit_tensors(directory / SINGLE, change)
    with pytest.raises(CorruptCheckpointError, match=message):
        load(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 5}, r"num_experts_per_tok \(5\) is more than the experts \(4\)"),
        ({"num_experts": 0}, "num_experts must be a whole number from 1"),
        ({"num_experts": 4, "num_local_experts": 5}, "contradict each other"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers must be a list of layers"),
    ],
)
def test_bad_numbers_of_experts(changes: dict[str, Any], message: str) -> None:
    config = tiny_checkpoints.SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config |= {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16} | changes
    with pytest.raises(ModelLoadError, match=message):
        spec_from_config(config)


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_tensors_that_contradict_the_config(checkpoint: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, error, message = TENSOR_FAULTS[fault]
    edit_tensors(checkpoint / SINGLE, change)
    if fault == "mixed":
        assert load(checkpoint, dtype=Dtype.bfloat16)["layers"][0]["wgate_up"].dtype == torch.bfloat16
    no_allocation(monkeypatch)
    with pytest.raises(error, match=message):
        load(checkpoint)


def first(header: dict[str, Any]) -> dict[str, Any]:
    """The header entry whose data come first."""
    return min((v for k, v in header.items() if k != "__metadata__"), key=lambda v: v["data_offsets"])


HEADER_FAULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "overlap": lambda h: first(h).update(data_offsets=[4, first(h)["data_offsets"][1] + 4]),
    "reversed": lambda h: first(h).update(data_offsets=first(h)["data_offsets"][::-1]),
    "negative": lambda h: first(h).update(data_offsets=[-8, 0]),
    "shape product": lambda h: first(h).update(shape=[1 << 32, 1 << 32, 4]),
    "many dimensions": lambda h: first(h).update(shape=[1] * 100_000),
    "outside": lambda h: first(h).update(shape=[1 << 40], dtype="U8", data_offsets=[0, 1 << 40]),
    "dtype": lambda h: first(h).update(dtype="Q4_K"),
    "float shape": lambda h: first(h).update(shape=[1.5]),
    "no entry": lambda h: h.update({"x": []}),
    "gap": lambda h: h.pop(next(k for k, v in h.items() if v is first(h))),
    "100,001 tensors": lambda h: h.update(
        {f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(100_001)}
    ),
}


@pytest.mark.parametrize("fault", HEADER_FAULTS)
def test_bad_headers(checkpoint: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_header(checkpoint / SINGLE, HEADER_FAULTS[fault])
    no_allocation(monkeypatch)
    with pytest.raises(CorruptCheckpointError, match="model.safetensors"):
        load(checkpoint)


def test_damaged_files(checkpoint: Path) -> None:
    path = checkpoint / SINGLE
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    text = data[8 : 8 + length]
    name = b'"lm_head.weight":'
    twice = text.replace(b"{", b"{" + name + json.dumps(json.loads(text)["lm_head.weight"]).encode() + b",", 1)
    bad = [data[:-1], data[: len(data) // 2], b"", data[: 8 + length], data[:5], data + b"\0"]
    bad += [struct.pack("<Q", size) + data[8:] for size in (0, 1, length - 1, 1 << 63, (1 << 64) - 1, len(data) - 7)]
    bad += [struct.pack("<Q", 4) + b"\xff\xfe{}", struct.pack("<Q", len(twice)) + twice + data[8 + length :]]
    for content in bad:
        path.write_bytes(content)
        with pytest.raises(CorruptCheckpointError, match="model.safetensors"):
            load(checkpoint)


def test_flipped_header_bytes_never_escape_the_typed_errors(checkpoint: Path) -> None:
    path = checkpoint / SINGLE
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    rng, failures = random.Random(0), 0
    for _ in range(600):
        mutated = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            mutated[rng.randrange(8 + length)] = rng.randrange(256)
        path.write_bytes(mutated)
        try:
            read_header(path)
        except ModelLoadError:
            failures += 1
    assert failures > 300


# -- where models come from -------------------------------------------------------------------------------------------


def hub_cache(root: Path, repo: str, checkpoint: Path) -> None:
    """Lays a checkpoint out as huggingface_hub's cache does: blobs, a snapshot of links, a ref."""
    storage, commit = root / f"models--{repo.replace('/', '--')}", "0123456789abcdef0123456789abcdef01234567"
    for folder in ("blobs", "refs", f"snapshots/{commit}"):
        (storage / folder).mkdir(parents=True)
    (storage / "refs" / "main").write_text(commit)
    for index, file in enumerate(sorted(checkpoint.iterdir())):
        file.rename(storage / "blobs" / f"{index:040x}")
        (storage / "snapshots" / commit / file.name).symlink_to(f"../../blobs/{index:040x}")


def test_hub_ids_from_a_local_cache(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    expected = load(checkpoint)
    hub_cache(tmp_path / "hub", "some-org/Some-Model-1B", checkpoint)
    params = load(resolve_model("some-org/Some-Model-1B"))
    assert all(torch.equal(a, b) for a, b in zip(leaves(params), leaves(expected), strict=True))
    for repo, revision in (("some-org/absent", None), ("some-org/Some-Model-1B", "v2")):
        with pytest.raises(ModelLoadError, match=rf"{repo}.*local cache.*HF_HUB_OFFLINE.*pass a directory"):
            resolve_model(repo, revision)


def test_directories_and_the_box(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model("box") == BOX
    assert resolve_model(str(checkpoint)) == checkpoint
    monkeypatch.chdir(tmp_path)
    assert resolve_model("model") == Path("model")
    for odd in ("~nosuchuser", "x" * 5000, "~nosuchuser/" + "x" * 300):
        with pytest.raises(ModelLoadError, match="model directory '.* cannot be read"):
            resolve_model(odd)
    with pytest.raises(ConfigError, match="revision 'v1' applies to hub ids"):
        resolve_model("model", "v1")
    with pytest.raises(ModelLoadError, match="is not a directory; pass the directory that holds config.json"):
        resolve_model("model/config.json")
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(UnsupportedFormatError, match=".gguf files are never opened"):
        resolve_model("weights.gguf")
    for path in ("nowhere", "/no/such/place", "../x/y", "a/b/c", ""):
        with pytest.raises(ModelLoadError, match="does not exist|is not a directory"):
            resolve_model(path)


def test_registry_lists_what_is_supported() -> None:
    for family in models.FAMILIES.values():
        assert getattr(transformers, family.architecture).config_class.model_type == family.model_type
    table = re.findall(r"^\| (.+?) \| `(\w+)` \|", (Path(models.__file__).parent / "README.md").read_text(), re.M)
    assert table == [(title, family.architecture) for title, family in models.FAMILIES.items()]
    generating = [family for family in models.FAMILIES.values() if family.architecture.endswith("ForCausalLM")]
    assert len(generating) == len(tiny_checkpoints.CLASSES)
    images = [name for name in models.MODELS if name.endswith("ForConditionalGeneration")]
    encoders = len(models.FAMILIES) - len(generating) - len(images)
    assert len(models.MODELS) == 3 * (len(generating) + encoders) + len(images)
    for asked, nearest in (
        ("Qwen3MoForCausalLM", "Qwen3MoeModel"),
        ("Gemma3nForConditionalGeneration", "Gemma3ForCausalLM"),
        ("XLMRobertaForTokenClassification", "XLMRobertaModel"),
    ):
        with pytest.raises(UnsupportedArchitectureError, match=f"supported: {nearest}, .*LlamaForSequenceClass"):
            models.lookup(asked)
