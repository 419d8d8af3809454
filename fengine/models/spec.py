"""`ModelSpec`: the hashable facts of one architecture, and how they are read from an HF `config.json`. No torch."""

import math
from dataclasses import dataclass, replace
from typing import Any

from fengine.errors import ModelLoadError, UnsupportedArchitectureError

Config = dict[str, Any]  # a parsed config.json


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding. `kind` is "default" or "llama3" (Llama 3.1's piecewise frequency scaling)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True)
class ModelSpec:
    """Shapes and switches of one decoder. Closed over by compiled code, never a run-time argument."""

    architecture: str  # HF class name, e.g. "LlamaForCausalLM"
    vocab_size: int  # V, the width of the logits
    hidden_size: int  # D
    mlp_size: int  # F
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # G
    head_dim: int  # K
    rms_eps: float
    rope: RopeSpec
    max_position: int  # the checkpoint's context length in tokens
    tie_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    exact: bool = True  # False: linear layers may add up in any order (numerics=fast)
    generates: bool = True  # False: an embedding model or a classifier, whose checkpoint needs no output head
    num_labels: int | None = None  # C, the outputs of a classification or reward head; None: there is none


def decoder_spec(config: Config, architecture: str, **switches: bool) -> ModelSpec:
    """The facts that Llama, Qwen2 and Qwen3 configs share; `switches` are the ModelSpec fields that differ. Pure.

    Keys that are absent take transformers' default where it has one for every checkpoint (rms_norm_eps 1e-6, head_dim
    hidden_size / heads, untied embeddings); sizes have none. Errors: ModelLoadError with every bad field, one a line;
    UnsupportedArchitectureError for a feature that is not built.
    """
    _refuse_features(config)
    problems: list[str] = []
    hidden = _size(config, "hidden_size", 1 << 20, problems)
    heads = _size(config, "num_attention_heads", 1 << 14, problems)
    kv_heads = _size(config, "num_key_value_heads", 1 << 14, problems, default=heads)
    head_dim = _size(config, "head_dim", 1 << 12, problems, default=max(hidden // heads, 1))
    if config.get("head_dim") is None and hidden % heads:
        problems.append(f"hidden_size ({hidden}) is no multiple of num_attention_heads ({heads}); head_dim is absent")
    if kv_heads > heads or heads % kv_heads:
        problems.append(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})")
    if head_dim % 2:
        problems.append(f"head_dim ({head_dim}) must be even: rotary embedding turns pairs")
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=_size(config, "vocab_size", 1 << 24, problems),
        hidden_size=hidden,
        mlp_size=_size(config, "intermediate_size", 1 << 22, problems),
        num_layers=_size(config, "num_hidden_layers", 1 << 12, problems),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=_number(config, "rms_norm_eps", 0.0, 1.0, problems, default=1e-6),
        rope=_rope_spec(config, problems),
        max_position=_size(config, "max_position_embeddings", 1 << 27, problems),
        tie_embeddings=_flag(config, "tie_word_embeddings", problems),
        **switches,
    )
    if problems:
        raise ModelLoadError(f"config.json does not describe a {architecture}:\n  " + "\n  ".join(problems))
    return spec


def embedding_spec(spec: ModelSpec, architecture: str | None = None) -> ModelSpec:
    """The same decoder without an output head: its hidden states are the result. Pure."""
    return replace(spec, architecture=architecture or spec.architecture, generates=False)


def classifier_spec(spec: ModelSpec, architecture: str, config: Config) -> ModelSpec:
    """The same decoder under a head with one output per label of `config`. Pure. Errors: ModelLoadError.

    As transformers: as many labels as `id2label` has entries; else `num_labels`; else 2.
    """
    problems: list[str] = []
    labels = config.get("id2label")
    if isinstance(labels, dict) and labels:
        count = len(labels)
    else:
        count = _size(config, "num_labels", 1 << 20, problems, default=2)
    if labels is not None and not isinstance(labels, dict):
        problems.append(f"id2label must be an object or null, got {labels!r}"[:200])
    if problems:
        raise ModelLoadError(f"config.json: {problems[0]}")
    return replace(embedding_spec(spec, architecture), num_labels=count)


def bias_flag(config: Config, name: str) -> bool:
    """A boolean key of an architecture that is absent from older configs, where it means False."""
    problems: list[str] = []
    value = _flag(config, name, problems)
    if problems:
        raise ModelLoadError(f"config.json: {problems[0]}")
    return value


def refuse_sliding_window(config: Config) -> None:
    """Qwen configs name a window but use it only with `use_sliding_window`. Errors: UnsupportedArchitectureError."""
    if config.get("use_sliding_window") not in (None, False):
        raise UnsupportedArchitectureError(
            f"use_sliding_window = {config['use_sliding_window']!r}: sliding-window attention is not supported."
        )


def _refuse_features(config: Config) -> None:
    """Features that would change the function computed. Errors: UnsupportedArchitectureError naming key and value."""
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise UnsupportedArchitectureError(f"hidden_act = {act!r} is not supported; supported: 'silu'.")
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise UnsupportedArchitectureError(f"layer_types = {kinds!r}: only 'full_attention' layers are supported.")


def _rope_spec(config: Config, problems: list[str]) -> RopeSpec:
    """From `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5)."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if not isinstance(new, dict) or not isinstance(old, dict):
        problems.append("rope_parameters and rope_scaling must be objects or null")
        return RopeSpec(1.0)
    if new and old and any(new.get(key, value) != value for key, value in old.items() if key != "type"):
        problems.append(f"rope_scaling {old!r} contradicts rope_parameters {new!r}; remove one")
    rope = {"rope_theta": config.get("rope_theta", 10000.0), **old, **new}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UnsupportedArchitectureError(f"rope_type = {kind!r} is not supported; supported: 'default', 'llama3'.")
    for source in (rope, config):
        if source.get("partial_rotary_factor", 1.0) not in (1, None):
            raise UnsupportedArchitectureError(
                f"partial_rotary_factor = {source['partial_rotary_factor']!r} is not supported; only 1.0 is."
            )
    if any(isinstance(value, dict) for value in rope.values()):
        raise UnsupportedArchitectureError(f"rope_parameters per layer type are not supported (got {sorted(rope)}).")
    theta = _number(rope, "rope_theta", 0.0, 1e15, problems)
    if kind == "default":
        return RopeSpec(theta)
    low = _number(rope, "low_freq_factor", 0.0, 1e6, problems)
    high = _number(rope, "high_freq_factor", 0.0, 1e6, problems)
    if high <= low:
        problems.append(f"high_freq_factor ({high}) must be larger than low_freq_factor ({low})")
    return RopeSpec(
        theta=theta,
        kind=kind,
        factor=_number(rope, "factor", 0.0, 1e6, problems),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=_size(rope, "original_max_position_embeddings", 1 << 27, problems),
    )


def _size(config: Config, name: str, limit: int, problems: list[str], default: int | None = None) -> int:
    """A whole number in [1, limit]; null and absent are the same. Returns 1 when it had to complain."""
    value = config.get(name)
    if value is None and default is not None:
        return default
    if value is None:
        problems.append(f"{name} is missing")
    elif isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        problems.append(f"{name} must be a whole number from 1 to {limit}, got {value!r}"[:200])
    else:
        return value
    return 1


def _number(
    config: Config, name: str, low: float, high: float, problems: list[str], default: float | None = None
) -> float:
    """A finite number in (low, high]. Returns `high` when it had to complain."""
    value = config.get(name)
    if value is None and default is not None:
        return default
    if value is None:
        problems.append(f"{name} is missing")
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        problems.append(f"{name} must be a number, got {value!r}"[:200])
    elif not (abs(value) <= high and math.isfinite(value) and value > low):
        problems.append(f"{name} must be above {low} and at most {high}, got {value!r}"[:200])
    else:
        return float(value)
    return high


def _flag(config: Config, name: str, problems: list[str]) -> bool:
    value = config.get(name)
    if value not in (None, True, False) or isinstance(value, int) and not isinstance(value, bool):
        problems.append(f"{name} must be true or false, got {value!r}"[:200])
    return value is True
