"""GLM-4: half of each head turns, in pairs of neighbours; that of 2025 (0414) has norms before and behind attention and
MLP, that of 2024 (glm-4-9b-chat-hf) before them. GLM-4.5 and its relatives: half of each head turns; behind dense
layers come experts that a token chooses by sigmoid and a correction, and one expert that every token uses."""

from dataclasses import replace
from functools import partial

from fengine.models.family import DECODER, OUTPUTS, READ, Family, refuse_others
from fengine.models.moe import expert_weights, moe_layer, with_experts
from fengine.models.reader import ConfigReader, decoder_spec
from fengine.models.sources import Source
from fengine.models.spec import ExpertSpec, ModelSpec
from fengine.models.weights import LayerWeights, Weight, joined_mlp, layer_weights

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
NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def spec_from_hf(read: ConfigReader) -> ModelSpec:
    return decoder_spec(read, o_bias=False, partial_rotary=True, interleaved=True)


def moe_spec(read: ConfigReader) -> ModelSpec:
    """Errors: also UnsupportedArchitectureError for experts in groups."""
    refuse_others(read.config, {"n_group": 1, "topk_group": 1})
    read = read.changed({"num_experts": read.config.get("n_routed_experts")})
    spec = decoder_spec(read, qk_norm=read.flag("use_qk_norm"), o_bias=False, partial_rotary=True)
    shared = read.size("n_shared_experts", 1 << 8, default=1) * read.size("moe_intermediate_size", 1 << 22)
    spec = with_experts(
        read, spec, read.flag("norm_topk_prob"), "moe_intermediate_size", shared_size=shared, shared_gate=False,
        sigmoid=True, scale=read.number("routed_scaling_factor", 0.0, 1e6, default=1.0),
        dense_layers=tuple(range(read.size("first_k_dense_replace", 1 << 12, default=1, least=0))),
    )  # fmt: skip
    return replace(spec, draft_layers=read.size("num_nextn_predict_layers", 1 << 8, default=1, least=0))


def experts(found: ExpertSpec, hidden: int, layer: LayerWeights) -> list[Weight]:
    source = Source(f"model.layers.{layer.index}.mlp.gate.e_score_correction_bias", (found.count,))
    correction = Weight(("layers", layer.index, "correction_E"), (source,), "E", fill="small", wide=True)
    return [*expert_weights(found, hidden, layer), correction]


GLM4 = Family(
    "Glm4ForCausalLM", "glm4", FIELDS, spec_from_hf, DEFAULTS,
    leaves=partial(layer_weights, norms=NORMS, mlp=joined_mlp),
)  # fmt: skip
FIRST = Family("GlmForCausalLM", "glm", FIELDS, spec_from_hf, DEFAULTS, leaves=partial(layer_weights, mlp=joined_mlp))
MOE = Family("Glm4MoeForCausalLM", "glm4_moe", MOE_FIELDS, moe_spec, MOE_DEFAULTS, leaves=moe_layer(experts))
