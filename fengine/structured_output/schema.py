"""JSON schemas: what can be held exactly is passed on to the matcher, everything else is refused by name. No torch.

A keyword that were ignored would let through what the schema forbids. So every keyword is known here, or refused; and
what the matcher reads in another way than a validator does is rewritten or refused:
- strings are written without \\u and \\/, so that a key cannot stand in an object twice in two spellings;
- patterns are written out (`regex.py`): `\\d`, `\\w` and `.` mean what both Python and JavaScript read;
- a date exists: 29 February in leap years only, and no year 0;
- with `properties` and no word about other ones an object has no others, as SGLang has it. Where allOf puts objects
  together, that would contradict itself: there, others stay allowed.
"""

import difflib
import json
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

from fengine.errors import GrammarError
from fengine.structured_output import bounds, references
from fengine.structured_output.characters import SURROGATE
from fengine.structured_output.regex import explicit

ANY = "$$ANY$$"  # SGLang's word for any JSON
MAX_DEPTH = 96  # of values inside one another; the matcher's own limit is 128
MAX_ENUM = 10_000
MAX_JOINED = 12  # patterns that may meet in one string: the matcher's work doubles with each
MAX_LENGTH = 1_000_000  # of strings and arrays
MAX_MULTIPLE = 1_000  # an automaton has a state for each remainder

DRAFTS = ("draft-04/schema", "draft-06/schema", "draft-07/schema", "draft/2019-09/schema", "draft/2020-12/schema")
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_ANNOTATIONS = {"title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly",
                "writeOnly", "discriminator"}  # fmt: skip
_ONE = {"items", "additionalItems", "additionalProperties"}  # a schema
_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}  # of schemas
_NAMED = {"properties", "patternProperties", "$defs", "definitions"}  # schemas by name
_VALUES = {"type", "enum", "const", "required", "minProperties", "maxProperties", "minItems", "maxItems", "minLength",
           "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
           "$ref", "$schema", "$id"}  # fmt: skip
_JOINING = {"anyOf", "oneOf", "$ref"}  # hold together with what stands beside them
_JOINED = _ONE | _JOINING | {"properties", "patternProperties", "prefixItems", "pattern", "format"}
KEYWORDS = _ONE | _LISTS | _NAMED | _VALUES
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29"
_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DATE = rf"^(?:{_YEAR}-(?:(?:0[13-9]|1[0-2])-|02-(?:[01]|2[0-8]))|{_LEAP})"


class Whitespace(NamedTuple):
    """What may stand between the parts of a JSON text. `pattern` None: nothing but one space behind comma and colon."""

    pattern: str | None = "[ ]|\\n[ ]{0,32}"  # one space, or a new line with its indentation: it never runs away


