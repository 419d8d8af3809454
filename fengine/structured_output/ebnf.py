"""EBNF as SGLang's users write it (GBNF: `root ::= "a" rule | [0-9]+`) -> rules. No torch.

Literals "…" or '…', classes [a-z] [^a-z] and `.`, groups, `|`, `* + ? {m} {m,} {m,n}`, comments with #; `root` is what
the output is. Lookahead and other extensions are refused.
"""

import re
from collections.abc import Iterator

from fengine.errors import GrammarError
from fengine.structured_output import characters
from fengine.structured_output.characters import Ranges
from fengine.structured_output.rules import Alt, Chars, Node, Ref, Repeat, Rules, Seq

MAX_DEPTH = 64  # of parentheses
MAX_REPEAT = 10_000
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


def parse(text: str) -> Rules:
    """The rules by name. Errors: GrammarError, with the line. Pure."""
    rules: Rules = {}
    reader = _Reader(text)
    while reader.kind != "end":
        name = reader.take("rule", "a rule (name ::= …)")
        if name in rules:
            raise GrammarError(f"ebnf defines the rule {name!r:.80} twice")
        rules[name] = reader.alternatives(0)
    return rules


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

    def alternatives(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise self.fail(f"more than {MAX_DEPTH} parentheses inside one another")
        found = [self.sequence(depth)]
        while self.value == "|" and self.kind == "mark":
            self.at += 1
            found.append(self.sequence(depth))
        return found[0] if len(found) == 1 else Alt(tuple(found))

    def sequence(self, depth: int) -> Node:
        found: list[Node] = []
        while self.kind in ("name", "literal", "class") or (self.kind == "mark" and self.value in "(."):
            item = self.item(depth)
            while self.kind == "repeat":
                item = self.repeat(item)
            found.append(item)
        return found[0] if len(found) == 1 else Seq(tuple(found))

    def item(self, depth: int) -> Node:
        kind, value = self.kind, self.value
        if value == "(" and kind == "mark":
            self.at += 1
            inner = self.alternatives(depth + 1)
            if self.value != ")":
                raise self.fail("a parenthesis is not closed")
            self.at += 1
            return inner
        if kind == "literal":
            node: Node = Seq(tuple(Chars(ranges) for ranges, _ in self.members(value[1:-1])))
        elif kind == "class":
            node = Chars(self.in_class(value[1:-1]))
        else:
            node = Ref(value) if kind == "name" else Chars(characters.complement(characters.of(characters.LINE_ENDS)))
        self.at += 1
        return node

    def repeat(self, item: Node) -> Node:
        value = self.take("repeat", "a repetition")
        if value in "*+?":
            return Repeat(item, int(value == "+"), 1 if value == "?" else None)
        low, comma, high = value.strip("{} \t\n").partition(",")
        least, most = int(low), (int(high) if high.strip() else None) if comma else int(low)
        if least > MAX_REPEAT or (most or 0) > MAX_REPEAT or (most is not None and most < least):
            raise self.fail(f"{value} must be {{m,n}} with m <= n <= {MAX_REPEAT}")
        return Repeat(item, least, most)

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
