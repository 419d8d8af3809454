"""Qwen3 (dense): Llama's decoder with an RMS norm on every query and key head, and a head width of its own."""

from fengine.errors import ModelLoadError
from fengine.models import qwen2
from fengine.models.family import Family
from fengine.models.fields import READ
from fengine.models.reader import decoder_spec, qwen_windows
from fengine.models.spec import Config, ModelSpec

FIELDS = {**qwen2.FIELDS, "attention_bias": READ}


def spec_from_hf(config: Config) -> ModelSpec:
    """Pure. Errors: as `reader.decoder_spec`."""
    if config.get("head_dim") is None:
        raise ModelLoadError("config.json: head_dim is missing; Qwen3 does not derive it from hidden_size.")
    return qwen_windows(config, decoder_spec(config, qk_norm=True))


FAMILY = Family("Qwen3ForCausalLM", "qwen3", FIELDS, spec_from_hf)
