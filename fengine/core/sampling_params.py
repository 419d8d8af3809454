"""`SamplingParams`: what a caller asks of the draw and of the text, in SGLang's words, validated. No torch."""

import difflib
import json
import math
from dataclasses import dataclass, fields
from typing import Any

from fengine.core.scalars import exact_int, flag, integer, number, told
from fengine.errors import GrammarError, InvalidRequestError, UnknownParameterError, UnsupportedFeatureError
from fengine.tokenizer.stop_regex import compile_patterns

TOP_K_ALL = 1 << 30  # stored form of "top_k off", as SGLang does
MAX_STOP_STRINGS = 32
MAX_STOP_BYTES = 1024
MAX_TEMPERATURE = 1e30  # still a finite float32; above it every token is equally likely anyway
MAX_SAMPLES = 4096  # n of one prompt
MAX_BIASES = 1024
MAX_BIAS = 1e30  # a finite float32
MAX_DEPTH = 32  # nesting of custom_params

GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")  # at most one of them
# Known to SGLang's users but not built. A value that means "off" is accepted, anything else is refused by name.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "beam_width": (None, 1),
    "watermark": (None,),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters in SGLang's words. Build with `SamplingParams.of(mapping)`, which validates.

    Stored values are normalised: greedy (temperature < 1e-6) becomes temperature 1 with top_k 1, top_k -1 becomes
    TOP_K_ALL, stop and stop_regex become tuples, logit_bias pairs (id, bias) in order of id.
    `stop_regex` has the syntax of `fengine.tokenizer.stop_regex`. `spaces_between_special_tokens` is accepted either
    way and changes nothing: the tokenizers that are read here put no such spaces, as in transformers.
    Errors: InvalidRequestError, UnknownParameterError, UnsupportedFeatureError.
    """

    max_new_tokens: int | None = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = TOP_K_ALL
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    sampling_seed: int | None = None
    custom_params: dict[str, Any] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None

    @property
    def greedy(self) -> bool:
        return self.top_k == 1

    @property
    def grammar(self) -> tuple[str, str] | None:
        """(which of GRAMMARS, its text): what the output must be."""
        return next(((name, text) for name in GRAMMARS if (text := getattr(self, name)) is not None), None)

    @classmethod
    def of(cls, values: "dict[str, Any] | SamplingParams | None", vocab_size: int | None = None) -> "SamplingParams":
        """Validates a mapping of SGLang sampling keys. `vocab_size` is the logits width, for the id checks."""
        if isinstance(values, SamplingParams):  # it may have been made by hand
            values = {f.name: getattr(values, f.name) for f in fields(cls)}
        if values is None:
            return cls()
        if not isinstance(values, dict):
            raise InvalidRequestError(f"sampling_params must be a dict, got {type(values).__name__}.")
        known = {f.name for f in fields(cls)}
        _refuse(values, known)
        given = {k: v for k, v in values.items() if k in known and (v is not None or k == "max_new_tokens")}
        draw, ends = _draw(given), _ends(given, vocab_size)
        return cls(**_lengths(given), **draw, **_biases(given, vocab_size), **ends, **_grammar(given))


def _refuse(values: dict[str, Any], known: set[str]) -> None:
    """Unknown keys, and those whose feature is not built."""
    for key, value in values.items():
        if key in known:
            continue
        if key not in NOT_BUILT:
            near = difflib.get_close_matches(str(key)[:80], sorted(known | set(NOT_BUILT)), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(sorted(known))}."
            raise UnknownParameterError(f"unknown sampling parameter {key!r:.80}.{hint}")
        width = exact_int(value)
        if key == "beam_width" and width is not None and width < 1:
            raise InvalidRequestError(f"beam_width must be at least 1, got {width}.")
        if not _is_off(key, value):
            raise UnsupportedFeatureError(
                f"sampling parameter {key!r} is not built yet (got {value!r:.200}); leave it out."
            )


def _is_off(key: str, value: Any) -> bool:
    return any(type(value) is type(off) and value == off for off in NOT_BUILT[key])


def _lengths(given: dict[str, Any]) -> dict[str, Any]:
    """Numbers of tokens and of samples."""
    out: dict[str, Any] = {}
    if "max_new_tokens" in given:
        most = out["max_new_tokens"] = given["max_new_tokens"]
        if most is not None:
            most = out["max_new_tokens"] = integer("max_new_tokens", most)
            if most < 0:
                raise InvalidRequestError(f"max_new_tokens must be at least 0, got {most}.")
    most = out.get("max_new_tokens", 128)
    least = out["min_new_tokens"] = integer("min_new_tokens", given.get("min_new_tokens", 0))
    if least < 0 or (most is not None and least > most):
        raise InvalidRequestError(f"min_new_tokens must be in [0, max_new_tokens({most})], got {least}.")
    out["n"] = samples = integer("n", given.get("n", 1))
    if not 1 <= samples <= MAX_SAMPLES:
        raise InvalidRequestError(f"n must be in [1, {MAX_SAMPLES}], got {samples}.")
    if "stream_interval" in given:
        out["stream_interval"] = every = integer("stream_interval", given["stream_interval"])
        if every < 1:
            raise InvalidRequestError(f"stream_interval must be at least 1, got {every}.")
    return out


def _draw(given: dict[str, Any]) -> dict[str, Any]:
    """What shapes the distribution, and the seed."""
    out: dict[str, Any] = {}
    temperature = number("temperature", given.get("temperature", 1.0))
    if not (math.isfinite(temperature) and temperature >= 0):
        raise InvalidRequestError(f"temperature must be a non-negative finite number, got {temperature}.")
    out["top_p"] = top_p = number("top_p", given.get("top_p", 1.0))
    if not 0 < top_p <= 1:
        raise InvalidRequestError(f"top_p must be in (0, 1], got {top_p}.")
    top_k = integer("top_k", given.get("top_k", -1))
    if top_k < 1 and top_k != -1:
        raise InvalidRequestError(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
    out["top_k"] = TOP_K_ALL if top_k == -1 else min(top_k, TOP_K_ALL)
    out["min_p"] = min_p = number("min_p", given.get("min_p", 0.0))
    if not 0 <= min_p <= 1:
        raise InvalidRequestError(f"min_p must be in [0, 1], got {min_p}.")
    out["temperature"] = min(temperature, MAX_TEMPERATURE)
    if temperature < 1e-6:  # SGLang's greedy
        out["temperature"], out["top_k"] = 1.0, 1
    if "sampling_seed" in given:
        seed = exact_int(given["sampling_seed"])
        if seed is None:
            raise InvalidRequestError(f"sampling_seed must be an integer, got {type(given['sampling_seed']).__name__}.")
        out["sampling_seed"] = seed
        if not -(2**63) <= seed < 2**63:
            raise InvalidRequestError(f"sampling_seed must be in [-2**63, 2**63 - 1], got {told(seed)}.")
    return out


def _biases(given: dict[str, Any], vocab_size: int | None) -> dict[str, Any]:
    """What is added to logits, and what a custom processor is handed."""
    out: dict[str, Any] = {}
    for name in ("frequency_penalty", "presence_penalty"):
        out[name] = penalty = number(name, given.get(name, 0.0))
        if not -2 <= penalty <= 2:
            raise InvalidRequestError(f"{name} must be in [-2, 2], got {penalty}.")
    out["repetition_penalty"] = penalty = number("repetition_penalty", given.get("repetition_penalty", 1.0))
    if not 2**-126 <= penalty <= 2:  # the least normal float32: below it logits would be divided by zero
        raise InvalidRequestError(f"repetition_penalty must be in (0, 2] (1.0 = no penalty), got {penalty}.")
    out["logit_bias"] = logit_biases(given.get("logit_bias", {}), vocab_size)
    if "custom_params" in given:
        if not isinstance(given["custom_params"], dict):
            raise InvalidRequestError(f"custom_params must be a dict, got {type(given['custom_params']).__name__}.")
        out["custom_params"] = json_like(given["custom_params"], "custom_params") or None
    return out


def logit_biases(value: Any, vocab_size: int | None) -> tuple[tuple[int, float], ...]:
    """(token id, bias) in order of id; keys are ids as text or int. Errors: InvalidRequestError."""
    if isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):  # stored form
        value = dict(value)
    if not isinstance(value, dict):
        raise InvalidRequestError(f"logit_bias must be a dict of token id to number, got {type(value).__name__}.")
    if len(value) > MAX_BIASES:
        raise InvalidRequestError(f"logit_bias may have at most {MAX_BIASES} entries, got {len(value)}.")
    out: dict[int, float] = {}
    for key, bias in value.items():
        text = key.strip() if isinstance(key, str) else ""
        token = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else exact_int(key)
        if token is None or token < 0 or (vocab_size is not None and token >= vocab_size):
            most = (vocab_size or 2**31) - 1
            raise InvalidRequestError(f"logit_bias must has keys in [0, {most}], got {key!r:.80}.")
        if token in out:
            raise InvalidRequestError(f"logit_bias has token {token} twice.")
        out[token] = number(f"logit_bias[{key!r}]", bias)
        if not abs(out[token]) <= MAX_BIAS:
            raise InvalidRequestError(f"logit_bias[{key!r}] must be a finite number up to 1e30, got {bias!r:.80}.")
    return tuple(sorted(out.items()))


def json_like(value: Any, where: str, depth: int = 0) -> Any:
    """A copy of JSON types with finite numbers, so that later changes by the caller have no effect. Pure."""
    if depth > MAX_DEPTH:
        raise InvalidRequestError(f"{where} is nested deeper than {MAX_DEPTH} levels.")
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequestError(f"{where} must be finite, got {value}.")
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, dict):
        return {key: json_like(item, f"{where}[{key!r:.80}]", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_like(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise InvalidRequestError(f"{where} must be JSON-like (str, number, bool, list, dict), got {type(value).__name__}.")


def _ends(given: dict[str, Any], vocab_size: int | None) -> dict[str, Any]:
    """What ends a request, and how its text reads."""
    out: dict[str, Any] = {}
    out["stop"] = _stop_strings(given.get("stop", ()))
    out["stop_token_ids"] = _stop_ids(given.get("stop_token_ids", ()), vocab_size)
    patterns = _texts("stop_regex", given.get("stop_regex", ()))
    out["stop_regex"] = patterns = () if patterns == ("",) else patterns
    compile_patterns(patterns)
    for name in ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"):
        if name in given:
            out[name] = flag(name, given[name])
    return out


def _grammar(given: dict[str, Any]) -> dict[str, Any]:
    """The text of a grammar. A json_schema or structural_tag may be given as a dict; "" is none."""
    out: dict[str, Any] = {}
    for name in GRAMMARS:
        value = given.get(name, "")
        if isinstance(value, dict) and name in ("json_schema", "structural_tag"):
            try:
                value = json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise GrammarError(f"{name} cannot be written as JSON: {error}") from None
        if not isinstance(value, str):
            raise InvalidRequestError(f"{name} must be a string, got {value!r:.80} of type {type(value).__name__}.")
        if value:
            out[name] = value
    if len(out) > 1:
        raise InvalidRequestError("Only one of json_schema, regex, ebnf, or structural_tag can be set.")
    return out


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else None
    if texts is None or any(not isinstance(s, str) for s in texts):
        raise InvalidRequestError(f"{name} must be a string or a list of strings, got {value!r:.200}.")
    return texts


def _stop_strings(stop: Any) -> tuple[str, ...]:
    stops = _texts("stop", stop)
    if "" in stops:
        raise InvalidRequestError("stop must not contain the empty string: it would match at once.")
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"at most {MAX_STOP_STRINGS} stop strings are allowed, got {len(stops)}.")
    for s in stops:
        if len(s.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
            raise InvalidRequestError(f"stop strings may have at most {MAX_STOP_BYTES} bytes, got {len(s)} characters.")
    return stops


def _stop_ids(ids: Any, vocab_size: int | None) -> tuple[int, ...]:
    if not isinstance(ids, (list, tuple, set, frozenset)):
        raise InvalidRequestError(f"stop_token_ids must be a list of token ids, got {ids!r:.200}.")
    out = tuple(integer("stop_token_ids", i) for i in ids if i is not None)
    for i in out:
        if i < 0 or (vocab_size is not None and i >= vocab_size):
            raise InvalidRequestError(f"stop_token_ids must be in [0, {(vocab_size or 2**31) - 1}], got {i}.")
    return tuple(sorted(set(out)))
