"""JSON schemas: what can be held exactly is passed on to the matcher, everything else is refused by name. No torch.

A keyword that were ignored would let through what the schema forbids. So every keyword is known here, or refused; and
what the matcher reads in another way than a validator does is rewritten or refused:
- strings are written without \\u and \\/, so that a key cannot stand in an object twice in two spellings;
- patterns are written out (`regex.py`): `\\d`, `\\w` and `.` mean what both Python and JavaScript read;
- a date exists: 29 February in leap years only, and no year 0;
- with `properties` and no word about other ones an object has no others, as SGLang has it. Where allOf puts objects
  together, that would contradict itself: there, others stay allowed."""

import json
from typing import Any, NamedTuple

from fengine.core.json_text import parse_json
from fengine.errors import GrammarError
from fengine.structured_output import bounds, keywords, references, rewrites
from fengine.structured_output.keywords import Node, objects
from fengine.structured_output.logic import Logic
from fengine.structured_output.regex import explicit

WRAPPER = {"name", "strict", "schema", "description", "type"}  # OpenAI's, around a schema
MAX_JOINED = 12  # patterns that may meet in one string: the matcher's work doubles with each
JOINING = {"anyOf", "$ref"}  # hold together with what stands beside them
JOINED = JOINING | {"properties", "patternProperties", "prefixItems", "pattern", "format", "items", "additionalItems",
                    "additionalProperties"}  # fmt: skip
COMPACT = {"whitespace_flexible": False}  # a schema's own x-guidance: as `Whitespace(None)`
SURROGATE = "a lone surrogate, which no UTF-8 text can hold"  # in messages
ANY = "$$ANY$$"  # SGLang's word for any JSON
MAX_DEPTH = 96  # of values inside one another; the matcher's own limit is 128


class Whitespace(NamedTuple):
    """What may stand between the parts of a JSON text. `pattern` None: nothing but one space behind comma and colon."""

    pattern: str | None = "[ ]|\\n[ ]{0,32}"  # one space, or a new line with its indentation: it never runs away

    def options(self) -> dict[str, Any]:
        """How the matcher is to read a schema. Pure."""
        strict = {"lenient": False, "coerce_one_of": False, "json_allowed_escapes": 'bfnrt"\\'}
        if self.pattern is None:
            return strict | {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        return strict | {"whitespace_flexible": True, "whitespace_pattern": self.pattern}


def to_lark(text: str, whitespace: Whitespace) -> str:
    """The grammar for the matcher: a rule `text`. Errors: GrammarError. Pure."""
    found = read(text)
    if isinstance(found, dict) and found.get("x-guidance") == COMPACT:
        found, whitespace = {key: value for key, value in found.items() if key != "x-guidance"}, Whitespace(None)
    return f"text: {as_rule(found, whitespace)}"


def as_rule(schema: Any, whitespace: Whitespace) -> str:
    """A schema as a part of a Lark rule. Errors: GrammarError. Pure but for the log."""
    if schema is False:
        raise GrammarError("json_schema is false, which nothing satisfies")
    exact = {} if schema is True else _exact(references.read(schema))
    return "%json " + json.dumps(exact | {"x-guidance": whitespace.options()})


def read(text: str) -> Any:
    """The schema that a text holds: an object, or a bool. Errors: GrammarError. Pure."""
    if text == ANY:
        return True
    schema = strict_json(text, "json_schema")
    if not isinstance(schema, (dict, bool)):
        raise GrammarError(f"json_schema must be a JSON object, got {type(schema).__name__}")
    if isinstance(schema, dict) and set(schema) <= WRAPPER and "name" in schema and "schema" in schema:
        return schema["schema"] if isinstance(schema["schema"], (dict, bool)) else {"schema": schema["schema"]}
    return schema


def strict_json(text: str, what: str) -> Any:
    """JSON without NaN, doubled keys, or more than MAX_DEPTH levels. Errors: GrammarError. Pure."""
    try:
        value = parse_json(text)
        if _depth(value) > MAX_DEPTH:
            raise RecursionError
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise GrammarError(f"{what} is nested deeper than {MAX_DEPTH} levels") from None
    except UnicodeEncodeError:
        raise GrammarError(f"{what} holds {SURROGATE}") from None
    except ValueError as error:
        raise GrammarError(f"{what} is not JSON: {error!s:.200}") from None
    return value


def _depth(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inside), default=0)


def _exact(schema: Node) -> Node:
    """A checked schema as the matcher is to see it: what it would read otherwise is rewritten or refused. Errors:
    GrammarError. Pure."""
    logic, fractions, nodes = Logic(schema), bounds.fractions(objects(schema)), {}
    closing = not any(key in node for node in objects(schema) for key in rewrites.OPENING)

    def visit(value: Any, at: str) -> Any:
        if isinstance(value, dict):
            value = rewrites.rewritten(logic, value)
            keywords.refuse_rest(value, at)
            value = keywords.mapped(value, visit, at)
            if closing and "properties" in value and not {"additionalProperties", "patternProperties"} & set(value):
                value["additionalProperties"] = False  # all that it names are all that it has
            _hold(value, at)
            bounds.hold(value, fractions, at)
        nodes[at] = value
        return value

    exact = visit(schema, "#")
    _check_joined(exact)
    references.check_finite(nodes)
    return exact


def _check_joined(document: Any) -> None:
    """Errors: GrammarError if more than MAX_JOINED patterns and formats might have to hold of one string. Pure."""
    nodes = list(objects(document))
    if any("allOf" in node or (JOINING & node.keys() and len(JOINED & node.keys()) > 1) for node in nodes):
        patterns = {node[key] for node in nodes for key in ("pattern", "format") if isinstance(node.get(key), str)}
        if len(patterns) > MAX_JOINED:
            raise GrammarError(
                f"json_schema has {len(patterns)} different patterns and formats; beside allOf, or anyOf, oneOf or "
                f"$ref with other keywords next to them, at most {MAX_JOINED} are supported"
            )


def _hold(node: Node, at: str) -> None:
    """Writes patterns out. Modifies: node. Errors: GrammarError."""
    what = f"json_schema at {at}:"
    if "pattern" in node:
        node["pattern"] = explicit(node["pattern"], what, searched=True)
        keywords.check_pattern(node["pattern"], at)
    if named := node.get("patternProperties"):
        wide = node.get("additionalProperties") is not False  # a name that is missed would be an additional one
        written = {explicit(name, what, searched=True, widest=wide): item for name, item in named.items()}
        node["patternProperties"] = written
    if node.get("minProperties", 0) > 1 and (named or node.get("additionalProperties", True) is not False):
        raise GrammarError(
            f"json_schema: minProperties at {at} needs additionalProperties: false and no patternProperties, for "
            "nothing keeps a key that the schema does not name from standing there twice"
        )
