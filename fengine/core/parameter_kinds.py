"""How parameters that are no numbers or flags are checked, by kind: (name, value, vocab_size) -> normal form. No torch.
Errors: InvalidRequestError and its kinds."""

import difflib
import json
import math
import re
from collections.abc import Callable, Collection
from typing import Any

from fengine.core.scalars import exact_int, integer, number, told
from fengine.errors import GrammarError, InvalidRequestError, UnknownParameterError, UnsupportedFeatureError

MAX_STOP_STRINGS = 32
MAX_STOP_BYTES = 1024
MAX_BIASES = 1024
MAX_BIAS = 1e30  # a finite float32
_LONE = re.compile(r"[\ud800-\udfff]")
MAX_DEPTH, MAX_BITS = 32, 4096  # nesting of what is like JSON; of its whole numbers
# Known to SGLang's users but not built. A value that means "off" is accepted, anything else is refused by name.
NOT_BUILT: dict[str, tuple[Any, ...]] = {"beam_width": (None, 1), "watermark": (None,)}


def _texts(name: str, value: Any, vocab_size: int | None = None) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else None
    if texts is None or any(not isinstance(s, str) for s in texts):
        raise InvalidRequestError(f"{name} must be a string or a list of strings, got {told(value)}.")
    for text in texts:
        if lone := _LONE.search(text):
            found = f"the lone surrogate U+{ord(lone[0]):04X}"
            raise InvalidRequestError(f"{name} holds {found}, which no output can hold; remove it, got {told(text)}.")
    return texts


def _stop_strings(name: str, value: Any, vocab_size: int | None) -> tuple[str, ...]:
    stops = _texts(name, value)
    if "" in stops:
        raise InvalidRequestError("stop must not contain the empty string: it would match at once.")
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"at most {MAX_STOP_STRINGS} stop strings are allowed, got {len(stops)}.")
    for s in stops:
        if len(s.encode()) > MAX_STOP_BYTES:
            raise InvalidRequestError(f"stop strings may have at most {MAX_STOP_BYTES} bytes, got {len(s)} characters.")
    return stops


def _patterns(name: str, value: Any, vocab_size: int | None) -> tuple[str, ...]:
    """Texts only: who finds them in the output compiles them, and refuses what is no pattern."""
    patterns = _texts(name, value)
    return () if patterns == ("",) else patterns


def _token_ids(name: str, value: Any, vocab_size: int | None) -> tuple[int, ...]:
    """Those of the vocabulary: as in SGLang, one beyond it is taken, for it is never drawn."""
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise InvalidRequestError(f"{name} must be a list of token ids, got {told(value)}.")
    ids = tuple(integer(name, i) for i in value if i is not None)
    for i in ids:
        if not 0 <= i < 2**31:
            raise InvalidRequestError(f"{name} must be in [0, {2**31 - 1}], got {i}.")
    return tuple(sorted({i for i in ids if vocab_size is None or i < vocab_size}))


def _biased_token(key: Any, vocab_size: int | None) -> int:
    text = key.strip() if isinstance(key, str) else ""
    token = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else exact_int(key)
    if token is None or token < 0 or (vocab_size is not None and token >= vocab_size):
        raise InvalidRequestError(
            f"logit_bias must has keys in [0, {(vocab_size or 2**31) - 1}], got {told(key)} (vocabulary: {vocab_size})."
        )
    return token


def _biases(name: str, value: Any, vocab_size: int | None) -> tuple[tuple[int, float], ...]:
    """(token id, bias) in order of id; keys are ids as text or int."""
    if isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):  # stored form
        value = dict(value)
    if not isinstance(value, dict):
        raise InvalidRequestError(f"logit_bias must be a dict of token id to number, got {type(value).__name__}.")
    if len(value) > MAX_BIASES:
        raise InvalidRequestError(f"logit_bias may have at most {MAX_BIASES} entries, got {len(value)}.")
    out: dict[int, float] = {}
    for key, bias in value.items():
        token = _biased_token(key, vocab_size)
        if token in out:
            raise InvalidRequestError(f"logit_bias has token {token} twice.")
        out[token] = number(f"logit_bias[{key!r}]", bias)
        if not abs(out[token]) <= MAX_BIAS:
            raise InvalidRequestError(f"logit_bias[{key!r}] must be a finite number up to 1e30, got {told(bias)}.")
    return tuple(sorted(out.items()))


