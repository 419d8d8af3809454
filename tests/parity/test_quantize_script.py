"""scripts/quantize.py: what it writes is read back with the values that it meant, here and by compressed-tensors."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import words
from safetensors.torch import load_file
from test_encoders import write as write_encoder
from transformers import AutoModelForCausalLM

from fengine import Engine
from fengine.ops.quantized import Quantized
from fengine.worker.hub import BOX
from fengine.worker.loader import load_params, spec_from_config
from fengine.worker.safetensors_file import read_config

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
quantize: Any = importlib.import_module("quantize")
NAME = "model.layers.1.mlp.down_proj"


def test_int4_by_its_own_packing(tmp_path: Path) -> None:
    quantize.quantize(BOX, tmp_path / "few", "w4a16", 64)
    stored, matrix = (
        load_file(tmp_path / "few" / "model.safetensors"),
        load_file(BOX / "model.safetensors")[f"{NAME}.weight"],
    )
    packed, scale = stored[f"{NAME}.weight_packed"], stored[f"{NAME}.weight_scale"]
    assert scale.dtype == torch.bfloat16 and stored[f"{NAME}.weight_shape"].tolist() == list(matrix.shape)
    code = ((packed[:, :, None] >> torch.arange(0, 32, 4)) & 15).flatten(1)
    assert torch.equal(torch.from_numpy(words(code.numpy(), 4)), packed)
    value = (code - 8) * scale.float().repeat_interleave(64, 1)
    params = load_params(tmp_path / "few", spec_from_config(read_config(tmp_path / "few")))
    got = params["layers"][1]["wdown"].linear(torch.eye(matrix.shape[1]), None, None, None, True).T
    assert torch.equal(got, value.bfloat16().float())
    plain = matrix.float() / (step := matrix.float().unflatten(1, (-1, 64)).abs().amax(-1) / 7.5).repeat_interleave(
        64, 1
    )
    plain = plain.round().clamp(-8, 7) * step.repeat_interleave(64, 1)
    error, simple = ((w - matrix.float()).square().mean() for w in (value, plain))
    assert error < simple  # the search for scales has gained


def test_the_box_in_few_bits_still_answers(tmp_path: Path) -> None:
    asked = {"text": "Q: What is 2 + 3?", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    for scheme in ("w4a16", "fp8"):
        quantize.quantize(BOX, tmp_path / scheme, scheme, 32)
        config = json.loads((tmp_path / scheme / "config.json").read_text())["quantization_config"]
        assert config["quant_method"] == "compressed-tensors" and config["ignore"] == []
        with Engine(model_path=str(tmp_path / scheme), device="cpu") as engine:
            assert engine.generate(asked["text"], asked["sampling_params"])["text"]


@pytest.mark.parametrize(("name", "scheme"), [("bert", "w4a16"), ("modernbert", "fp8")])
def test_an_encoder_keeps_its_names_and_folders(name: str, scheme: str, tmp_path: Path) -> None:
    source, few = tmp_path / "source", tmp_path / "few"
    write_encoder(source, name).to(torch.bfloat16).save_pretrained(source)
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("{}")
    quantize.quantize(source, few, scheme, 16)
    assert (few / "1_Pooling" / "config.json").exists()
    kept, made = load_file(source / "model.safetensors").keys(), load_file(few / "model.safetensors").keys()
    end = "weight" if scheme == "fp8" else "weight_packed"
    assert {key.removesuffix(".weight") for key in kept} == {
        key.removesuffix(f".{end}").removesuffix(".weight") for key in made if not key.endswith(("_scale", "_shape"))
    }
    spec = spec_from_config(read_config(few))
    assert isinstance(load_params(few, spec)["layers"][0]["wo"], Quantized)
    with pytest.raises(SystemExit, match="quantized already"):
        quantize.quantize(few, tmp_path / "again", scheme, 16)
    with pytest.raises(SystemExit, match="no multiple of --group 0"):
        quantize.quantize(source, tmp_path / "none", "w4a16", 0)


@pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed"
)
@pytest.mark.parametrize("scheme", ["w4a16", "fp8"])
def test_transformers_reads_the_same_values(scheme: str, tmp_path: Path) -> None:
    from transformers.utils.quantization_config import CompressedTensorsConfig

    quantize.quantize(BOX, tmp_path / "few", scheme, 32)
    told = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "few", quantization_config=told, dtype=torch.bfloat16)
    want = model.get_parameter(f"{NAME}.weight").float()
    params = load_params(tmp_path / "few", spec_from_config(read_config(tmp_path / "few")))
    got = params["layers"][1]["wdown"].linear(torch.eye(want.shape[1]), None, None, None, True).T
    assert torch.equal(got, want)
