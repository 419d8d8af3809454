"""Structural tags (SGLang's `structural_tag`): free text, in which a trigger begins a tag that must be right. No torch.

    {"structures": [{"begin": "<f=add>", "schema": {…}, "end": "</f>"}], "triggers": ["<f="]}
    {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [
        {"begin": "<f=add>", "content": {"type": "json_schema", "json_schema": {…}}, "end": "</f>"}]}}

The second form also puts together tags, sequences, choices, fixed texts, regular expressions and lists of tags. A tag
begins with one of the triggers; behind the trigger stands the rest of its `begin`, its content, and its `end`.
"""

from typing import Any

from fengine.errors import GrammarError
from fengine.structured_output import characters
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
    tags = []
    for i, tag in enumerate(_list(value["structures"], "structures")):
        if not isinstance(tag, dict) or set(tag) != {"begin", "schema", "end"}:
            raise GrammarError(f"structural_tag: structures[{i}] must have exactly begin, schema and end")
        content = {"type": "json_schema", "json_schema": tag["schema"]}
        tags.append({"begin": tag["begin"], "content": content, "end": tag["end"]})
    return {"type": "triggered_tags", "triggers": value["triggers"], "tags": tags}


class _Writer:
    """Writes formats as parts of rules; what must be rules of their own is collected. Every error tells where."""

    def __init__(self, whitespace: Whitespace) -> None:
        self.whitespace = whitespace
        self.lines: list[str] = []

    def rule(self, body: str, lazy: bool = False) -> str:
        name = f"s{len(self.lines)}"
        self.lines.append(f"{name}[lazy]: {body}" if lazy else f"{name}: {body}")
        return name

    def format(self, value: Any, at: str, depth: int, *, last: bool) -> str:
        """`last`: nothing stands behind it, so that it may end with any text. Errors: GrammarError."""
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind not in KEYS:
            raise GrammarError(f"structural_tag: {at} has the type {kind!r:.80}; supported are {', '.join(KEYS)}")
        must, may = KEYS[kind]
        if not must <= set(value) - {"type"} <= must | may:
            raise GrammarError(f"structural_tag: {at} of type {kind} must have {', '.join(sorted(must)) or 'no keys'}")
        if depth > MAX_DEPTH:
            raise GrammarError(f"structural_tag is nested deeper than {MAX_DEPTH} formats")
        if kind == "const_string":
            return _literal(_text(value["value"], f"{at}.value"))
        if kind == "json_schema":
            return self.schema(value["json_schema"], at)
        if kind == "regex":
            return f"/{explicit(_text(value['pattern'], f'{at}.pattern'), 'structural_tag: pattern')}/"
        if kind in ("sequence", "or"):
            return self.elements(kind, value["elements"], at, depth, last)
        if kind == "tag":
            return self.tag(value, at, depth)
        if not last:
            raise GrammarError(f"structural_tag: {kind} at {at} must be the last, for any text may end it")
        if kind == "any_text":
            return "TEXT"
        return self.triggered(value, at, depth) if kind == "triggered_tags" else self.separated(value, at, depth)

    def schema(self, schema: Any, at: str) -> str:
        if not isinstance(schema, (dict, bool)):
            raise GrammarError(f"structural_tag: the schema of {at} must be a JSON schema")
        return as_rule(schema, self.whitespace)

    def elements(self, kind: str, values: Any, at: str, depth: int, last: bool) -> str:
        values = _list(values, f"{at}.elements")
        parts = []
        for i, value in enumerate(values):
            ends = last and (kind == "or" or i == len(values) - 1)
            parts.append(self.rule(self.format(value, f"{at}.elements[{i}]", depth + 1, last=ends)))
        return f"({(' | ' if kind == 'or' else ' ').join(parts)})"

    def tag(self, tag: Any, at: str, depth: int, after: str = "") -> str:
        """A tag; behind a trigger `after`, what is left of it."""
        begin, end, content = _text(tag["begin"], f"{at}.begin"), tag["end"], tag["content"]
        end = _text(end, f"{at}.end") if end != "" else ""
        if end and content == {"type": "any_text"}:  # lazy: it ends where the end first stands
            inside = self.rule(f"/(?s:.)*{_characters(end)}/", lazy=True)
        else:
            inside = f"{self.format(content, f'{at}.content', depth + 1, last=False)} {_literal(end)}"
        return f"{_literal(begin.removeprefix(after))} {inside}"

    def tags(self, values: Any, at: str) -> list[Any]:
        values = _list(values, f"{at}.tags")
        for i, tag in enumerate(values):
            if not isinstance(tag, dict) or set(tag) - {"type"} != KEYS["tag"][0]:
                raise GrammarError(f"structural_tag: {at}.tags[{i}] must have exactly begin, content and end")
        return values

    def triggered(self, value: Any, at: str, depth: int) -> str:
        """Free text, in which each trigger begins a tag."""
        triggers = _triggers(value["triggers"])
        pieces: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for i, tag in enumerate(self.tags(value["tags"], at)):
            begin = _text(tag["begin"], f"{at}.tags[{i}].begin")
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise GrammarError(f"structural_tag: {at}.tags[{i}] begins with {begin!r:.80}, which no trigger does")
            pieces[trigger].append(self.rule(self.tag(tag, f"{at}.tags[{i}]", depth, trigger)))
        begun = []
        for trigger, tags in pieces.items():
            if not tags:
                raise GrammarError(f"structural_tag: no tag begins with the trigger {trigger!r:.80}")
            # lazy: it ends where the trigger first does, so that no free text holds one
            before = self.rule(f"/(?s:.)*{_characters(trigger)}/", lazy=True)
            begun.append(self.rule(f"{before} ({' | '.join(tags)})"))
        piece = self.rule(" | ".join(begun))
        least, once = _flag(value, "at_least_one", at), _flag(value, "stop_after_first", at)
        if once:
            return piece if least else f"({piece} | TEXT)"
        return f"{piece}{'+' if least else '*'} TEXT"

    def separated(self, value: Any, at: str, depth: int) -> str:
        """A list of tags."""
        tags = [
            self.rule(self.tag(tag, f"{at}.tags[{i}]", depth)) for i, tag in enumerate(self.tags(value["tags"], at))
        ]
        one, separator = self.rule(" | ".join(tags)), _text(value["separator"], f"{at}.separator")
        several = one if _flag(value, "stop_after_first", at) else f"{one} ({_literal(separator)} {one})*"
        return several if _flag(value, "at_least_one", at) else f"({several})?"


