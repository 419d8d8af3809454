"""Gemma (1 and 1.1): Llama's decoder with norms that multiply by 1 + weight, scaled embeddings, and gelu.
Gemma 2: norms behind attention and MLP, too, capped scores and logits, a window in every other layer.
Gemma 3, text: Gemma 2 without the cap on scores, with norms on q and k, and windows in five of six layers, whose
rotary embedding has a base of its own. In EmbeddingGemma all tokens see each other, through windows to both sides."""

from dataclasses import replace
from functools import partial
from typing import Any

from fengine.errors import UnsupportedArchitectureError
from fengine.models.family import DECODER, READ, SPEED, Family, refuse_others
from fengine.models.reader import (
    FULL,
    GELU_TANH,
    LEAST,
    MOST,
    SLIDING,
    ConfigReader,
    decoder_spec,
    every,
    rope_spec,
    sliding_window,
    windowed,
)
from fengine.models.rope import LOCAL
from fengine.models.spec import Config, ModelSpec
from fengine.models.weights import sandwich_layer

FIELDS = {
    **DECODER, "attention_bias": READ,
    "hidden_activation": "an older name that transformers does not look at: hidden_act counts",
}  # fmt: skip
DEFAULTS = {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True}
OWN2 = (
    "attention_bias", "hidden_activation", "query_pre_attn_scalar", "sliding_window", "layer_types",
    "final_logit_softcapping", "attn_logit_softcapping",
)  # fmt: skip
FIELDS2 = {
    **DECODER, **dict.fromkeys(OWN2, READ), "cache_implementation": SPEED,
    "sliding_window_size": "an older name that transformers does not look at: sliding_window counts",
    "hidden_act": "an older name that transformers does not look at: hidden_activation counts",
}  # fmt: skip
DEFAULTS2: Config = {
    "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
}  # fmt: skip
FIELDS3 = {
    **FIELDS2,
    **dict.fromkeys(("sliding_window_pattern", "rope_local_base_freq", "use_bidirectional_attention"), READ),
    "_sliding_window_pattern": "what layer_types was made of",
}
DEFAULTS3 = {**DEFAULTS2, "final_logit_softcapping": None, "attn_logit_softcapping": None}
NORMS = ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")

UNREAD = dict.fromkeys(("rope_scaling", "rope_theta", "original_max_position_embeddings"))  # beside ropes by type
BESIDE = [("rope_theta", None), ("rope_type", "default")]


def spec1_from_hf(config: Config) -> ModelSpec:
    read = ConfigReader(config)
    hidden = read.size("hidden_size", 1 << 20)
    read.done(config["architectures"][0])
    return decoder_spec(  # "gelu" is what the first checkpoints call the other
        config, activation=("hidden_act", (*GELU_TANH, "gelu")), act="gelu_tanh", norm_shift=1.0,
        embed_scale=hidden**0.5,
    )  # fmt: skip


def gemma_spec(config: Config, **switches: Any) -> ModelSpec:
    """What Gemma 2 and 3 share, without windows. Pure."""
    read = ConfigReader(config)
    hidden = read.size("hidden_size", 1 << 20)
    scale = read.number("query_pre_attn_scalar", LEAST, 1e9, default=256.0) ** -0.5
    cap = read.number("final_logit_softcapping", LEAST, MOST) if config["final_logit_softcapping"] is not None else 0.0
    read.done(config["architectures"][0])
    return decoder_spec(
        config, activation=("hidden_activation", GELU_TANH), act="gelu_tanh", norm_shift=1.0, embed_scale=hidden**0.5,
        attention_scale=scale, logit_cap=cap, **switches,
    )  # fmt: skip


def spec2_from_hf(config: Config) -> ModelSpec:
    read = ConfigReader(config)
    cap = read.number("attn_logit_softcapping", LEAST, MOST) if config["attn_logit_softcapping"] is not None else 0.0
    spec = gemma_spec(config, attention_cap=cap)
    read.done(spec.architecture)
    return windowed(spec, sliding_window(config), config.get("layer_types") or every(2, spec.num_layers))


