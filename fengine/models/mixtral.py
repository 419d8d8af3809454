"""Mixtral: Mistral with 8 experts, of which a token uses 2, in place of the MLP."""

from functools import partial

from fengine.models import mistral
from fengine.models.family import Family
from fengine.models.moe import EXPERT_FIELDS, expert_weights, moe_layer, with_experts
from fengine.models.reader import ConfigReader
from fengine.models.spec import Config, ModelSpec

FIELDS = {**mistral.FIELDS, **EXPERT_FIELDS}
DEFAULTS = {"sliding_window": None, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
NAMES = ("w1", "w3", "w2")


def spec_from_hf(config: Config) -> ModelSpec:
    """Pure. Errors: as `reader.decoder_spec`."""
    return with_experts(ConfigReader(config), mistral.spec_from_hf(config), "intermediate_size", renormalise=True)


FAMILY = Family(
    "MixtralForCausalLM", "mixtral", FIELDS, spec_from_hf, DEFAULTS,
    leaves=moe_layer(partial(expert_weights, block="block_sparse_moe", names=NAMES)),
)  # fmt: skip
