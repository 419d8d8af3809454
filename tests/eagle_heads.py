"""EAGLE-3 heads of random weights for a target's config, in the public form."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def write(folder: Path, target: dict[str, Any], seed: int = 1, head: int = 40, **changes: Any) -> str:
    """A checkpoint whose streams are those of the first three layers. Returns its folder."""
    generator = torch.Generator().manual_seed(seed)
    hidden, mlp, heads = target["hidden_size"], target["intermediate_size"], target["num_attention_heads"]
    width = target.get("head_dim") or hidden // heads
    kv = target["num_key_value_heads"] * width
    shapes = {
        "fc": (hidden, 3 * hidden), "midlayer.self_attn.q_proj": (heads * width, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv, 2 * hidden), "midlayer.self_attn.v_proj": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * width), "midlayer.mlp.gate_proj": (mlp, hidden),
        "midlayer.mlp.up_proj": (mlp, hidden), "midlayer.mlp.down_proj": (hidden, mlp), "lm_head": (head, hidden),
    }  # fmt: skip
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    tensors = {f"{n}.weight": torch.randn(s, generator=generator) * s[-1] ** -0.5 for n, s in shapes.items()}
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    ids = torch.randperm(target["vocab_size"], generator=generator)[:head].sort().values
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors | {"d2t": ids - torch.arange(head)}, folder / "model.safetensors")
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
             "max_position_embeddings", "rms_norm_eps", "rope_theta")  # fmt: skip
    config = {name: target[name] for name in names if name in target}
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "draft_vocab_size": head, "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | changes))
    return str(folder)
