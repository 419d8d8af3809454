"""JSON schema keywords that the matcher does not hold, or holds wrongly, in the words of those that it holds.

Each function of RULES changes one object of a schema into an equivalent one and says why it is there. What has no
equivalent is left, and is then refused by name. Where a format is held by a pattern, the pattern lets only texts of the
format through, if not always all of them. No torch.
"""

import re
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

from fengine.structured_output import formats, keywords
from fengine.structured_output.keywords import Node
from fengine.structured_output.logic import Logic, equal, without

OPENING = ("allOf", "if", "dependentSchemas", "dependencies")  # put objects together: none of them is the whole one
EVALUATING = {*OPENING, "$ref", "anyOf", "oneOf", "not"}  # other properties, or items
MAX_ARRAYS = 400  # that an array of few values without repetition comes to
MAX_OPTIONS = 24  # of a oneOf whose options overlap


def rewritten(document: Node) -> Node:
    """An equivalent schema in the matcher's words, as far as there is one. Pure."""
    logic = Logic(document)

    def visit(value: Any, at: str) -> Any:
        if not isinstance(value, dict):
            return value
        node = dict(value)
        for key, rule in RULES.items():
            if key in value:
                rule(logic, node)
        return keywords.mapped(node, visit, at)

    return visit(document, "#")


def is_open(objects: Iterator[Node]) -> bool:
    """Whether objects of a document are put together, so that none of them names all properties. Pure."""
    return any(key in node for node in objects for key in OPENING)


def also(node: Node, *schemas: Any) -> None:
    """Modifies: node, which must satisfy one of these, too."""
    one = schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)} if schemas else False
    node["allOf"] = [*node.get("allOf", ()), one]


# -- rules: each modifies its node -------------------------------------------------------------------------------------


def named_formats(_: Logic, node: Node) -> None:
    """The matcher knows eleven formats, and four of them wrongly: see formats.py."""
    name = node.get("format")
    if name in formats.RANGES and node.get("type") in ("integer", "number"):
        least, most = formats.RANGES[name]
        also(node, {"minimum": least, "maximum": most})
    if name in formats.PATTERNS:
        pattern = f"^(?:{formats.PATTERNS[name]})$"
        if "pattern" in node:
            also(node, {"pattern": pattern})
        else:
            node["pattern"] = pattern
    if name in formats.SAME:
        node["format"] = formats.SAME[name]
    elif name not in formats.HELD:
        node.pop("format", None)


def one_of(logic: Logic, node: Node) -> None:
    """The matcher proves of few schemas that only one can hold, and of none behind a `$ref`: pydantic's unions.

    Of options that may overlap, each holds with what breaks the others.
    """
    options = node.get("oneOf")
    if options is None:
        return
    parts = []
    for i, option in enumerate(options):
        others = options[:i] + options[i + 1 :]
        overlapping = [other for other in others if not logic.disjoint(option, other)]
        broken = [logic.complement(other, option) for other in overlapping]
        if any(way is None for way in broken) or (broken and len(options) > MAX_OPTIONS):
            return
        apart = [{"anyOf": ways} if ways else False for ways in broken]
        parts.append({"allOf": [option, *apart]} if apart else option)
    del node["oneOf"]
    if "anyOf" in node:
        also(node, {"anyOf": parts})
    else:
        node["anyOf"] = parts


def unique_items(logic: Logic, node: Node) -> None:
    """Unknown to the matcher. Held where an array has at most one item, or few values."""
    if node.get("uniqueItems") is False or node.get("maxItems", 2) < 2:
        node.pop("uniqueItems", None)
    values = logic.values(node.get("items"))
    if "uniqueItems" not in node or node.get("type") != "array" or values is None:
        return
    if {"prefixItems", "additionalItems", "enum", "const", "$ref"} & node.keys():
        return
    least, most = node.get("minItems", 0), min(node.get("maxItems", len(values)), len(values))
    different = [v for i, v in enumerate(values) if not any(equal(v, w) for w in values[:i])]
    arrays: list[Any] = []
    for count in range(least, most + 1):
        for found in permutations(different, count):
            arrays.append(list(found))
            if len(arrays) > MAX_ARRAYS:
                return
    del node["uniqueItems"]
    if arrays:
        also(node, {"enum": arrays})
    else:
        also(node)


def negation(logic: Logic, node: Node) -> None:
    """Unknown to the matcher."""
    if "not" in node and (others := logic.complement(node["not"], node)) is not None:
        del node["not"]
        also(node, *others)


def conditional(logic: Logic, node: Node) -> None:
    """Unknown to the matcher: (if and then) or (not if and else)."""
    if "if" not in node:
        node.pop("then", None)
        node.pop("else", None)
    elif (others := logic.complement(node["if"], node)) is not None:
        condition, then, other = node.pop("if"), node.pop("then", True), node.pop("else", True)
        also(node, *([{"allOf": [condition, then]}] + [{"allOf": [part, other]} for part in others]))


def dependencies(_: Logic, node: Node) -> None:
    """Unknown to the matcher: the property is absent, or what depends on it holds."""
    for key in ("dependencies", "dependentRequired", "dependentSchemas"):
        for name, needed in node.pop(key, {}).items():
            needs = {"required": needed} if isinstance(needed, list) else needed
            absent = {key: item for key, item in without(name).items() if key != "type"}
            also(node, absent, {"allOf": [{"required": [name]}, needs]})


def property_names(logic: Logic, node: Node) -> None:
    """Unknown to the matcher: names become properties, or a pattern of them."""
    names = logic.resolved(node.get("propertyNames"))
    names = {} if names is True else names
    if isinstance(names, dict) and names.get("type", "string") == "string" and "patternProperties" not in node:
        if not names.keys() - {"type"} or _named(logic, node, names):
            del node["propertyNames"]


def _named(logic: Logic, node: Node, names: Node) -> bool:
    """Whether properties of the node, or a pattern of them, now say what `names` does. Modifies: node."""
    known, rest, said = node.get("properties", {}), node.get("additionalProperties", True), names.keys() - {"type"}
    listed = logic.values(names)
    if len(said) == 1 and listed is not None and not set(known) - set(map(str, listed)):
        node["properties"] = {name: rest for name in listed if isinstance(name, str)} | known
    elif said == {"pattern"} and all(re.search(names["pattern"], name) for name in known):
        node["patternProperties"] = {names["pattern"]: rest}
    else:
        return False
    node["additionalProperties"] = False
    return True


def unevaluated(_: Logic, node: Node) -> None:
    """Unknown to the matcher; the same as additional ones where nothing else could have evaluated any."""
    others = EVALUATING & node.keys()
    for key, same in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if key in node and not others and (key == "unevaluatedProperties" or "items" not in node):
            node.setdefault(same, node[key])
            del node[key]


RULES: dict[str, Callable[[Logic, Node], None]] = {  # by what makes them necessary
    "unevaluatedProperties": unevaluated, "unevaluatedItems": unevaluated, "format": named_formats, "oneOf": one_of,
    "uniqueItems": unique_items, "not": negation, "if": conditional, "then": conditional, "else": conditional,
    "dependencies": dependencies, "dependentRequired": dependencies, "dependentSchemas": dependencies,
    "propertyNames": property_names,
}  # fmt: skip
