"""Structural tags (SGLang's `structural_tag`): free text, in which a trigger begins a tag that must be right. No torch.

    {"structures": [{"begin": "<f=add>", "schema": {…}, "end": "</f>"}], "triggers": ["<f="]}
    {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [
        {"begin": "<f=add>", "content": {"type": "json_schema", "json_schema": {…}}, "end": "</f>"}]}}

The second form also puts together tags, sequences, choices, fixed texts, regular expressions and lists of tags. A tag
begins with one of the triggers; behind the trigger stands the rest of its `begin`, its content, and its `end`."""

import re
from collections.abc import Callable
from typing import Any

from fengine.errors import GrammarError
from fengine.structured_output.regex import explicit
from fengine.structured_output.schema import Whitespace, as_rule, strict_json

MAX_TAGS = 256
MAX_TEXT = 1024  # characters of a trigger, a begin, an end or a fixed text
MAX_DEPTH = 16  # of formats inside one another
KEYS = {  # of each format: those it must have, and those it may
    "const_string": ({"value"}, set()),
    "json_schema": ({"json_schema"}, set()),
    "regex": ({"pattern"}, set()),
    "any_text": (set(), set()),
    "sequence": ({"elements"}, set()),
    "or": ({"elements"}, set()),
    "tag": ({"begin", "content", "end"}, set()),
    "triggered_tags": ({"triggers", "tags"}, {"at_least_one", "stop_after_first"}),
    "tags_with_separator": ({"tags", "separator"}, {"at_least_one", "stop_after_first"}),
}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= MAX_TAGS


_TEXT = f"a text of 1 to {MAX_TEXT} characters"
VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {  # of the keys: what they must be
    **dict.fromkeys(("value", "pattern", "separator", "begin"), (_is_text, _TEXT)),
    "end": (lambda value: value == "" or _is_text(value), f"empty, or {_TEXT}"),
    **dict.fromkeys(("elements", "tags", "structures"), (_is_list, f"a list of 1 to {MAX_TAGS}")),
    "triggers": (lambda value: _is_list(value) and all(map(_is_text, value)),
                 f"1 to {MAX_TAGS} texts that are not empty"),
    **dict.fromkeys(("at_least_one", "stop_after_first"), (lambda value: isinstance(value, bool), "true or false")),
    **dict.fromkeys(("json_schema", "schema"), (lambda value: isinstance(value, (dict, bool)), "a JSON schema")),
}  # fmt: skip


def to_lark(text: str, whitespace: Whitespace) -> str:
    """The grammar for the matcher: a rule `text`. Errors: GrammarError. Pure."""
    writer = _Writer(whitespace)
    body = writer.format(_read(text), "format", 0, last=True)
    return "\n".join([f"text: {body}", "TEXT: /(?s:.)*/", *writer.lines])


def _read(text: str) -> Any:
    """The format, from either form."""
    value = strict_json(text, "structural_tag")
    if not isinstance(value, dict) or value.get("type", "structural_tag") != "structural_tag":
        raise GrammarError("structural_tag must be an object whose type is structural_tag")
    keys = set(value) - {"type"}
    if keys == {"format"}:
        return value["format"]
    if keys != {"structures", "triggers"}:
        raise GrammarError(
            'structural_tag must be {"structures": [{"begin", "schema", "end"}, …], "triggers": [texts]} or '
            '{"type": "structural_tag", "format": {…}}'
        )
    _check_values(value, "the whole")
    tags = []
    for i, tag in enumerate(value["structures"]):
        if not isinstance(tag, dict) or set(tag) != {"begin", "schema", "end"}:
            raise GrammarError(f"structural_tag: structures[{i}] must have exactly begin, schema and end")
        content = {"type": "json_schema", "json_schema": tag["schema"]}
        tags.append({"begin": tag["begin"], "content": content, "end": tag["end"]})
    return {"type": "triggered_tags", "triggers": value["triggers"], "tags": tags}


def _check_values(value: dict[str, Any], at: str) -> None:
    """Errors: GrammarError."""
    for key, item in value.items():
        is_right, needed = VALUES.get(key, (lambda item: True, ""))
        if not is_right(item):
            raise GrammarError(f"structural_tag: {key} of {at} must be {needed}, got {item!r:.80}")


