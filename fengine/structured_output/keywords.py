"""The words of JSON schemas: keywords that are held, those that are refused, annotations, and near misses. No torch."""

import difflib
import logging
import re
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

from fengine.errors import GrammarError
from fengine.structured_output import formats

logger = logging.getLogger(__name__)
MAX_ENUM = 10_000
MAX_JOINED = 12  # patterns that may meet in one string: the matcher's work doubles with each
MAX_LENGTH = 1_000_000  # of strings and arrays
MAX_MULTIPLE = 1_000  # an automaton has a state for each remainder

DRAFTS = ("schema", "draft-04/schema", "draft-06/schema", "draft-07/schema", "draft/2019-09/schema",
          "draft/2020-12/schema")  # fmt: skip
_ANNOTATIONS = {"title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly",
                "writeOnly", "discriminator", "$anchor", "$dynamicAnchor", "$vocabulary", "id", "readonly", "self",
                "nullable", "note", "notes", "cost", "contentEncoding", "contentMediaType",
                "contentSchema"}  # fmt: skip
ONE = {"items", "additionalItems", "additionalProperties"}  # a schema
LISTS = {"anyOf", "allOf", "prefixItems"}  # of schemas
NAMED = {"properties", "patternProperties", "$defs", "definitions"}  # schemas by name
_COUNTS = ("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_TEXTS = ("pattern", "format", "$ref", "$schema", "$id")
_VALUES = {*_COUNTS, *_BOUNDS, *_TEXTS, "type", "enum", "const", "required", "multipleOf"}
_HELD_SOMETIMES = {  # by rewriting; what could not be rewritten is refused
    "oneOf": "its options cannot be shown to exclude one another; give them a required property with different consts, "
             "or use anyOf",
    "uniqueItems": "only arrays with few listed values, or of at most one item, can be held",
    "not": "only what is said with type, required, properties, and const or enum of listed values can be held",
    "if": "only conditions with type, required, properties, and const or enum of listed values can be held",
    "then": "what its if says cannot be held",
    "else": "what its if says cannot be held",
    "propertyNames": "only a pattern, or a list of names, that also holds for the named properties can be held",
    "unevaluatedProperties": "use additionalProperties: false",
    "unevaluatedItems": "use items: false",
}  # fmt: skip
_NEVER = {"contains", "minContains", "maxContains", "dependencies", "dependentRequired",
          "dependentSchemas", "$dynamicRef", "$recursiveRef", "$recursiveAnchor", "extends", "disallow", "divisibleBy",
          "x-guidance"}  # fmt: skip
CONTROLS = "control characters, which JSON writes as \\\\u00XX: they are never generated"
WRAPPER = {"name", "strict", "schema", "description", "type"}  # OpenAI's, around a schema
JOINING = {"anyOf", "$ref"}  # hold together with what stands beside them
JOINED = ONE | JOINING | {"properties", "patternProperties", "prefixItems", "pattern", "format"}
KEYWORDS = ONE | LISTS | NAMED | _VALUES
_CONTROL = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")  # what JSON writes only as \\u00XX


def check_annotation(key: str, at: str) -> None:
    """That a word that is no keyword here constrains nothing. Errors: GrammarError for one of JSON Schema that is not
    held, and for a near miss of one that is; pure but for the log."""
    if key in _ANNOTATIONS or key.startswith(("_", "x-")) and key != "x-guidance":
        return
    if key in _HELD_SOMETIMES or key in _NEVER:
        why = _HELD_SOMETIMES.get(key, f"supported are {', '.join(sorted(KEYWORDS))}")
        raise GrammarError(f"json_schema: the keyword {key!r} at {at} is not supported; {why}")
    if near := _near(key[:80]):
        raise GrammarError(f"json_schema: the keyword {key!r:.80} at {at} is not supported; did you mean {near!r}?")
    logger.info("json_schema: %r at %s is no keyword of JSON Schema, and is ignored.", key[:80], at)


def _near(key: str) -> str | None:
    """The keyword that a word may have been meant as. Pure."""
    known = {_bare(word): word for word in sorted(KEYWORDS | _NEVER | _HELD_SOMETIMES.keys())}
    if _bare(key) in known:
        return known[_bare(key)]
    found = difflib.get_close_matches(_bare(key), list(known), n=1, cutoff=0.8)
    return known[found[0]] if found else None


def _bare(word: str) -> str:
    return re.sub("[^a-z]", "", word.lower()).removesuffix("s")


def parts(value: Any) -> Iterator[Any]:
    """Every value in a JSON value, itself and keys included. Pure."""
    todo = [value]
    while todo:
        value = todo.pop()
        yield value
        if isinstance(value, (dict, list)):
            todo += [*value, *value.values()] if isinstance(value, dict) else value


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_small_multiple(value: Any) -> bool:
    try:
        number = Decimal(repr(value)) if is_number(value) else Decimal(0)
        return 0 < number and int(number.scaleb(-int(number.normalize().as_tuple().exponent))) <= MAX_MULTIPLE
    except (InvalidOperation, OverflowError, ValueError):
        return False


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_VALUE_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {  # by keyword; the words of its error
    **dict.fromkeys(
        _COUNTS, (lambda value: type(value) is int and 0 <= value <= MAX_LENGTH, f"an integer in [0, {MAX_LENGTH}]")
    ),
    **dict.fromkeys(_BOUNDS, (is_number, "a number")),
    **dict.fromkeys(_TEXTS, (lambda value: isinstance(value, str), "a string")),
    "multipleOf": (_is_small_multiple, f"a number above 0 with at most {MAX_MULTIPLE} as its digits"),
    "required": (_is_names, "a list of names"),
    "type": (lambda value: isinstance(value, str) or (value != [] and _is_names(value)), "a type or a list of types"),
}


def check_value(key: str, value: Any, at: str) -> None:
    """That the value of a keyword is one the matcher takes as it is meant. Errors: GrammarError. Pure."""
    if key in ("const", "enum"):
        _check_listed(key, value, at)
        return
    is_right, needed = _VALUE_CHECKS[key]
    if not is_right(value):
        raise GrammarError(f"json_schema at {at} must be {needed}, got {value!r:.80}")
    _check_word(key, value, at)


def _check_listed(key: str, value: Any, at: str) -> None:
    if _CONTROL.search("".join(part for part in parts(value) if isinstance(part, str))):
        raise GrammarError(f"json_schema: {key} at {at} holds {CONTROLS}")
    if key == "enum" and (not isinstance(value, list) or not 1 <= len(value) <= MAX_ENUM):
        raise GrammarError(f"json_schema at {at} must be a list of 1 to {MAX_ENUM} values")


def _check_word(key: str, value: Any, at: str) -> None:
    if key == "format" and value not in formats.HELD:
        known = ", ".join(formats.FORMATS)
        raise GrammarError(f"json_schema: format {value!r:.80} at {at} is not supported; {known} are")
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