def options(whitespace: Whitespace) -> dict[str, Any]:
    """How the matcher is to read a schema. Pure."""
    strict = {"lenient": False, "coerce_one_of": False, "json_allowed_escapes": 'bfnrt"\\'}
    if whitespace.pattern is None:
        return strict | {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return strict | {"whitespace_flexible": True, "whitespace_pattern": whitespace.pattern}


def to_lark(text: str, whitespace: Whitespace) -> str:
    """The grammar for the matcher: a rule `text`. Errors: GrammarError. Pure."""
    return f"text: {as_rule(read(text), whitespace)}"


def as_rule(schema: Any, whitespace: Whitespace) -> str:
    """A checked schema as a part of a Lark rule. Errors: GrammarError. Pure."""
    if schema is False:
        raise GrammarError("json_schema is false, which nothing satisfies")
    _check_joined(schema)
    if schema is True:
        checked = {}
    else:
        checker = _Checker(schema)
        checked = checker.schema(schema, "#")
        references.check(checker.nodes)
    return "%json " + json.dumps(checked | {"x-guidance": options(whitespace)})


def read(text: str) -> Any:
    """The schema that a text holds: an object, or a bool. Errors: GrammarError. Pure."""
    if text == ANY:
        return True
    schema = strict_json(text, "json_schema")
    if not isinstance(schema, (dict, bool)):
        raise GrammarError(f"json_schema must be a JSON object, got {type(schema).__name__}")
    return schema


def strict_json(text: str, what: str) -> Any:
    """JSON without NaN, doubled keys, or more than MAX_DEPTH levels. Errors: GrammarError. Pure."""

    def constant(name: str) -> Any:
        raise GrammarError(f"{what} holds {name}, which is not JSON")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(items)) < len(items):
            ((key, _),) = Counter(key for key, _ in items).most_common(1)
            raise GrammarError(f"{what} has the key {key!r:.80} twice")
        return found

    try:
        value = json.loads(text, parse_constant=constant, object_pairs_hook=pairs)
    except GrammarError:
        raise
    except RecursionError:
        raise GrammarError(f"{what} is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise GrammarError(f"{what} is not JSON: {error!s:.200}") from None
    if any(level > MAX_DEPTH for level in _levels(value)):
        raise GrammarError(f"{what} is nested deeper than {MAX_DEPTH} levels")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise GrammarError(f"{what} holds {SURROGATE}") from None
    return value


def _levels(value: Any) -> Iterator[int]:
    todo = [(value, 1)]
    while todo:
        value, level = todo.pop()
        yield level
        if isinstance(value, (dict, list)):
            todo += [(item, level + 1) for item in (value.values() if isinstance(value, dict) else value)]


def _check_joined(document: Any) -> None:
    """Errors: GrammarError if more than MAX_JOINED patterns and formats might have to hold of one string. Pure."""
    nodes = list(_objects(document))
    if any("allOf" in node or (_JOINING & node.keys() and len(_JOINED & node.keys()) > 1) for node in nodes):
        patterns = {node[key] for node in nodes for key in ("pattern", "format") if isinstance(node.get(key), str)}
        if len(patterns) > MAX_JOINED:
            raise GrammarError(
                f"json_schema has {len(patterns)} different patterns and formats; beside allOf, or anyOf, oneOf or "
                f"$ref with other keywords next to them, at most {MAX_JOINED} are supported"
            )


class _Checker:
    """Checks and rewrites one document. Every error tells where."""

    def __init__(self, document: Any) -> None:
        self.closing = not any("allOf" in node for node in _objects(document))
        self.fractions = bounds.fractions(_objects(document))
        self.nodes: dict[str, Any] = {}

    def schema(self, value: Any, at: str) -> dict[str, Any]:
        """The schema as the matcher is to see it. Errors: GrammarError."""
        if isinstance(value, bool):
            return {} if value else {"enum": []}
        if not isinstance(value, dict):
            raise GrammarError(f"json_schema at {at} must be an object or a bool, got {type(value).__name__}")
        out: dict[str, Any] = {}
        for key, item in value.items():
            if key in _ANNOTATIONS:
                continue
            if key not in KEYWORDS:
                near = difflib.get_close_matches(key[:80], sorted(KEYWORDS), n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"supported are {', '.join(sorted(KEYWORDS))}"
                raise GrammarError(f"json_schema: the keyword {key!r:.80} at {at} is not supported; {hint}")
            out[key] = self.keyword(key, item, f"{at}/{key}")
        self.nodes[at] = self.exact(out, at)
        return out

    def keyword(self, key: str, value: Any, at: str) -> Any:
        if key in _LISTS or (key == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise GrammarError(f"json_schema at {at} must be a list of schemas")
            return [self.part(item, f"{at}/{i}") for i, item in enumerate(value)]
        if key in _ONE:
            return self.part(value, at)
        if key in _NAMED:
            if not isinstance(value, dict):
                raise GrammarError(f"json_schema at {at} must be an object of schemas")
            named = {name: self.part(item, references.pointer(at, name)) for name, item in value.items()}
            if key == "patternProperties":
                return {explicit(name, f"json_schema at {at}:", searched=True): item for name, item in named.items()}
            return named
        check_value(key, value, at)
        return explicit(value, f"json_schema at {at}:", searched=True) if key == "pattern" else value

    def part(self, value: Any, at: str) -> Any:
        """A schema inside; a bool stays one."""
        if isinstance(value, bool):
            self.nodes[at] = value
            return value
        return self.schema(value, at)

    def exact(self, out: dict[str, Any], at: str) -> dict[str, Any]:
        """`out`. What the matcher would read otherwise, rewritten or refused. Modifies: `out`."""
        if self.closing and "properties" in out and not {"additionalProperties", "patternProperties"} & set(out):
            out["additionalProperties"] = False
        bounds.hold(out, self.fractions, at)
        open_keys = out.get("additionalProperties", True) is not False or out.get("patternProperties")
        if out.get("minProperties", 0) > 1 and open_keys:
            raise GrammarError(
                f"json_schema: minProperties at {at} needs additionalProperties: false and no patternProperties, for "
                "nothing keeps a key that the schema does not name from standing there twice"
            )
        if out.get("format") in ("date", "date-time"):
            exists = {"pattern": explicit(_DATE, "date", searched=True)}
            out["allOf"] = [*out.get("allOf", ()), exists]
            self.nodes[f"{at}/allOf/{len(out['allOf']) - 1}"] = exists
        return out


def check_value(key: str, value: Any, at: str) -> None:
    """That the value of a keyword is one the matcher takes as it is meant. Errors: GrammarError. Pure."""

    def wrong(needed: str) -> GrammarError:
        return GrammarError(f"json_schema at {at} must be {needed}, got {value!r:.80}")

    integer = isinstance(value, int) and not isinstance(value, bool)
    if key in ("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength"):
        if not integer or not 0 <= value <= MAX_LENGTH:
            raise wrong(f"an integer in [0, {MAX_LENGTH}]")
    elif key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if not integer and not isinstance(value, float):
            raise wrong("a number")
    elif key == "multipleOf":
        if isinstance(value, bool) or not _is_small_multiple(value):
            raise wrong(f"a number above 0 with at most {MAX_MULTIPLE} as its digits")
    elif key in ("pattern", "format", "$ref", "$schema", "$id"):
        if not isinstance(value, str):
            raise wrong("a string")
        _check_word(key, value, at)
    elif key == "enum":
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_ENUM:
            raise GrammarError(f"json_schema at {at} must be a list of 1 to {MAX_ENUM} values")
    elif key == "required":
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise wrong("a list of names")
    elif key == "type" and not isinstance(value, str):
        if not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
            raise wrong("a type or a list of types")


def _check_word(key: str, value: str, at: str) -> None:
    if key == "format" and value not in FORMATS:
        raise GrammarError(f"json_schema: format {value!r:.80} at {at} is not supported; {', '.join(FORMATS)} are")
    if key == "$ref" and not (value == "#" or value.startswith("#/")):
        raise GrammarError(
            f"json_schema: $ref {value!r:.200} at {at} leads out of this schema, and nothing is ever fetched; put it "
            "under $defs and refer to it as #/$defs/…"
        )
    if key == "$schema" and value.rstrip("#").partition("json-schema.org/")[2] not in DRAFTS:
        raise GrammarError(f"json_schema: $schema {value!r:.80} is unknown; known are {', '.join(DRAFTS)}")
    if key == "$id" and at != "#/$id":
        raise GrammarError(f"json_schema: $id at {at} changes what $ref means; only the whole schema may have one")


def _is_small_multiple(value: Any) -> bool:
    try:
        number = Decimal(repr(value)) if isinstance(value, (int, float)) else Decimal(0)
        return 0 < number and int(number.scaleb(-int(number.normalize().as_tuple().exponent))) <= MAX_MULTIPLE
    except (InvalidOperation, OverflowError, ValueError):
        return False


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            yield value
        if isinstance(value, (dict, list)):
            todo += value.values() if isinstance(value, dict) else value
