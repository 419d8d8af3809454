"""Structural tags (SGLang's `structural_tag`): free text, in which a trigger begins a tag that must be right. No torch.

    {"structures": [{"begin": "<f=add>", "schema": {…}, "end": "</f>"}], "triggers": ["<f="]}

A tag begins with one of the triggers; behind the trigger stands the rest of a `begin`, JSON of its schema, and `end`.
"""

from typing import Any

from fengine.errors import GrammarError
from fengine.structured_output import characters
from fengine.structured_output.schema import Whitespace, as_rule, strict_json

MAX_TAGS = 256
MAX_TEXT = 1024  # characters of a trigger, a begin or an end


def to_lark(text: str, whitespace: Whitespace) -> str:
    """The grammar for the matcher: a rule `text`. Errors: GrammarError. Pure."""
    structures, triggers = _read(text)
    lines = ["text: piece* TEXT", "TEXT: /(?s:.)*/"]
    for i, trigger in enumerate(triggers):
        tags = []
        for begin, schema, end in structures:
            if begin.startswith(trigger) and not any(begin.startswith(t) for t in triggers[:i]):
                name = f"tag{len(lines)}"
                lines.append(f"{name}: {_literal(begin[len(trigger) :])} {as_rule(schema, whitespace)} {_literal(end)}")
                tags.append(name)
        # lazy: it ends where the trigger first does, so that no free text holds one
        lines.append(f"trigger{i}[lazy]: /(?s:.)*{_characters(trigger)}/")
        lines.append(f"piece{i}: trigger{i} ({' | '.join(tags)})")
    lines.append(f"piece: {' | '.join(f'piece{i}' for i in range(len(triggers)))}")
    return "\n".join(lines)


def _read(text: str) -> tuple[list[tuple[str, Any, str]], list[str]]:
    value = strict_json(text, "structural_tag")
    if not isinstance(value, dict) or not set(value) <= {"type", "structures", "triggers"}:
        raise GrammarError(
            'structural_tag must be {"structures": [{"begin", "schema", "end"}, …], "triggers": [texts]}; '
            "other forms of it are not supported"
        )
    if value.get("type", "structural_tag") != "structural_tag":
        raise GrammarError(f"structural_tag has the type {value['type']!r:.80}; it must be structural_tag")
    given, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_TAGS:
        raise GrammarError(f"structural_tag: structures must be a list of 1 to {MAX_TAGS} tags")
    if not isinstance(triggers, list) or not 1 <= len(triggers) <= MAX_TAGS or not all(map(_is_text, triggers)):
        raise GrammarError(f"structural_tag: triggers must be 1 to {MAX_TAGS} texts that are not empty")
    triggers = sorted(set(triggers), key=len)
    for i, one in enumerate(triggers):
        if any(one in longer for longer in triggers[i + 1 :]):
            raise GrammarError(
                f"structural_tag: the trigger {one!r:.80} stands inside another one; leave the longer out"
            )
    structures = [_structure(tag, i, triggers) for i, tag in enumerate(given)]
    for trigger in triggers:
        if not any(begin.startswith(trigger) for begin, _, _ in structures):
            raise GrammarError(f"structural_tag: no structure begins with the trigger {trigger!r:.80}")
    return structures, triggers


def _structure(tag: Any, i: int, triggers: list[str]) -> tuple[str, Any, str]:
    if not isinstance(tag, dict) or set(tag) != {"begin", "schema", "end"}:
        raise GrammarError(f"structural_tag: structures[{i}] must have exactly begin, schema and end")
    begin, schema, end = tag["begin"], tag["schema"], tag["end"]
    if not _is_text(begin) or not (end == "" or _is_text(end)):
        raise GrammarError(f"structural_tag: begin and end of structures[{i}] must be texts; begin is not empty")
    if not any(begin.startswith(trigger) for trigger in triggers):
        raise GrammarError(f"structural_tag: structures[{i}] begins with {begin!r:.80}, which no trigger does")
    if not isinstance(schema, (dict, bool)):
        raise GrammarError(f"structural_tag: schema of structures[{i}] must be a JSON schema")
    return begin, schema, end


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT


def _literal(text: str) -> str:
    return f"/{_characters(text)}/" if text else ""


def _characters(text: str) -> str:
    return "".join(characters.written(characters.of(c)) for c in text)
