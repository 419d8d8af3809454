"""JSON as its standard has it (RFC 8259); Python's reader also takes NaN, infinities, and a key twice. No torch."""

import json
import math
from typing import Any, NoReturn

from fengine.core.scalars import told
from fengine.errors import ConfigError


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"number {text:.20} is too large")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Which of two values of a key is meant would be a guess."""
    if len(found := dict(pairs)) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r:.80} occurs twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
LAST_COUNTS = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)  # of a key that occurs twice


def parse_json(text: str) -> Any:
    """The value of a text that is one JSON value, white space around it aside. Pure. Errors: JSONDecodeError, with the
    place; ValueError for NaN, infinities, numbers out of range, a key that occurs twice, and nesting too deep to be
    read."""
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def json_object(name: str, given: Any) -> dict[str, Any]:
    """A dict whose keys are texts, or one as JSON; {} for None and "". Pure. Errors: ConfigError."""
    try:
        values = parse_json(given or "{}") if isinstance(given, str) else {} if given is None else given
        json.dumps(values, allow_nan=False)
        if isinstance(values, dict) and all(isinstance(key, str) for key in values):
            return dict(values)
        problem = "it is none"
    except (ValueError, TypeError, RecursionError) as error:
        problem = str(error)
    raise ConfigError(f"{name} must be a JSON object, got {told(given)}: {problem}")
