"""Chat templates, compiled and rendered by jinja2 as transformers does it, in a child process (`trial.py`). A template
comes from a checkpoint, so it is untrusted code: jinja2's immutable sandbox keeps it from attributes, and the kernel
ends the process of one that takes too much time or memory."""

import json
import re
from datetime import datetime
from functools import cache, lru_cache
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
    """The messages, their contents in the form that the template reads: a text, or a list of parts. Given the other
    one, it would write nothing of it, or the list as Python does."""
    text = _reads(template, given, PROBE)
    if text and all(isinstance(message.get("content", ""), str) for message in given["messages"]):
        return given["messages"]
    parts = _reads(template, given, [{"type": "text", "text": PROBE}])

    def fitting(content: Any) -> Any:
        if parts and not text and isinstance(content, str):
            return [{"type": "text", "text": content}]
        if text and not parts and isinstance(content, list) and all(part["type"] == "text" for part in content):
            return "\n".join(part["text"] for part in content)
        return content

    return [message | {"content": fitting(message["content"])} if "content" in message else message
            for message in given["messages"]]  # fmt: skip


def _reads(template: jinja2.Template, given: dict[str, Any], content: Any) -> bool:
    """Whether it writes the text of a content, and not as Python or JSON write it in a list."""
    try:
        written = template.render(given | {"messages": [{"role": "user", "content": content}]})
    except MemoryError:
        raise
    except Exception:  # untrusted code
        return False
    return PROBE in written and (content == PROBE or not re.search(f"""["']{PROBE}["']""", written))


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
