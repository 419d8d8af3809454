"""JSON schema keywords that the matcher does not hold, or holds wrongly, in the words of those that it holds.

Each function of RULES changes one object of a schema into an equivalent one and says why it is there. What has no
equivalent is left, and the checker of `schema.py` refuses it by name. Where a format is held by a pattern, the pattern
lets only texts of the format through, if not always all of them. No torch.
"""

import json
import re
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any
from urllib.parse import unquote

from fengine.structured_output import disjoint, formats

Node = dict[str, Any]
OPENING = ("allOf", "if", "dependentSchemas", "dependencies")  # put objects together: none of them is the whole one
EVALUATING = {*OPENING, "$ref", "anyOf", "oneOf", "not", "contains"}  # other properties, or items
COUNTS = ("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength")
ANNOTATIONS = ("title", "description", "default", "examples", "$comment")
MAX_ARRAYS = 400  # that an array of few values without repetition comes to
TYPES = ("object", "array", "string", "number", "boolean", "null")


class Rewriter:
    """Rewrites one document."""

    def __init__(self, document: Any) -> None:
        self.document = document

    def schema(self, value: Any) -> Any:
        """A schema and those inside it. Pure."""
        if not isinstance(value, dict):
            return value
        node = dict(value)
        for rule in RULES:
            rule(self, node)
        for key, inner in node.items():
            if key in ("items", "additionalItems", "additionalProperties") and isinstance(inner, dict):
                node[key] = self.schema(inner)
            elif key in ("anyOf", "oneOf", "allOf", "prefixItems", "items") and isinstance(inner, list):
                node[key] = [self.schema(item) for item in inner]
            elif key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(inner, dict):
                node[key] = {name: self.schema(item) for name, item in inner.items()}
        return node

    def resolved(self, value: Any) -> Any:
        """What a schema that is only a `$ref` refers to, if it is anything. Pure."""
        for _ in range(16):
            if not isinstance(value, dict) or not isinstance(value.get("$ref"), str):
                break
            found: Any = self.document
            for name in unquote(value["$ref"]).split("/")[1:]:
                name = name.replace("~1", "/").replace("~0", "~")
                if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                    found = found[int(name)]
                else:
                    found = found.get(name) if isinstance(found, dict) else None
            beside = {key: item for key, item in value.items() if key != "$ref"}
            value = beside | found if isinstance(found, dict) else {}
        return value

    def values(self, value: Any) -> list[Any] | None:
        """All values of a schema, if they are few and listed. Pure."""
        node = self.resolved(value)
        if not isinstance(node, dict):
            return None
        if "const" in node:
            return [node["const"]]
        if isinstance(node.get("enum"), list):
            return node["enum"]
        return {"boolean": [False, True], "null": [None]}.get(str(node.get("type")))

    def complement(self, value: Any, among: Any) -> list[Any] | None:
        """Schemas of which any holds where `value` does not, for values of `among`; None: not known. Pure."""
        if isinstance(value, bool):
            return [] if value else [{}]
        if not isinstance(value, dict):
            return None
        out: list[Any] = []
        for key, item in value.items():
            others = [] if key in ANNOTATIONS else self.broken(key, item, among)
            if others is None:
                return None
            out += others
        return [part for part in out if part not in ({"enum": []}, {"type": []})]

    def broken(self, key: str, item: Any, among: Any) -> list[Any] | None:
        """`complement` of one keyword. Pure."""
        match key, item:
            case "not", _:
                return [item]
            case "const", _:
                return self.other_values([item], among)
            case "enum", list():
                return self.other_values(item, among)
            case "type", str() | list():
                kinds = [item] if isinstance(item, str) else item
                others = [kind for kind in TYPES if kind not in kinds]
                return [{"type": others}] if all(kind in TYPES for kind in kinds) else None
            case "required", list() if all(isinstance(name, str) for name in item):
                return [self.without(name) for name in item]
            case "properties", dict():
                return self.other_properties(item, among)
        return None

    def other_values(self, barred: list[Any], among: Any) -> list[Any] | None:
        """The values of `among` but these, if they are listed. Pure."""
        domain = self.values(among)
        return domain and [{"enum": [v for v in domain if not any(equal(v, b) for b in barred)]}]

    def other_properties(self, properties: Node, among: Any) -> list[Any] | None:
        """Objects with a property that is not as it is here. Pure."""
        around = self.resolved(among)
        known = around.get("properties", {}) if isinstance(around, dict) else {}
        out: list[Any] = []
        for name, inner in properties.items():
            others = self.complement(inner, known.get(name, {}))
            if others is None:
                return None
            out += [self.having(name, other) for other in others]
        return out

    @staticmethod
    def without(name: str) -> Node:
        """Objects without a property."""
        return {"type": "object", "properties": {name: False}, "additionalProperties": True}

    @staticmethod
    def having(name: str, schema: Any) -> Node:
        """Objects with a property."""
        return {"type": "object", "required": [name], "properties": {name: schema}, "additionalProperties": True}


