"""What two machines over regular expressions share: Python's own parser, and patterns for single characters."""

import re
import threading
import warnings
from importlib import import_module
from typing import Any

from fengine.errors import InvalidRequestError

parser: Any = import_module("re._parser")  # that `re.compile` itself uses; the same in all supported Pythons
_CLASSES = {"DIGIT": r"\d", "NOT_DIGIT": r"\D", "SPACE": r"\s", "NOT_SPACE": r"\S", "WORD": r"\w", "NOT_WORD": r"\W"}
_REFUSED = {
    "GROUPREF": "a back-reference", "GROUPREF_IGNORE": "a back-reference", "GROUPREF_EXISTS": "a conditional",
    "ASSERT": "look-around", "ASSERT_NOT": "look-around", "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive quantifier",
}  # fmt: skip


_QUIET = threading.Lock()  # the warnings module has one list of filters for all threads


def parse(pattern: str) -> Any:
    """The parser's tree of a user's pattern, without its warnings of syntax to come. Errors: as `re.compile`. Pure."""
    with _QUIET, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return parser.parse(pattern)


def inside(flags: int, more: int, less: int) -> int:
    """The flags inside (?more-less:…): of ASCII and UNICODE there is one. Pure."""
    kinds = re.ASCII | re.UNICODE
    return ((flags & ~kinds if more & kinds else flags) | more) & ~less


def one_character(whole: str, kind: str, value: Any, flags: int) -> re.Pattern[str]:
    """A pattern for one character, from an item of the parser. Pure.

    Errors: InvalidRequestError for what is no character at all; `whole` names the expression it stands in.
    """
    if kind == "ANY":
        source = "."
    elif kind in ("LITERAL", "NOT_LITERAL"):
        source = f"[{'^' if kind == 'NOT_LITERAL' else ''}{_escaped(value)}]"
    elif kind == "IN":
        parts = []
        for item, what in value:
            name = str(item)
            ends = (what,) if name == "LITERAL" else what if name == "RANGE" else ()
            category = _CLASSES.get(str(what).removeprefix("CATEGORY_"), "")
            parts.append("^" if name == "NEGATE" else "-".join(map(_escaped, ends)) or category)
        source = f"[{''.join(parts)}]"
    else:
        raise InvalidRequestError(
            f"{whole} uses {_REFUSED.get(kind, kind)}, which may take unbounded time; use characters, classes, groups, "
            "|, anchors and the quantifiers * + ? {m,n}."
        )
    return re.compile(source, flags & ~re.VERBOSE)


def _escaped(code: int) -> str:
    return f"\\U{code:08x}"
