"""OLMo 2 and 3: norms stand behind attention and MLP, not before; q and k are normed over all their heads at once. In
OLMo 3 three of four layers have a window, and may have a rotary embedding of their own. OLMoE: norms before attention
and experts, which are in every layer; q and k as in the others."""

from fengine.models.family import DECODER, READ, Family, refuse_others
from fengine.models.gemma import UNREAD, gemma_windows, ropes_by_type
from fengine.models.moe import EXPERT_FIELDS, moe_layer, with_experts
from fengine.models.reader import ConfigReader, decoder_spec
from fengine.models.spec import Config, ModelSpec
from fengine.models.weights import LayerWeights, Weight, attention_weights, mlp_weights

FIELDS = {**DECODER, "attention_bias": READ}
FIELDS3 = {**FIELDS, "sliding_window": READ, "layer_types": READ}
DEFAULTS = {"rms_norm_eps": 1e-5}
THETA3 = 500000.0
DEFAULTS3 = {**DEFAULTS, "rope_theta": THETA3, "sliding_window": 4096}


def spec3_from_hf(config: Config) -> ModelSpec:
    refuse_others(config, {"rope_theta": THETA3})  # of sliding layers, too, in transformers 4 alone
    far, near = ropes_by_type(config, THETA3, THETA3)
    spec = decoder_spec(config | {"rope_parameters": far} | UNREAD)
    return gemma_windows(config, spec, near, 4)


def moe_spec(config: Config) -> ModelSpec:
    read = ConfigReader(config)
    return with_experts(read, decoder_spec(config), "intermediate_size", read.flag("norm_topk_prob"))


def postnorm_layer(spec: ModelSpec, layer: LayerWeights) -> list[Weight]:
    """Attention, norm, gated MLP, norm. Pure."""
    return [
        *attention_weights(spec, layer),
        layer.norm("attn_post_norm_D", "post_attention_layernorm", spec.hidden_size),
        *mlp_weights(spec, layer),
        layer.norm("mlp_post_norm_D", "post_feedforward_layernorm", spec.hidden_size),
    ]


def whole_norms(spec: ModelSpec, layer: LayerWeights) -> list[Weight]:
    """Of q and k, over all their heads at once. Pure."""
    return [
        layer.norm("q_norm_C", "self_attn.q_norm", spec.num_heads * spec.head_dim),
        layer.norm("k_norm_C", "self_attn.k_norm", spec.num_kv_heads * spec.head_dim),
    ]


def layer_weights(spec: ModelSpec, layer: LayerWeights) -> list[Weight]:
    return postnorm_layer(spec, layer) + whole_norms(spec, layer)


def moe_weights(spec: ModelSpec, layer: LayerWeights) -> list[Weight]:
    return moe_layer()(spec, layer) + whole_norms(spec, layer)


OLMO2 = Family("Olmo2ForCausalLM", "olmo2", FIELDS, decoder_spec, DEFAULTS, leaves=layer_weights)
OLMO3 = Family("Olmo3ForCausalLM", "olmo3", FIELDS3, spec3_from_hf, DEFAULTS3, leaves=layer_weights)
OLMOE = Family(
    "OlmoeForCausalLM", "olmoe", {**FIELDS, **EXPERT_FIELDS, "norm_topk_prob": READ}, moe_spec, DEFAULTS,
    leaves=moe_weights,
)  # fmt: skip
