"""EBNF as SGLang's users write it (GBNF: `root ::= "a" rule | [0-9]+`) -> the matcher's words. No torch.

Literals "…" or '…', classes [a-z] [^a-z] and `.`, groups, `|`, `* + ? {m} {m,} {m,n}`, comments with #; `root` is what
the output is. Lookahead and other extensions are refused."""

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from fengine.errors import GrammarError
from fengine.structured_output.regex import explicit

MAX_DEPTH = 64  # of parentheses
MAX_REPEAT = 10_000
MAX_RULES = 256
_NAME = r"[A-Za-z_][A-Za-z0-9_.-]*"
_ESCAPE = r"\\(?:[^0-9\n]|0(?![0-9]))"  # no octal numbers
_TOKENS = re.compile(
    rf"""(?P<space>(?:\s|\#[^\n]*)+) | (?P<rule>{_NAME})(?:\s|\#[^\n]*)*::= | (?P<name>{_NAME})
    | (?P<literal>"(?:[^"\\\n]|{_ESCAPE})*"|'(?:[^'\\\n]|{_ESCAPE})*') | (?P<class>\[(?:[^\]\\\n]|{_ESCAPE})*\])
    | (?P<repeat>[*+?]|\{{\s*[0-9]+\s*(?:,\s*[0-9]*\s*)?\}}) | (?P<mark>[()|.])""",
    re.VERBOSE,
)
_CHARACTER = re.compile(r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)|.", re.DOTALL)
_REF = re.compile("<([^>]*)>")  # in a written expression, which has no other < than these


class Expression(NamedTuple):
    """`lark`: in the matcher's words, every character a lexeme /…/ of its own, names in <>. `ends(finite)`: whether a
    finite text satisfies it, if one does each of these rules."""

    lark: str
    ends: Callable[[set[str]], bool]


def to_lark(text: str) -> str:
    """The grammar for the matcher: a rule `text`. Errors: GrammarError. Pure. A grammar without recursion becomes one
    regular expression. With recursion it is read character by character, for the matcher's lexer would take the longest
    match where a shorter one was meant."""
    rules = _rules(text)
    refs = {name: _REF.findall(rule.lark) for name, rule in rules.items()}
    _check(rules, refs)
    reached = _reached(refs, ["root"])
    flat = not any(name in _reached(refs, refs[name]) for name in reached)
    words = {name: f"{'R' if flat else 'r'}{i}" for i, name in enumerate(reached)}
    lines = [f"text: {words['root']}"]
    for name in reached:
        body = _REF.sub(lambda match: words[match[1]], rules[name].lark)
        lines.append(f"{words[name]}: {body.replace('/ /', '') if flat else body}")  # lexemes of a terminal are joined
    return "\n".join(lines)


def _check(rules: dict[str, Expression], refs: dict[str, list[str]]) -> None:
    """Errors: GrammarError. Pure."""
    if "root" not in rules:
        raise GrammarError("ebnf has no rule `root`, where a text begins: root ::= …")
    if len(rules) > MAX_RULES:
        raise GrammarError(f"ebnf has {len(rules)} rules, more than {MAX_RULES}")
    if missing := sorted({ref for found in refs.values() for ref in found} - set(rules)):
        raise GrammarError(f"ebnf uses rules that it does not define: {', '.join(missing)[:400]}")
    finite: set[str] = set()
    while more := {name for name, rule in rules.items() if name not in finite and rule.ends(finite)}:
        finite |= more
    if endless := sorted(set(rules) - finite):
        raise GrammarError(f"ebnf has rules that no finite text satisfies: {', '.join(endless)[:400]}")


def _reached(refs: dict[str, list[str]], todo: list[str]) -> list[str]:
    """These rules and those that they lead to. Pure."""
    seen: dict[str, None] = {}
    todo = list(todo)
    while todo:
        name = todo.pop()
        if name not in seen:
            seen[name] = None
            todo += refs[name]
    return list(seen)


