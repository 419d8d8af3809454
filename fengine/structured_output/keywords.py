"""The words of JSON schemas: which there are, what their values must be, annotations, and near misses. No torch."""

import difflib
import logging
import re
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from fengine.errors import GrammarError
from fengine.structured_output import formats

logger = logging.getLogger(__name__)
MAX_ENUM = 10_000
MAX_LENGTH = 1_000_000  # of strings and arrays
MAX_MULTIPLE = 1_000  # an automaton has a state for each remainder
Node = dict[str, Any]

DRAFTS = ("schema", "draft-04/schema", "draft-06/schema", "draft-07/schema", "draft/2019-09/schema",
          "draft/2020-12/schema")  # fmt: skip
ANNOTATIONS = set("title description default examples example $comment deprecated readOnly writeOnly discriminator "
                  "$anchor $dynamicAnchor $vocabulary id readonly self nullable note notes cost constraints "
                  "contentEncoding contentMediaType contentSchema".split())  # fmt: skip
NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas",
         "dependencies"}  # schemas by name; a dependency may be a list of names  # fmt: skip
INSIDE = set("items additionalItems additionalProperties not if then else propertyNames unevaluatedProperties "
             "unevaluatedItems anyOf oneOf allOf prefixItems".split())  # a schema, or a list of them  # fmt: skip
COUNTS = ("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength")
_SIMPLE = "only {} with types, bounds, required, properties, and const or enum of listed values can be held"
REWRITTEN = {  # what could not be rewritten is refused
    "oneOf": "its options cannot be shown to exclude one another; give them a required property with different consts, "
             "or use anyOf",
    "uniqueItems": "only arrays with few listed values, or of at most one item, can be held",
    "not": _SIMPLE.format("what is said"),
    "if": _SIMPLE.format("conditions"),
    "then": "what its if says cannot be held",
    "else": "what its if says cannot be held",
    "propertyNames": "only a pattern, or a list of names, that also holds for the named properties can be held",
    "unevaluatedProperties": "use additionalProperties: false",
    "unevaluatedItems": "use items: false",
}  # fmt: skip
_NEVER = set("contains minContains maxContains $dynamicRef $recursiveRef $recursiveAnchor extends disallow divisibleBy "
             "x-guidance".split())  # fmt: skip
CONTROLS = "control characters, which JSON writes as \\\\u00XX: they are never generated"
_CONTROL = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")  # what JSON writes only as \\u00XX


def pointer(at: str, name: str) -> str:
    """To what `name` is called inside `at`. Pure."""
    return f"{at}/{name.replace('~', '~0').replace('/', '~1')}"


def target(node: Node) -> str:
    """The JSON pointer that its `$ref` is. Pure."""
    return unquote(node["$ref"])


def mapped(node: Node, change: Callable[[Any, str], Any], at: str) -> Node:
    """The node with every schema inside changed; `change` gets its JSON pointer, too. Pure, if `change` is."""

    def inside(key: str, value: Any) -> Any:
        here = f"{at}/{key}"
        if key in NAMED:
            return {n: v if isinstance(v, list) else change(v, pointer(here, n)) for n, v in value.items()}
        if key in INSIDE and isinstance(value, list):
            return [change(item, f"{here}/{i}") for i, item in enumerate(value)]
        return change(value, here) if key in INSIDE else value

    return {key: inside(key, value) for key, value in node.items()}


def parts(value: Any) -> Iterator[Any]:
    """Every value in a JSON value, itself and keys included. Pure."""
    todo = [value]
    while todo:
        value = todo.pop()
        yield value
        if isinstance(value, (dict, list)):
            todo += [*value, *value.values()] if isinstance(value, dict) else value


def objects(value: Any) -> Iterator[Node]:
    """Every object in a JSON value, itself included. Pure."""
    return (part for part in parts(value) if isinstance(part, dict))


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_schema(value: Any) -> bool:
    return isinstance(value, (dict, bool))


