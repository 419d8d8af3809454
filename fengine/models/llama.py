"""Llama (1 to 3.x): the pre-norm decoder; and what differs from it by a key of its config alone.

    hidden = embed[token]
    per layer:  hidden += attention(rms_norm(hidden));  hidden += down(silu(gate) * up) of rms_norm(hidden)
    logits = unembed(rms_norm(hidden))

Norm weights and biases carry the activations' dtype (float32 on the CPU, the model's on CUDA); matrices keep theirs."""

from fengine.models.family import DECODER, NAMES, READ, TRAINING, Family
from fengine.models.reader import ConfigReader, decoder_spec, refuse_layer_types
from fengine.models.spec import ModelSpec

FIELDS = {
    **DECODER, "attention_bias": READ, "mlp_bias": READ, "layer_types": READ,
    "activation": "of Falcon 3, whose layers are Llama's: hidden_act counts", "is_llama_config": NAMES,
}  # fmt: skip


def spec_from_hf(read: ConfigReader) -> ModelSpec:
    refuse_layer_types(read.config)
    return decoder_spec(read)


FAMILY = Family("LlamaForCausalLM", "llama", FIELDS, spec_from_hf)


def ernie_spec(read: ConfigReader) -> ModelSpec:
    """Pairs of neighbours turn."""
    bias = read.config.get("use_bias")
    return decoder_spec(read.changed({"attention_bias": bias, "mlp_bias": bias}), interleaved=True)


ERNIE = Family(
    "Ernie4_5ForCausalLM", "ernie4_5", {**DECODER, "use_bias": READ}, ernie_spec,
    {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 5e5, "num_key_value_heads": 2, "head_dim": 128},
)  # fmt: skip
SEED_OSS = Family(
    "SeedOssForCausalLM", "seed_oss",
    {**DECODER, **dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias"), READ),
     "residual_dropout": TRAINING},
    lambda read: decoder_spec(read, o_bias=read.config["attention_out_bias"] is True),
    {"attention_bias": True, "attention_out_bias": False, "num_key_value_heads": 8, "head_dim": 128},
)  # fmt: skip
