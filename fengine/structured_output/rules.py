"""The rules of an EBNF grammar: their nodes, whether they can be used, and how the matcher reads them. No torch."""

from typing import NamedTuple

from fengine.errors import GrammarError
from fengine.structured_output import characters
from fengine.structured_output.characters import Ranges

MAX_RULES = 256


class Chars(NamedTuple):
    """One of these characters."""

    ranges: Ranges


class Ref(NamedTuple):
    """What another rule stands for."""

    name: str


class Seq(NamedTuple):
    """One behind the other; of none: the empty text."""

    items: "tuple[Node, ...]"


class Alt(NamedTuple):
    """One of them."""

    items: "tuple[Node, ...]"


class Repeat(NamedTuple):
    """So many times; `most` None: without limit."""

    item: "Node"
    least: int
    most: int | None


Node = Chars | Ref | Seq | Alt | Repeat
Rules = dict[str, Node]


# -- checks ------------------------------------------------------------------------------------------------------------


def check(rules: Rules) -> None:
    """Errors: GrammarError. Pure."""
    if "root" not in rules:
        raise GrammarError("ebnf has no rule `root`, where a text begins: root ::= …")
    if len(rules) > MAX_RULES:
        raise GrammarError(f"ebnf has {len(rules)} rules, more than {MAX_RULES}")
    missing = sorted({ref for node in rules.values() for ref in _refs(node)} - set(rules))
    if missing:
        raise GrammarError(f"ebnf uses rules that it does not define: {', '.join(missing)[:400]}")
    finite: set[str] = set()
    while more := {name for name, node in rules.items() if name not in finite and _can_end(node, finite)}:
        finite |= more
    if endless := sorted(set(rules) - finite):
        raise GrammarError(f"ebnf has rules that no finite text satisfies: {', '.join(endless)[:400]}")


def _can_end(node: Node, finite: set[str]) -> bool:
    match node:
        case Seq(items):
            return all(_can_end(item, finite) for item in items)
        case Alt(items):
            return any(_can_end(item, finite) for item in items)
        case Repeat(item, least, _):
            return least == 0 or _can_end(item, finite)
        case Ref(name):
            return name in finite
    return True


def _refs(node: Node) -> list[str]:
    """The rules that it names."""
    match node:
        case Ref(name):
            return [name]
        case Seq(items) | Alt(items):
            return [name for item in items for name in _refs(item)]
        case Repeat(item, _, _):
            return _refs(item)
    return []


def _reached(edges: dict[str, list[str]], start: str, *, strictly: bool = False) -> list[str]:
    """Rules reached from `start`, itself first unless `strictly`: then only if a way leads back. Pure."""
    seen: dict[str, None] = {} if strictly else {start: None}
    todo = list(edges[start])
    while todo:
        name = todo.pop()
        if name not in seen:
            seen[name] = None
            todo += edges[name]
    return list(seen)


# -- writing -----------------------------------------------------------------------------------------------------------


def to_lark(rules: Rules) -> str:
    """The grammar for the matcher: a rule `text`; the rules have passed `check`. Pure.

    A grammar without recursion becomes one regular expression. With recursion it is read character by character, for
    the matcher's lexer would take the longest match where a shorter one was meant.
    """
    refs = {name: _refs(node) for name, node in rules.items()}
    names = {name: f"r{i}" for i, name in enumerate(_reached(refs, "root"))}
    flat = not any(name in _reached(refs, name, strictly=True) for name in names)
    word = {name: short.upper() if flat else short for name, short in names.items()}
    lines = [f"{word[name]}: {_written(rules[name], word, flat)}" for name in names]
    return "\n".join([f"text: {word['root']}", *lines])


def _written(node: Node, word: dict[str, str], flat: bool) -> str:
    """As a rule of lexemes that are one character each, or (`flat`) as a terminal: then all text of one place is one
    regular expression."""
    match node:
        case Chars(ranges):
            return f"/{characters.written(ranges)}/"
        case Ref(name):
            return word[name]
        case Seq(items):
            return _sequence(items, word, flat)
        case Alt(items):
            return f"({' | '.join(_written(item, word, flat) for item in items)})"
        case Repeat(_, _, 0):
            return '""'
        case Repeat(item, least, most):
            return f"({_written(item, word, flat)}){{{least},{'' if most is None else most}}}"


def _sequence(items: tuple[Node, ...], word: dict[str, str], flat: bool) -> str:
    chars = [characters.written(item.ranges) for item in items if isinstance(item, Chars)]
    if flat and 0 < len(chars) == len(items):
        return f"/{''.join(chars)}/"
    return " ".join(_written(item, word, flat) for item in items) or '""'
