"""Grammars without a model: every text that they allow is right, by `re`, by jsonschema, by a recogniser of EBNF."""

import itertools
import json
import random
import re
import sys
from typing import Any

import numpy as np
import pytest
import tokenizer_cases
from grammar_walks import END, TOKENS, accepts, allowed, compiled, core_seconds, cursor_of, masks, walk
from hypothesis import given, settings
from hypothesis import strategies as st

from fengine.core.masks import MaskedDraft
from fengine.core.request import Request, SamplingParams
from fengine.errors import GrammarError, MissingExtraError, UnsupportedFeatureError
from fengine.structured_output.backend import Grammar, Grammars, Source, Vocabulary
from fengine.structured_output.masks import AT_HAND, Cursor, fill
from fengine.structured_output.regex import explicit
from fengine.structured_output.schema import Whitespace
from fengine.tokenizer.detokenizer import token_texts
from fengine.tokenizer.stop_regex import StopRegex
from fengine.tokenizer.tokenizer import Tokenizer

jsonschema = pytest.importorskip("jsonschema")

# -- regular expressions -----------------------------------------------------------------------------------------------

CHARACTERS = [
    "a",
    "b",
    "[ab]",
    "[^a]",
    "c",
    r"\d",
    r"\w",
    ".",
    r"\s",
    "é",
    "[a-c]",
    r"\.",
    r"\S",
    r"\W",
    "(?i:k)",
    r"[^\w]",
]
PATTERNS = st.recursive(
    st.sampled_from(CHARACTERS),
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("(?:{}){}".format, inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "*?"])),
    ),
    max_leaves=8,
)
SHORT = ["".join(x) for n in range(4) for x in itertools.product("abc1 _K", repeat=n)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(PATTERNS, st.integers(0, 1000))
def test_a_text_of_a_regex_matches_it_in_every_reading(pattern: str, seed: int) -> None:
    grammar, draw = compiled("regex", pattern), random.Random(seed)
    text = walk(grammar, seed, 60)
    for flags in (0, re.ASCII):
        assert text is None or re.fullmatch(pattern, text, flags), (pattern, text)
    for short in draw.sample(SHORT, 25):
        assert accepts(grammar, short) == bool(re.fullmatch(pattern, short)), (pattern, short)


@pytest.mark.parametrize(
    "pattern,right,wrong",
    [
        ("^abc$", "abc", "abcd"),
        ("(^a|b)c$", "bc", "cb"),
        ("a*a", "aaa", "ab"),
        ("(?:ab|abc)c", "abc", "ab"),
        ("", "", "a"),
        ("(a+)+b", "aaab", "aaa"),
        ("[^\\n]{3}", "é日本", "ab"),
        *((".", "\v", end) for end in "\n\r\u2028\u2029"),  # a dot is none of them here or in JavaScript
        ("(?P<x>[a-z]+)\\.\\/", "ab./", "ab.\\"),
    ],
)
def test_regexes_by_example(pattern: str, right: str, wrong: str) -> None:
    grammar = compiled("regex", pattern)
    assert accepts(grammar, right) and not accepts(grammar, wrong)


@pytest.mark.filterwarnings("error")
def test_a_pattern_that_python_warns_of_is_silent_and_means_what_it_means_today() -> None:
    assert explicit("[[a]b", "regex") == r"[\x{5b}a]b" and StopRegex("[[a]b").size
    with pytest.raises(GrammarError, match="look-around"):
        explicit("a(?<=b+)", "regex")


# -- EBNF --------------------------------------------------------------------------------------------------------------


def matches(rules: dict[str, Any], node: Any, text: str, at: int) -> set[int]:
    """Where `node` can end that begins at `at`: the definition, spelt out. Rules here never begin with themselves."""
    kind, *rest = node
    if kind == "text":
        return {at + len(rest[0])} if text.startswith(rest[0], at) else set()
    if kind == "class":
        return {at + 1} if at < len(text) and text[at] in rest[0] else set()
    if kind == "rule":
        return matches(rules, rules[rest[0]], text, at)
    if kind == "or":
        return set().union(*(matches(rules, item, text, at) for item in rest))
    ends = {at}
    if kind == "then":
        for item in rest:
            ends = set().union(*(matches(rules, item, text, end) for end in ends))
        return ends
    item, least, most = rest  # "many"
    found, seen = set(ends) if least == 0 else set(), {at}
    for n in range(1, most + 1):
        ends = set().union(*(matches(rules, item, text, end) for end in ends))
        found |= ends if n >= least else set()
        if not (ends := ends - seen) and n >= least:
            break
        seen |= ends if n >= least else set()
    return found


def written(node: Any) -> str:
    kind, *rest = node
    if kind == "text":
        return json.dumps(rest[0])
    if kind in ("class", "rule"):
        return f"[{rest[0]}]" if kind == "class" else rest[0]
    if kind == "many":
        return f"({written(rest[0])}){{{rest[1]},{rest[2]}}}"
    return "(" + (" | " if kind == "or" else " ").join(map(written, rest)) + ")"


LEAVES = st.one_of(
    st.builds(lambda t: ("text", t), st.text("ab", min_size=1, max_size=3)),
    st.builds(lambda t: ("class", "".join(sorted(t))), st.sets(st.sampled_from("abc"), min_size=1)),
)
NODES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda a, b: ("or", a, b), inner, inner),
        st.builds(lambda a, b: ("then", a, b), inner, inner),
        st.builds(lambda a, low, more: ("many", a, low, low + more), inner, st.integers(0, 2), st.integers(0, 2)),
    ),
    max_leaves=6,
)
WORDS = ["".join(x) for n in range(7) for x in itertools.product("abc", repeat=n)]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(NODES, NODES, st.booleans(), st.integers(0, 1000))
def test_ebnf_is_what_it_says(first: Any, second: Any, recursive: bool, seed: int) -> None:
    """Ambiguity and all: in a recursive grammar, too, where one word is the beginning of another."""
    more = ("or", second, ("then", ("class", "abc"), ("rule", "root"))) if recursive else second
    rules = {"root": ("then", first, ("many", ("rule", "r_2"), 0, 2)), "r_2": more}
    text = "\n".join(f"{name} ::= {written(node)} # a rule" for name, node in rules.items())
    if recursive and 0 in matches(rules, first, "", 0):
        return  # it might begin with itself
    grammar = compiled("ebnf", text)
    for word in random.Random(seed).sample(WORDS, 40):
        assert accepts(grammar, word) == (len(word) in matches(rules, rules["root"], word, 0)), (text, word)
    if (found := walk(grammar, seed, 40)) is not None:
        assert len(found) in matches(rules, rules["root"], found, 0)


