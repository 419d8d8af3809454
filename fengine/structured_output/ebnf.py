"""EBNF as SGLang's users write it (GBNF: `root ::= "a" rule | [0-9]+`) -> the matcher's words. No torch.

Literals "…" or '…', classes [a-z] [^a-z] and `.`, groups, `|`, `* + ? {m} {m,} {m,n}`, comments with #; `root` is what
the output is. Lookahead and other extensions are refused.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fengine.errors import GrammarError
from fengine.structured_output import characters
from fengine.structured_output.characters import Ranges

MAX_DEPTH = 64  # of parentheses
MAX_REPEAT = 10_000
MAX_RULES = 256
_NAME = r"[A-Za-z_][A-Za-z0-9_.-]*"
_TOKENS = re.compile(
    rf"""(?P<space>(?:\s|\#[^\n]*)+) | (?P<rule>{_NAME})(?:\s|\#[^\n]*)*::= | (?P<name>{_NAME})
    | (?P<literal>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*') | (?P<class>\[(?:[^\]\\\n]|\\.)*\])
    | (?P<repeat>[*+?]|\{{\s*[0-9]+\s*(?:,\s*[0-9]*\s*)?\}}) | (?P<mark>[()|.])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|(.)", re.DOTALL)
_PLAIN = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0", "a": "\a", "b": "\b"}
_CLASSES = {"d": "DIGIT", "s": "SPACE", "w": "WORD", "D": "NOT_DIGIT", "S": "NOT_SPACE", "W": "NOT_WORD"}
_REF = re.compile("<([^>]*)>")  # in a written expression, which has no other < than these


class Expression(NamedTuple):
    """`lark`: in the matcher's words, every character a lexeme /…/ of its own, names in <>. `ends(finite)`: whether a
    finite text satisfies it, if one does each of these rules."""

    lark: str
    ends: Callable[[set[str]], bool]


def to_lark(text: str) -> str:
    """The grammar for the matcher: a rule `text`. Errors: GrammarError. Pure.

    A grammar without recursion becomes one regular expression. With recursion it is read character by character, for
    the matcher's lexer would take the longest match where a shorter one was meant.
    """
    rules: dict[str, Expression] = {}
    reader = _Reader(text)
    while reader.kind != "end":
        name = reader.take("rule", "a rule (name ::= …)")
        if name in rules:
            raise GrammarError(f"ebnf defines the rule {name!r:.80} twice")
        rules[name] = reader.alternatives(0)
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


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    at = 0
    while at < len(text):
        match = _TOKENS.match(text, at)
        if match is None or match.lastgroup is None:
            line = text.count("\n", 0, at) + 1
            raise GrammarError(
                f"ebnf, line {line}: {text[at : at + 20]!r} is neither rule, literal, class nor operator"
            )
        if match.lastgroup != "space":
            yield match.lastgroup, match[match.lastgroup], at
        at = match.end()
    yield "end", "", len(text)


def _of_characters(sets: list[Ranges]) -> Expression:
    lark = " ".join(f"/{characters.written(ranges)}/" for ranges in sets)
    return Expression(lark or '""', lambda finite: True)


class _Reader:
    """Recursive descent over the tokens."""

    def __init__(self, text: str) -> None:
        self.text, self.tokens, self.at = text, list(_tokens(text)), 0

    @property
    def kind(self) -> str:
        return self.tokens[self.at][0]

    @property
    def value(self) -> str:
        return self.tokens[self.at][1]

    def fail(self, problem: str) -> GrammarError:
        line = self.text.count("\n", 0, self.tokens[self.at][2]) + 1
        return GrammarError(f"ebnf, line {line}: {problem}")

    def take(self, kind: str, wanted: str) -> str:
        if self.kind != kind:
            raise self.fail(f"expected {wanted}, got {self.value!r:.80}")
        self.at += 1
        return self.tokens[self.at - 1][1]

    def alternatives(self, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            raise self.fail(f"more than {MAX_DEPTH} parentheses inside one another")
        found = [self.sequence(depth)]
        while self.value == "|" and self.kind == "mark":
            self.at += 1
            found.append(self.sequence(depth))
        if len(found) == 1:
            return found[0]
        return Expression(
            f"({' | '.join(one.lark for one in found)})", lambda finite: any(one.ends(finite) for one in found)
        )

    def sequence(self, depth: int) -> Expression:
        found: list[Expression] = []
        while self.kind in ("name", "literal", "class") or (self.kind == "mark" and self.value in "(."):
            item = self.item(depth)
            while self.kind == "repeat":
                item = self.repeat(item)
            found.append(item)
        return Expression(
            " ".join(one.lark for one in found) or '""', lambda finite: all(one.ends(finite) for one in found)
        )

    def item(self, depth: int) -> Expression:
        kind, value = self.kind, self.value
        if value == "(" and kind == "mark":
            self.at += 1
            inner = self.alternatives(depth + 1)
            if self.value != ")":
                raise self.fail("a parenthesis is not closed")
            found = inner._replace(lark=f"({inner.lark})")
        elif kind == "literal":
            found = _of_characters([ranges for ranges, _ in self.members(value[1:-1])])
        elif kind == "class":
            found = _of_characters([self.in_class(value[1:-1])])
        elif kind == "name":
            found = Expression(f"<{value}>", lambda finite: value in finite)
        else:
            found = _of_characters([characters.complement(characters.of(characters.LINE_ENDS))])
        self.at += 1
        return found

    def repeat(self, item: Expression) -> Expression:
        value = self.take("repeat", "a repetition")
        low, comma, high = {"*": "0,", "+": "1,", "?": "0,1"}.get(value, value.strip("{} \t\n")).partition(",")
        least, most = int(low), (int(high) if high.strip() else None) if comma else int(low)
        if least > MAX_REPEAT or (most or 0) > MAX_REPEAT or (most is not None and most < least):
            raise self.fail(f"{value} must be {{m,n}} with m <= n <= {MAX_REPEAT}")
        if most == 0:
            return _of_characters([])
        lark = f"({item.lark}){{{least},{'' if most is None else most}}}"
        return Expression(lark, item.ends if least else lambda finite: True)

    def in_class(self, text: str) -> Ranges:
        negated = text.startswith("^")
        found = self.members(text[negated:], most=negated)[::-1]  # the next one last
        sets: list[Ranges] = []
        while found:
            ranges, _ = found.pop()
            if len(found) > 1 and found[-1] == (characters.of("-"), True):
                ends = characters.union(ranges), characters.union(found[-2][0])
                if any(len(end) != 1 or end[0][0] != end[0][1] for end in ends) or ends[0] > ends[1]:
                    raise self.fail(f"[{text:.80}] holds a range that is none")
                ranges = ((ends[0][0][0], ends[1][0][0]),)
                del found[-2:]
            sets.append(ranges)
        ranges = characters.without_surrogates(characters.union(*sets))
        ranges = characters.complement(ranges) if negated else ranges
        if not ranges:
            raise self.fail(f"no character is in [{text:.80}]")
        return ranges

    def members(self, text: str, *, most: bool = False) -> list[tuple[Ranges, bool]]:
        """(characters, whether written without a backslash) of each part."""
        out = []
        for match in _ESCAPE.finditer(text):
            *codes, after, plain = match.groups()
            code = next((int(c, 16) for c in codes if c), None)
            if code is not None and (code > characters.LAST or 0xD800 <= code <= 0xDFFF):
                raise self.fail(f"{match[0]} is no character")
            if after in _CLASSES:
                out.append((characters.category(_CLASSES[after], most=most), False))
            elif after is not None and after.isalnum() and after not in _PLAIN:
                raise self.fail(f"{match[0]} is not an escape; known are \\n \\t \\r \\x \\u \\U \\d \\s \\w")
            else:
                char = chr(code) if code is not None else plain if after is None else _PLAIN.get(after, after)
                out.append((characters.of(char), plain is not None))
        return out
