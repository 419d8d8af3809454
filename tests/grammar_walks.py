"""Random texts of a grammar, without a model: what the tests of grammars share."""

import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import numpy as np

from fengine.structured_output.backend import Grammar, Grammars, Source
from fengine.structured_output.masks import Cursor, Filled, fill
from fengine.structured_output.schema import Whitespace

PIECES = [
    '{"',
    '":',
    '": ',
    '", "',
    '"}',
    '"a"',
    " b",
    "ab",
    "abc",
    "12",
    "00",
    "true",
    "null",
    "[[",
    "]]",
    "  ",
    "é",
    "日本",
]
TOKENS: list[bytes | None] = [*(bytes([b]) for b in range(256)), *(p.encode() for p in PIECES), None, None]
END = len(TOKENS) - 1
CLOSERS = [TOKENS.index(c) for c in (b'"', b"}", b"]", b")")]


DEFAULT = Whitespace()


@contextmanager
def core_seconds(most: float) -> Iterator[None]:
    """What is inside fails once this process has worked so long; time in which it waits, or others work, is no part."""

    def late(*_: object) -> None:
        raise AssertionError(f"more than {most} seconds of a core")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, most)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@cache
def grammars(whitespace: Whitespace) -> Grammars:
    return Grammars(lambda: (TOKENS, False), whitespace)


def compiled(kind: str, text: str, whitespace: Whitespace = DEFAULT) -> Grammar:
    return grammars(whitespace).compile(Source(kind, text))


def cursor_of(grammar: Grammar, *, barred: Sequence[int] = (), eager: bool = True) -> Cursor:
    return Cursor(grammar, [END], barred, [], eager=eager)


def masks(cursors: Sequence[Cursor], fresh: Sequence[list[int]], early: bool = False) -> Filled:
    for cursor, tokens in zip(cursors, fresh, strict=True):
        cursor.take(tokens)
        cursor.least = len(cursor.tokens) + early
    return fill(range(len(cursors)), cursors)


def allowed(mask_W: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little")).tolist()


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the text, byte by byte, is complete."""
    matcher = grammar.matcher()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def walk(grammar: Grammar, seed: int, most: int = 300) -> str | None:
    """A random text of the grammar; None if it has not come to its end after `most` tokens."""
    rng, cursor, fresh, out = random.Random(seed), cursor_of(grammar), [], b""
    for _ in range(most):
        filled = masks([cursor], [fresh])
        if filled.errors:
            raise filled.errors[0]
        ids = allowed(filled.mask_MW[0])
        ending = [i for i in (END, *CLOSERS) if i in ids]
        token = rng.choice(ending if ending and rng.random() < 0.3 else ids)
        if token == END:
            return out.decode()
        out, fresh = out + (TOKENS[token] or b""), [token]
    return None
