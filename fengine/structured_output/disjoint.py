"""Whether no value satisfies two schemas at once: shown from types, listed values, and properties. No torch."""

import json
from collections.abc import Callable
from typing import Any

Resolve = Callable[[Any], Any]
MAX_DEPTH = 6


def all_pairs(options: list[Any], resolve: Resolve) -> bool:
    """Whether of these at most one can hold, as far as it can be shown. Pure."""
    return all(_disjoint(a, b, resolve, 0) for i, a in enumerate(options) for b in options[:i])


def _disjoint(a: Any, b: Any, resolve: Resolve, depth: int) -> bool:
    a, b = resolve(a), resolve(b)
    if a is False or b is False:
        return True
    if not isinstance(a, dict) or not isinstance(b, dict) or depth > MAX_DEPTH:
        return False
    if _parts_disjoint(a, b, resolve, depth) or _parts_disjoint(b, a, resolve, depth):
        return True
    kinds, mine, theirs = _kinds(a) & _kinds(b), _values(a), _values(b)
    if not kinds or (mine is not None and theirs is not None and not mine & theirs):
        return True
    return kinds == {"object"} and _objects_disjoint(a, b, resolve, depth)


def _parts_disjoint(one: Any, other: Any, resolve: Resolve, depth: int) -> bool:
    """Whether `other` excludes all options of `one`, or a schema that holds with it."""
    return any(
        isinstance(one.get(key), list) and enough(_disjoint(part, other, resolve, depth + 1) for part in one[key])
        for key, enough in (("anyOf", all), ("oneOf", all), ("allOf", any))
    )


def _objects_disjoint(a: Any, b: Any, resolve: Resolve, depth: int) -> bool:
    """For objects: a property that both need has no common value, or one needs a property that the other bars."""
    mine, theirs = _properties(a), _properties(b)
    for name in set(_required(a)) | set(_required(b)):
        both = name in mine and name in theirs and _disjoint(mine[name], theirs[name], resolve, depth + 1)
        if both and (name in _required(a) and name in _required(b)):
            return True
        for one, other, known in ((a, b, theirs), (b, a, mine)):
            closed = other.get("additionalProperties") is False and "patternProperties" not in other
            if name in _required(one) and (known.get(name) is False or (closed and name not in known)):
                return True
    return False


def _properties(node: Any) -> dict[str, Any]:
    found = node.get("properties")
    return found if isinstance(found, dict) else {}


def _required(node: Any) -> list[str]:
    found = node.get("required")
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _kinds(node: Any) -> set[str]:
    """The types that a schema's values can have; whole numbers are numbers."""
    every = {"object", "array", "string", "number", "boolean", "null"}
    values = [node["const"]] if "const" in node else node.get("enum")
    if isinstance(values, list):
        names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
        every &= {names.get(type(value), "number") for value in values}
    kinds = node.get("type")
    if kinds is None:
        return every
    return every & {"number" if kind == "integer" else kind for kind in ([kinds] if isinstance(kinds, str) else kinds)}


def _values(node: Any) -> set[str] | None:
    """The listed values, as texts that are equal where they are."""
    values = [node["const"]] if "const" in node else node.get("enum")
    if not isinstance(values, list):
        return None
    return {json.dumps(_plain(value), sort_keys=True) for value in values}


def _plain(value: Any) -> Any:
    """A value with whole floats as integers."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
