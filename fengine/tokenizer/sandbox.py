"""The sandbox that chat templates run in: jinja2's immutable one, with limits on time and on everything that is made.

A template comes from a checkpoint or a request, so it is untrusted code. Three budgets end it:
- the CPU time of its thread, looked at in every loop turn, call, filter, test and comparison;
- the size of every value, counted as what it would be written out: a list that holds another one twice counts it twice;
- what all values come to together, since a template may keep them all.
What one operation could make of a large number, before its result can be looked at, is refused beforehand.
"""

import json
import re
import time
from collections.abc import Iterable
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2.filters import make_attrgetter
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_environment

from fengine.errors import ChatTemplateError
from fengine.tokenizer.template_syntax import Generation

MAX_TURNS = 300_000  # loop turns of one rendering; a macro call counts as ten
MAX_SECONDS = 1.0  # of the thread's CPU time
LOOKS = 16  # checks of a template to one look at the clock
MAX_BITS = 4096  # of a whole number that a template makes
WRITTEN = 8  # what a list or dict holds, written out, may be so many times the longest text
TOGETHER = 48  # all values that are made may be so many times the longest text
EACH = 8  # what an item counts besides its characters
SLOW = ("pprint", "striptags", "urlize", "wordwrap")  # filters whose time is not linear; no chat needs them
SLOW_METHODS = ("striptags", "translate", "unescape")  # of strings
MAX_INDENT = 32  # of tojson
MAX_DIGITS = 64  # of a power's exponent, and of round
MAX_DATE = 256  # characters of a date's format
# Filters and methods that make something as long as a number that they are given.
WIDENING = frozenset(("batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "to_bytes", "zfill"))
_HUGE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")
_HUGE_BRACES = re.compile(r"\{[^{}]*(\{|:[^{}]*\d{4})")
_SCALARS = frozenset((str, int, float, bool, type(None)))  # write out as no more than they are
_HOLDING = (list, tuple, dict, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))


class _Namespace(Namespace):
    """jinja's, which would write out all that it holds."""

    def __repr__(self) -> str:
        return "<Namespace>"


class Sandbox(ImmutableSandboxedEnvironment):
    """Build with `make_sandbox`. One overlay per rendering (`for_rendering`) carries that rendering's budget."""

    intercepted_binops = frozenset(["*", "**", "%", "+"])
    turns_left: int = MAX_TURNS
    max_chars: int = 0
    chars_left: int = 0  # for all values together
    deadline: float = 0.0
    looks: int = 0
    known: dict[int, int]  # id -> weight of what the rendering was given
    all_filters: dict[str, Any]  # without limits
    all_tests: dict[str, Any]

    def for_rendering(self, max_chars: int, given: Any = None) -> "Sandbox":
        """The same with a budget for one rendering of `given`, in which no string may be longer than `max_chars`."""
        env: Any = self.overlay()
        env.turns_left, env.max_chars, env.chars_left = MAX_TURNS, max_chars, TOGETHER * max_chars
        env.deadline, env.known = time.thread_time() + MAX_SECONDS, {}
        env.filters = {name: env.bound(name, function) for name, function in self.all_filters.items()}
        env.tests = {name: env.watched(function) for name, function in self.all_tests.items()}
        env.finalize = env.compared
        env.weight(given, env.known)
        return env

    # -- budgets -------------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        self.looks += 1  # the clock costs more than most of what a template does
        if self.looks % LOOKS == 0 and time.thread_time() > self.deadline:
            raise ChatTemplateError(f"the chat template took more than {MAX_SECONDS:g} s.")

    def turn(self, turns: int) -> bool:
        self.turns_left -= turns
        if self.turns_left < 0:
            raise ChatTemplateError(f"the chat template took more than {MAX_TURNS} loop turns.")
        self.watch()
        return True

    def weight(self, value: Any, seen: dict[int, int]) -> int:
        """About the characters of a value written out. Modifies: `seen`, the weights of what it holds by id."""
        if isinstance(value, (str, bytes)):
            return len(value) + EACH
        if not isinstance(value, _HOLDING):
            return EACH
        found = self.known.get(id(value)) or seen.get(id(value))
        if found is None:
            items: Iterable[Any] = value
            if isinstance(value, dict):
                items = [part for pair in value.items() for part in pair]
            found = EACH + sum(self.weight(item, seen) for item in items)
            if found > WRITTEN * self.max_chars:
                raise ChatTemplateError(f"the chat template made a value longer than {self.max_chars}.")
            seen[id(value)] = found
        return found

    def compared(self, value: Any) -> Any:
        """`value`, which is looked at or written as a whole."""
        self.watch()
        if type(value) not in _SCALARS and isinstance(value, _HOLDING):
            self.weight(value, {})
        return value

    def all_compared(self, values: list[Any]) -> None:
        self.watch()
        if not all(type(value) in _SCALARS for value in values):
            self.weight(values, {})

    def sized(self, value: Any) -> Any:
        """`value`, which was made."""
        self.watch()
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise ChatTemplateError(f"the chat template made a number of more than {MAX_BITS} bits.")
        if isinstance(value, (str, bytes, *_HOLDING)):
            if len(value) > self.max_chars:
                raise ChatTemplateError(
                    f"the chat template made a value longer than {self.max_chars}; shorten the chat."
                )
            if type(value) is not str:
                self.weight(value, {})
            self.chars_left -= len(value)
            if self.chars_left < 0:
                raise ChatTemplateError("the chat template made too many values.")
        return value

    def check_growth(self, name: str, given: list[Any]) -> None:
        """Stops the filter, or method of a string, `name` before it makes something huge of what it is given."""
        if name in SLOW_METHODS or self.growth(name, given) > self.max_chars:
            raise ChatTemplateError(f"the chat template asks {name} for a value longer than {self.max_chars}.")

    def growth(self, name: str, given: list[Any]) -> int:
        """About the characters that `name` makes of what it is given; 0 where no argument can make them many."""
        texts = [x for x in given if isinstance(x, str)]
        width = max((abs(x) for x in given if isinstance(x, int)), default=0) if name in WIDENING else 0
        match name:
            case "indent" | "expandtabs" if texts:
                return width * (texts[0].count("\n" if name == "indent" else "\t") + 1)
            case "replace" if len(texts) > 2:
                text, old, new = texts[:3]
                return (text.count(old) if old else len(text) + 1) * len(new)
            case "format" | "format_map" if texts:
                return len(re.findall("[{%]", texts[0])) * self.weight(given[1:], {}) // WRITTEN
            case "round" if any(isinstance(x, int) and abs(x) > MAX_DIGITS for x in given[1:]):
                return self.max_chars + 1
        return width

    def check_format(self, style: str, form: str) -> None:
        """Stops a format, of style "%" or "{", with a width that is huge or an argument."""
        huge = _HUGE_PERCENT if style == "%" else _HUGE_BRACES
        if huge.search(form if style == "%" else form.replace("{{", "").replace("}}", "")):
            raise ChatTemplateError("the chat template formats with a huge or variable width.")

    # -- what a template calls -----------------------------------------------------------------------------------------

    def bound(self, name: str, function: Any) -> Any:
        """A filter with limits, on each value and on all together."""

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            given = [*args, *kwargs.values()]
            self.all_compared(given)
            self.check_growth(name, given)
            if name == "format" and isinstance(args[0], str):
                self.check_format("%", args[0])
            if name == "sum" and any(isinstance(x, _HOLDING) for x in given[2:]):  # behind environment and items
                raise ChatTemplateError("the chat template sums what are no numbers.")
            return self.sized(function(*args, **kwargs))

        return bounded

    def watched(self, function: Any) -> Any:
        """A test, which may be asked of each item of a list."""

        @wraps(function)
        def test(*args: Any, **kwargs: Any) -> Any:
            self.all_compared([*args, *kwargs.values()])
            return function(*args, **kwargs)

        return test

    def joined(self, items: Any, between: Any = "", attribute: Any = None) -> str:
        """The filter `join`, and the method."""
        items = items if attribute is None else map(make_attrgetter(self, attribute), items)
        between = str(self.compared(between))
        parts = (part for i, item in enumerate(items) for part in ((between,) if i else ()) + (self.written(item),))
        return self.concat(parts)

    def written(self, value: Any) -> str:
        return str(self.compared(value))

    def concat(self, parts: Any) -> str:  # type: ignore[override]
        room, out = self.max_chars, []
        for part in parts:
            room -= len(part)
            if room < 0:
                raise ChatTemplateError(f"the chat template wrote more than {self.max_chars} characters.")
            out.append(part)
        return self.sized("".join(out))

    def join(self, *parts: Any) -> str:
        return self.concat(map(self.written, parts))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.compared(left)
        self.compared(right)
        if operator == "*":
            size = next((len(x) for x in (left, right) if isinstance(x, (str, bytes, list, tuple))), None)
            count = next((x for x in (left, right) if isinstance(x, int)), 0)
            if size is not None and size * count > self.max_chars:
                raise ChatTemplateError(f"the chat template made a value longer than {self.max_chars}.")
        if operator == "**" and (abs(left) > 1e9 or abs(right) > MAX_DIGITS):
            raise ChatTemplateError("the chat template raised a number to a huge power.")
        if operator == "%" and isinstance(left, (str, bytes)):
            if isinstance(left, bytes):
                raise ChatTemplateError("the chat template formats bytes.")
            self.check_format("%", left)
            self.check_growth("format", [left, right])
        return self.sized(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        owner, name = getattr(getattr(obj, "__wrapped__", obj), "__self__", None), getattr(obj, "__name__", "")
        if owner is self:  # a check that was written in; no template can name one
            return obj(*args)
        given = [*args, *kwargs.values()]
        self.all_compared(given)
        if isinstance(owner, bytes) and name != "decode":
            raise ChatTemplateError(f"the chat template calls {name} of bytes.")
        if isinstance(owner, str) and name == "join":
            return self.joined(args[0], owner)
        if isinstance(owner, (str, int)):
            self.check_growth(name, [owner, *given])
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
    if max(map(len, separators or ("",))) > MAX_INDENT:
        raise ChatTemplateError(f"the chat template separates JSON by more than {MAX_INDENT}.")
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_environment
def _join(environment: Sandbox, value: Any, d: Any = "", attribute: Any = None) -> str:
    return environment.joined(value, d, attribute)


def _strftime_now(form: str) -> str:
    if len(form) > MAX_DATE:
        raise ChatTemplateError(f"the chat template formats a date with more than {MAX_DATE} characters.")
    return datetime.now().strftime(form)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def make_sandbox() -> Sandbox:
    """To compile templates in, as transformers does. Its own limits are 0: where the compiler would compute a constant
    with a filter, that fails, and is left for the rendering."""
    env = Sandbox(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    known = {name: function for name, function in env.filters.items() if name not in SLOW}
    env.all_filters, env.all_tests = {**known, "tojson": _tojson, "join": _join}, dict(env.tests)
    env.known = {}
    env.filters = {name: env.bound(name, function) for name, function in env.all_filters.items()}
    del env.globals["lipsum"]  # slow, and random
    env.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_new_dict, namespace=_Namespace
    )
    return env