@pytest.mark.parametrize(
    "text,right,wrong",
    [
        ('root ::= "(" root ")" | [0-9]+', "((12))", "((12)"),
        ('root ::= item ("," item)*\nitem ::= [a-z]+', "ab,c", "ab,"),
        ("root ::= 'a\\'b' [\\x41-\\u0043] . # end", "a'bB!", "a'bD!"),
        ("root ::= [^a-c\\]\\n]{2,3}", "é€", "]x"),
        ('root ::= root "a" | "b"', "baaa", "ab"),
        ('root ::= b "y" | "x"\nb ::= "z"? root', "zxyy", "zx"),
        ('root ::= root "+" root | [0-9]', "1+2+3", "1+"),
        ('root ::= a? root "b" | "c"\na ::= "a"', "aacbb", "aacba"),
        ('root ::= "a"? root2\nroot2 ::= "b" | "a" root2', "aaab", "aaa"),
        ('root ::= "\\"" ([^"\\\\] | "\\\\" ["\\\\/bfnrt])* "\\""', '"a\\n"', '"a\\x"'),
    ],
)
def test_ebnf_by_example(text: str, right: str, wrong: str) -> None:
    grammar = compiled("ebnf", text)
    assert accepts(grammar, right) and not accepts(grammar, wrong)


# -- JSON schemas ------------------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.builds(lambda a, b: {"type": "integer", "minimum": a, "maximum": a + b}, st.integers(-99, 99),
              st.integers(0, 999)),
    st.builds(lambda a, b: {"type": "number", "exclusiveMinimum": a / 4, "maximum": a / 4 + b}, st.integers(-9, 9),
              st.integers(1, 99)),
    st.builds(lambda a, b: {"type": "string", "minLength": a, "maxLength": a + b}, st.integers(0, 3),
              st.integers(0, 5)),
    st.sampled_from([
        {"type": "integer", "multipleOf": 7}, {"type": "boolean"}, {"type": ["null", "string"], "maxLength": 3},
        {"enum": [1, "é\"\n", None, {"k": [2.5]}]}, {"const": {"a": [1, False]}}, {}, True,
        *({"type": "string", "pattern": p} for p in ("^[a-z]+$", r"\d{2}", "^a|b$", r"^[^a-z\s]{1,4}$", r"^\w.\w$")),
        *({"type": "string", "format": f} for f in ("date", "ipv4", "ipv6", "uuid", "email", "date-time")),
    ]),
)  # fmt: skip
NAMES = st.sampled_from(["a", "b", "c d", 'q"', "é", "x1"])


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(properties: dict[str, Any], needed: int, others: Any, pattern: bool) -> dict[str, Any]:
        out = {"type": "object", "properties": properties, "required": list(properties)[:needed]}
        out |= {} if others is None else {"additionalProperties": others}
        return out | ({"patternProperties": {"^x[0-9]+$": {"type": "integer"}}} if pattern else {})

    named = st.dictionaries(NAMES, inner, max_size=3)
    return st.builds(build, named, st.integers(0, 3), st.one_of(st.none(), st.booleans(), inner), st.booleans())


SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(lambda i, a, b: {"type": "array", "items": i, "minItems": a, "maxItems": a + b}, inner,
                  st.integers(0, 2), st.integers(0, 2)),
        st.builds(lambda i, j: {"type": "array", "prefixItems": [i], "items": j}, inner,
                  st.one_of(inner, st.just(False))),
        st.builds(lambda i, j: {"anyOf": [i, j]}, inner, inner),
        st.builds(lambda i, j: {"allOf": [i, j]}, inner, inner),
        st.builds(lambda i: {"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}, "v": i}, "required": ["next"]}}}, SCALARS),
    ),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=120, deadline=None, derandomize=True)
@given(SCHEMAS, st.integers(0, 1000))
def test_a_text_of_a_schema_satisfies_it(schema: Any, seed: int) -> None:
    if not isinstance(schema, dict) or (set(schema) != {"$ref", "$defs"} and "$ref" in json.dumps(schema)):
        return  # definitions stand at the top only
    try:
        grammar = compiled("json_schema", json.dumps(schema))
    except GrammarError:
        return  # unsatisfiable; `test_most_schemas_can_be_held` sees that it does not happen often
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for i in range(3):
        if (text := walk(grammar, seed + i)) is not None:
            validator.validate(json.loads(text))


def test_most_schemas_can_be_held() -> None:
    schemas = [{"type": "object", "properties": {"a": {"type": "string"}, "b": {"enum": [1, 2]}}, "required": ["b"]},
               {"type": "array", "items": {"$ref": "#/$defs/p"}, "$defs": {"p": {"type": "number"}}}, {},
               {"title": "T", "description": "d", "type": "integer", "default": 3, "examples": [1], "$comment": "c"},
               {"oneOf": [{"type": "object", "properties": {"k": {"const": c}}, "required": ["k"]}
                          for c in "ab"]}]  # fmt: skip
    for schema in schemas:
        texts = [walk(compiled("json_schema", json.dumps(schema)), seed) for seed in range(10)]
        assert any(texts)
        for text in filter(None, texts):
            jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    "schema,right,wrong",
    [
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"a":1}', '{"a":1,"c":2}'),
        ({"properties": {"a": {"type": "integer"}}, "additionalProperties": True}, '{"c":2}', '{"\\u0061":"x"}'),
        ({"type": "string", "format": "date"}, '"2000-02-29"', '"1900-02-29"'),
        ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", "[1,  2]"),
        ({"type": "array", "items": {"type": "integer"}}, "[\n  1\n]", "[1] "),
        ({"type": "string", "maxLength": 2}, '"é日"', '"abc"'),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0.5", "0"),
        ({"type": "number", "exclusiveMinimum": 9, "exclusiveMaximum": 9.99}, "9.01", "9"),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, "-0.001", "-0"),
        ({"minimum": -1.97, "allOf": [{"type": "number", "exclusiveMaximum": -1}]}, "-1.01", "-1"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "0.001", "0"),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, "9007199254740993", "-1"),
        ({"type": "object", "required": ["n"], "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
         '{"n": {"n": null}}', '{"n": {}}'),
        ({"type": "array", "items": {"$ref": "#/$defs/a~1b%25/items"}, "$defs": {"a/b%": {"items": {"const": 5}}}},
         "[5]", "[6]"),
        ({"type": "array", "minItems": 1, "prefixItems": [{"format": "date"}, {"$ref": "#"}]}, "[0]", "[]"),
    ],
)  # fmt: skip
def test_schemas_by_example(schema: Any, right: str, wrong: str) -> None:
    grammar = compiled("json_schema", json.dumps(schema))
    assert accepts(grammar, right) and not accepts(grammar, wrong)