def _triggers(values: Any) -> list[str]:
    if not isinstance(values, list) or not 1 <= len(values) <= MAX_TAGS:
        raise GrammarError(f"structural_tag: triggers must be 1 to {MAX_TAGS} texts that are not empty")
    triggers = sorted({_text(value, f"triggers[{i}]") for i, value in enumerate(values)}, key=len)
    for i, one in enumerate(triggers):
        if any(one in longer for longer in triggers[i + 1 :]):
            raise GrammarError(
                f"structural_tag: the trigger {one!r:.80} stands inside another one; leave the longer out"
            )
    return triggers


def _list(value: Any, at: str) -> list[Any]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_TAGS:
        raise GrammarError(f"structural_tag: {at} must be a list of 1 to {MAX_TAGS}")
    return value


def _text(value: Any, at: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT:
        raise GrammarError(f"structural_tag: {at} must be a text of 1 to {MAX_TEXT} characters")
    return value


def _flag(value: Any, name: str, at: str) -> bool:
    if not isinstance(value.get(name, False), bool):
        raise GrammarError(f"structural_tag: {at}.{name} must be true or false")
    return value.get(name, False)


def _literal(text: str) -> str:
    return f"/{_characters(text)}/" if text else ""


def _characters(text: str) -> str:
    return "".join(characters.written(characters.of(c)) for c in text)
