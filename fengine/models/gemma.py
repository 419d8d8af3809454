"""Gemma (1 and 1.1): Llama's decoder with norms that multiply by 1 + weight, scaled embeddings, and gelu."""

from fengine.models.family import Family
from fengine.models.fields import DECODER, READ
from fengine.models.reader import GELU_TANH, ConfigReader, decoder_spec
from fengine.models.spec import Config, ModelSpec

FIELDS = {
    **DECODER, "attention_bias": READ,
    "hidden_activation": "an older name that transformers does not look at: hidden_act counts",
}  # fmt: skip
DEFAULTS = {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True}


def spec_from_hf(config: Config) -> ModelSpec:
    """Pure. Errors: as `reader.decoder_spec`."""
    read = ConfigReader(config)
    hidden = read.size("hidden_size", 1 << 20)
    read.done(config["architectures"][0])
    return decoder_spec(  # "gelu" is what the first checkpoints call the other
        config, activation=("hidden_act", (*GELU_TANH, "gelu")), act="gelu_tanh", norm_shift=1.0,
        embed_scale=hidden**0.5,
    )  # fmt: skip


FAMILY = Family("GemmaForCausalLM", "gemma", FIELDS, spec_from_hf, DEFAULTS)