KINDS = {kind: {"type": "object", "required": ["kind", "n"], "properties": {"kind": {"const": kind}, "n": {"type": t}}}
         for kind, t in (("cat", "integer"), ("dog", "boolean"))}  # fmt: skip
REWRITTEN: list[tuple[Any, list[Any], list[Any]]] = [  # schema, values that satisfy it, values that do not
    ({"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "discriminator": {"propertyName": "kind"},
      "$defs": KINDS}, [{"kind": "cat", "n": 3}, {"kind": "dog", "n": True}], [{"kind": "cat", "n": True}, {"n": 3}]),
    ({"oneOf": [{"type": "string"}, {"enum": [1, 2]}, {"type": "array"}]}, ["a", 2, []], [3, None]),
    ({"not": {"type": ["string", "object"]}}, [1, None, [], True], ["a", {}]),
    ({"properties": {"a": {}, "b": {}}, "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}]),
    ({"enum": ["a", "b", 1, True], "not": {"enum": ["b", 1.0]}}, ["a", True], ["b", 1]),
    ({"properties": {"k": {"enum": ["a", "b"]}, "x": {"type": "integer"}}, "required": ["k"],
      "if": {"properties": {"k": {"const": "a"}}}, "then": {"required": ["x"]}, "else": {"not": {"required": ["x"]}}},
     [{"k": "a", "x": 1}, {"k": "b"}], [{"k": "a"}, {"k": "b", "x": 1}]),
    ({"if": {"type": "number"}, "then": {"minimum": 5}}, [5, 7, "a"], [3]),
    ({"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}], [{"a": 1}]),
    ({"dependencies": {"a": ["b"], "c": {"properties": {"d": {"type": "null"}}}}},
     [{}, {"b": 1}, 3, {"d": None, "c": 1}], [{"a": 1}, {"c": 1, "d": 2}]),
    ({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {"type": "integer"}},
     [{}, {"ab": 1}], [{"A": 1}, {"ab": "x"}]),
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, [{"a": 1}, {}], [{"c": 1}]),
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "properties": {"a": {"type": "null"}}},
     [{"a": None}, {"b": 1}], [{"a": 1}, {"c": 1}]),
    ({"type": "string", "format": "byte", "pattern": "^Y"}, ["YQ==", "YWJj"], ["aWJj", "Y"]),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}], "oneOf": [{"type": "integer"}, {"type": "null"}]},
     [1], ["a", None]),
    ({"type": "object", "patternProperties": {"^\\d$|^.a$": {"type": "integer"}}},
     [{"٣": 1}, {"b": "x"}, {"1\n": 1}], [{"٣": "x"}, {"1": "x"}, {"1\n": "x"}, {"\ra": "x"}]),
    ({"type": "object", "patternProperties": {"(?i)^[^k\\W]$": {"type": "integer"}}, "additionalProperties": False},
     [{"a": 1}], [{"é": 1}, {"k": 1}, {"a\n": 1}]),
    ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
     [[], ["b", "a"], ["c", "a", "b"]], [["a", "a"], ["d"]]),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 1}, [["a"]], [["a", "a"]]),
    ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
    ({"minimum": 3, "exclusiveMinimum": True, "type": "integer"}, [4], [3]),
    ({"type": "string", "maxLength": 2.0}, ["ab"], ["abc"]),
    ({"name": "answer", "strict": True, "schema": {"type": "integer"}}, [1], ["a"]),
    ({"type": "integer", "format": "int32"}, [2**31 - 1, -5], [2**31, -(2**31) - 1]),
    ({"type": "string", "format": "time"}, ["23:59:59Z", "01:02:03.5+01:00"], ["23:59:60Z", "22:58:60Z", "1:2:3Z"]),
    ({"type": "string", "format": "date"}, ["0004-02-29", "2400-02-29"], ["0000-02-29", "1900-02-29", "2001-02-29"]),
    ({"type": "string", "format": "date-time"}, ["2000-02-29T00:00:00Z"], ["1900-02-29T00:00:00Z",
     "1998-12-31T23:58:60Z", "2000-01-01 00:00:00Z", "2000-06-31T00:00:00Z"]),
    ({"type": "string", "format": "hostname"}, ["a", "www.example.com", "x-1.y--z", "a" * 63 + ".org"],
     ["-a", "a-", "a..b", "a" * 64, ".".join(["a" * 60] * 5), "xn--X", "ab--c", "a.", "ab--"]),
    ({"type": "string", "format": "byte"}, ["", "YQ==", "YWJj"], ["YQ", "Y", "a=b="]),
    ({"type": "string", "format": "json-pointer"}, ["", "/a/b~0~1", "/"], ["a", "/~", "/~2"]),
    ({"type": "string", "format": "uri-reference"}, ["a/b?x=1#y", "/a", "https://a.org/b", ""],
     ["a b", "\\\\a", "#a#b"]),
    ({"if": {"minimum": 3}, "then": {"type": "integer"}}, [4, 2.5], [3.5, "a"]),
    ({"type": "string", "not": {"anyOf": [{"maxLength": 1}, {"minLength": 4}]}}, ["ab", "abc"], ["a", "abcd"]),
    ({"type": "number", "not": {"minimum": 3}}, [2.5], [3]),
    ({"type": "number", "not": {"exclusiveMinimum": 3}}, [3], [3.5]),
    ({"type": "number", "not": {"maximum": 3}}, [3.5], [3]),
    ({"type": "number", "not": {"exclusiveMaximum": 3}}, [3], [2.5]),
    ({"type": "array", "items": {"type": "null"}, "not": {"minItems": 2}}, [[], [None]], [[None, None]]),
    ({"type": "array", "items": {"type": "null"}, "not": {"maxItems": 1}}, [[None, None]], [[], [None]]),
    ({"oneOf": [{"type": "number", "minimum": 2}, {"type": "number", "maximum": 5}]}, [1, 7, 5.5], [3, 2, 5, "a"]),
    ({"oneOf": [True, {"type": "number"}]}, ["a", None], [3]),
    ({"type": "string", "contentEncoding": "base64"}, ["YQ=="], ["Y", "%"]),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": {}, "b": {}}},
     [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
    ({"oneOf": [{"$ref": "#/$defs/n"}, {"const": 1}], "$defs": {"n": {"enum": [1, 2]}}}, [2], [1, 3]),
    ({"type": "object", "properties": {"a": {"$ref": "#/components/schemas/a b"}},
      "components": {"schemas": {"a b": {"type": "array", "items": {"$ref": "#/components/schemas/c"}},
                                 "c": {"enum": [1, 2], "x-note": 3}}}}, [{"a": [1, 2]}, {}], [{"a": [3]}, {"a": 1}]),
    ({"type": "array", "uniqueItems": True, "items": {"enum": ["a", "bb", "c"], "maxLength": 1}}, [["c", "a"]],
     [["bb"], ["a", "a"]]),
    ({"type": "string", "format": "regex"}, ["^ab+\\d$", "(a|b)*"], ["(a", "a**", "\\", "[z-a]"]),
    ({"type": "string", "format": "color"}, ["red"], [1]),
    ({"type": "integer", "format": "uint8"}, [0, 255], [-1, 256]),
    ({"type": "string", "x-order": 3, "order": 4, "self": 1, "_y": 2, "id": "me", "note": ""}, ["a"], [1]),
]  # fmt: skip


