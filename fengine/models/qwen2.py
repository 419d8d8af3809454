"""Qwen2 and Qwen2.5: Llama's decoder with biases on q, k and v, often with tied embeddings."""

from fengine.models.family import Family
from fengine.models.fields import DECODER, READ
from fengine.models.reader import decoder_spec, qwen_windows
from fengine.models.spec import Config, ModelSpec

WINDOWED = ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers")
FIELDS = {**DECODER, **dict.fromkeys(WINDOWED, READ)}


def spec_from_hf(config: Config) -> ModelSpec:
    """Pure. Errors: as `reader.decoder_spec`."""
    return qwen_windows(config, decoder_spec(config, qkv_bias=True))


FAMILY = Family("Qwen2ForCausalLM", "qwen2", FIELDS, spec_from_hf)
