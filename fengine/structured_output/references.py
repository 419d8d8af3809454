"""Where the `$ref`s of a JSON schema lead: to checked schemas, and not round in circles without an end.

{"properties": {"next": {"$ref": "#"}}, "required": ["next"]}    no finite text satisfies it: it is refused
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from fengine.errors import GrammarError

Nodes = Mapping[str, Any]  # every schema of a document, checked, by its JSON pointer: "#", "#/properties/name", ...


def pointer(at: str, name: str) -> str:
    """To what `name` is called inside `at`. Pure."""
    return f"{at}/{name.replace('~', '~0').replace('/', '~1')}"


def check(nodes: Nodes) -> None:
    """Errors: GrammarError for a `$ref` to what is no schema, and for a schema that no finite text satisfies. Pure."""
    for at, node in nodes.items():
        if isinstance(node, dict) and "$ref" in node and unquote(node["$ref"]) not in nodes:
            raise GrammarError(f"json_schema: $ref {node['$ref']!r:.200} at {at:.200} leads to where no schema stands")
    finite: set[str] = set()
    open_, before = list(nodes)[::-1], 0  # what is referred to stands mostly behind
    while len(open_) != before:
        for at in open_:
            if _can_end(nodes[at], at, finite):
                finite.add(at)
        before, open_ = len(open_), [at for at in open_ if at not in finite]
    if open_:
        raise GrammarError(f"json_schema at {open_[-1]:.200} needs itself inside itself: no finite text satisfies it")


def _can_end(node: Any, at: str, finite: set[str]) -> bool:
    """Whether a value may be found, given the schemas of which one is: false only where there is none. Pure."""
    if isinstance(node, bool):
        return True  # what is false is the matcher's to tell
    if "$ref" in node and unquote(node["$ref"]) not in finite:
        return False
    for key, enough in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        if node.get(key) and not enough(f"{at}/{key}/{i}" in finite for i in range(len(node[key]))):
            return False
    kinds = node.get("type", ())
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    if "enum" in node or "const" in node or not kinds or kinds - {"object", "array"}:
        return True
    return any(part <= finite for part in [_needed(node, at, kind) for kind in kinds])


def _needed(node: dict[str, Any], at: str, kind: str) -> set[str]:
    """The schemas inside that every object, or array, of this schema has a value of. Pure."""
    if kind == "object":
        return {
            pointer(f"{at}/properties", name) for name in node.get("required", ()) if name in node.get("properties", {})
        }
    key, rest = ("items", "additionalItems") if isinstance(node.get("items"), list) else ("prefixItems", "items")
    least, first = node.get("minItems", 0), len(node.get(key, ()))
    needed = {f"{at}/{key}/{i}" for i in range(min(least, first))}
    return needed | {f"{at}/{rest}"} if least > first and rest in node else needed
