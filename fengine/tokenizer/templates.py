"""Chat templates, compiled and rendered by jinja2 as transformers does it, in a child process (`trial.py`). A template
comes from a checkpoint, so it is untrusted code: jinja2's immutable sandbox keeps it from attributes, and the kernel
ends the process of one that takes too much time or memory."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import cache, lru_cache, partial
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fengine.tokenizer.trial import Refused

MAX_TOLD = 2000  # characters of an error
PROBE = "xyzzy"  # a text that no template writes by itself


class Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it is only a scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def attempt(question: tuple[str, dict[str, Any] | None, int]) -> Any:
    """In the child: the rendered text of (source, values, most characters). Without values: the names that a caller may
    set, and those that have a meaning of their own. Errors: Refused."""
    source, given, max_chars = question
    try:
        template, names = _compiled(source)
    except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError) as error:
        raise Refused(f"it cannot be compiled: {error}"[:MAX_TOLD]) from error
    if given is None:
        return sorted(names), sorted(_environment().globals)
    try:
        text = template.render(given | {"messages": _as_it_reads(template, given)})
    except MemoryError:
        raise
    except Exception as error:  # untrusted code: whatever it does wrong belongs to this request
        raise Refused(f"it failed: {type(error).__name__}: {error}"[:MAX_TOLD]) from error
    if len(text) > max_chars:
        raise Refused(f"it wrote {len(text)} characters, more than {max_chars}; shorten the chat")
    return text


def _as_it_reads(template: jinja2.Template, given: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages in the form that the template reads: contents as texts, or as lists of parts; arguments of calls as
    objects, or as JSON texts; OpenAI's newer role of a developer, or that of the system. Given the other one, it would
    write nothing of a text, a list as Python does, or a JSON text in quotes."""
    messages = _by_known_roles(template, given)
    text = PROBE in _written(template, given, {"role": "user", "content": PROBE})
    if not text or any(isinstance(message.get("content"), list) for message in messages):
        written = _written(template, given, {"role": "user", "content": [{"type": "text", "text": PROBE}]})
        parts = PROBE in written and not re.search(f"""["']{PROBE}["']""", written)
        messages = [_with(message, "content", partial(_content, text, parts)) for message in messages]
    if not any(message.get("tool_calls") for message in messages):
        return messages
    objects, texts = (
        _written(template, given, {"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [
            {"id": "callnum01", "type": "function", "function": {"name": "f", "arguments": arguments}}]})
        for arguments in ({PROBE: 1}, json.dumps({PROBE: 1}))
    )  # fmt: skip
    arguments = partial(_arguments, f'\\"{PROBE}' in texts, PROBE in texts and PROBE not in objects)
    return [_with(message, "tool_calls", partial(_calls, arguments)) for message in messages]


def _by_known_roles(template: jinja2.Template, given: dict[str, Any]) -> list[dict[str, Any]]:
    messages = given["messages"]
    if "developer" in (message["role"] for message in messages):
        ask = {"role": "developer", "content": PROBE}, {"role": "user", "content": "?"}
        if PROBE not in _written(template, given, *ask):
            return [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    return messages


def _written(template: jinja2.Template, given: dict[str, Any], *messages: dict[str, Any]) -> str:
    """What it writes of these messages; nothing where it fails."""
    try:
        return template.render(given | {"messages": list(messages)})
    except MemoryError:
        raise
    except Exception:  # untrusted code
        return ""


def _with(value: Any, name: str, change: Callable[[Any], Any]) -> Any:
    return value | {name: change(value[name])} if isinstance(value, dict) and name in value else value


def _content(text: bool, parts: bool, content: Any) -> Any:
    """As a template takes it that reads `text`, `parts`, or both."""
    if parts and not text and isinstance(content, str):
        return [{"type": "text", "text": content}]
    if text and not parts and isinstance(content, list) and all(part["type"] == "text" for part in content):
        return "\n".join(part["text"] for part in content)
    return content


def _calls(change: Callable[[Any], Any], calls: Any) -> Any:
    change = partial(_with, name="function", change=partial(_with, name="arguments", change=change))
    return [change(call) for call in calls] if isinstance(calls, list) else calls


def _arguments(quotes: bool, joins: bool, arguments: Any) -> Any:
    """As a template takes them that `quotes` a JSON text, or one that `joins` it to others, which objects cannot be."""
    if quotes and isinstance(arguments, str):
        with suppress(ValueError):
            found = json.loads(arguments)
            return found if isinstance(found, dict) else arguments
    return json.dumps(arguments, ensure_ascii=False) if joins and isinstance(arguments, dict) else arguments


@lru_cache(8)
def _compiled(source: str) -> tuple[jinja2.Template, set[str]]:
    env = _environment()
    tree = env.parse(source)
    return env.from_string(source), _parameters(tree, jinja2.meta.find_undeclared_variables(tree))


def _parameters(tree: nodes.Template, undeclared: set[str]) -> set[str]:
    """Of the names that a template reads before it sets them, those that a caller may set. Pure. One that the template
    sets itself is its own, unless it asks whether it is defined."""
    stored = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "store"}
    asked = {
        node.node.name
        for node in tree.find_all((nodes.Test, nodes.Filter))
        if node.name in ("defined", "undefined", "default", "d") and isinstance(node.node, nodes.Name)
    }
    return undeclared - (stored - asked)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    """transformers' own. Pure."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = _tojson
    del env.globals["lipsum"]  # random
    env.globals.update(raise_exception=_raise_exception, strftime_now=lambda form: datetime.now().strftime(form))
    return env


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """jinja's own filter escapes HTML; chat templates need plain JSON (as in transformers)."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
