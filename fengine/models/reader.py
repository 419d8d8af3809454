"""From an HF `config.json` to a `ModelSpec`: what decoders share, and the kinds of rotary embedding. No torch."""

import math
from dataclasses import replace
from typing import Any

from fengine.errors import ModelLoadError, UnsupportedArchitectureError
from fengine.models.spec import Config, LayerKind, ModelSpec, RopeSpec

Acts = dict[str, str]  # activations by the names that configs give them, first what is meant where there is none
SILU: Acts = {"silu": "silu", "swish": "silu"}
GELU_TANH: Acts = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
GELU_ALL: Acts = {"gelu": "gelu", **GELU_TANH}
LEAST, MOST = 1e-6, 1e6  # of factors: with others float32 overflows, or rounds the result away
FULL, SLIDING = "full_attention", "sliding_attention"
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
ROPE_KEYS = {
    "rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale",
    "mscale_all_dim", "short_factor", "long_factor", "attn_factor",
}  # fmt: skip


class ConfigReader:
    """Typed reads of one config, which collect every problem. Null and absent are the same."""

    def __init__(self, config: Config, problems: list[str] | None = None) -> None:
        """`problems`: those of the config that this one is part of."""
        self.config, self.problems = config, [] if problems is None else problems

    def changed(self, changes: Config) -> "ConfigReader":
        """Of the same config with other values."""
        return ConfigReader(self.config | changes, self.problems)

    def size(self, name: str, limit: int, default: int | None = None, least: int = 1) -> int:
        """A whole number in [least, limit]; 1 when it had to complain."""
        value = self.config.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            self.problems.append(f"{name} is missing")
        elif isinstance(value, bool) or not isinstance(value, int) or not least <= value <= limit:
            self.problems.append(f"{name} must be a whole number from {least} to {limit}, got {value!r}"[:200])
        else:
            return value
        return 1

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in (low, high]; `high` when it had to complain."""
        value = self.config.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            self.problems.append(f"{name} is missing")
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            self.problems.append(f"{name} must be a number, got {value!r}"[:200])
        elif not (abs(value) <= high and math.isfinite(value) and value > low):
            self.problems.append(f"{name} must be above {low} and at most {high}, got {value!r}"[:200])
        else:
            return float(value)
        return high

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of `count` finite numbers above LEAST."""
        values = self.config.get(name)
        listed = values if isinstance(values, list) and len(values) == count else []
        if listed and all(type(v) in (int, float) and LEAST < v < math.inf for v in listed):
            return tuple(float(v) for v in listed)
        self.problems.append(f"{name} must be a list of {count} numbers above {LEAST}, got {values!r}"[:200])
        return (1.0,) * count

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            self.problems.append(f"{name} must be true or false, got {value!r}"[:200])
        return default if value is None else value is True

    def done(self, architecture: str) -> None:
        """Errors: ModelLoadError with every problem, one a line."""
        if self.problems:
            shown = "\n  ".join(dict.fromkeys(self.problems))  # a key may have been read twice
            raise ModelLoadError(f"config.json does not describe a {architecture}:\n  {shown}")


def decoder_spec(
    read: ConfigReader, norm_eps: str = "rms_norm_eps", activation: tuple[str, Acts] = ("hidden_act", SILU),
    partial_rotary: bool = False, **facts: Any,
) -> ModelSpec:  # fmt: skip
    """What all configs of decoders tell, but for `facts`. `norm_eps`: the key of norms' eps; `activation`: that of the
    gate, and its names; `partial_rotary`: the family knows heads of which only the first columns turn.

    Keys that are absent take transformers' default where it has one for every checkpoint (rms_norm_eps 1e-6, head_dim
    hidden_size / heads, untied embeddings, no biases); sizes have none. Errors: ModelLoadError with every bad field so
    far; UnsupportedArchitectureError for a feature that is not built."""
    key, acts = activation
    named = read.config.get(key)
    act = activation_of(key, next(iter(acts)) if named is None else named, acts)
    hidden, heads, kv_heads, head_dim = _heads(read)
    if read.config.get("is_causal", True) is None:  # which transformers reads in one way or another, by its attention
        read.problems.append("is_causal must be true or false, got None")
    found: dict[str, Any] = {
        "vocab_size": read.size("vocab_size", 1 << 24),
        "hidden_size": hidden,
        "mlp_size": read.size("intermediate_size", 1 << 22),
        "num_layers": read.size("num_hidden_layers", 1 << 12),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rms_eps": read.number(norm_eps, 0.0, 1.0, default=1e-6 if norm_eps == "rms_norm_eps" else None),
        "act": act,
        "max_position": read.size("max_position_embeddings", 1 << 27),
        "tie_embeddings": read.flag("tie_word_embeddings"),
        "causal": read.flag("is_causal", default=True),
        "qkv_bias": (bias := read.flag("attention_bias")),
        "o_bias": bias,
        "mlp_bias": read.flag("mlp_bias"),
    }
    if partial_rotary:
        found["rotary_dim"] = head_dim = rotary_dim(read, head_dim)
    found["rope"] = rope_spec(read, head_dim, found["max_position"], partial_rotary)
    architecture = read.config["architectures"][0]
    read.done(architecture)
    return ModelSpec(architecture, **found | facts)


