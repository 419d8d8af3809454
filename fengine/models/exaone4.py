"""EXAONE 4: norms behind attention and MLP, a norm on every query and key head; the large one mixes layers with a
window, which have rotary embedding, and layers that see all, which have none."""

from fengine.models.family import DECODER, READ, Family
from fengine.models.olmo import leaves
from fengine.models.reader import FULL, ConfigReader, decoder_spec, every, sliding_window, windowed
from fengine.models.rope import NONE
from fengine.models.spec import ModelSpec

FIELDS = {**DECODER, "sliding_window": READ, "sliding_window_pattern": READ, "layer_types": READ}
DEFAULTS = {"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4}


def spec_from_hf(read: ConfigReader) -> ModelSpec:
    spec, window, types = decoder_spec(read, qk_norm=True), sliding_window(read), read.config.get("layer_types")
    if window is None:
        return windowed(spec, None, types or [FULL] * spec.num_layers)
    if types is None:
        types = every(read.size("sliding_window_pattern", 1 << 12), spec.num_layers)
    return windowed(spec, window, types, far=NONE)


FAMILY = Family("Exaone4ForCausalLM", "exaone4", FIELDS, spec_from_hf, DEFAULTS, leaves=leaves)
