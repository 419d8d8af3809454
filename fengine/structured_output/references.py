"""A JSON schema read whole: every schema in it is checked, and every `$ref` leads to one of them.

{"properties": {"next": {"$ref": "#"}}, "required": ["next"]}    no finite text satisfies it: it is refused

Behind a word that JSON Schema does not know, such as OpenAPI's `components`, a schema is looked for only where a `$ref`
leads there; it is then moved to `$defs`. No torch."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from fengine.errors import GrammarError
from fengine.structured_output import keywords
from fengine.structured_output.keywords import Node, pointer

Nodes = Mapping[str, Any]  # every schema of a document by its JSON pointer: "#", "#/properties/name", …


def read(document: Node) -> Node:
    """A copy with known keywords alone. Pure but for the log. Errors: GrammarError, which tells where."""
    nodes: dict[str, Any] = {}
    referring: list[tuple[Node, str]] = []
    moved: dict[str, str] = {}

    def visit(value: Any, at: str) -> Any:
        if isinstance(value, dict):
            value = keywords.mapped(keywords.known(value, at), visit, at)
            if "$ref" in value:
                referring.append((value, at))
        nodes[at] = value
        return value

    root = visit(document, "#")
    for node, at in referring:  # which grows meanwhile
        if (target := keywords.target(node)) in nodes:
            continue
        if target not in moved:
            found = _behind_unknown(document, nodes, target)
            if not isinstance(found, (dict, bool)):
                where = f"$ref {node['$ref']!r:.200} at {at:.200}"
                raise GrammarError(f"json_schema: {where} leads to where no schema stands")
            name, definitions = target[2:], root.setdefault("$defs", {})
            while name in definitions:
                name += "'"
            moved[target] = pointer("#/$defs", name)
            definitions[name] = visit(found, moved[target])
        node["$ref"] = "#" + quote(moved[target][1:], safe="/$~'")
    return root


def _behind_unknown(document: Any, nodes: Nodes, target: str) -> Any:
    """What stands at a pointer that leads through a word which is no keyword. Pure."""
    names = target.split("/")
    last = next(n for n in range(len(names), 0, -1) if "/".join(names[:n]) in nodes)
    if last == len(names) or names[last] in keywords.KEYWORDS:
        return None
    return look_up(document, target)


def look_up(document: Any, target: str) -> Any:
    """What stands at a JSON pointer; None: nothing. Pure."""
    for name in target.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(document, list) and name.isdecimal() and len(name) < 20 and int(name) < len(document):
            document = document[int(name)]  # of thousands of digits Python makes no number
        else:
            document = document.get(name) if isinstance(document, dict) else None
    return document


def check_finite(nodes: Nodes) -> None:
    """Errors: GrammarError for a schema that no finite text satisfies. Pure."""
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
    if "$ref" in node and keywords.target(node) not in finite:
        return False
    for key, enough in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        if node.get(key) and not enough(f"{at}/{key}/{i}" in finite for i in range(len(node[key]))):
            return False
    kinds = node.get("type", ())
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    if "enum" in node or "const" in node or not kinds or kinds - {"object", "array"}:
        return True
    return any(part <= finite for part in [_needed(node, at, kind) for kind in kinds])


def _needed(node: Node, at: str, kind: str) -> set[str]:
    """The schemas inside that every object, or array, of this schema has a value of. Pure."""
    if kind == "object":
        known = node.get("properties", {})
        return {pointer(f"{at}/properties", name) for name in node.get("required", ()) if name in known}
    key, rest = ("items", "additionalItems") if isinstance(node.get("items"), list) else ("prefixItems", "items")
    least, first = node.get("minItems", 0), len(node.get(key, ()))
    needed = {f"{at}/{key}/{i}" for i in range(min(least, first))}
    return needed | {f"{at}/{rest}"} if least > first and rest in node else needed
