"""Mistral, Ministral and Nemo: Llama's decoder, in older checkpoints with a sliding window in every layer."""

from fengine.models.family import Family
from fengine.models.fields import DECODER, READ
from fengine.models.reader import SLIDING, ConfigReader, decoder_spec, refuse_layer_types, windowed
from fengine.models.spec import Config, ModelSpec

FIELDS = {**DECODER, "sliding_window": READ, "layer_types": READ}
DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8}


def spec_from_hf(config: Config) -> ModelSpec:
    """Pure. Errors: as `reader.decoder_spec`."""
    refuse_layer_types(config)
    spec, read = decoder_spec(config, FAMILY.architecture), ConfigReader(config)
    window = None if config["sliding_window"] is None else read.size("sliding_window", 1 << 27)
    read.done(spec.architecture)
    return windowed(spec, window, [SLIDING] * spec.num_layers)


FAMILY = Family("MistralForCausalLM", "mistral", FIELDS, spec_from_hf, DEFAULTS)
