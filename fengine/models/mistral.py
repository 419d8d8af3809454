"""Mistral, Ministral and Nemo: Llama's decoder, in older checkpoints with a sliding window in every layer; the class of
Ministral has one in the layers that layer_types names."""

from fengine.models.family import Family
from fengine.models.fields import DECODER, READ
from fengine.models.reader import SLIDING, decoder_spec, refuse_layer_types, sliding_window, windowed
from fengine.models.spec import Config, ModelSpec

FIELDS = {**DECODER, "sliding_window": READ, "layer_types": READ}
DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8}


def spec_from_hf(config: Config) -> ModelSpec:
    """Pure. Errors: as `reader.decoder_spec`."""
    refuse_layer_types(config)
    spec = decoder_spec(config)
    return windowed(spec, sliding_window(config), [SLIDING] * spec.num_layers)


FAMILY = Family("MistralForCausalLM", "mistral", FIELDS, spec_from_hf, DEFAULTS)


def mixed_spec(config: Config) -> ModelSpec:
    """Pure. Errors: as `reader.decoder_spec`."""
    spec, window = decoder_spec(config), sliding_window(config)
    return windowed(spec, window, config.get("layer_types") or [SLIDING] * spec.num_layers)


MINISTRAL = Family("MinistralForCausalLM", "ministral", FIELDS, mixed_spec, DEFAULTS)
