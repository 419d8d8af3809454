"""The sandbox that chat templates run in: jinja2's immutable one, with limits on time and on everything that is made.

A template comes from a checkpoint, so it is untrusted code. Loop turns, the length of every string and list, the size
of every number, and what filters make all together are bounded; so is what one filter or method could make of a large
number before its result can be looked at.
"""

import json
import re
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_environment
from jinja2.visitor import NodeTransformer

from fengine.errors import ChatTemplateError

MAX_TURNS = 300_000  # loop turns of one rendering; a macro call counts as ten
MAX_BITS = 4096  # of a whole number that a template makes
FILTERED = 64  # all results of filters together may be so many times the longest value
SLOW = ("striptags", "urlize", "wordwrap")  # filters whose time is not linear; no chat needs them
MAX_INDENT = 32  # of tojson
# Filters and methods that make something as long as a number that they are given.
WIDENING = frozenset(("batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "to_bytes", "zfill"))
_HUGE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")
_HUGE_BRACES = re.compile(r"\{[^{}]*(\{|:[^{}]*\d{4})")


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it is only a scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class Budgeted(NodeTransformer):
    """Writes `environment.turn()` into every loop and macro body, so that a runaway template ends."""

    @staticmethod
    def _turn(line: int, turns: int = 1) -> Any:
        return nodes.Call(nodes.EnvironmentAttribute("turn"), [nodes.Const(turns)], [], None, None).set_lineno(line)

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(self._turn(node.lineno), node.test).set_lineno(node.lineno)
        node.body.insert(0, nodes.ExprStmt(self._turn(node.lineno)).set_lineno(node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._turn(node.lineno, 10)).set_lineno(node.lineno))
        return node

    visit_CallBlock = visit_Macro  # type: ignore[assignment]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("join"), node.nodes, [], None, None)
        return call.set_lineno(node.lineno)


class Sandbox(ImmutableSandboxedEnvironment):
    """Build with `make_sandbox`. One overlay per rendering (`for_rendering`) carries that rendering's budget."""

    intercepted_binops = frozenset(["*", "**", "%", "+"])
    turns_left: int = MAX_TURNS
    max_chars: int = 0
    chars_left: int = 0  # for the results of filters
    all_filters: dict[str, Any]  # without limits

    def for_rendering(self, max_chars: int) -> "Sandbox":
        """The same with a budget for one rendering, in which no string may be longer than `max_chars`."""
        env: Any = self.overlay()
        env.turns_left, env.max_chars, env.chars_left = MAX_TURNS, max_chars, FILTERED * max_chars
        env.filters = {name: env.bound(name, function) for name, function in self.all_filters.items()}
        return env

    def turn(self, turns: int) -> bool:
        self.turns_left -= turns
        if self.turns_left < 0:
            raise ChatTemplateError(f"the chat template took more than {MAX_TURNS} loop turns.")
        return True

    def sized(self, value: Any) -> Any:
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise ChatTemplateError(f"the chat template made a number of more than {MAX_BITS} bits.")
        if isinstance(value, (str, bytes, list, tuple)) and len(value) > self.max_chars:
            raise ChatTemplateError(f"the chat template made a value longer than {self.max_chars}; shorten the chat.")
        return value

    def check_growth(self, name: str, given: Any) -> None:
        """Stops the filter, or method of a string, `name` before it makes something huge of what it is given."""
        texts = [x for x in given if isinstance(x, str)]
        size = 0
        if name in WIDENING:
            size = max((abs(x) for x in given if isinstance(x, int)), default=0)
        if name in ("indent", "expandtabs") and texts:
            size *= texts[0].count("\n" if name == "indent" else "\t") + 1
        if name == "replace" and len(texts) > 2:
            text, old, new = texts[:3]
            size = (text.count(old) if old else len(text)) * len(new)
        if size > self.max_chars:
            raise ChatTemplateError(f"the chat template asks {name} for a value longer than {self.max_chars}.")

    def check_format(self, style: str, form: str) -> None:
        """Stops a format, of style "%" or "{", with a width that is huge or an argument."""
        huge = _HUGE_PERCENT if style == "%" else _HUGE_BRACES
        if huge.search(form if style == "%" else form.replace("{{", "").replace("}}", "")):
            raise ChatTemplateError("the chat template formats with a huge or variable width.")

    def bound(self, name: str, function: Any) -> Any:
        """A filter with limits, on each value and on all together."""

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.check_growth(name, (*args, *kwargs.values()))
            if name == "format" and isinstance(args[0], str):
                self.check_format("%", args[0])
            result = self.sized(function(*args, **kwargs))
            self.chars_left -= len(result) if isinstance(result, str) else 1
            if self.chars_left < 0:
                raise ChatTemplateError("the chat template made too many values in filters.")
            return result

        return bounded

    def joined(self, items: Any, between: Any = "", attribute: Any = None) -> str:
        """The filter `join`, and the method."""
        items = items if attribute is None else map(make_attrgetter(self, attribute), items)
        between = str(between)
        return self.concat(part for i, item in enumerate(items) for part in ((between,) if i else ()) + (str(item),))

    def concat(self, parts: Any) -> str:  # type: ignore[override]
        room, out = self.max_chars, []
        for part in parts:
            room -= len(part)
            if room < 0:
                raise ChatTemplateError(f"the chat template wrote more than {self.max_chars} characters.")
            out.append(part)
        return "".join(out)

    def join(self, *parts: Any) -> str:
        return self.concat(map(str, parts))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            size = next((len(x) for x in (left, right) if isinstance(x, (str, list, tuple))), None)
            count = next((x for x in (left, right) if isinstance(x, int)), 0)
            if size is not None and size * count > self.max_chars:
                raise ChatTemplateError(f"the chat template made a value longer than {self.max_chars}.")
        if operator == "**" and (abs(left) > 1e9 or abs(right) > 64):
            raise ChatTemplateError("the chat template raised a number to a huge power.")
        if operator == "%" and isinstance(left, str):
            self.check_format("%", left)
        return self.sized(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        owner, name = getattr(getattr(obj, "__wrapped__", obj), "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name == "join":
            return self.joined(args[0], owner)
        if isinstance(owner, (str, bytes, int)):
            self.check_growth(name, (owner, *args, *kwargs.values()))
        if isinstance(owner, str) and name in ("format", "format_map"):
            self.check_format("{", owner)
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(result, range):
            self.turn(len(result))
        return self.sized(result)


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """jinja's own filter escapes HTML; chat templates need plain JSON (as in transformers)."""
    if (len(indent) if isinstance(indent, str) else indent or 0) > MAX_INDENT:
        raise ChatTemplateError(f"the chat template indents JSON by more than {MAX_INDENT}.")
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_environment
def _join(environment: Sandbox, value: Any, d: Any = "", attribute: Any = None) -> str:
    return environment.joined(value, d, attribute)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def make_sandbox() -> Sandbox:
    """To compile templates in, as transformers does. Its own limits are 0: where the compiler would compute a constant
    with a filter, that fails, and is left for the rendering."""
    env = Sandbox(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    known = {name: function for name, function in env.filters.items() if name not in SLOW}
    env.all_filters = {**known, "tojson": _tojson, "join": _join}
    env.filters = {name: env.bound(name, function) for name, function in env.all_filters.items()}
    del env.globals["lipsum"]  # slow, and random
    env.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_new_dict)
    return env
