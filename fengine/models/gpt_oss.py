"""gpt-oss, with weights in bfloat16: a sink in every head, a window in every other layer, biases, and experts whose
gate and up are clamped."""

from fengine.models.family import DECODER, READ, Family, refuse_others
from fengine.models.moe import EXPERT_FIELDS, expert_stacks, moe_layer, with_experts
from fengine.models.reader import LEAST, MOST, ConfigReader, decoder_spec, every, sliding_window, windowed
from fengine.models.sources import Source
from fengine.models.spec import ModelSpec
from fengine.models.weights import LayerWeights, Weight
from fengine.ops.experts import ALPHA

FIELDS = {
    **DECODER, **EXPERT_FIELDS, "attention_bias": READ, "sliding_window": READ, "layer_types": READ,
    "swiglu_limit": READ, "swiglu_alpha": READ, "experts_per_token": "an older name of num_experts_per_tok",
    "initial_context_length": "an older name of original_max_position_embeddings",
}  # fmt: skip
ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
DEFAULTS = {
    "rms_norm_eps": 1e-5, "head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128, "attention_bias": True,
    "rope_theta": 150000.0,
}  # fmt: skip


def spec_from_hf(read: ConfigReader) -> ModelSpec:
    refuse_others(read.config, {"swiglu_alpha": ALPHA})
    limit = read.number("swiglu_limit", LEAST, MOST, default=7.0)
    if read.config.get("rope_parameters") is None and not read.config.get("rope_scaling"):
        read = read.changed({"rope_parameters": ROPE})
    spec = with_experts(read, decoder_spec(read), renormalise=True, limit=limit)
    return windowed(spec, sliding_window(read), read.config.get("layer_types") or every(2, spec.num_layers))


def leaves(spec: ModelSpec, layer: LayerWeights) -> list[Weight]:
    experts = expert_stacks("mlp.router", "mlp.experts.gate_up_proj", "mlp.experts.down_proj", as_gpt_oss=True)
    sinks = Source(f"model.layers.{layer.index}.self_attn.sinks", (spec.num_heads,))
    leaf = Weight(("layers", layer.index, "sinks_H"), (sinks,), "H", "H", fill="small")
    return [*moe_layer(experts)(spec, layer), leaf]


FAMILY = Family("GptOssForCausalLM", "gpt_oss", FIELDS, spec_from_hf, DEFAULTS, leaves=leaves)
