"""What follows from JSON schemas: their listed values, that two exclude one another, and what holds where one does not.
All of it is shown from types, listed values, bounds and properties, or not at all. No torch."""

import json
from collections.abc import Callable
from typing import Any

from fengine.structured_output import keywords
from fengine.structured_output.keywords import Node
from fengine.structured_output.references import look_up

MAX_DEPTH = 6
TYPES = ("object", "array", "string", "number", "boolean", "null")
_NAMES = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
_LIMITS = {  # what breaks a bound: the type that it speaks of, the keyword that then holds, and with how much more
    "minimum": ("number", "exclusiveMaximum", 0), "exclusiveMinimum": ("number", "maximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0), "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1), "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1), "maxItems": ("array", "minItems", 1),
}  # fmt: skip


def text_of(value: Any) -> str:
    """A text that is the same for equal JSON values: 1 is 1.0, and no true. Pure."""
    return json.dumps(json.loads(json.dumps(value), parse_float=_number), sort_keys=True)


def _number(text: str) -> float:
    return int(value) if (value := float(text)).is_integer() else value


def without(name: str) -> Node:
    """Objects without a property."""
    return {"type": "object", "properties": {name: False}, "additionalProperties": True}


def having(name: str, schema: Any) -> Node:
    """Objects with a property."""
    return {"type": "object", "required": [name], "properties": {name: schema}, "additionalProperties": True}


class Logic:
    """Of the schemas of one document, which has known keywords alone. Pure."""

    def __init__(self, document: Node) -> None:
        self.document = document

    def resolved(self, value: Any) -> Any:
        """What a schema says, and what it refers to, as one object."""
        for _ in range(16):
            if not isinstance(value, dict) or "$ref" not in value:
                break
            found = look_up(self.document, keywords.target(value))
            beside = {key: item for key, item in value.items() if key != "$ref"}
            apart = isinstance(found, dict) and beside.keys().isdisjoint(found)
            value = beside | found if apart else {"allOf": [beside, found]} if beside else found
        return value

    def values(self, value: Any) -> list[Any] | None:
        """All values of a schema, and maybe more, if they are few and listed."""
        node = self.resolved(value)
        if not isinstance(node, dict):
            return None
        return _listed(node) or {"boolean": [False, True], "null": [None]}.get(str(node.get("type")))

    def disjoint(self, a: Any, b: Any, depth: int = 0) -> bool:
        """Whether it can be shown that no value satisfies both."""
        a, b = self.resolved(a), self.resolved(b)
        if a is False or b is False:
            return True
        if not isinstance(a, dict) or not isinstance(b, dict) or depth > MAX_DEPTH:
            return False
        if self._parts_disjoint(a, b, depth) or self._parts_disjoint(b, a, depth):
            return True
        kinds, mine, theirs = _kinds(a) & _kinds(b), _listed(a), _listed(b)
        apart = mine is not None and theirs is not None and not {*map(text_of, mine)} & {*map(text_of, theirs)}
        return apart or not kinds or kinds == {"object"} and self._objects_disjoint(a, b, depth)

    def _parts_disjoint(self, one: Node, other: Node, depth: int) -> bool:
        """Whether `other` excludes all options of `one`, or a schema that holds with it."""
        parts = [(enough, one[key]) for key, enough in (("anyOf", all), ("oneOf", all), ("allOf", any)) if key in one]
        return any(enough(self.disjoint(part, other, depth + 1) for part in some) for enough, some in parts)

    def _objects_disjoint(self, a: Node, b: Node, depth: int) -> bool:
        """A property that both need has no common value, or one needs a property that the other bars."""
        for one, other in ((a, b), (b, a)):
            mine, theirs = one.get("properties", {}), other.get("properties", {})
            closed = other.get("additionalProperties") is False and "patternProperties" not in other
            for name in one.get("required", ()):
                if theirs.get(name) is False or (closed and name not in theirs):
                    return True
                if name in mine and name in theirs and name in other.get("required", ()):
                    if self.disjoint(mine[name], theirs[name], depth + 1):
                        return True
        return False

    def complement(self, value: Any, among: Any, depth: int = 0) -> list[Any] | None:
        """Schemas of which any holds where `value` does not, for values of `among`; None: not known."""
        if isinstance(value, bool):
            return [] if value else [{}]
        out: list[Any] = []
        for key, item in value.items():
            others = BROKEN[key](self, item, among, depth) if key in BROKEN and depth < MAX_DEPTH else None
            if others is None:
                return None
            out += others
        return [part for part in out if part not in ({"enum": []}, {"type": []}, False)]

    def other_reference(self, item: str, among: Any, depth: int) -> list[Any] | None:
        """Where what is referred to does not hold."""
        at = keywords.target({"$ref": item})
        return None if self._recurs(at) else self.complement(look_up(self.document, at), among, depth + 1)

    def other_values(self, barred: list[Any], among: Any) -> list[Any] | None:
        """The values of `among` but these, if they are listed."""
        domain, texts = self.values(among), {*map(text_of, barred)}
        return domain and [{"enum": [value for value in domain if text_of(value) not in texts]}]

    def other_parts(self, parts: list[Any], among: Any, depth: int) -> list[Any] | None:
        """Of each of several schemas one that holds where it does not."""
        each = [self.complement(part, among, depth + 1) for part in parts]
        return None if None in each else [{"anyOf": others} if others else False for others in each]

    def other_properties(self, properties: Node, among: Any, depth: int) -> list[Any] | None:
        """Objects with a property that is not as it is here."""
        around = self.resolved(among)
        known = around.get("properties", {}) if isinstance(around, dict) else {}
        each = {name: self.complement(inner, known.get(name, {}), depth + 1) for name, inner in properties.items()}
        if None in each.values():
            return None
        return [having(name, other) for name, others in each.items() for other in others or ()]

    def _recurs(self, at: str) -> bool:
        """Whether the references of the schema there lead back to it: what it says cannot be written out."""
        seen, todo = {at}, [at]
        for here in todo:  # which grows meanwhile
            nodes = keywords.objects(look_up(self.document, here))
            targets = {keywords.target(node) for node in nodes if isinstance(node.get("$ref"), str)}
            if any(at == target or at.startswith(f"{target}/") for target in targets):
                return True
            todo += targets - seen
            seen |= targets
        return False


