"""OLMoE: experts in every layer; q and k are normed over all their heads at once."""

from fengine.models.family import Family
from fengine.models.fields import DECODER, READ
from fengine.models.moe import EXPERT_FIELDS, moe_layer, with_experts
from fengine.models.reader import ConfigReader, decoder_spec
from fengine.models.spec import Config, ModelSpec
from fengine.models.weights import LayerWeights, Weight, whole_norms

FIELDS = {**DECODER, **EXPERT_FIELDS, "norm_topk_prob": READ, "attention_bias": READ}
DEFAULTS = {"rms_norm_eps": 1e-5}


def spec_from_hf(config: Config) -> ModelSpec:
    """Pure. Errors: as `reader.decoder_spec`."""
    read = ConfigReader(config)
    return with_experts(read, decoder_spec(config), "intermediate_size", read.flag("norm_topk_prob"))


def layer_weights(spec: ModelSpec, layer: LayerWeights) -> list[Weight]:
    return moe_layer()(spec, layer) + whole_norms(spec, layer)


FAMILY = Family("OlmoeForCausalLM", "olmoe", FIELDS, spec_from_hf, DEFAULTS, leaves=layer_weights)
