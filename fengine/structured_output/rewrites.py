"""JSON schema keywords that the matcher does not hold, or holds wrongly, in the words of those that it holds.

Each function of RULES changes one object of a schema into an equivalent one and says why it is there. What has no
equivalent is left, and is then refused by name. Where a format is held by a pattern, the pattern lets only texts of the
format through, if not always all of them. No torch."""

import re
from collections.abc import Callable, Iterable
from itertools import islice, permutations
from typing import Any

from fengine.structured_output import formats
from fengine.structured_output.keywords import Node
from fengine.structured_output.logic import Logic, text_of, without

OPENING = ("allOf", "if", "dependentSchemas", "dependencies")  # put objects together: none of them is the whole one
EVALUATING = {*OPENING, "$ref", "anyOf", "oneOf", "not"}  # other properties, or items
MAX_ARRAYS = 400  # that an array of few values without repetition comes to
MAX_OPTIONS = 24  # of a oneOf whose options overlap


def rewritten(logic: Logic, value: Node) -> Node:
    """One object of a document in the matcher's words, as far as there are any. Pure."""
    node = dict(value)
    for key, rule in RULES.items():
        if key in value:
            rule(logic, node)
    return node


def also(node: Node, *schemas: Any) -> None:
    """Modifies: node, which must satisfy one of these, too."""
    one = schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)} if schemas else False
    node["allOf"] = [*node.get("allOf", ()), one]


def beside(node: Node, key: str, value: Any) -> None:
    """Modifies: node, which must satisfy this keyword, too."""
    if key in node:
        also(node, {key: value})
    else:
        node[key] = value


def named_formats(_: Logic, node: Node) -> None:
    """The matcher knows eleven formats, and four of them wrongly: see formats.py."""
    name = node.pop("format")
    if name in formats.RANGES and node.get("type") in ("integer", "number"):
        least, most = formats.RANGES[name]
        also(node, {"minimum": least, "maximum": most})
    if name in formats.PATTERNS:
        beside(node, "pattern", f"^(?:{formats.PATTERNS[name]})$")
    if name in formats.SAME or name in formats.HELD:
        node["format"] = formats.SAME.get(name, name)


def one_of(logic: Logic, node: Node) -> None:
    """The matcher proves of few schemas that only one can hold, and of none behind a `$ref`: pydantic's unions. Of
    options that may overlap, each holds with what breaks the others."""
    options, parts = node["oneOf"], []
    for i, option in enumerate(options):
        overlapping = [other for other in options[:i] + options[i + 1 :] if not logic.disjoint(option, other)]
        broken = [logic.complement(other, option) for other in overlapping]
        if None in broken or (broken and len(options) > MAX_OPTIONS):
            return
        apart = [{"anyOf": ways} if ways else False for ways in broken]
        parts.append({"allOf": [option, *apart]} if apart else option)
    del node["oneOf"]
    beside(node, "anyOf", parts)


def unique_items(logic: Logic, node: Node) -> None:
    """Unknown to the matcher. Held where an array has at most one item, or few values."""
    if node["uniqueItems"] is False or node.get("maxItems", 2) < 2:
        del node["uniqueItems"]
        return
    values = logic.values(node.get("items"))
    if node.get("type") != "array" or values is None:
        return
    if {"prefixItems", "additionalItems", "enum", "const", "$ref"} & node.keys():
        return
    different = list({text_of(value): value for value in values}.values())
    counts = range(node.get("minItems", 0), min(node.get("maxItems", len(values)), len(values)) + 1)
    arrays = [*islice((list(found) for n in counts for found in permutations(different, n)), MAX_ARRAYS + 1)]
    if len(arrays) <= MAX_ARRAYS:
        del node["uniqueItems"]
        also(node, *([{"enum": arrays}] if arrays else []))


def negation(logic: Logic, node: Node) -> None:
    """Unknown to the matcher."""
    if (others := logic.complement(node["not"], node)) is not None:
        del node["not"]
        also(node, *others)


def conditional(logic: Logic, node: Node) -> None:
    """Unknown to the matcher: (if and then) or (not if and else)."""
    if "if" not in node:  # then the others say nothing
        node.pop("then", None)
        node.pop("else", None)
    elif (others := logic.complement(node["if"], node)) is not None:
        condition, then, other = (node.pop(key, True) for key in ("if", "then", "else"))
        also(node, {"allOf": [condition, then]}, *({"allOf": [part, other]} for part in others))


def dependencies(_: Logic, node: Node) -> None:
    """Unknown to the matcher: the property is absent, or what depends on it holds."""
    for key in ("dependencies", "dependentRequired", "dependentSchemas"):
        for name, needed in node.pop(key, {}).items():
            needs = {"required": needed} if isinstance(needed, list) else needed
            absent = {key: item for key, item in without(name).items() if key != "type"}
            also(node, absent, {"allOf": [{"required": [name]}, needs]})


def property_names(logic: Logic, node: Node) -> None:
    """Unknown to the matcher: names become properties, or a pattern of them."""
    names = logic.resolved(node["propertyNames"])
    names = {} if names is True else names
    if not isinstance(names, dict) or names.get("type", "string") != "string" or "patternProperties" in node:
        return
    known, rest, said = node.get("properties", {}), node.get("additionalProperties", True), names.keys() - {"type"}
    listed = logic.values(names)
    if len(said) == 1 and listed is not None and not set(known) - set(map(str, listed)):
        node["properties"] = {name: rest for name in listed if isinstance(name, str)} | known
    elif said == {"pattern"} and _all_match(names["pattern"], known, rest):
        node["patternProperties"] = {names["pattern"]: rest}
    elif said:
        return
    del node["propertyNames"]
    if said:
        node["additionalProperties"] = False


def _all_match(pattern: str, known: Iterable[str], rest: Any) -> bool:
    """Whether a pattern of names asks nothing more of the named properties. Pure."""
    return all(rest in (True, {}) and re.search(pattern, name) for name in known)


def unevaluated(_: Logic, node: Node) -> None:
    """Unknown to the matcher; the same as additional ones where nothing else could have evaluated any."""
    for key, same in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if key in node and not EVALUATING & node.keys() and (key == "unevaluatedProperties" or "items" not in node):
            node.setdefault(same, node[key])
            del node[key]


RULES: dict[str, Callable[[Logic, Node], None]] = {  # by what makes them necessary
    "unevaluatedProperties": unevaluated, "unevaluatedItems": unevaluated, "format": named_formats, "oneOf": one_of,
    "uniqueItems": unique_items, "not": negation, "if": conditional, "then": conditional, "else": conditional,
    "dependencies": dependencies, "dependentRequired": dependencies, "dependentSchemas": dependencies,
    "propertyNames": property_names,
}  # fmt: skip
