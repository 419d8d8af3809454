"""Qwen3 (dense): Llama's decoder with an RMS norm on every query and key head, and a head width of its own."""

from fengine.errors import ModelLoadError
from fengine.models.spec import Config, ModelSpec, bias_flag, decoder_spec, refuse_sliding_window

ARCHITECTURE = "Qwen3ForCausalLM"


def spec_from_hf(config: Config) -> ModelSpec:
    """Pure. Errors: as `spec.decoder_spec`; UnsupportedArchitectureError with `use_sliding_window`."""
    refuse_sliding_window(config)
    if config.get("head_dim") is None:
        raise ModelLoadError("config.json: head_dim is missing; Qwen3 does not derive it from hidden_size.")
    bias = bias_flag(config, "attention_bias")
    return decoder_spec(config, ARCHITECTURE, qkv_bias=bias, o_bias=bias, qk_norm=True)