@pytest.mark.parametrize("schema,right,wrong", REWRITTEN, ids=[str(i) for i in range(len(REWRITTEN))])
def test_what_the_matcher_does_not_know_is_rewritten(schema: Any, right: list[Any], wrong: list[Any]) -> None:
    grammar = compiled("json_schema", json.dumps(schema))
    for values, satisfy in ((right, True), (wrong, False)):
        for value in values:
            assert accepts(grammar, json.dumps(value, ensure_ascii=False)) == satisfy, value


def small(draw: random.Random, depth: int = 0) -> Any:
    """A random schema of the keywords that are rewritten, over few names and values."""
    scalar = draw.choice(
        [{"type": "integer"}, {"enum": ["x", "y", 1]}, {"const": "x"}, {"type": ["string", "null"]}, {}]
    )
    if depth > 2 or draw.random() < 0.2:
        return scalar
    names = draw.sample("abc", draw.randint(1, 3))
    node: dict[str, Any] = {"type": "object", "properties": {name: small(draw, depth + 1) for name in names}}
    if draw.random() < 0.5:
        node["required"] = names[:1]
    if draw.random() < 0.3:
        node["additionalProperties"] = draw.choice([True, False, {"type": "integer"}])
    about = draw.choice(
        [{"required": [draw.choice("abc")]}, {"properties": {names[0]: {"const": "x"}}}, {"type": "null"}]
    )
    for key, value in {
        "not": about, "if": about, "oneOf": [small(draw, depth + 1), small(draw, depth + 1)],
        "dependentRequired": {draw.choice("abc"): [draw.choice("abc")]},
        "dependentSchemas": {draw.choice("abc"): small(draw, 2)}, "propertyNames": {"enum": ["a", "b", "c"]},
    }.items():  # fmt: skip
        if draw.random() < 0.2:
            node[key] = value
    if "if" in node:
        node |= {"then": small(draw, depth + 1), "else": {"required": [draw.choice("abc")]}}
    return node


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_texts_of_rewritten_schemas_satisfy_them(seed: int) -> None:
    schema = small(random.Random(seed))
    try:
        grammar = compiled("json_schema", json.dumps(schema))
    except GrammarError:
        return
    for i in range(4):
        try:
            text = walk(grammar, i, 80)
        except GrammarError:  # nothing left to draw, where two parts contradict each other
            continue
        if text is not None:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def test_whitespace_is_a_policy() -> None:
    schema = json.dumps({"type": "array", "items": {"type": "integer"}})
    one, tabs = (compiled("json_schema", schema, Whitespace(pattern)) for pattern in (None, "\\t"))
    assert accepts(one, "[1, 2]") and not accepts(one, "[1,2]") and not accepts(one, "[1,\n2]")
    assert accepts(tabs, "[1,\t2]") and accepts(tabs, "[1,2]") and not accepts(tabs, "[1, 2]")
    anything = compiled("json_schema", "$$ANY$$")
    assert accepts(anything, '[{"a": [null]}, 1.5e3]') and not accepts(anything, "[1")


def test_structural_tags() -> None:
    tags = [{"begin": "<f=add>", "schema": {"type": "object", "properties": {"a": {"type": "integer"}},
             "required": ["a"]}, "end": "</f>"},
            {"begin": "<f=no>", "schema": {"type": "null"}, "end": ""}]  # fmt: skip
    grammar = compiled("structural_tag", json.dumps({"structures": tags, "triggers": ["<f="]}))
    for right in ("hello", 'x <f=add>{"a":1}</f> bye', '<f=no>null<f=add>{"a": 3}</f>', ""):
        assert accepts(grammar, right), right
    for wrong in ("<f=x", "<f=add>{}</f>", '<f=add>{"a":1}', "hi <f="):
        assert not accepts(grammar, wrong), wrong