def _each(kind: type, right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a value is a list, or an object, of right ones."""
    return lambda value: isinstance(value, kind) and all(map(right, value.values() if kind is dict else value))


_are_schemas, _are_names = _each(list, _is_schema), _each(list, _is_text)


def _is_small_multiple(value: Any) -> bool:
    try:
        number = Decimal(repr(value)) if is_number(value) else Decimal(0)
        return 0 < number and int(number.scaleb(-int(number.normalize().as_tuple().exponent))) <= MAX_MULTIPLE
    except (InvalidOperation, OverflowError, ValueError):
        return False


_VALUES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (  # keywords, and what their values must be
    ("additionalItems additionalProperties not if then else propertyNames unevaluatedProperties unevaluatedItems",
     _is_schema, "an object or a bool"),
    ("anyOf oneOf allOf prefixItems", _are_schemas, "a list of schemas"),
    ("properties patternProperties $defs definitions dependentSchemas", _each(dict, _is_schema),
     "an object of schemas"),
    ("items", lambda value: _is_schema(value) or _are_schemas(value), "a schema or a list of schemas"),
    ("dependencies", _each(dict, lambda value: _is_schema(value) or _are_names(value)),
     "an object of schemas and lists of names"),
    ("dependentRequired", _each(dict, _are_names), "an object of lists of names"),
    (" ".join(COUNTS), lambda value: is_number(value) and float(value).is_integer() and 0 <= value <= MAX_LENGTH,
     f"an integer in [0, {MAX_LENGTH}]"),
    ("minimum maximum", is_number, "a number"),
    ("exclusiveMinimum exclusiveMaximum", lambda value: isinstance(value, (int, float)), "a number"),  # or a switch
    ("multipleOf", _is_small_multiple, f"a number above 0 with at most {MAX_MULTIPLE} as its digits"),
    ("pattern format $ref $schema $id", _is_text, "a string"),
    ("required", _are_names, "a list of names"),
    ("type", lambda value: _is_text(value) or (value != [] and _are_names(value)), "a type or a list of types"),
    ("uniqueItems", lambda value: isinstance(value, bool), "true or false"),
    ("enum", lambda value: isinstance(value, list) and 1 <= len(value) <= MAX_ENUM,
     f"a list of 1 to {MAX_ENUM} values"),
    ("const", lambda value: True, ""),
)  # fmt: skip
KEYWORDS = {key: (is_right, needed) for keys, is_right, needed in _VALUES for key in keys.split()}
WORDS = sorted(KEYWORDS.keys() | _NEVER)


def known(node: Node, at: str) -> Node:
    """The keywords of a schema, whose values are of the right kinds; annotations are left out. Pure but for the log.
    Errors: GrammarError for a value, a keyword that is never held, and a near miss of one."""
    out = {}
    for key, value in node.items():
        if key in KEYWORDS:
            _check_value(key, value, f"{at}/{key}")
            out[key] = int(value) if key in COUNTS else value  # which may be written as 2.0
        else:
            _check_annotation(key, at)
    if node.get("contentEncoding") == "base64":
        out.setdefault("format", "base64")
    if node.get("contentMediaType") == "application/json":
        raise GrammarError(f"json_schema: contentMediaType at {at} is JSON in a text, which cannot be held")
    for key, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):  # switches, in draft 4
        if isinstance(out.get(key), bool) and out.pop(key) and bound in out:
            out[key] = out.pop(bound)
    return out


def refuse_rest(node: Node, at: str) -> None:
    """Errors: GrammarError for a keyword that could not be rewritten. Pure."""
    if key := next((key for key in node if key in REWRITTEN), ""):
        raise GrammarError(f"json_schema: the keyword {key!r} at {at} is not supported; {REWRITTEN[key]}")


def _check_annotation(key: str, at: str) -> None:
    if key in ANNOTATIONS or key.startswith("_") or (key.startswith("x-") and key not in _NEVER):
        return
    if near := key if key in _NEVER else _near(key[:80]):
        hint = f"supported are {', '.join(sorted(KEYWORDS))}" if near == key else f"did you mean {near!r}?"
        raise GrammarError(f"json_schema: the keyword {key!r:.80} at {at} is not supported; {hint}")
    logger.info("json_schema: %r at %s is no keyword of JSON Schema, and is ignored.", key[:80], at)


@lru_cache(256)
def _near(key: str) -> str | None:
    """The keyword that a word may have been meant as. Pure."""
    bare, *known = (re.sub("[^a-z]", "", word.lower()).removesuffix("s") for word in (key, *WORDS))
    found = difflib.get_close_matches(bare, known, n=1, cutoff=0.86)
    return WORDS[known.index(found[0])] if found else None


def _check_value(key: str, value: Any, at: str) -> None:
    is_right, needed = KEYWORDS[key]
    if not is_right(value):
        raise GrammarError(f"json_schema at {at} must be {needed}, got {value!r:.80}")
    if key in ("const", "enum") and any(_CONTROL.search(part) for part in parts(value) if isinstance(part, str)):
        raise GrammarError(f"json_schema: {key} at {at} holds {CONTROLS}")
    if key == "format":
        formats.check(value, at)
    if key == "$ref" and not (value == "#" or value.startswith("#/")):
        raise GrammarError(
            f"json_schema: $ref {value!r:.200} at {at} leads out of this schema, and nothing is ever fetched; put it "
            "under $defs and refer to it as #/$defs/…"
        )
    if key == "$schema" and value.rstrip("#").partition("json-schema.org/")[2] not in DRAFTS:
        raise GrammarError(f"json_schema: $schema {value!r:.80} is unknown; known are {', '.join(DRAFTS)}")
    if key == "$id" and at != "#/$id" and not value.startswith("#"):
        raise GrammarError(f"json_schema: $id at {at} changes what $ref means; only the whole schema may have one")


def check_pattern(written: str, at: str) -> None:
    """Errors: GrammarError if a written-out pattern needs a control character. Pure."""
    alone = re.sub(r"\[[^\]]*\]", "", written)
    if any(_CONTROL.match(chr(int(code, 16))) for code in re.findall(r"\\x\{([0-9a-f]+)\}", alone)):
        raise GrammarError(f"json_schema: the pattern at {at} needs {CONTROLS}")