def _limit(kind: str, keyword: str, more: int) -> Callable[[Logic, Any, Any, int], list[Any]]:
    """Values of a type on the other side of a bound: there is no count below 0."""
    return lambda logic, bound, among, depth: (
        [{"type": kind, keyword: bound + more}] if bound + more >= 0 or kind == "number" else []
    )


def _other_types(kinds: list[str]) -> list[Any] | None:
    return [{"type": [kind for kind in TYPES if kind not in kinds]}] if set(kinds) <= set(TYPES) else None


BROKEN: dict[str, Callable[[Logic, Any, Any, int], list[Any] | None]] = {  # by keyword: what breaks it
    **{key: _limit(*how) for key, how in _LIMITS.items()},
    "$ref": Logic.other_reference,
    "not": lambda logic, item, among, depth: [item],
    "const": lambda logic, item, among, depth: logic.other_values([item], among),
    "enum": lambda logic, item, among, depth: logic.other_values(item, among),
    "type": lambda logic, item, among, depth: _other_types([item] if isinstance(item, str) else item),
    "required": lambda logic, item, among, depth: [without(name) for name in item],
    "properties": Logic.other_properties,
    "allOf": Logic.other_parts,
    "anyOf": lambda logic, item, among, depth: (
        None if (parts := logic.other_parts(item, among, depth)) is None else [{"allOf": parts}]
    ),
    "$defs": lambda logic, item, among, depth: [],
    "definitions": lambda logic, item, among, depth: [],
}


def _kinds(node: Node) -> set[str]:
    """The types that a schema's values can have; whole numbers are numbers."""
    values, kinds = _listed(node), node.get("type", TYPES)
    every: set[str] = {*TYPES} if values is None else {_NAMES.get(type(value), "number") for value in values}
    return every & {"number" if kind == "integer" else kind for kind in ([kinds] if isinstance(kinds, str) else kinds)}


def _listed(node: Node) -> list[Any] | None:
    return [node["const"]] if "const" in node else node.get("enum")
