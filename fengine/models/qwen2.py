"""Qwen2 and Qwen2.5: Llama's decoder with biases on q, k and v, often with tied embeddings."""

from fengine.models.spec import Config, ModelSpec, decoder_spec, refuse_sliding_window

ARCHITECTURE = "Qwen2ForCausalLM"


def spec_from_hf(config: Config) -> ModelSpec:
    """Pure. Errors: as `spec.decoder_spec`; UnsupportedArchitectureError with `use_sliding_window`."""
    refuse_sliding_window(config)
    return decoder_spec(config, ARCHITECTURE, qkv_bias=True)
