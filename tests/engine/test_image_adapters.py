"""LoRA adapters of a model that takes images: what the merged decoder says, and the row's own bits."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_adapters
import tiny_vision
import torch
from safetensors.torch import load_file, save_file
from tiny_vision import TOKEN, picture

from fengine import Engine
from fengine.errors import AdapterError

RANK = 4
THEIRS = "base_model.model.model.language_model."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, an adapter with the names that PEFT gives it, and the model with the adapter merged."""
    folder = tmp_path_factory.mktemp("adapters")
    model = tiny_vision.write(folder / "model", "qwen2_5_vl")
    values = {name.replace("base_model.model.model.", THEIRS): one
              for name, one in tiny_adapters.tensors(model, RANK).items()}  # fmt: skip
    tiny_adapters.write(folder / "adapter", values, RANK, lora_alpha=RANK)
    shutil.copytree(model, folder / "merged")
    weights = load_file(model / "model.safetensors")
    for name, down in values.items():
        if name.endswith("lora_A.weight"):
            at = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
            at = at if at in weights else at.replace("model.language_model.", "model.")
            weights[at] = weights[at] + values[name.replace("lora_A", "lora_B")] @ down
    save_file(weights, folder / "merged" / "model.safetensors", {"format": "pt"})
    return folder


def asked(ids: Any, given: Any, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    return {"input_ids": ids, "image_data": given, "sampling_params": sampling, "return_logprob": True, **more}


def bits(output: Any) -> Any:
    return output["output_ids"], output["meta_info"]["output_token_logprobs"]


def test_rows_with_images_have_the_adapter_that_they_name(folder: Path) -> None:
    ids = [[5, TOKEN, 7], [TOKEN, 9, TOKEN], [5, TOKEN, 7]]
    given = [[picture(0)], [picture(1), picture(2, 8, 8)], [picture(0)]]
    names = ["one", "one", None]
    facts: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True}
    with Engine(model_path=str(folder / "model"), lora_paths={"one": str(folder / "adapter")}, **facts) as engine:
        together = [bits(output) for output in engine.generate(**asked(ids, given, lora_path=names))]
        for i, name in enumerate(names):
            engine.flush_cache()
            assert bits(engine.generate(**asked(ids[i], given[i], lora_path=name))) == together[i]
    assert together[0] != together[2]
    with Engine(model_path=str(folder / "merged"), **facts) as engine:
        for output, (tokens, logprobs) in zip(engine.generate(**asked(ids[:2], given[:2])), together, strict=False):
            assert output["output_ids"] == tokens
            scores = output["meta_info"]["output_token_logprobs"]
            assert all(abs(a[0] - b[0]) < 1e-4 for a, b in zip(scores, logprobs, strict=True))


def test_an_adapter_of_the_tower_is_refused(folder: Path, tmp_path: Path) -> None:
    name = "base_model.model.model.visual.blocks.0.attn.qkv"
    values = {f"{name}.lora_A.weight": torch.ones(RANK, 48), f"{name}.lora_B.weight": torch.ones(144, RANK)}
    tiny_adapters.write(tmp_path, values, RANK, target_modules=["qkv"])
    with pytest.raises(AdapterError, match="visual.blocks.0.attn.qkv"):
        Engine(model_path=str(folder / "model"), lora_paths={"one": str(tmp_path)}, device="cpu",
               skip_tokenizer_init=True)  # fmt: skip