def _heads(read: ConfigReader) -> tuple[int, int, int, int]:
    """Hidden size, query heads, kv heads, and their width."""
    config = read.config
    hidden = read.size("hidden_size", 1 << 20)
    heads = read.size("num_attention_heads", 1 << 14)
    kv_heads = read.size("num_key_value_heads", 1 << 14, default=heads)
    head_dim = read.size("head_dim", 1 << 12, default=max(hidden // heads, 1))
    if config.get("head_dim") is None and hidden % heads:
        read.problems.append(
            f"hidden_size ({hidden}) is no multiple of num_attention_heads ({heads}); head_dim is absent"
        )
    if kv_heads > heads or heads % kv_heads:
        read.problems.append(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})")
    if head_dim % 2:
        read.problems.append(f"head_dim ({head_dim}) must be even: rotary embedding turns pairs")
    return hidden, heads, kv_heads, head_dim


def activation_of(name: str, value: Any, acts: Acts) -> str:
    """Our name of the function that the key `name` names. Errors: UnsupportedArchitectureError."""
    if not isinstance(value, str) or value not in acts:
        raise UnsupportedArchitectureError(f"{name} = {value!r:.80} is not supported; supported: {', '.join(acts)}.")
    return acts[value]


def sliding_window(read: ConfigReader) -> int | None:
    """The key `sliding_window`; None if it is null."""
    return None if read.config.get("sliding_window") is None else read.size("sliding_window", 1 << 27)


def every(interval: int, count: int) -> list[str]:
    """Types of `count` layers of which every `interval`th sees all. Pure."""
    return [SLIDING if (index + 1) % interval else FULL for index in range(count)]


def windowed(
    spec: ModelSpec, window: int | None, types: Any = None, near: str | None = None, far: str | None = None,
    both_ways: bool = False,
) -> ModelSpec:  # fmt: skip
    """The spec with `window` in the layers that `types` calls sliding, without types in all; None: in none. Pure.
    `near` and `far`: which rotary table sliding layers and the others take; `both_ways`: a token sees window - 1 tokens
    on either side. A window as long as the context cuts nothing off. Errors: ModelLoadError,
    UnsupportedArchitectureError."""
    types = [SLIDING] * spec.num_layers if types is None else types
    _check_types(types, spec.num_layers)
    kinds = []
    for index, kind in enumerate(types):
        was, table = spec.kind(index), near if kind == SLIDING else far
        cut = window if kind == SLIDING and window is not None and window < spec.max_position else 0
        kinds.append(replace(was, window=cut, rope=table or was.rope))
    if any(kind.window for kind in kinds) and not spec.causal and not both_ways:
        raise UnsupportedArchitectureError("is_causal = false with sliding windows is not supported.")
    return replace(spec, kinds=tuple(kinds) if any(kind != LayerKind() for kind in kinds) else ())


def _check_types(types: Any, layers: int) -> None:
    """Errors: ModelLoadError, UnsupportedArchitectureError."""
    if not isinstance(types, list) or any(kind not in (FULL, SLIDING) for kind in types):
        raise UnsupportedArchitectureError(
            f"layer_types = {types!r:.200}: supported are {FULL!r} and {SLIDING!r} layers."
        )
    if len(types) != layers:
        raise ModelLoadError(f"config.json: layer_types has {len(types)} entries for {layers} layers.")


def stated(config: Config, window: int | None) -> Any:
    """The key `layer_types`, which by transformers' masks slides by a window that is off. Errors: ModelLoadError."""
    types = config.get("layer_types")
    if window is None and isinstance(types, list) and SLIDING in types:
        raise ModelLoadError("config.json: layer_types has sliding layers, use_sliding_window or sliding_window none.")
    return types


def refuse_layer_types(config: Config) -> None:
    """Of a family all of whose layers are alike. Errors: UnsupportedArchitectureError."""
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != FULL for kind in kinds):
        raise UnsupportedArchitectureError(f"layer_types = {kinds!r:.200}: this model has only {FULL!r} layers.")


