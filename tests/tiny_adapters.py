"""Random LoRA adapters in PEFT's files, for any model: what every test of adapters loads."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fengine.lora.layout import Module, all_sites
from fengine.models.spec import ModelSpec
from fengine.worker.loader import spec_from_config
from fengine.worker.safetensors_file import read_config

CONFIG = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "lora_alpha": 16, "lora_dropout": 0.05}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
JOINED = ("qkv_proj", "gate_up_proj")


def modules_of(model: str | Path | ModelSpec, kinds: Iterable[str] = ALL + JOINED) -> list[Module]:
    spec = model if isinstance(model, ModelSpec) else spec_from_config(read_config(Path(model)))
    return [module for site in all_sites(spec) for module in site.modules if module.kind in kinds]


def tensors(
    model: str | Path | ModelSpec, rank: int, kinds: Iterable[str] = ALL + JOINED, seed: int = 0, gain: float = 1.0,
    ranks: Mapping[str, int] | None = None, dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:  # fmt: skip
    """By PEFT's names. An update of gain 1 is about as large as the layer's own output, if alpha is the rank."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for module in modules_of(model, kinds):
        own = (ranks or {}).get(module.name, rank)
        for side, shape in (("A", (own, module.inputs)), ("B", (module.outputs, own))):
            std = gain * module.inputs**-0.5 if side == "A" else own**-0.5
            value = torch.randn(shape, generator=generator) * std
            found[f"base_model.model.{module.name}.lora_{side}.weight"] = value.to(dtype)
    return found


def write(directory: Path, values: Mapping[str, Tensor], rank: int, **config: Any) -> Path:
    """An adapter's directory, with `config` over the usual values."""
    directory.mkdir(parents=True, exist_ok=True)
    kinds = sorted({name.split(".")[-3] for name in values if ".lora_" in name})
    config = CONFIG | {"r": rank, "target_modules": kinds} | config
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in values.items()}, directory / "adapter_model.safetensors")
    return directory


def random_adapter(directory: Path, model: str | Path, rank: int, seed: int = 0, **config: Any) -> Path:
    """Every kind of module, alpha = rank: as large as the model's own layers."""
    return write(directory, tensors(model, rank, seed=seed), rank, **{"lora_alpha": rank, **config})
