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
    Acts,
    ConfigReader,
    decoder_spec,
    every,
    rope_spec,
    sliding_window,
    windowed,
)
from fengine.models.rope import LOCAL
from fengine.models.spec import Config, ModelSpec
from fengine.models.weights import layer_weights

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
NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")

UNREAD = dict.fromkeys(("rope_scaling", "rope_theta", "original_max_position_embeddings"))  # beside ropes by type
BESIDE = [("rope_theta", None), ("rope_type", "default")]


def spec1_from_hf(read: ConfigReader) -> ModelSpec:  # "gelu" is what the first checkpoints call the other
    return gemma_spec(read, "hidden_act", GELU_TANH | {"gelu": "gelu_tanh"})


def gemma_spec(read: ConfigReader, key: str = "hidden_activation", acts: Acts = GELU_TANH, **facts: Any) -> ModelSpec:
    """What they share, without windows. `key`: of the activation."""
    spec = decoder_spec(read, activation=(key, acts), norm_shift=1.0, **facts)
    return replace(spec, embed_scale=spec.hidden_size**0.5)


def cap(read: ConfigReader, kind: str) -> float:
    name = f"{kind}_logit_softcapping"
    return 0.0 if read.config.get(name) is None else read.number(name, LEAST, MOST)


def scales(read: ConfigReader) -> dict[str, Any]:
    """Of scores and logits, from Gemma 2 on."""
    width = read.number("query_pre_attn_scalar", LEAST, 1e9, default=256.0)
    return {"attention_scale": width**-0.5, "logit_cap": cap(read, "final")}


def spec2_from_hf(read: ConfigReader) -> ModelSpec:
    spec = gemma_spec(read, attention_cap=cap(read, "attn"), **scales(read))
    return windowed(spec, sliding_window(read), read.config.get("layer_types") or every(2, spec.num_layers))


def spec3_from_hf(read: ConfigReader) -> ModelSpec:
    refuse_others(read.config, {"attn_logit_softcapping": None})
    far, near = ropes_by_type(read.config, 1_000_000.0, 10_000.0)
    both_ways, facts = read.flag("use_bidirectional_attention"), scales(read)
    if both_ways:  # transformers would take other windows
        refuse_others(read.config, {"is_causal": True})
        facts["causal"] = False
    spec = gemma_spec(read.changed({"rope_parameters": far} | UNREAD), qk_norm=True, **facts)
    return gemma_windows(read, spec, near, 6, both_ways)


def gemma_windows(
    read: ConfigReader, spec: ModelSpec, near: Config, interval: int, both_ways: bool = False
) -> ModelSpec:
    """The spec with windows in most layers, which have the rotary embedding `near`; half of one lies on either side if
    `both_ways`."""
    interval, window = read.size("sliding_window_pattern", 1 << 12, default=interval), sliding_window(read)
    local = rope_spec(ConfigReader({"rope_parameters": near}, read.problems), spec.head_dim, spec.max_position)
    window = window // 2 + 1 if both_ways and window is not None else window
    types = read.config.get("layer_types") or every(interval, spec.num_layers)
    return windowed(replace(spec, rope_local=local), window, types, near=LOCAL, both_ways=both_ways)


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


leaves = partial(layer_weights, norms=NORMS)
GEMMA = Family("GemmaForCausalLM", "gemma", FIELDS, spec1_from_hf, DEFAULTS)
GEMMA2 = Family("Gemma2ForCausalLM", "gemma2", FIELDS2, spec2_from_hf, DEFAULTS2, leaves=leaves)
GEMMA3 = Family("Gemma3ForCausalLM", "gemma3_text", FIELDS3, spec3_from_hf, DEFAULTS3, base="Gemma3Text", leaves=leaves)
