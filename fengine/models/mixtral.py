"""Mixtral: Mistral with 8 experts, of which a token uses 2, in place of the MLP."""

from functools import partial

from fengine.models import mistral
from fengine.models.family import Family
from fengine.models.moe import EXPERT_FIELDS, expert_weights, moe_layer, with_experts
from fengine.models.reader import SLIDING, ConfigReader, decoder_spec, refuse_layer_types, windowed
from fengine.models.spec import Config, ModelSpec
from fengine.models.weights import Weight, decoder_weights

FIELDS = {**mistral.FIELDS, **EXPERT_FIELDS}
DEFAULTS = {"sliding_window": None, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
NAMES = ("w1", "w3", "w2")


def spec_from_hf(config: Config) -> ModelSpec:
    """Pure. Errors: as `reader.decoder_spec`."""
    refuse_layer_types(config)
    read = ConfigReader(config)
    spec = decoder_spec(config, FAMILY.architecture)
    window = None if config["sliding_window"] is None else read.size("sliding_window", 1 << 27)
    spec = with_experts(read, spec, "intermediate_size", renormalise=True)
    return windowed(spec, window, [SLIDING] * spec.num_layers)


def weights(spec: ModelSpec) -> list[Weight]:
    """Pure."""
    return decoder_weights(spec, moe_layer(partial(expert_weights, block="block_sparse_moe", names=NAMES)))


FAMILY = Family("MixtralForCausalLM", "mixtral", FIELDS, spec_from_hf, DEFAULTS, weights=weights)