FUNCTION = {"begin": "<f=add>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": "</f>"}
THOUGHT = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}
YES = {"type": "regex", "pattern": "yes|no"}
SOME = {"type": "triggered_tags", "triggers": ["<f="], "tags": [FUNCTION]}
FORMATS: list[tuple[Any, list[str], list[str]]] = [
    (SOME, ["", "hi", "a <f=add>3</f> b<f=add>4</f>"], ["<f=", "<f=add>x</f>", "<f=add>3"]),
    (SOME | {"at_least_one": True}, ["<f=add>3</f> b"], ["", "hi"]),
    (SOME | {"at_least_one": True, "stop_after_first": True}, ["a<f=add>3</f>"], ["", "<f=add>3</f> b"]),
    (THOUGHT, ["<t>a <b</t>", "<t></t>"], ["<t>", "<t></t>a</t>", "a"]),
    ({"type": "sequence", "elements": [THOUGHT, SOME]}, ["<t>x</t>", "<t>x</t>y <f=add>1</f>"], ["y", "<t>x</t><f=a"]),
    ({"type": "or", "elements": [YES, {"type": "const_string", "value": "may/be"}]}, ["yes", "may/be"], ["", "yesno"]),
    ({"type": "tags_with_separator", "tags": [FUNCTION], "separator": ", "}, ["", "<f=add>1</f>, <f=add>2</f>"],
     ["<f=add>1</f>,", "<f=add>1</f><f=add>2</f>"]),
    ({"type": "any_text"}, ["", "a\nb"], []),
]  # fmt: skip


@pytest.mark.parametrize("format,right,wrong", FORMATS, ids=[str(i) for i in range(len(FORMATS))])
def test_structural_tags_of_the_new_form(format: Any, right: list[str], wrong: list[str]) -> None:
    grammar = compiled("structural_tag", json.dumps({"type": "structural_tag", "format": format}))
    for text in right:
        assert accepts(grammar, text), text
    for text in wrong:
        assert not accepts(grammar, text), text


# -- what is refused ---------------------------------------------------------------------------------------------------

