"""GLM-4: half of each head turns, in pairs of neighbours; that of 2025 (0414) has norms before and behind attention and
MLP, that of 2024 (glm-4-9b-chat-hf) before them.
"""

from fengine.models.family import Family
from fengine.models.fields import DECODER, READ
from fengine.models.reader import decoder_spec
from fengine.models.spec import Config, ModelSpec
from fengine.models.weights import LayerWeights, Weight, attention_weights, decoder_weights, mlp_weights

FIELDS = {**DECODER, "attention_bias": READ}
DEFAULTS = {
    "rms_norm_eps": 1.5625e-7, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True,
    "partial_rotary_factor": 0.5,
}  # fmt: skip


def spec_from_hf(config: Config) -> ModelSpec:
    """Pure. Errors: as `reader.decoder_spec`."""
    return decoder_spec(config, o_bias=False, partial_rotary=True, interleaved=True)


def layer_weights(spec: ModelSpec, layer: LayerWeights) -> list[Weight]:
    """Pure."""
    return [
        layer.norm("attn_norm_D", "input_layernorm", spec.hidden_size),
        *attention_weights(spec, layer),
        layer.norm("attn_post_norm_D", "post_self_attn_layernorm", spec.hidden_size),
        layer.norm("mlp_norm_D", "post_attention_layernorm", spec.hidden_size),
        *mlp_weights(spec, layer, fused=True),
        layer.norm("mlp_post_norm_D", "post_mlp_layernorm", spec.hidden_size),
    ]


def first_weights(spec: ModelSpec) -> list[Weight]:
    """Of GLM-4 of 2024. Pure."""

    def leaves(spec: ModelSpec, layer: LayerWeights) -> list[Weight]:
        return [
            layer.norm("attn_norm_D", "input_layernorm", spec.hidden_size),
            *attention_weights(spec, layer),
            layer.norm("mlp_norm_D", "post_attention_layernorm", spec.hidden_size),
            *mlp_weights(spec, layer, fused=True),
        ]

    return decoder_weights(spec, leaves)


def weights(spec: ModelSpec) -> list[Weight]:
    """Pure."""
    return decoder_weights(spec, layer_weights)


FAMILY = Family("Glm4ForCausalLM", "glm4", FIELDS, spec_from_hf, DEFAULTS, weights=weights)
FIRST = Family("GlmForCausalLM", "glm", FIELDS, spec_from_hf, DEFAULTS, weights=first_weights)
