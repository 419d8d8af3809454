"""OLMoE: experts in every layer; q and k are normed over all their heads at once."""

from fengine.models.family import Family
from fengine.models.fields import DECODER, READ
from fengine.models.moe import EXPERT_FIELDS, moe_layer, with_experts
from fengine.models.reader import ConfigReader, decoder_spec
from fengine.models.spec import Config, ModelSpec
from fengine.models.weights import LayerWeights, Weight, decoder_weights

FIELDS = {**DECODER, **EXPERT_FIELDS, "norm_topk_prob": READ, "attention_bias": READ}
DEFAULTS = {"rms_norm_eps": 1e-5}


def spec_from_hf(config: Config) -> ModelSpec:
    """Pure. Errors: as `reader.decoder_spec`."""
    read = ConfigReader(config)
    return with_experts(read, decoder_spec(config), "intermediate_size", read.flag("norm_topk_prob"))


def weights(spec: ModelSpec) -> list[Weight]:
    """Pure."""
    base = moe_layer()

    def layer_weights(spec: ModelSpec, layer: LayerWeights) -> list[Weight]:
        norms = [
            layer.norm("q_norm_C", "self_attn.q_norm", spec.num_heads * spec.head_dim),
            layer.norm("k_norm_C", "self_attn.k_norm", spec.num_kv_heads * spec.head_dim),
        ]
        return base(spec, layer) + norms

    return decoder_weights(spec, layer_weights)


FAMILY = Family("OlmoeForCausalLM", "olmoe", FIELDS, spec_from_hf, DEFAULTS, weights=weights)
