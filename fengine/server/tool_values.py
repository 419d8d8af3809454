"""Arguments that a call writes as text or as Python's literals, to JSON values. No torch."""

import ast
import math
from contextlib import suppress
from typing import Any

from fengine.core.json_text import LAST_COUNTS
from fengine.structured_output.references import look_up

_NAMES = {"true": True, "false": False, "null": None}
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_INNER = ("anyOf", "oneOf", "allOf")


def decode(text: str, whole: bool = True) -> tuple[Any, str]:
    """(the JSON value that a text is, or begins with, what follows). Errors: ValueError, also for what is nested too
    deeply."""
    try:
        if whole:
            return LAST_COUNTS.decode(text), ""
        value, end = LAST_COUNTS.raw_decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value, text[end:]


def python_value(node: ast.expr) -> Any:
    """The JSON value that a literal is; true, false and null are read as well. Pure. Errors: ValueError."""
    if isinstance(node, (ast.List, ast.Tuple)):
        return [python_value(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(python_value, node.values), strict=True))
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    value = ast.literal_eval(node)
    if not isinstance(value, (str, int, float, type(None))) or value in (math.inf, -math.inf):
        raise ValueError(f"{ast.unparse(node)!r:.80} is no JSON")
    return value


def written_value(text: str, schema: Any, root: Any = None) -> Any:
    """The value of an argument that stands as it is if it is a string, and else as JSON, or as Python writes it: what
    it is its JSON schema tells, within `root`, the function's. Without a word of that, JSON where it reads as such.
    Pure."""
    kinds = _kinds(schema, root)
    if kinds == {"string"}:
        return text
    with suppress(ValueError):
        value = decode(text)[0]
        return value if "string" not in kinds or _kind(value) in kinds else text
    if kinds and "string" not in kinds:
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            return python_value(ast.parse(text.strip(), mode="eval").body)
    return text


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "null")


def _kinds(schema: Any, root: Any) -> set[str]:
    """The types that a JSON schema names, itself or by references into `root`; none: it does not tell. Pure."""
    found, left, seen = set[str](), [schema], set[str]()
    while left:
        one = left.pop()
        own = _own_kinds(one) if isinstance(one, dict) else set[str]()
        found |= own
        if isinstance(one, dict) and not own:
            left += [inner for name in _INNER if isinstance(one.get(name), list) for inner in one[name]]
            if isinstance(to := one.get("$ref"), str) and to not in seen:
                seen.add(to)
                left.append(look_up(root, to) if to.startswith("#") else None)
    return found | ({"integer"} if "number" in found else set())


def _own_kinds(schema: dict[str, Any]) -> set[str]:
    """The types that stand in it, or those of its values. Pure."""
    named = schema.get("type", [])
    if found := {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)}:
        return found
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return {_kind(value) for value in values}
