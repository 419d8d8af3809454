"""Chat messages and chat templates: validation, and rendering in a bounded sandbox.

A template comes from a checkpoint, so it is untrusted code. It runs in jinja2's immutable sandbox with a budget of loop
turns and a limit on every string it makes; whatever goes wrong in it is a `ChatTemplateError` of this request alone.
Rendered text equals that of transformers' `apply_chat_template`.
"""

import json
import re
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from fengine.errors import ChatTemplateError, InvalidRequestError, UnknownParameterError

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
MAX_TURNS = 300_000  # loop turns of one rendering; a macro call counts as ten
MAX_DEPTH = 32  # nesting of what a template may see
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names that chats use; templates read the first two


# -- what a template may see ------------------------------------------------------------------------------------------


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy of `value` made of exact JSON types. Pure. Errors: InvalidRequestError naming `where`."""
    if depth > MAX_DEPTH:
        raise InvalidRequestError(f"{where} is nested deeper than {MAX_DEPTH} levels.")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, dict):
        if any(not isinstance(key, str) for key in value):
            raise InvalidRequestError(f"{where} has a key that is not a string.")
        return {key: plain(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise InvalidRequestError(f"{where} must be JSON-like (str, number, bool, list, dict), got {type(value).__name__}.")


def _content(value: Any, where: str) -> None:
    if isinstance(value, str):
        return
    if isinstance(value, list) and value:
        for i, part in enumerate(value):
            if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                raise InvalidRequestError(
                    f'{where}[{i}] must be {{"type": "text", "text": str}}; images and other parts are not built.'
                )
        return
    raise InvalidRequestError(f"{where} must be a string or a list of text parts, got {type(value).__name__}.")


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Validated plain copies of chat messages, normalised as transformers does: keys with None are dropped and
    reasoning is offered under each of its names. Pure. Errors: InvalidRequestError."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequestError(
            f'messages must be a non-empty list of {{"role", "content"}}, got {type(messages).__name__}'
            + ("." if not isinstance(messages, (list, tuple)) else " of length 0.")
        )
    checked = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise InvalidRequestError(f"{where} must be a dict, got {type(message).__name__}.")
        message = {key: value for key, value in plain(message, where).items() if value is not None}
        if "role" not in message:
            raise InvalidRequestError(f"{where} has no role; use one of {', '.join(ROLES)}.")
        if message["role"] not in ROLES:
            raise InvalidRequestError(f"{where} has unknown role {message['role']!r}; use one of {', '.join(ROLES)}.")
        if "content" in message:
            _content(message["content"], f"{where}['content']")
        elif "tool_calls" not in message:
            raise InvalidRequestError(f"{where} has no content (missing or None); pass a string.")
        reasoning = next((message[key] for key in _REASONING if key in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        checked.append(message)
    return checked


# -- the sandbox ------------------------------------------------------------------------------------------------------


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it is only a scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Budgeted(NodeTransformer):
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


class _Sandbox(ImmutableSandboxedEnvironment):
    """One overlay per rendering carries that rendering's budget: `turns_left` and `max_chars`."""

    intercepted_binops = frozenset(["*", "**", "%", "+"])
    turns_left: int = MAX_TURNS
    max_chars: int = 0

    def turn(self, turns: int) -> bool:
        self.turns_left -= turns
        if self.turns_left < 0:
            raise ChatTemplateError(f"the chat template took more than {MAX_TURNS} loop turns.")
        return True

    def sized(self, value: Any) -> Any:
        if isinstance(value, (str, list, tuple)) and len(value) > self.max_chars:
            raise ChatTemplateError(f"the chat template made a value longer than {self.max_chars}; shorten the chat.")
        return value

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
        if operator == "%" and isinstance(left, str) and re.search(r"%[^a-zA-Z%]*(\d{4}|\*)", left):
            raise ChatTemplateError("the chat template formats with a huge or variable width.")
        return self.sized(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
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
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


class ChatTemplate:
    """A compiled chat template. Rendering is a function of its arguments (and of the clock if it asks for the date)."""

    def __init__(self, source: str) -> None:
        """Errors: ChatTemplateError if `source` is not a valid template."""
        self._env = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        self._env.filters["tojson"] = _tojson
        self._env.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_new_dict)
        self._source = source
        try:
            tree = self._env.parse(source)
            self._names = jinja2.meta.find_undeclared_variables(tree)
            tree = _Budgeted().visit(tree)
            self._code = self._env.compile(tree.set_environment(self._env))
        except (jinja2.TemplateError, RecursionError) as error:
            raise ChatTemplateError(f"the model's chat template cannot be compiled: {error}") from error

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads and a caller may set."""
        return frozenset(self._names) - {"messages", "add_generation_prompt"} - frozenset(self._env.globals)

    def render(
        self,
        messages: list[dict[str, Any]],
        special_tokens: dict[str, str],
        values: dict[str, Any],
        *,
        add_generation_prompt: bool,
        max_chars: int,
    ) -> str:
        """Renders checked messages. `values` may set only `variables` that are no special token.

        Errors: UnknownParameterError, ChatTemplateError (the template raised, used something undefined, ran too long,
        or wrote more than `max_chars`).
        """
        allowed = self.variables - special_tokens.keys()
        for name in values:
            if name not in allowed:
                known = ", ".join(sorted(allowed)) or "none"
                raise UnknownParameterError(f"the model's chat template takes no variable {name!r}; it takes: {known}.")
        env = self._env.overlay()
        env.turns_left, env.max_chars = MAX_TURNS, max_chars
        template = jinja2.Template.from_code(env, self._code, env.make_globals(None))
        # transformers always passes these two, as None where unset
        fixed = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        try:
            return template.render({**special_tokens, **fixed, **values, "messages": messages})
        except ChatTemplateError:
            raise
        except Exception as error:  # untrusted code: whatever it does wrong belongs to this request
            raise ChatTemplateError(f"the model's chat template failed: {type(error).__name__}: {error}") from error