def _tokens(text: str) -> Iterator[tuple[str, str, str]]:
    """(kind, text, where it stands) of each."""
    at, line = 0, 1
    while at < len(text):
        match, where = _TOKENS.match(text, at), f"ebnf, line {line}:"
        if match is None or match.lastgroup is None:
            raise GrammarError(f"{where} {text[at : at + 20]!r} is neither rule, literal, class nor operator")
        if match.lastgroup != "space":
            yield match.lastgroup, match[match.lastgroup], where
        at, line = match.end(), line + match[0].count("\n")
    yield "end", "", f"ebnf, line {line}:"


def _rules(text: str) -> dict[str, Expression]:
    """The rules by name. Errors: GrammarError. Pure."""
    rules: dict[str, Expression] = {}
    name, open_ = "", list[list[list[Expression]]]()  # the parentheses that are open: sequences, of which one holds
    for kind, value, where in _tokens(text):
        if kind in ("rule", "end"):
            if len(open_) > 1:
                raise GrammarError(f"{where} a parenthesis is not closed")
            if open_:
                rules[name] = _either(open_.pop())
            if value in rules:
                raise GrammarError(f"ebnf defines the rule {value!r:.80} twice")
            name, open_ = value, [[[]]]
            continue
        _check_place(kind, value, open_, where)
        if value == "(":
            open_.append([[]])
        elif value == "|":
            open_[-1].append([])
        elif value == ")":
            inner = _either(open_.pop())
            open_[-1][-1].append(inner._replace(lark=f"({inner.lark})"))
        elif kind == "repeat":
            open_[-1][-1].append(_repeated(open_[-1][-1].pop(), value, where))
        else:
            open_[-1][-1].append(_one(kind, value, where))
    return rules


def _check_place(kind: str, value: str, open_: list[list[list[Expression]]], where: str) -> None:
    """Errors: GrammarError for a token that cannot stand there. Pure."""
    if not open_ or (value == ")" and len(open_) < 2) or (kind == "repeat" and not open_[-1][-1]):
        wanted = "something to repeat" if kind == "repeat" else "a rule (name ::= …)"
        raise GrammarError(f"{where} expected {wanted}, got {value!r:.80}")
    if value == "(" and len(open_) > MAX_DEPTH:
        raise GrammarError(f"{where} more than {MAX_DEPTH} parentheses inside one another")


def _either(options: list[list[Expression]]) -> Expression:
    """One of several sequences. Pure."""
    written = [" ".join(part.lark for part in parts) or '""' for parts in options]
    lark = written[0] if len(written) == 1 else f"({' | '.join(written)})"
    return Expression(lark, lambda finite: any(all(part.ends(finite) for part in parts) for parts in options))


def _one(kind: str, value: str, where: str) -> Expression:
    """A rule's name, or characters. Errors: GrammarError. Pure."""
    if kind == "name":
        return Expression(f"<{value}>", lambda finite: value in finite)
    sets = [value]
    if kind == "literal":
        found = _CHARACTER.findall(value[1:-1])
        sets = [f"[{one}]" if one.startswith("\\") else re.escape(one) for one in found]
    return Expression(" ".join(f"/{_written(one, where)}/" for one in sets) or '""', lambda finite: True)


@lru_cache(1024)
def _written(pattern: str, where: str) -> str:
    return explicit("(?s:.)" if pattern == "[^]" else pattern, where)


def _repeated(item: Expression, value: str, where: str) -> Expression:
    """Errors: GrammarError. Pure."""
    low, comma, high = {"*": "0,", "+": "1,", "?": "0,1"}.get(value, value.strip("{} \t\n")).partition(",")
    least, most = int(low), (int(high) if high.strip() else None) if comma else int(low)
    if least > MAX_REPEAT or (most or 0) > MAX_REPEAT or (most is not None and most < least):
        raise GrammarError(f"{where} {value} must be {{m,n}} with m <= n <= {MAX_REPEAT}")
    if most == 0:
        return Expression('""', lambda finite: True)
    lark = f"({item.lark}){{{least},{'' if most is None else most}}}"
    return Expression(lark, item.ends if least else lambda finite: True)