def _json(name: str, value: Any, vocab_size: int | None) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{name} must be a dict, got {type(value).__name__}.")
    return json_like(value, name) or None


def json_like(value: Any, where: str, depth: int = 0) -> Any:
    """A copy of JSON types with finite numbers, so that later changes by the caller have no effect. Pure."""
    if depth > MAX_DEPTH:
        raise InvalidRequestError(f"{where} is nested deeper than {MAX_DEPTH} levels.")
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequestError(f"{where} must be finite, got {value}.")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise InvalidRequestError(f"{where} is a number of more than {MAX_BITS} bits.")
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise InvalidRequestError(f"{where} has a key that is not a string.")
        return {key: json_like(item, f"{where}[{told(key)}]", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_like(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise InvalidRequestError(f"{where} must be JSON-like (str, number, bool, list, dict), got {type(value).__name__}.")


def _grammar(name: str, value: Any, vocab_size: int | None) -> str | None:
    """The text of a grammar; "" is none."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be a string, got {told(value)} of type {type(value).__name__}.")
    return value or None


def _json_grammar(name: str, value: Any, vocab_size: int | None) -> str | None:
    """As `_grammar`; it may be given as a dict."""
    if isinstance(value, dict):
        try:
            value = json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"{name} cannot be written as JSON: {error}") from None
    return _grammar(name, value, vocab_size)


CHECKS: dict[str, Callable[[str, Any, int | None], Any]] = {
    "stop strings": _stop_strings,
    "patterns": _patterns,
    "token ids": _token_ids,
    "biases": _biases,
    "json": _json,
    "grammar": _grammar,
    "json grammar": _json_grammar,
}


# Names of OpenAI, vLLM and transformers -> ours.
OTHER_NAMES = {
    "seed": "sampling_seed", "max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens",
    "max_length": "max_new_tokens", "min_tokens": "min_new_tokens", "best_of": "n", "num_return_sequences": "n",
    "use_beam_search": "beam_width", "num_beams": "beam_width", "eos_token_id": "stop_token_ids", "temp": "temperature",
    "stop_sequences": "stop", "guided_json": "json_schema", "guided_regex": "regex", "grammar": "ebnf",
    "response_format": "json_schema", "include_stop_str_in_output": "no_stop_trim", "do_sample": "temperature",
    "bad_words": "logit_bias", "allowed_token_ids": "logit_bias",
}  # fmt: skip
OF_CALLS = {  # -> arguments of a call that do the same
    **dict.fromkeys(("logprobs", "top_logprobs", "return_logprob"), "return_logprob=True, top_logprobs_num=…"),
    "prompt_logprobs": "return_logprob=True, logprob_start_len=0", "stream": "stream=True",
    "logits_processors": "custom_logit_processor=…", "lora_request": "lora_path=…",
}  # fmt: skip


def refuse(key: str, value: Any, known: Collection[str]) -> None:
    """A key that is no parameter, or is one that is not built."""
    if key not in NOT_BUILT:
        near = difflib.get_close_matches(str(key)[:80], sorted({*known, *NOT_BUILT}), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(sorted(known))}."
        hint = f" Did you mean {OTHER_NAMES[key]!r}?" if key in OTHER_NAMES else hint
        hint = f" It is an argument of the call: {OF_CALLS[key]}." if key in OF_CALLS else hint
        raise UnknownParameterError(f"unknown sampling parameter {told(key)}.{hint}")
    width = exact_int(value)
    if key == "beam_width" and width is not None and width < 1:
        raise InvalidRequestError(f"beam_width must be at least 1, got {width}.")
    if not any(type(value) is type(off) and value == off for off in NOT_BUILT[key]):
        raise UnsupportedFeatureError(f"sampling parameter {key!r} is not built yet (got {told(value)}); leave it out.")
