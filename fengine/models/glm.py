"""GLM-4: half of each head turns, in pairs of neighbours; that of 2025 (0414) has norms before and behind attention and
MLP, that of 2024 (glm-4-9b-chat-hf) before them. GLM-4.5 and its relatives: half of each head turns; behind dense
layers come experts that a token chooses by sigmoid and a correction, and one expert that every token uses."""

from dataclasses import replace
from functools import partial

from fengine.models.family import DECODER, OUTPUTS, READ, Family, refuse_others
from fengine.models.moe import expert_weights, moe_layer, with_experts
from fengine.models.reader import ConfigReader, decoder_spec
from fengine.models.sources import Source
from fengine.models.spec import Config, ExpertSpec, ModelSpec
from fengine.models.weights import LayerWeights, Weight, prenorm_layer, sandwich_layer

FIELDS = {**DECODER, "attention_bias": READ}
DEFAULTS = {
    "rms_norm_eps": 1.5625e-7, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
OWN = (
    "moe_intermediate_size", "num_experts_per_tok", "n_shared_experts", "n_routed_experts", "n_group", "topk_group",
    "routed_scaling_factor", "first_k_dense_replace", "norm_topk_prob", "use_qk_norm", "num_nextn_predict_layers",
)  # fmt: skip
MOE_FIELDS = {**FIELDS, **dict.fromkeys(OWN, READ), "output_router_logits": OUTPUTS}
MOE_DEFAULTS = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "num_key_value_heads": 8, "norm_topk_prob": True}
NORMS = ("post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def spec_from_hf(config: Config) -> ModelSpec:
    return decoder_spec(config, o_bias=False, partial_rotary=True, interleaved=True)


def moe_spec(config: Config) -> ModelSpec:
    """Errors: also UnsupportedArchitectureError for experts in groups."""
    refuse_others(config, {"n_group": 1, "topk_group": 1})
    read = ConfigReader(config | {"num_experts": config.get("n_routed_experts")})
    norms, renormalise = read.flag("use_qk_norm"), read.flag("norm_topk_prob")
    spec = decoder_spec(config, qk_norm=norms, o_bias=False, partial_rotary=True)
    shared = read.size("n_shared_experts", 1 << 8, default=1) * read.size("moe_intermediate_size", 1 << 22)
    dense = read.size("first_k_dense_replace", 1 << 12, default=1, least=0)
    scale = read.number("routed_scaling_factor", 0.0, 1e6, default=1.0)
    drafts = read.size("num_nextn_predict_layers", 1 << 8, default=1, least=0)
    spec = with_experts(read, spec, "moe_intermediate_size", renormalise)
    facts = {"shared_size": shared, "shared_gate": False, "sigmoid": True, "scale": scale}
    experts = spec.experts and replace(spec.experts, dense_layers=tuple(range(dense)), **facts)
    return replace(spec, experts=experts, draft_layers=drafts)


def experts(found: ExpertSpec, hidden: int, layer: LayerWeights) -> list[Weight]:
    source = Source(f"model.layers.{layer.index}.mlp.gate.e_score_correction_bias", (found.count,))
    correction = Weight(("layers", layer.index, "correction_E"), (source,), "E", fill="small", wide=True)
    return [*expert_weights(found, hidden, layer), correction]


GLM4 = Family(
    "Glm4ForCausalLM", "glm4", FIELDS, spec_from_hf, DEFAULTS,
    leaves=partial(sandwich_layer, names=NORMS, fused_mlp=True),
)  # fmt: skip
FIRST = Family("GlmForCausalLM", "glm", FIELDS, spec_from_hf, DEFAULTS, leaves=partial(prenorm_layer, fused_mlp=True))
MOE = Family("Glm4MoeForCausalLM", "glm4_moe", MOE_FIELDS, moe_spec, MOE_DEFAULTS, leaves=moe_layer(experts))