NESTED = json.dumps({"type": "array"})[:-1] + ', "items": '
BAD = [
    ("json_schema", "not json", "is not JSON"),
    ("json_schema", "[1]", "must be a JSON object"),
    ("json_schema", '{"a": 1, "a": 2}', "twice"),
    ("json_schema", '{"minimum": NaN}', "NaN"),
    ("json_schema", "[" * 10_000, "nested deeper|is not JSON"),
    ("json_schema", NESTED * 10_000 + "{}" + "}" * 10_000, "more than the limit|nested deeper"),
    ("json_schema", NESTED * 200 + "{}" + "}" * 200, "nested deeper"),
    ("json_schema", " " * 10_000_000 + "{}", "more than the limit"),
    *(("json_schema", json.dumps({"type": "object", key: value}), f"keyword '{key}' at # is not supported")
      for key, value in {"uniqueItems": True, "not": {"pattern": "a"}, "if": {"pattern": "a"}, "contains": {},
                         "propertyNames": {"minLength": 2}, "x-guidance": {"lenient": True}, "anyof": [], "require": [],
                         "ref": "#", "dependantRequired": {}, "Not": {}, "enums": [1], "minLenght": 3}.items()),
    ("json_schema", '{"properties": {"c": {}}, "propertyNames": {"enum": ["a"]}}', "'propertyNames' at # is not"),
    *(("json_schema", json.dumps({"propertyNames": {"$ref": "#/$defs/n", "pattern": "^b"}, "$defs": {"n": names}}),
       "'propertyNames' at # is not") for names in ({"pattern": "a$"}, True)),
    ("json_schema", json.dumps({"propertyNames": {"pattern": "^b"}, "properties": {"b": {"type": "string"}},
                                "additionalProperties": {"type": "integer"}}), "'propertyNames' at # is not"),
    ("json_schema", '{"unevaluatedProperties": false, "anyOf": [{}]}', "'unevaluatedProperties' at # is not supported"),
    ("json_schema", '{"type": "object", "not": {}}', "Unsatisfiable|nothing satisfies"),
    *(("json_schema", json.dumps(schema), "control characters, which JSON writes as")
      for schema in ({"const": "a\x07b"}, {"enum": ["ok", {"a": ["\x00"]}]}, {"pattern": "^a\x07b$"},
                     {"pattern": "[\\x7f]"}, {"properties": {"x": {"const": {"\x1f": 1}}}})),
    ("json_schema", '{"properties": {"a": {"items": {"uniqueItems": true}}}}', "'uniqueItems' at #/properties/a/items"),
    ("json_schema", '{"type": "array", "items": {"enum": [1, 2, 3, 4, 5, 6]}, "uniqueItems": true}', "uniqueItems"),
    ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "Unsatisfiable"),
    ("json_schema", "false", "nothing satisfies"),
    ("json_schema", '{"enum": []}', "1 to 10000"),
    ("json_schema", json.dumps({"enum": list(range(20_000))}), "1 to 10000"),
    ("json_schema", '{"$ref": "http://example.com/x.json"}', "nothing is ever fetched"),
    ("json_schema", '{"$ref": "file:///etc/passwd"}', "nothing is ever fetched"),
    ("json_schema", '{"$ref": "#/$defs/none"}', "no schema stands"),
    ("json_schema", f'{{"$ref": "#/components/{"1" * 5000}", "components": [{{}}]}}', "no schema stands"),
    ("json_schema", '{"properties": {"a": {"$ref": "#/properties"}, "uniqueItems": true}}', "no schema stands"),
    ("json_schema", '{"items": {"$ref": "#/const"}, "const": {"uniqueItems": true}}', "no schema stands"),
    ("json_schema", '{"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}', "itself"),
    ("json_schema", '{"type": "object", "properties": {"a/b": {"$ref": "#"}}, "required": ["a/b"]}', "no finite text"),
    ("json_schema", '{"type": "array", "minItems": 2, "prefixItems": [{}], "items": {"$ref": "#"}}', "no finite text"),
    ("json_schema", '{"type": "array", "minItems": 1, "prefixItems": [{"$ref": "#"}, {}]}', "no finite text"),
    ("json_schema", '{"$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}]}}}', "itself"),
    ("json_schema", '{"type": "strin"}', "Invalid type"),
    ("json_schema", '{"type": "string", "format": "uri-template"}', "format 'uri-template'"),
    ("json_schema", '{"properties": {"a": {"not": {"$ref": "#"}}}}', "'not' at #/properties/a is not supported"),
    ("json_schema", '{"not": {"$ref": "#/$defs/a"}, "$defs": {"a": {"if": {"$ref": "#/$defs/a"}}}}', "not supported"),
    ("json_schema", '{"oneOf": [true, true]}', "Unsatisfiable|nothing satisfies"),
    ("json_schema", '{"contentMediaType": "application/json"}', "contentMediaType at # .* cannot be held"),
    ("json_schema", '{"type": "string", "format": "datetime"}', "format 'datetime'"),
    *(("json_schema", json.dumps(schema), told) for schema, told in (  # of wrong types, wherever they stand
        ({"format": []}, "at #/format must be a string"), ({"oneOf": [{"type": 5}]}, "at #/oneOf/0/type must be a"),
        ({"propertyNames": {"pattern": 5}}, "at #/propertyNames/pattern must be a string"),
        ({"properties": 5}, "at #/properties must be an object"), ({"allOf": 5}, "at #/allOf must be a list"),
        ({"not": {"properties": {"a/b": {"enum": 3}}}}, "at #/not/properties/a~1b/enum must be a list"),
        ({"if": {"minimum": "3"}}, "at #/if/minimum must be a number"), ({"items": [5]}, "at #/items must be"),
        ({"dependencies": {"a": [1]}}, "at #/dependencies must be"), ({"then": {"required": "a"}}, "#/then/required"),
        ({"$defs": {"x": {"minLength": 1.5}}}, "at #/\\$defs/x/minLength must be"), ({"uniqueItems": "no"}, "true or"),
        ({"dependentRequired": {"a": "b"}}, "lists of names"), ({"anyOf": [{}, None]}, "a list of schemas"),
        ({"unevaluatedItems": []}, "an object or a bool"), ({"maxItems": 1e300}, "an integer in"),
        ({"$ref": "#/x/y", "x": {"y": {"type": 3}}}, "/x~1y/type must be"), ({"$ref": 5}, "must be a string"),
        ({"$ref": "#/x/y", "x": {"y": 3}}, "no schema stands"), ({"const": 1, "not": {"contains": {}}}, "'contains'"),
        ({"multipleOf": 0}, "a number above 0"), ({"multipleOf": "3"}, "a number above 0"),
        ({"type": [[]]}, "a type or a list"), ({"exclusiveMinimum": None}, "must be a number"))),
    ("json_schema", '{"type": "string", "pattern": "(?=a)b"}', "look-around"),
    ("json_schema", '{"type": "integer", "multipleOf": 999983}', "multipleOf"),
    ("json_schema", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "exclude one another; give them"),
    *(("json_schema", json.dumps({"type": kind} | bound), "to be held exactly") for kind, bound in (
        ("integer", {"minimum": 1e20}), ("integer", {"maximum": -(2**63) - 1}), ("integer", {"minimum": 2**53 + 1}),
        (["integer", "null"], {"exclusiveMinimum": 2**63}), ("number", {"maximum": 2**53 + 3}),
        ("number", {"maximum": -(10**400)}))),
    ("json_schema", '{"type": "number", "maximum": 1e999}', "1e999 is too large"),
    ("json_schema", json.dumps({"allOf": [{"type": "integer"}, {"enum": [1, [1e20]]}]}), "a number of enum"),
    ("json_schema", json.dumps({"const": {"a": 2**53 + 1}}), "a number of const at # is too large"),
    ("json_schema", '{"const": 123456789.12345679}', "a number of const at # is too large"),
    *(("json_schema", schema, "13 different patterns")  # the matcher's work would double with each
      for schema in (
          json.dumps({"allOf": [{"pattern": f"a.*{i}.*b"} for i in range(13)]}),
          json.dumps({"$ref": "#/$defs/0", "$defs": {
              str(i): {"pattern": f"a.*{i}.*b", "$ref": f"#/$defs/{(i + 1) % 13}"} for i in range(13)}}),
      )),
    ("json_schema", '{"minProperties": 2}', "minProperties"),
    ("json_schema", '{"type": ["integer", "number"], "maximum": 9223372036854776833}', "maximum at # is too large"),
    ("json_schema", '{"const": "\\ud800"}', "json_schema holds a lone surrogate"),
    ("json_schema", '{"const": "\ud800"}', "json_schema holds a lone surrogate"),
    ("json_schema", '{"properties": {"\\udfff": {"x": 1}}}', "json_schema holds a lone surrogate"),
    ("json_schema", "{" + ",".join(f'"{i}":0' for i in range(14_000)) + ', "0": 0}', "key '0' occurs twice"),
    ("regex", "\ud800", "regex holds a lone surrogate, which .* at character 0"),
    ("ebnf", 'root ::= "\ud800"', "ebnf holds a lone surrogate, which .* at character 10"),
    ("json_schema", '{"$schema": "http://example.com"}', r"\$schema"),
    ("regex", "(?=a)b", "look-around"),
    ("regex", "(a)\\1", "back-reference"),
    ("regex", "[", "unterminated"),
    ("regex", "(" * 5000 + ")" * 5000, "regular expression"),
    ("regex", ".{1,1000000}", "repeats 1000000 times"),
    ("regex", "((a{100}){2}b?){3000}", "repeats 600000 times in all"),
    *(("regex", pattern, "anchor") for pattern in (r"a\b", "$a", "a^")),
    ("regex", "[^\\s\\S]", "no character"),
    ("regex", "a" * 20_000, "more than the limit"),
    ("ebnf", "", "no rule `root`"),
    ("ebnf", 'start ::= "a"', "no rule `root`"),
    ("ebnf", "root ::= missing", "does not define: missing"),
    ("ebnf", 'root ::= a? b\na ::= "x"\nb ::= root', "no finite text"),
    ("ebnf", 'root ::= "a" root', "no finite text"),
    ("ebnf", 'root ::= "a"\nroot ::= "b"', "twice"),
    ("ebnf", 'root ::= ("a"', "line 1: a parenthesis"),
    ("ebnf", 'root ::= "a"\n @', "line 2"),
    ("ebnf", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "parentheses"),
    ("ebnf", "root ::= [z-a]", "range"),
    ("ebnf", 'root ::= "a\\1"', "line 1"),
    ("ebnf", "root ::= [\\07]", "line 1"),
    ("ebnf", 'root ::= "a"{3,2}', "m <= n"),
    ("ebnf", "root ::= r39\n" + "\n".join(f"r{i} ::= r{i - 1} r{i - 1}" for i in range(1, 40)) + '\nr0 ::= "a"',
     "too big"),
    ("structural_tag", "[]", "structural_tag must be"),
    ("structural_tag", '{"format": {}}', "type None; supported are const_string"),
    ("structural_tag", '{"format": {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "any_text"}]}}',
     "elements.0. must be the last"),
    ("structural_tag", '{"format": {"type": "regex", "pattern": "(a)\\\\1"}}', "back-reference"),
    ("structural_tag", '{"format": {"type": "const_string", "value": "a", "x": 1}}', "must have value"),
    ("structural_tag", '{"structures": [], "triggers": ["<"]}', "1 to 256"),
    ("structural_tag", '{"structures": 5, "triggers": ["<"]}', "structures of the whole must be"),
    ("structural_tag", '{"format": ' + '{"type": "or", "elements": [' * 17 + '{"type": "any_text"}' + "]}" * 17 + "}",
     "deeper than 16"),
    ("structural_tag", '{"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]}', "no trigger"),
    ("structural_tag", '{"structures": [{"begin": "a", "schema": {"contains": {}}, "end": ""}], "triggers": ["a"]}',
     "'contains'"),
]  # fmt: skip


