"""Tiny random checkpoints, written by transformers itself: what every parity test loads on both sides."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

NAMES = {  # family -> name of its classes in transformers
    "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "phi3": "Phi3", "granite": "Granite",
    "olmo2": "Olmo2", "exaone4": "Exaone4", "smollm3": "SmolLM3", "glm4": "Glm4",
    "gemma": "Gemma", "gemma2": "Gemma2", "gemma3": "Gemma3", "qwen3_moe": "Qwen3Moe", "qwen2_moe": "Qwen2Moe",
    "mixtral": "Mixtral",
    "olmoe": "Olmoe", "cohere2": "Cohere2", "cohere": "Cohere", "olmo3": "Olmo3", "granitemoe": "GraniteMoe",
    "glm4_moe": "Glm4Moe", "starcoder2": "Starcoder2", "hunyuan_v1_dense": "HunYuanDenseV1", "gpt_oss": "GptOss",
    "ministral": "Ministral", "glm": "Glm", "ernie4_5": "Ernie4_5", "seed_oss": "SeedOss",
}  # fmt: skip
CLASSES: dict[str, Any] = {
    family: (getattr(transformers, f"{name}ForCausalLM").config_class, getattr(transformers, f"{name}ForCausalLM"))
    for family, name in NAMES.items()
}
SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA: dict[str, Any] = {  # a config alone: the weights are drawn
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA3_ROPE = {  # with 64 positions of pretraining, frequencies fall into each of the three bands
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def config_of(family: str) -> dict[str, Any]:
    """A config alone, in transformers' form."""
    config_class, model_class = CLASSES[family]
    return config_class(**SIZES, pad_token_id=0).to_dict() | {"architectures": [model_class.__name__]}


def write(
    directory: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: bool = False,
    old_config: bool = False,
    **overrides: Any,
) -> Path:
    """Writes a checkpoint in ordinary HF form and returns its directory.

    `shards` splits the weights into several files; `old_config` rewrites config.json as transformers 4 does.
    `overrides` are config fields. Every norm and bias is random too, so that leaving one out shows.
    """
    config_class, model_class = CLASSES[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(**(SIZES | overrides)))
        for name, parameter in model.named_parameters():
            _fill(name, parameter.data, shift=1.0 if family.startswith("gemma") else 0.0)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                _fill(name, buffer)
    model.to(dtype).save_pretrained(directory, max_shard_size="50KB" if shards else "5GB")
    if old_config:
        _as_transformers_4(directory / "config.json")
    return directory


def _fill(name: str, data: torch.Tensor, shift: float = 0.0) -> None:
    """Gains above a trained model's: attention is sharp, and a greedy text neither repeats itself nor has near-ties."""
    sharp = any(part in name for part in ("q_proj", "k_proj", "qkv_proj", "q_norm", "k_norm", "query_lay", "key_lay"))
    if data.dim() > 1:
        gain = 1.5 if "embed" in name or "lm_head" in name else 1.7 if sharp else 1.6
        data.normal_(0.0, gain * data.shape[-1] ** -0.5)
    elif "norm" in name and not name.endswith("bias"):
        data.normal_((1.7 if sharp else 1.0) - shift, 0.3)
    else:
        data.normal_(0.0, 0.3)


def _as_transformers_4(path: Path) -> None:
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.51.0"
    path.write_text(json.dumps(config))
