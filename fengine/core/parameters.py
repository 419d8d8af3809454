"""`Parameter`: how one sampling parameter is declared and validated. No torch.

`core/sampling_params.py` declares each parameter once, beside its field; `PARAMETERS` there is the table. HTTP fields,
the reader of OpenAI bodies, harness mappings, the Hydra schema and the documentation derive from it.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fengine.core.scalars import exact_int, flag, integer, number, told
from fengine.errors import GrammarError, InvalidRequestError

MAX_STOP_STRINGS = 32
MAX_STOP_BYTES = 1024
MAX_BIASES = 1024
MAX_BIAS = 1e30  # a finite float32
MAX_DEPTH = 32  # nesting of custom_params


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers low .. high; with `low_open` without low. `also` is one more, `words` replaces the derived text."""

    low: float
    high: float = math.inf
    low_open: bool = False
    also: int | None = None
    words: str | None = None

    def __contains__(self, value: float) -> bool:
        inside = self.low < value if self.low_open else self.low <= value
        return (inside and value <= self.high and not math.isinf(value)) or value == self.also

    def __str__(self) -> str:
        if self.words is not None:
            return self.words
        if self.high == math.inf:
            return f"at least {self.low}"
        return f"in {'(' if self.low_open else '['}{self.low}, {self.high}]"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One row of the table.

    `kind` names its check in CHECKS. `default` is written as a caller writes it. `stage` is the part of a request that
    heeds it. `openai` is the field of OpenAI's body, or vLLM's; `null` tells whether None is a value of its own.
    """

    name: str
    kind: str
    default: Any
    stage: str
    doc: str
    range: Range | None = None
    openai: str | None = None
    null: bool = False

    def checked(self, value: Any, vocab_size: int | None = None) -> Any:
        """The value in its normal form, a copy. Errors: InvalidRequestError and its kinds."""
        return None if value is None and self.null else CHECKS[self.kind](self, value, vocab_size)


def declare(
    default: Any, kind: str, stage: str, doc: str, range: Range | None = None, *, openai: str | None = None,
    null: bool = False, written: Any = None,
) -> Any:  # fmt: skip
    """A field of `SamplingParams` with its row of the table. `written`: the default in a caller's words."""
    row = Parameter("", kind, default if written is None else written, stage, doc, range, openai, null)
    return field(default=default, metadata={"parameter": row})


# -- checks by kind: (parameter, value, vocab_size) -> normal form -----------------------------------------------------


def _number(parameter: Parameter, value: Any, vocab_size: int | None) -> float:
    return _in_range(parameter, number(parameter.name, value))


def _integer(parameter: Parameter, value: Any, vocab_size: int | None) -> int:
    return _in_range(parameter, integer(parameter.name, value))


def _in_range(parameter: Parameter, value: Any) -> Any:
    if parameter.range is not None and value not in parameter.range:
        raise InvalidRequestError(f"{parameter.name} must be {parameter.range}, got {told(value)}.")
    return value


def _flag(parameter: Parameter, value: Any, vocab_size: int | None) -> bool:
    return flag(parameter.name, value)


def _texts(parameter: Parameter, value: Any, vocab_size: int | None = None) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else None
    if texts is None or any(not isinstance(s, str) for s in texts):
        raise InvalidRequestError(f"{parameter.name} must be a string or a list of strings, got {value!r:.200}.")
    return texts


def _stop_strings(parameter: Parameter, value: Any, vocab_size: int | None) -> tuple[str, ...]:
    stops = _texts(parameter, value)
    if "" in stops:
        raise InvalidRequestError("stop must not contain the empty string: it would match at once.")
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"at most {MAX_STOP_STRINGS} stop strings are allowed, got {len(stops)}.")
    for s in stops:
        if len(s.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
            raise InvalidRequestError(f"stop strings may have at most {MAX_STOP_BYTES} bytes, got {len(s)} characters.")
    return stops


def _patterns(parameter: Parameter, value: Any, vocab_size: int | None) -> tuple[str, ...]:
    """Texts only: who finds them in the output compiles them, and refuses what is no pattern."""
    patterns = _texts(parameter, value)
    return () if patterns == ("",) else patterns


def _token_ids(parameter: Parameter, value: Any, vocab_size: int | None) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise InvalidRequestError(f"{parameter.name} must be a list of token ids, got {value!r:.200}.")
    ids = tuple(integer(parameter.name, i) for i in value if i is not None)
    for i in ids:
        if i < 0 or (vocab_size is not None and i >= vocab_size):
            raise InvalidRequestError(
                f"{parameter.name} must be in [0, {(vocab_size or 2**31) - 1}], got {i} (vocabulary: {vocab_size})."
            )
    return tuple(sorted(set(ids)))


def _biased_token(key: Any, vocab_size: int | None) -> int:
    text = key.strip() if isinstance(key, str) else ""
    token = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else exact_int(key)
    if token is None or token < 0 or (vocab_size is not None and token >= vocab_size):
        raise InvalidRequestError(
            f"logit_bias must has keys in [0, {(vocab_size or 2**31) - 1}], got {key!r:.80} (vocabulary: {vocab_size})."
        )
    return token


def _biases(parameter: Parameter, value: Any, vocab_size: int | None) -> tuple[tuple[int, float], ...]:
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
            raise InvalidRequestError(f"logit_bias[{key!r}] must be a finite number up to 1e30, got {bias!r:.80}.")
    return tuple(sorted(out.items()))


def _json(parameter: Parameter, value: Any, vocab_size: int | None) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{parameter.name} must be a dict, got {type(value).__name__}.")
    return json_like(value, parameter.name) or None


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


def _grammar(parameter: Parameter, value: Any, vocab_size: int | None) -> str | None:
    """The text of a grammar; "" is none."""
    if not isinstance(value, str):
        name = parameter.name
        raise InvalidRequestError(f"{name} must be a string, got {value!r:.80} of type {type(value).__name__}.")
    return value or None


def _json_grammar(parameter: Parameter, value: Any, vocab_size: int | None) -> str | None:
    """As `_grammar`; it may be given as a dict."""
    if isinstance(value, dict):
        try:
            value = json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"{parameter.name} cannot be written as JSON: {error}") from None
    return _grammar(parameter, value, vocab_size)


CHECKS: dict[str, Callable[[Parameter, Any, int | None], Any]] = {
    "number": _number,
    "integer": _integer,
    "flag": _flag,
    "stop strings": _stop_strings,
    "patterns": _patterns,
    "token ids": _token_ids,
    "biases": _biases,
    "json": _json,
    "grammar": _grammar,
    "json grammar": _json_grammar,
}