@pytest.mark.parametrize("kind,text,told", BAD, ids=[f"{kind}-{i}" for i, (kind, _, _) in enumerate(BAD)])
def test_what_cannot_be_held_is_refused_in_time(kind: str, text: str, told: str) -> None:
    """The child that tries it ends after 2 seconds of a core, whatever it does."""
    with pytest.raises(GrammarError, match=told) as caught, core_seconds(2):
        compiled(kind, text)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "kind,text",
    [
        ("regex", "(a+)+b"), ("regex", "(x+x+)+y"), ("regex", "((a{1,99}){1,99}){1,99}"), ("regex", "(a|b)*a(a|b){60}"),
        ("regex", "a{100000}"), ("regex", ".*" * 60 + "x"), ("regex", "a?" * 400 + "a" * 400),
        ("ebnf", 'root ::= e\ne ::= t | t "+" e\nt ::= "a" | t2 | "(" e ")"\nt2 ::= "a" "a"'),
        ("json_schema", json.dumps({"type": "string", "maxLength": 1_000_000})),
        ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(5000)]})),
        ("json_schema", json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(500)}})),
    ],
)  # fmt: skip
def test_no_pattern_runs_away(kind: str, text: str) -> None:
    """It is linear, or ends with a typed error; each mask in bounded time."""
    try:
        grammar = compiled(kind, text)
    except GrammarError:
        return
    cursor, draw, fresh = cursor_of(grammar), random.Random(0), []
    with core_seconds(10):
        for _ in range(60):
            filled = masks([cursor], [fresh])
            if filled.errors:
                assert isinstance(filled.errors[0], GrammarError)
                break
            fresh = [draw.choice(allowed(filled.mask_MW[0]))]
            if fresh == [END]:
                break