def spec3_from_hf(config: Config) -> ModelSpec:
    refuse_others(config, {"attn_logit_softcapping": None})
    far, near = ropes_by_type(config, 1_000_000.0, 10_000.0)
    read = ConfigReader(config)
    both_ways = read.flag("use_bidirectional_attention")
    read.done(config["architectures"][0])
    if both_ways:  # transformers would take other windows
        refuse_others(config, {"is_causal": True})
    if both_ways and config["sliding_window"] is not None:
        config = config | {"sliding_window": (sliding_window(config) or 0) // 2 + 1}
    causal = {"causal": False} if both_ways else {}
    spec = gemma_spec(config | {"rope_parameters": far} | UNREAD, qk_norm=True, **causal)
    return gemma_windows(config, spec, near, 6, both_ways)


def gemma_windows(config: Config, spec: ModelSpec, near: Config, interval: int, both_ways: bool = False) -> ModelSpec:
    """The spec with windows in most layers, which have the rotary embedding `near`. Pure. Errors: ModelLoadError."""
    read = ConfigReader(config)
    interval = read.size("sliding_window_pattern", 1 << 12, default=interval)
    local = rope_spec(ConfigReader({"rope_parameters": near}, read.problems), spec.head_dim, spec.max_position)
    read.done(spec.architecture)
    types = config.get("layer_types") or every(interval, spec.num_layers)
    return windowed(replace(spec, rope_local=local), sliding_window(config), types, near=LOCAL, both_ways=both_ways)


def ropes_by_type(config: Config, far_theta: float, near_theta: float) -> tuple[Config, Config]:
    """Of full layers and of sliding ones, as in `rope_parameters` per layer type, or by the keys of transformers 4."""
    both, scaling = _by_type(config), config.get("rope_scaling") or {}
    if both and scaling:
        raise UnsupportedArchitectureError("rope_scaling beside rope_parameters: remove one.")
    if "type" in scaling and "rope_type" not in scaling:  # which transformers does not look at here
        raise UnsupportedArchitectureError(f"rope_scaling.type = {scaling['type']!r:.80}: call it rope_type.")
    far = {"rope_theta": config.get("rope_theta", far_theta), **scaling, **(both.get(FULL) or {})}
    near = {"rope_theta": config.get("rope_local_base_freq", near_theta), **(both.get(SLIDING) or {})}
    for rope in (far, near):  # transformers truncates in any case
        refuse_others(rope, {"truncate": True})
    return far, near


def _by_type(config: Config) -> Config:
    """`rope_parameters` per layer type. Errors: UnsupportedArchitectureError, for ropes that are no objects, too."""
    both, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if isinstance(both, dict) and both.keys() & {FULL, SLIDING}:  # transformers 5.0 wrote these beside the types
        both = {key: rope for key, rope in both.items() if (key, rope) not in BESIDE}
    ropes = [scaling, both, *(both.values() if isinstance(both, dict) else ())]
    if any(type(rope or {}) is not dict for rope in ropes) or both.keys() - {FULL, SLIDING}:
        raise UnsupportedArchitectureError(f"rope_parameters must be per layer type, got {both or scaling!r:.200}.")
    return both


layer_weights = partial(sandwich_layer, names=NORMS)
GEMMA = Family("GemmaForCausalLM", "gemma", FIELDS, spec1_from_hf, DEFAULTS)
GEMMA2 = Family("Gemma2ForCausalLM", "gemma2", FIELDS2, spec2_from_hf, DEFAULTS2, leaves=layer_weights)
GEMMA3 = Family(
    "Gemma3ForCausalLM", "gemma3_text", FIELDS3, spec3_from_hf, DEFAULTS3, base="Gemma3Text", leaves=layer_weights
)