class _Writer:
    """Writes formats as parts of rules; what must be rules of their own is collected. Every error tells where."""

    def __init__(self, whitespace: Whitespace) -> None:
        self.whitespace = whitespace
        self.lines: list[str] = []

    def rule(self, body: str, lazy: bool = False) -> str:
        name = f"s{len(self.lines)}"
        self.lines.append(f"{name}[lazy]: {body}" if lazy else f"{name}: {body}")
        return name

    def upto(self, text: str) -> str:
        """Any text to where this one first stands, so that none is inside."""
        return self.rule(f"/(?s:.)*{_characters(text)}/", lazy=True)

    def format(self, value: Any, at: str, depth: int, *, last: bool, after: str = "") -> str:
        """`last`: nothing stands behind it, so that it may end with any text. `after`: the trigger of a tag, which is
        written already. Errors: GrammarError."""
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind not in KEYS:
            raise GrammarError(f"structural_tag: {at} has the type {kind!r:.80}; supported are {', '.join(KEYS)}")
        must, may = KEYS[kind]
        if not must <= set(value) - {"type"} <= must | may:
            raise GrammarError(f"structural_tag: {at} of type {kind} must have {', '.join(sorted(must)) or 'no keys'}")
        if depth > MAX_DEPTH:
            raise GrammarError(f"structural_tag is nested deeper than {MAX_DEPTH} formats")
        _check_values(value, at)
        if kind == "const_string":
            return _literal(value["value"])
        if kind == "json_schema":
            return as_rule(value["json_schema"], self.whitespace)
        if kind == "regex":
            return f"/{explicit(value['pattern'], 'structural_tag: pattern')}/"
        if kind in ("sequence", "or"):
            return self.elements(kind, value["elements"], at, depth, last)
        if kind == "tag":
            return self.tag(value, at, depth, after)
        if not last:
            raise GrammarError(f"structural_tag: {kind} at {at} must be the last, for any text may end it")
        return "TEXT" if kind == "any_text" else self.tags(kind, value, at, depth)

    def elements(self, kind: str, values: list[Any], at: str, depth: int, last: bool) -> str:
        parts = []
        for i, part in enumerate(values):
            ends = last and (kind == "or" or i == len(values) - 1)
            parts.append(self.rule(self.format(part, f"{at}.elements[{i}]", depth + 1, last=ends)))
        return f"({(' | ' if kind == 'or' else ' ').join(parts)})"

    def tag(self, tag: dict[str, Any], at: str, depth: int, after: str) -> str:
        content, end = tag["content"], tag["end"]
        if end and content == {"type": "any_text"}:
            inside = self.upto(end)
        else:
            inside = f"{self.format(content, f'{at}.content', depth + 1, last=False)} {_literal(end)}"
        return f"{_literal(tag['begin'].removeprefix(after))} {inside}"

    def pieces(self, value: Any, at: str, depth: int) -> dict[str, list[str]]:
        """The tags by their triggers: what stands behind each."""
        triggers = sorted(set(value.get("triggers", ("",))), key=len)
        pieces: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for i, tag in enumerate(value["tags"]):
            where = f"{at}.tags[{i}]"
            if not isinstance(tag, dict) or set(tag) - {"type"} != KEYS["tag"][0]:
                raise GrammarError(f"structural_tag: {where} must have exactly begin, content and end")
            begin = str(tag["begin"])
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise GrammarError(f"structural_tag: {where} begins with {begin!r:.80}, which no trigger does")
            tag = {**tag, "type": "tag"}
            pieces[trigger].append(self.rule(self.format(tag, where, depth, last=False, after=trigger)))
        return pieces

    def tags(self, kind: str, value: Any, at: str, depth: int) -> str:
        """Free text, in which each trigger begins a tag; or a list of tags."""
        pieces = self.pieces(value, at, depth)
        least, once = value.get("at_least_one", False), value.get("stop_after_first", False)
        if kind == "tags_with_separator":
            one = self.rule(" | ".join(pieces[""]))
            several = one if once else f"{one} ({_literal(value['separator'])} {one})*"
            return several if least else f"({several})?"
        for trigger, tags in pieces.items():
            if not tags:
                raise GrammarError(f"structural_tag: no tag begins with the trigger {trigger!r:.80}")
            if any(trigger in longer for longer in pieces if longer != trigger):
                raise GrammarError(
                    f"structural_tag: the trigger {trigger!r:.80} stands inside another one; leave the longer out"
                )
        piece = self.rule(" | ".join(f"{self.upto(trigger)} ({' | '.join(tags)})" for trigger, tags in pieces.items()))
        if once:
            return piece if least else f"({piece} | TEXT)"
        return f"{piece}{'+' if least else '*'} TEXT"


def _literal(text: str) -> str:
    return f"/{_characters(text)}/" if text else ""


def _characters(text: str) -> str:
    return explicit(re.escape(text), "structural_tag:")