def equal(a: Any, b: Any) -> bool:
    """Whether two JSON values are: 1 is 1.0, and no true. Pure."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, (int, float)) or isinstance(b, (int, float)):
        return isinstance(a, (int, float)) and isinstance(b, (int, float)) and a == b
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def also(node: Node, *schemas: Any) -> None:
    """Modifies: node, which must satisfy these, too."""
    one = schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)} if schemas else False
    node["allOf"] = [*node.get("allOf", ()), one]


# -- rules: each modifies its node -------------------------------------------------------------------------------------


def old_bounds(_: Rewriter, node: Node) -> None:
    """Draft 4 has exclusive bounds as switches; counts may be written as 2.0."""
    for key, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(node.get(key), bool) and node.pop(key) and bound in node:
            node[key] = node.pop(bound)
    for key in COUNTS:
        if isinstance(node.get(key), float) and node[key].is_integer():
            node[key] = int(node[key])


def named_formats(_: Rewriter, node: Node) -> None:
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
    elif name in formats.PATTERNS or name in formats.RANGES or name in formats.FREE:
        del node["format"]


def one_of(rewriter: Rewriter, node: Node) -> None:
    """The matcher proves of few schemas that only one can hold, and of none behind a `$ref`: pydantic's unions."""
    options = node.get("oneOf")
    if isinstance(options, list) and disjoint.all_pairs(
        [rewriter.resolved(option) for option in options], rewriter.resolved
    ):
        del node["oneOf"]
        if "anyOf" in node:
            also(node, {"anyOf": options})
        else:
            node["anyOf"] = options


def unique_items(rewriter: Rewriter, node: Node) -> None:
    """Unknown to the matcher. Held where an array has at most one item, or few values."""
    if node.get("uniqueItems") is False or (node.get("uniqueItems") is True and node.get("maxItems", 2) in (0, 1)):
        del node["uniqueItems"]
    if node.get("uniqueItems") is not True or node.get("type") != "array":
        return
    values = rewriter.values(node.get("items"))
    if values is None or {"prefixItems", "additionalItems", "enum", "const", "$ref"} & node.keys():
        return
    least, most = node.get("minItems", 0), min(node.get("maxItems", len(values)), len(values))
    different = [v for i, v in enumerate(values) if not any(equal(v, w) for w in values[:i])]
    arrays: list[Any] = []
    for count in range(least, most + 1):
        for found in permutations(different, count):
            arrays.append(list(found))
            if len(arrays) > MAX_ARRAYS:
                return
    for key in ("uniqueItems", "items", "minItems", "maxItems"):
        node.pop(key, None)
    node["enum"] = arrays


def negation(rewriter: Rewriter, node: Node) -> None:
    """Unknown to the matcher."""
    if "not" in node:
        barred = node.pop("not")
        others = rewriter.complement(barred, node)
        if others is None:
            node["not"] = barred
        else:
            also(node, *others)


def conditional(rewriter: Rewriter, node: Node) -> None:
    """Unknown to the matcher: (if and then) or (not if and else)."""
    if "if" not in node:
        for key in ("then", "else"):
            node.pop(key, None)
        return
    others = rewriter.complement(node["if"], node)
    if others is not None:
        condition, then, other = node.pop("if"), node.pop("then", True), node.pop("else", True)
        also(node, *([{"allOf": [condition, then]}] + [{"allOf": [part, other]} for part in others]))


def dependencies(_: Rewriter, node: Node) -> None:
    """Unknown to the matcher: the property is absent, or what depends on it holds."""
    for key in ("dependencies", "dependentRequired", "dependentSchemas"):
        if not isinstance(node.get(key), dict):
            continue
        for name, needed in node.pop(key).items():
            needs = {"required": needed} if isinstance(needed, list) else needed
            absent = {key: item for key, item in Rewriter.without(name).items() if key != "type"}
            also(node, absent, {"allOf": [{"required": [name]}, needs]})


def property_names(rewriter: Rewriter, node: Node) -> None:
    """Unknown to the matcher: names become properties, or a pattern of them."""
    if "propertyNames" not in node or "patternProperties" in node:
        return
    names = rewriter.resolved(node["propertyNames"])
    names = {} if names is True else names
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return
    if not names.keys() - {"type"} or _named(rewriter, node, names):
        del node["propertyNames"]


def _named(rewriter: Rewriter, node: Node, names: Node) -> bool:
    """Whether properties of the node, or a pattern of them, now say what `names` does. Modifies: node."""
    known, rest = node.get("properties", {}), node.get("additionalProperties", True)
    listed = rewriter.values(names)
    if listed is not None and not set(known) - set(map(str, listed)):
        node["properties"] = {name: rest for name in listed if isinstance(name, str)} | known
    elif names.keys() - {"type"} == {"pattern"} and all(re.search(names["pattern"], name) for name in known):
        node["patternProperties"] = {names["pattern"]: rest}
    else:
        return False
    node["additionalProperties"] = False
    return True


def unevaluated(_: Rewriter, node: Node) -> None:
    """Unknown to the matcher; the same as additional ones where nothing else could have evaluated any."""
    others = EVALUATING & node.keys()
    for key, same in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if key in node and not others and (key == "unevaluatedProperties" or "items" not in node):
            node.setdefault(same, node[key])
            del node[key]


RULES: tuple[Callable[[Rewriter, Node], None], ...] = (
    old_bounds, unevaluated, named_formats, one_of, unique_items, negation, conditional, dependencies, property_names,
)  # fmt: skip


def rewritten(document: Any) -> Any:
    """An equivalent schema in the matcher's words, as far as there is one. Pure."""
    return Rewriter(document).schema(document)


def is_open(objects: Iterator[Node]) -> bool:
    """Whether objects of a document are put together, so that none of them names all properties. Pure."""
    return any(key in node for node in objects for key in OPENING)
