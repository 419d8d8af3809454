"""Gemma 3, text: Gemma 2 without the cap on scores, with norms on q and k, and windows in five of six layers, whose
rotary embedding has a base of its own. In EmbeddingGemma all tokens see each other, through windows to both sides."""

from dataclasses import replace

from fengine.errors import UnsupportedArchitectureError
from fengine.models import gemma2
from fengine.models.family import Family
from fengine.models.fields import READ, refuse_others
from fengine.models.gemma2 import gemma_spec
from fengine.models.reader import FULL, SLIDING, ConfigReader, every, rope_spec, sliding_window, windowed
from fengine.models.rope import LOCAL
from fengine.models.spec import Config, ModelSpec

FIELDS = {
    **gemma2.FIELDS, **dict.fromkeys(("sliding_window_pattern", "rope_local_base_freq"), READ),
    "use_bidirectional_attention": READ,
    "_sliding_window_pattern": "what layer_types was made of",
}  # fmt: skip
DEFAULTS = {**gemma2.DEFAULTS, "final_logit_softcapping": None, "attn_logit_softcapping": None}


UNREAD = dict.fromkeys(("rope_scaling", "rope_theta", "original_max_position_embeddings"))  # beside ropes by type

BESIDE = [("rope_theta", None), ("rope_type", "default")]


def spec_from_hf(config: Config) -> ModelSpec:
    """Pure. Errors: as `reader.decoder_spec`."""
    refuse_others(config, {"attn_logit_softcapping": None})
    far, near = ropes_by_type(config, 1_000_000.0, 10_000.0)
    read = ConfigReader(config)
    both_ways = read.flag("use_bidirectional_attention")
    read.done(config["architectures"][0])
    if both_ways and config["sliding_window"] is not None:
        config = config | {"sliding_window": (sliding_window(config) or 0) // 2 + 1}
    causal = {"causal": False} if both_ways else {}
    spec = gemma_spec(config | {"rope_parameters": far} | UNREAD, qk_norm=True, **causal)
    return gemma_windows(config, spec, near, 6, both_ways)


def gemma_windows(
    config: Config, spec: ModelSpec, near: Config, interval: int, both_ways: bool = False
) -> ModelSpec:  # fmt: skip
    """The spec with windows in most layers, which have the rotary embedding `near`. Pure. Errors: ModelLoadError."""
    read, part = ConfigReader(config), ConfigReader({"rope_parameters": near})
    local = rope_spec(part, spec.head_dim, spec.max_position)
    interval = read.size("sliding_window_pattern", 1 << 12, default=interval)
    read.problems += part.problems
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


FAMILY = Family(
    "Gemma3ForCausalLM", "gemma3_text", FIELDS, spec_from_hf, DEFAULTS, base="Gemma3Text", leaves=gemma2.FAMILY.leaves
)  # fmt: skip
