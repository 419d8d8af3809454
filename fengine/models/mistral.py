"""Mistral, Ministral and Nemo: Llama's decoder, in older checkpoints with a sliding window in every layer, or in those
that layer_types names, for which transformers has a class of its own, Ministral. Mixtral: Mistral with 8 experts, of
which a token uses 2."""

from functools import partial

from fengine.models.family import DECODER, READ, Family
from fengine.models.moe import EXPERT_FIELDS, expert_weights, moe_layer, with_experts
from fengine.models.reader import ConfigReader, decoder_spec, refuse_layer_types, sliding_window, windowed
from fengine.models.spec import ModelSpec

FIELDS = {**DECODER, "sliding_window": READ, "layer_types": READ}
DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8}
MIXTRAL_DEFAULTS = {"sliding_window": None, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}


def spec_from_hf(read: ConfigReader) -> ModelSpec:
    return windowed(decoder_spec(read), sliding_window(read), read.config.get("layer_types"))


def moe_spec(read: ConfigReader) -> ModelSpec:
    refuse_layer_types(read.config)
    return with_experts(read, spec_from_hf(read.changed({"layer_types": None})), renormalise=True)


FAMILY = Family("MistralForCausalLM", "mistral", FIELDS, spec_from_hf, DEFAULTS)
TEXT = FAMILY._replace(fields={**DECODER, "sliding_window": READ})  # beside images transformers reads no layer_types
MINISTRAL = Family("MinistralForCausalLM", "ministral", FIELDS, spec_from_hf, DEFAULTS)
MIXTRAL = Family(
    "MixtralForCausalLM", "mixtral", {**FIELDS, **EXPERT_FIELDS}, moe_spec, MIXTRAL_DEFAULTS,
    leaves=moe_layer(partial(expert_weights, block="block_sparse_moe", names=("w1", "w3", "w2"))),
)  # fmt: skip