# -- cursors and vocabularies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_hand", [0, AT_HAND])
def test_a_shared_automaton_that_is_full_fails_nobody_else(at_hand: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request's states fill it; the next one begins again with its own, and gets the very same masks."""
    monkeypatch.setattr("fengine.structured_output.masks.AT_HAND", at_hand)
    text, limits = "(a|b)*a(a|b){9}", dict(compiled("regex", "a").vocabulary.llguidance.__dict__)
    assert "LLParserLimits" in limits
    vocabulary = Vocabulary(TOKENS, False)
    vocabulary.limits = vocabulary.llguidance.LLParserLimits(max_lexer_states=150, verbose_errors=False)
    small, large = (
        Grammar(v, Source("regex", text), f"text: /{text}/") for v in (vocabulary, Vocabulary(TOKENS, False))
    )
    failed = 0
    for seed in range(30):
        draw = random.Random(seed)
        taken = [draw.choice([97, 98]) for _ in range(20)]
        one, other = cursor_of(small), cursor_of(large)
        for token in taken:
            got, want = masks([one], [[token]]), masks([other], [[token]])
            if got.errors:
                failed += 1
                break
            assert (got.mask_MW == want.mask_MW).all()
    assert failed < 30  # a request that is too much by itself may fail, but not for what others did


def test_ends_bars_and_dead_ends() -> None:
    word = compiled("regex", "[ab]{2,3}")
    cursor = cursor_of(word)
    assert allowed(masks([cursor], [[]]).mask_MW[0])[:2] == [97, 98]
    assert END in allowed(masks([cursor], [[97, 98]]).mask_MW[0])
    assert END not in allowed(masks([cursor], [[]], early=True).mask_MW[0])
    assert allowed(masks([cursor], [[97]]).mask_MW[0]) == [END]
    stuck = masks([cursor], [[]], early=True)
    assert "min_new_tokens" in str(stuck.errors[0]) and not stuck.mask_MW.any()
    lazy = cursor_of(word, eager=False)
    assert END not in allowed(masks([lazy], [[97, 98]]).mask_MW[0])
    assert allowed(masks([lazy], [[97]]).mask_MW[0]) == [END]
    barred = cursor_of(compiled("regex", "a"), barred=[97])
    assert "logit_bias" in str(masks([barred], [[]]).errors[0])
    few = Grammars(lambda: ([b"a", b"c", None], False), Whitespace())
    with pytest.raises(GrammarError, match="no token of this vocabulary"):
        few.compile(Source("regex", "b"))
    late = few.compile(Source("regex", "ab"))  # begins well, and then there is no b
    one = cursor_of(late)
    assert "no token of this vocabulary" in str(masks([one], [[0]]).errors[0])
    few.close()


def test_a_step_in_which_all_have_failed_has_nothing_to_draw() -> None:
    cursor = cursor_of(compiled("regex", "ab"))
    cursor.fail("it has failed before")
    filled = masks([cursor], [[97]])
    assert filled.errors == {0: cursor.error} and not filled.mask_MW.any()


@pytest.mark.parametrize("at_hand", [0, AT_HAND])
def test_neighbours_in_one_fill_do_not_meet(at_hand: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The matchers' threads find what the loop finds."""
    texts = ["[a-z]+", "(a|b)*", "[0-9]{3}", "((a{1,79}){1,79}){1,79}"] * 4
    alone = [masks([cursor_of(compiled("regex", text))], [[]]).mask_MW[0] for text in texts]
    monkeypatch.setattr("fengine.structured_output.masks.AT_HAND", at_hand)
    together = masks([cursor_of(compiled("regex", text)) for text in texts], [[]] * len(texts)).mask_MW
    assert all((a == b).all() for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("make", ["byte_level", "qwen2", "llama2", "unigram"])
def test_texts_of_tokens_are_those_of_the_tokenizer(make: str, tmp_path: Any) -> None:
    """What a walk draws reads, decoded, as the grammar wants it: bytes, byte fallback, and the space in front."""
    tokenizer = Tokenizer.from_directory(tokenizer_cases.save(tmp_path, getattr(tokenizer_cases, make)()))
    texts = token_texts(tokenizer, tokenizer.vocab_size)
    grammars = Grammars(lambda: texts, Whitespace())
    tried = 0
    for pattern in ("[a-z]+", " ?[a-z]{1,9}( [a-z]+)*", "[^a-z]{2,5}", "é+[a-z]", " [a-z]"):
        try:
            grammar = grammars.compile(Source("regex", pattern))
        except GrammarError:
            continue  # not with these few tokens
        for seed in range(6):
            draw, cursor, ids = random.Random(seed), None, []
            cursor = Cursor(grammar, [], [], [])
            for _ in range(12):
                filled = masks([cursor], [ids[-1:] if ids else []])
                if draw.random() < 0.3 or filled.errors:
                    cursor.matcher.compute_bitmask()
                    if ids and cursor.matcher.is_accepting():
                        tried += 1
                        text = tokenizer.decode(ids)
                        assert re.fullmatch(pattern, text), (pattern, text, ids)
                        break
                if filled.errors:
                    break
                ids.append(draw.choice(allowed(filled.mask_MW[0])))
    assert tried > 3
    special = [i for i, token in tokenizer.backend.get_added_tokens_decoder().items() if token.special]
    assert special and all(texts.tokens[i] is None for i in special)
    grammars.close()


def test_a_tokenizer_whose_texts_do_not_join_is_refused(tmp_path: Any) -> None:
    tokenizer = Tokenizer.from_directory(tokenizer_cases.save(tmp_path, tokenizer_cases.no_decoder()))
    with pytest.raises(UnsupportedFeatureError, match="join to a text"):
        token_texts(tokenizer, 10)


def test_the_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'fengine\[grammar\]'"):
        Grammars(lambda: (TOKENS, False), Whitespace()).compile(Source("regex", "a"))


# -- masks -------------------------------------------------------------------------------------------------------------

EARLY, BARRED = TOKENS.index(b"b"), TOKENS.index(b"a")
OPEN = [
    ("regex", "[ab]{2,6}"),
    ("regex", "a*b?"),
    ("json_schema", '{"type": "array", "items": {"enum": [1, "a", "ab"]}}'),
]


def stands(grammar: Grammar, taken: list[int], barred: list[int], eager: bool, least: int) -> Cursor:
    """As for a request that has drawn these tokens."""
    params = SamplingParams(min_new_tokens=least, ignore_eos=not eager)
    request = Request("r", 1, [0, *taken], params, 0, 9, frozenset([END]), early_ids=frozenset([EARLY]))
    return grammar.cursor(request, barred)


@pytest.mark.parametrize("seed", range(60))
def test_masks_behind_drafts_are_those_behind_the_tokens(seed: int) -> None:
    """And each is what the matcher allows, with ends where the text may end, without what is barred or comes too early;
    guesses change nothing of where a request stands."""
    rng = random.Random(seed)
    cursors, drafts, meant, at = list[Cursor](), list[MaskedDraft](), dict[int, list[int]](), 3
    for i in range(3):
        grammar, barred, eager = compiled(*rng.choice(OPEN)), rng.choice([[], [BARRED], [END]]), rng.random() < 0.7
        path, least, known = list[int](), rng.randrange(5), rng.randrange(4)
        for _ in range(8):
            ids = [id for id in plain(grammar, path)[0] if id != END]
            path += [rng.choice(ids)] if ids else []
        draft = path[known:]
        if draft and rng.random() < 0.3:
            draft[rng.randrange(len(draft))] = TOKENS.index(b"[[") if i else END
        cursors.append(stands(grammar, path[:known], barred, eager, len(path[:known]) + least))
        drafts += [MaskedDraft(i, draft, at)] * bool(draft)
        for k in range(len(draft) + 1):
            ids, complete = plain(grammar, [*path[:known], *draft[:k]])
            left = max(least - k, 0)
            found = set(ids) - ({END, EARLY} if left else {END})
            if complete and not left and (eager or not found):
                found.add(END)
            meant[i if k == 0 else at + k - 1] = sorted(found - set(barred))
            if k < len(draft) and (draft[k] not in ids or not meant[i if k == 0 else at + k - 1]):
                break
        at += len(draft)
    taken = [list(cursor.tokens) for cursor in cursors]
    filled = fill(range(3), cursors, drafts)
    masks_of = dict(zip(filled.row_M.tolist(), filled.mask_MW, strict=True))
    assert {row: allowed(mask) for row, mask in masks_of.items()} == meant
    assert [cursor.tokens for cursor in cursors] == taken
    assert filled.errors.keys() == {row for row, ids in meant.items() if not ids}


def plain(grammar: Grammar, taken: list[int]) -> tuple[list[int], bool]:
    """The ids that may come behind these, and whether the text may end there, by the matcher alone."""
    matcher = grammar.matcher()
    assert matcher.consume_tokens(list(taken)) or not taken
    words = np.zeros(-(-(len(TOKENS) + 1) // 32), np.int32)
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    return [id for id in allowed(words) if id < len(TOKENS)], matcher.is_accepting()


def test_a_row_takes_the_guesses_that_were_drawn_and_what_came_behind() -> None:
    """Nothing where nothing was drawn since, or what was drawn ends the request."""
    a, b = TOKENS.index(b"a"), TOKENS.index(b"b")
    for drawn in ([], [a], [a, a, b], [a, a, a, a], [a, a, END]):
        cursor = stands(compiled("regex", "a*b?a*"), [a, a], [], True, 0)
        fill([0], [cursor], [MaskedDraft(0, [a, a, a], 1)])
        cursor.catch_up(2 + len(drawn), drawn[-1] if drawn else a)
        assert cursor.tokens == [a, a] + drawn * (drawn[-1:] != [END]) and cursor.error is None
