"""Qwen3-MoE: Qwen3 with 128 experts, of which a token uses 8, in place of the MLP."""

from fengine.models.family import Family
from fengine.models.fields import DECODER, READ
from fengine.models.moe import SPARSE_FIELDS, moe_layer, with_sparse_layers
from fengine.models.reader import SLIDING, ConfigReader, decoder_spec, windowed
from fengine.models.spec import Config, ModelSpec

FIELDS = {
    **DECODER, **SPARSE_FIELDS, "attention_bias": READ, "use_sliding_window": READ, "sliding_window": READ,
    "use_qk_norm": "transformers norms always",
    "max_window_layers": "is not read by transformers' Qwen3-MoE: its layers slide all, or none",
}  # fmt: skip


def spec_from_hf(config: Config) -> ModelSpec:
    """Pure. Errors: as `reader.decoder_spec`."""
    read = ConfigReader(config)
    spec = decoder_spec(config, qk_norm=True)
    window = read.size("sliding_window", 1 << 27, 4096) if read.flag("use_sliding_window") else None
    return windowed(with_sparse_layers(read, spec), window, [SLIDING] * spec.num_layers)


FAMILY = Family("Qwen3MoeForCausalLM", "qwen3_moe", FIELDS, spec_from_hf, leaves=moe_layer())
