"""Gemma 2: norms before and behind attention and MLP, which multiply by 1 + weight; scaled embeddings, capped scores
and logits, a window in every other layer."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fengine.models.family import Family
from fengine.models.fields import DECODER, READ, SPEED
from fengine.models.reader import GELU_TANH, LEAST, MOST, ConfigReader, decoder_spec, every, sliding_window, windowed
from fengine.models.spec import Config, ModelSpec
from fengine.models.weights import sandwich_layer

OWN = (
    "attention_bias", "hidden_activation", "query_pre_attn_scalar", "sliding_window", "layer_types",
    "final_logit_softcapping", "attn_logit_softcapping",
)  # fmt: skip
FIELDS = {
    **DECODER, **dict.fromkeys(OWN, READ), "cache_implementation": SPEED,
    "sliding_window_size": "an older name that transformers does not look at: sliding_window counts",
    "hidden_act": "an older name that transformers does not look at: hidden_activation counts",
}  # fmt: skip
DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
}  # fmt: skip

NORMS = ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def gemma_spec(config: Config, **switches: Any) -> ModelSpec:
    """What Gemma 2 and 3 share, without windows. Pure. Errors: as `reader.decoder_spec`."""
    read = ConfigReader(config)
    hidden = read.size("hidden_size", 1 << 20)
    scale = read.number("query_pre_attn_scalar", LEAST, 1e9, default=256.0) ** -0.5
    cap = read.number("final_logit_softcapping", LEAST, MOST) if config["final_logit_softcapping"] is not None else 0.0
    read.done(config["architectures"][0])
    return decoder_spec(
        config, activation=("hidden_activation", GELU_TANH), act="gelu_tanh", norm_shift=1.0, embed_scale=hidden**0.5,
        attention_scale=scale, logit_cap=cap, **switches,
    )  # fmt: skip


def spec_from_hf(config: Config) -> ModelSpec:
    """Pure. Errors: as `reader.decoder_spec`."""
    read = ConfigReader(config)
    cap = read.number("attn_logit_softcapping", LEAST, MOST) if config["attn_logit_softcapping"] is not None else 0.0
    spec = gemma_spec(config, attention_cap=cap)
    read.done(spec.architecture)
    return windowed(spec, sliding_window(config), config.get("layer_types") or every(2, spec.num_layers))


FAMILY = Family(
    "Gemma2ForCausalLM", "gemma2", FIELDS, spec_from_hf, dict(DEFAULTS), leaves=partial(sandwich_layer, names=NORMS)
)
