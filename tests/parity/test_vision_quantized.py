"""A decoder in few bits beside images: the bits of the dequantized checkpoint; the tower stays whole."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_vision
import torch
from quantized_checkpoints import Maker
from safetensors.torch import load_file, save_file
from tiny_vision import TOKEN, picture

from fengine import Engine
from fengine.errors import ModelLoadError
from fengine.ops.quantized import Quantized

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
TOWERS = ("visual", "vision", "multi_modal_projector", "connector")


def few_and_dense(directory: Path, family: str, towers: bool = False) -> tuple[Path, Path]:
    """A tiny checkpoint whose decoder, or with `towers` also the tower, is in AWQ's four bits, and the same whole."""
    plain = tiny_vision.write(directory / "few", family)
    tensors, maker = load_file(plain / "model.safetensors"), Maker(0, torch.bfloat16)
    tensors = {name: one.to(torch.bfloat16) for name, one in tensors.items()}
    few, dense = dict(tensors), dict(tensors)
    for name, matrix in tensors.items():
        tower = any(word in name for word in TOWERS)
        if matrix.dim() != 2 or "layers." not in name or tower and not towers:
            continue
        parts, dense[name] = maker.awq(*matrix.shape, 16)
        few |= {f"{name.removesuffix('weight')}{part}": one for part, one in parts.items()}
        del few[name]
    config = json.loads((plain / "config.json").read_text()) | {"dtype": "bfloat16"}
    for folder, stored, more in ((directory / "dense", dense, {}), (plain, few, {"quantization_config": AWQ})):
        folder.mkdir(exist_ok=True)
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config | more))
    processor = "preprocessor_config.json"
    (directory / "dense" / processor).write_text((plain / processor).read_text())
    return plain, directory / "dense"


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_bits_are_those_of_the_dequantized_checkpoint(family: str, tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "input_ids": [[5, TOKEN, 7], [TOKEN, 9, TOKEN], [4, 5, 6]], "return_logprob": True, "logprob_start_len": 0,
        "image_data": [[picture(0)], [picture(1, 33, 64), picture(2, 8, 8)], None],
        "sampling_params": {"max_new_tokens": 8, "temperature": 0.8, "sampling_seed": 3, "ignore_eos": True},
    }  # fmt: skip
    found, (few, dense) = [], few_and_dense(tmp_path, family)
    if family == "llava":  # some say it in text_config
        config = json.loads((few / "config.json").read_text())
        config["text_config"]["quantization_config"] = config.pop("quantization_config")
        (few / "config.json").write_text(json.dumps(config))
    for path in (few, dense):
        with Engine(model_path=str(path), device="cpu", skip_tokenizer_init=True) as engine:
            layer = engine._parts.weights.params["layers"][0]
            assert isinstance(layer["wo"], Quantized) == (path.name == "few")
            found.append([
                (o["output_ids"], o["meta_info"]["input_token_logprobs"], o["meta_info"]["output_token_logprobs"])
                for o in engine.generate(**asked)
            ])  # fmt: skip
    assert found[0] == found[1]


def test_rules_name_the_decoder_as_the_file_does(tmp_path: Path) -> None:
    few, dense = few_and_dense(tmp_path, "llava")
    told = json.loads((few / "config.json").read_text())
    weights = {"type": "int", "strategy": "group", "group_size": 16, "symmetric": True}
    groups = {
        "mlp": {"targets": ["re:.*language_model.*mlp.*"], "weights": weights | {"num_bits": 8}},
        "rest": {"targets": ["Linear"], "weights": weights | {"num_bits": 4}},
    }
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    (few / "config.json").write_text(json.dumps(told | {"quantization_config": config}))
    whole, maker = load_file(dense / "model.safetensors"), Maker(0, torch.bfloat16)
    stored = dict(whole)
    for name in [name for name, one in whole.items() if "language_model" in name and "_proj.weight" in name]:
        n, k = stored.pop(name).shape
        parts, whole[name] = maker.packed(n, k, 16, 8 if "mlp" in name else 4)
        stored |= {f"{name.removesuffix('weight')}{part}": one for part, one in parts.items()}
    for folder, tensors in ((few, stored), (dense, whole)):
        save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors")
    asked: dict[str, Any] = {"input_ids": [5, 6, 7], "return_logprob": True, "sampling_params": {"max_new_tokens": 4}}
    found = []
    for path in (few, dense):
        with Engine(model_path=str(path), device="cpu", skip_tokenizer_init=True, random_seed=0) as engine:
            found.append(engine.generate(**asked)["meta_info"]["output_token_logprobs"])
    assert found[0] == found[1]


def test_a_tower_in_few_bits_is_refused(tmp_path: Path) -> None:
    path, _ = few_and_dense(tmp_path, "llava", towers=True)
    with pytest.raises(ModelLoadError, match="vision"):
        Engine(model_path=str(path), device="cpu", skip_tokenizer_init=True)


def test_at_load_the_decoder_alone_comes_to_few_bits(tmp_path: Path) -> None:
    _, path = few_and_dense(tmp_path, "llava")
    with Engine(model_path=str(path), device="cpu", skip_tokenizer_init=True, quantization="fp8") as engine:
        params = engine._parts.weights.params
        assert isinstance(params["layers"][0]["wo"], Quantized)
        assert not isinstance(params["vision"]["layers"][0]["wo"], Quantized)
        answer = engine.generate(None, {"max_new_tokens": 2}, [5, TOKEN, 7], image_data=picture(0))
        assert answer["meta_info"]["completion_tokens"] >= 1
