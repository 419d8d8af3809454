"""EXAONE 4: norms behind attention and MLP, a norm on every query and key head; the large one mixes layers with a
window, which have rotary embedding, and layers that see all, which have none."""

from fengine.errors import UnsupportedArchitectureError
from fengine.models.family import DECODER, READ, Family
from fengine.models.olmo import leaves
from fengine.models.reader import FULL, ConfigReader, decoder_spec, every, sliding_window, windowed
from fengine.models.rope import NONE
from fengine.models.spec import ModelSpec

FIELDS = {**DECODER, "sliding_window": READ, "sliding_window_pattern": READ, "layer_types": READ}
DEFAULTS = {"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4}


def spec_from_hf(read: ConfigReader) -> ModelSpec:
    spec, pattern = decoder_spec(read, qk_norm=True), read.config["sliding_window_pattern"]
    types = read.config.get("layer_types")
    if read.config["sliding_window"] is None:
        return windowed(spec, None, types or [FULL] * spec.num_layers)
    if types is None:
        if type(pattern) is not int or pattern < 1:
            raise UnsupportedArchitectureError(f"sliding_window_pattern = {pattern!r} is not supported; a number is.")
        types = every(pattern, spec.num_layers)
    return windowed(spec, sliding_window(read), types, far=NONE)


FAMILY = Family("Exaone4ForCausalLM", "exaone4", FIELDS, spec_from_hf, DEFAULTS, leaves=leaves)
