"""Mixtral: Mistral with 8 experts, of which a token uses 2, in place of the MLP."""

from functools import partial

from fengine.models import mistral
from fengine.models.family import Family
from fengine.models.moe import EXPERT_FIELDS, expert_weights, moe_layer, with_experts
from fengine.models.reader import ConfigReader
from fengine.models.spec import Config, ModelSpec
from fengine.models.weights import Weight, decoder_weights

FIELDS = {**mistral.FIELDS, **EXPERT_FIELDS}
DEFAULTS = {"sliding_window": None, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
NAMES = ("w1", "w3", "w2")


def spec_from_hf(config: Config) -> ModelSpec:
    """Pure. Errors: as `reader.decoder_spec`."""
    return with_experts(ConfigReader(config), mistral.spec_from_hf(config), "intermediate_size", renormalise=True)


def weights(spec: ModelSpec) -> list[Weight]:
    """Pure."""
    return decoder_weights(spec, moe_layer(partial(expert_weights, block="block_sparse_moe", names=NAMES)))


FAMILY = Family("MixtralForCausalLM", "mixtral", FIELDS, spec_from_hf, DEFAULTS, weights=weights)
