"""Granite 3: Llama's decoder whose embeddings, attention scores, residual additions and logits are scaled."""

from dataclasses import replace

from fengine.models.family import Family
from fengine.models.fields import DECODER, READ
from fengine.models.reader import ConfigReader, decoder_spec
from fengine.models.spec import Config, ModelSpec

SCALES = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")
FIELDS = {**DECODER, "attention_bias": READ, "mlp_bias": READ, **dict.fromkeys(SCALES, READ)}


def spec_from_hf(config: Config) -> ModelSpec:
    """Pure. Errors: as `reader.decoder_spec`."""
    read = ConfigReader(config)
    bias, mlp_bias = read.flag("attention_bias"), read.flag("mlp_bias")
    embed, logits, residual, attention = (read.number(name, 0.0, 1e6, default=1.0) for name in SCALES)
    read.done(FAMILY.architecture)
    spec = decoder_spec(config, FAMILY.architecture, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)
    return replace(
        spec, embed_scale=embed, logit_scale=1.0 / logits, residual_scale=residual, attention_scale=attention
    )


FAMILY = Family("GraniteForCausalLM", "granite", FIELDS, spec_from_hf)