def rotary_dim(read: ConfigReader, head_dim: int) -> int:
    """How many columns of a head turn, by `partial_rotary_factor`."""
    rope = read.config.get("rope_parameters") or read.config.get("rope_scaling") or {}
    name = "partial_rotary_factor"
    own = rope if isinstance(rope, dict) and rope.get(name) is not None else read.config
    count = int(head_dim * ConfigReader(own, read.problems).number(name, 0.0, 1.0, default=1.0))
    if count < 2 or count % 2:
        read.problems.append(f"partial_rotary_factor leaves {count} columns of {head_dim}; they must be pairs")
    return max(count // 2 * 2, 2)


def joined_rope(read: ConfigReader) -> Config:
    """The keys of `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5)."""
    config = read.config
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if not isinstance(new, dict) or not isinstance(old, dict):
        read.problems.append("rope_parameters and rope_scaling must be objects or null")
        return {}
    theta = {"rope_theta": config.get("rope_theta", 10000.0)}
    before, now = (
        theta | {("rope_type" if key == "type" else key): value for key, value in rope.items()} for rope in (old, new)
    )
    if new and old and before != now:  # transformers takes the old key alone
        read.problems.append(f"rope_scaling {old!r} contradicts rope_parameters {new!r}; remove one")
    return {**theta, **old, **new}


def rope_spec(read: ConfigReader, width: int, max_position: int, partial: bool = False) -> RopeSpec:
    """One kind of rotary embedding, as the config says it in one way or the other."""
    config, rope = read.config, joined_rope(read)
    if not rope:
        return RopeSpec(1.0)
    _refuse_rope(rope, config, partial)
    if config.get("original_max_position_embeddings") is not None:  # transformers prefers it to that of the embedding
        rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return _rope_of(ConfigReader(rope, read.problems), width, max_position)


def _refuse_rope(rope: Config, config: Config, partial: bool) -> None:
    """Errors: UnsupportedArchitectureError for what is not built."""
    if any(isinstance(value, dict) for value in rope.values()):
        raise UnsupportedArchitectureError(f"rope_parameters per layer type are not supported (got {sorted(rope)}).")
    if unknown := sorted(key for key in rope.keys() - ROPE_KEYS if rope[key] is not None):
        raise UnsupportedArchitectureError(f"rope_parameters has {unknown[0]} = {rope[unknown[0]]!r:.80}: not built.")
    for part in (source.get("partial_rotary_factor") for source in (rope, config)):
        if not partial and part not in (1, None):
            raise UnsupportedArchitectureError(f"partial_rotary_factor = {part!r} is not supported; only 1.0 is.")


def _rope_of(read: ConfigReader, width: int, max_position: int) -> RopeSpec:
    """One kind of rotary embedding over `width` columns of a head."""
    kind = read.config.get("rope_type", read.config.get("type", "default"))
    kind = "longrope" if kind == "su" else kind
    if kind not in ROPE_KINDS:
        known = ", ".join(repr(name) for name in ROPE_KINDS)
        raise UnsupportedArchitectureError(f"rope_type = {kind!r} is not supported; supported: {known}.")
    spec = RopeSpec(read.number("rope_theta", 1.0 if kind == "yarn" else LEAST, 1e15))  # yarn divides by its logarithm
    if kind in ("default", "dynamic"):  # dynamic: the same up to max_position, and nothing is longer here
        return spec
    if kind == "linear":
        return replace(spec, kind=kind, factor=read.number("factor", LEAST, MOST))
    original = read.size("original_max_position_embeddings", 1 << 27)
    default = max_position / original
    if kind == "llama3":
        low, high = read.number("low_freq_factor", 0.0, 1e6), read.number("high_freq_factor", 0.0, 1e6)
        if high <= low:
            read.problems.append(f"high_freq_factor ({high}) must be larger than low_freq_factor ({low})")
        return replace(
            spec, kind=kind, factor=read.number("factor", LEAST, MOST), low_freq_factor=low, high_freq_factor=high,
            original_max_position=original,
        )  # fmt: skip
    factor = read.number("factor", LEAST, MOST, default=default)
    spec = replace(spec, kind=kind, factor=factor, original_max_position=original)
    if kind == "longrope":
        short, long = read.numbers("short_factor", width // 2), read.numbers("long_factor", width // 2)
        scale = math.sqrt(1 + math.log(factor) / math.log(max(original, 2))) if factor > 1 else 1.0
        scale = read.number("attention_factor", 0.0, 1e6, default=scale)
        return replace(spec, attention_factor=scale, short_factor=short, long_factor=long)
    return replace(
        spec, beta_fast=read.number("beta_fast", 0.0, 1e6, default=32.0),
        beta_slow=read.number("beta_slow", 0.0, 1e6, default=1.0),
        truncate=read.flag("truncate", default="truncate" not in read.config),  # null is false to transformers
        attention_factor=read.number("attention_factor", 0.0, 1e6, default=_yarn_scale(read, factor)),
    )  # fmt: skip


def _yarn_scale(read: ConfigReader, factor: float) -> float:
    def scale(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    times = read.number("attn_factor", 0.0, 1e6, default=1.0)  # as SGLang and vLLM do; transformers does not look at it
    over, under = read.number("mscale", -1.0, 1e6, default=0.0), read.number("mscale_all_dim", -1.0, 1e6, default=0.0)
    return times * (scale(over) / scale(under) if over and under else scale(1.0))
