"""Ids to text, a few at a time, with the very text that decoding all ids at once gives; stop strings and patterns.

Held back is only what may still change: an incomplete UTF-8 character; a run of byte tokens until it ends, for the
library turns the whole run into U+FFFD if one byte of it is wrong; and text that may begin a stop string.
Cost per token: one dict look-up and a few string operations, independent of the length of the output."""

import copy
from codecs import utf_8_decode
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from fengine.core.request import SamplingParams
from fengine.errors import UnsupportedFeatureError
from fengine.tokenizer.decoding import Decoding, PieceTable, clean_cut, clean_up
from fengine.tokenizer.stop_regex import StopRegex, StopRegexSearch, compile_patterns
from fengine.tokenizer.tokenizer import Tokenizer


@dataclass(slots=True)
class Text:
    """Growing text of one sequence: committed characters leave at once, the rest waits here. Copyable. The
    concatenation of all `feed`s and `flush` is the library's decode of all ids."""

    decoding: Decoding
    table: PieceTable
    first: bool  # no piece shown yet
    strip: int  # leading characters still to drop
    run: bytes = b""  # incomplete character (bytes), or run of byte tokens (pieces)
    dirty: str = ""  # text not yet cleaned up

    def feed_all(self, token_ids: Iterable[int]) -> str:
        if self.decoding.as_bytes:
            data = self.run + b"".join(map(self.table.__getitem__, token_ids))  # type: ignore[arg-type]
            text, used = utf_8_decode(data, "replace", False)
            self.run = data[used:]
        else:
            text = "".join([self._feed_piece(token_id) for token_id in token_ids])
        return self._cleaned(text) if self.decoding.cleanup else text

    def peek(self) -> str:
        """What a sequence ending here would add to the text, if that consists of whole characters. Pure."""
        if self.decoding.as_bytes:
            return clean_up(self.dirty) if self.dirty and not self.run else ""
        try:
            run = self.run.decode()
        except UnicodeDecodeError:
            return ""
        run = self._lstrip(run)[0] if self.strip else run
        return clean_up(self.dirty + run) if self.decoding.cleanup else run

    def flush(self) -> str:
        """Ends the sequence; what is incomplete becomes U+FFFD. Modifies: self."""
        if self.decoding.as_bytes:
            text, self.run = utf_8_decode(self.run, "replace", True)[0], b""
        else:
            text = self._end_run()
        text, self.dirty = self.dirty + text, ""
        return clean_up(text) if self.decoding.cleanup else text

    def _feed_piece(self, token_id: int) -> str:
        piece = self.table[token_id]
        if piece is None:
            return ""
        if isinstance(piece, int):
            self.run += bytes((piece,))
            return ""
        assert isinstance(piece, str)
        text = self._end_run() if self.run else ""
        if self.first:
            piece, self.first = self.decoding.first_piece(token_id, piece), False
        if self.strip:
            piece, self.strip = self._lstrip(piece)
        return text + piece

    def _end_run(self) -> str:
        run, self.run = self.run, b""
        try:
            text = run.decode()
        except UnicodeDecodeError:
            text = "\ufffd" * len(run)
        if self.strip:
            text, self.strip = self._lstrip(text)
        return text

    def _lstrip(self, text: str) -> tuple[str, int]:
        """(`text` less leading characters, how many more may go from what follows). Pure."""
        drop = 0
        while drop < min(self.strip, len(text)) and text[drop] == self.decoding.strip_char:
            drop += 1
        return text[drop:], self.strip - drop if drop == len(text) else 0

    def _cleaned(self, text: str) -> str:
        text = self.dirty + text
        cut = clean_cut(text)
        self.dirty = text[cut:]
        return clean_up(text[:cut])


class Detokenizer:
    """The text of one request. Not thread-safe; one thread may serve many requests.

    `matched` is the stop string or pattern that ended the text, or None; `matched_tokens` the number of pushed tokens
    up to and including the one that completed it. A stop matches at the first token after which the text of the tokens
    so far (without an incomplete character at its end) holds one: strings before patterns, of several strings the one
    that ends first, of those the longest, of several patterns the first given. The text is cut before a string, with
    `no_stop_trim` behind it, and not for a pattern: then it is that of all tokens up to the match. A special token that
    is a stop string matches, too, where it is not shown. How tokens are grouped in pushes changes nothing."""

    __slots__ = (
        "_ends", "_held", "_longest", "_search", "_stops", "_text", "_trim", "matched", "matched_tokens", "num_tokens"
    )  # fmt: skip

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, *, patterns: tuple[StopRegex, ...] | None = None
    ) -> None:
        """`patterns`: params.stop_regex, compiled, where many requests of one thread share them."""
        decoding = tokenizer.decoding
        table = decoding.tables[params.skip_special_tokens]
        self._text = Text(decoding, table, first=True, strip=decoding.strip)
        self._stops = params.stop
        tokens = ((tokenizer.backend.token_to_id(stop), stop) for stop in params.stop)
        self._ends = {token: stop for token, stop in tokens if token is not None and table[token] in (None, b"")}
        self._longest = max(map(len, params.stop), default=0)
        patterns = compile_patterns(params.stop_regex) if patterns is None else patterns
        self._search = StopRegexSearch(patterns) if patterns else None
        self._trim = not params.no_stop_trim
        self._held = ""  # text that may begin a stop string
        self.matched: str | None = None
        self.matched_tokens: int | None = None
        self.num_tokens = 0

    def push(self, token_ids: list[int], *, trim_last: bool = False) -> str:
        """Takes further ids, returns the text that is now certain; "" once a stop has matched. `trim_last`: the last id
        is a stop token, whose own text is left out unless it completes a stop string or pattern, or `no_stop_trim`
        keeps it."""
        if trim_last and token_ids and self._trim:
            return self.push(token_ids[:-1]) + self._push_stop_token(token_ids[-1])
        if not self._stops and self._search is None:
            self.num_tokens += len(token_ids)
            return self._text.feed_all(token_ids)
        out = []
        for token_id in token_ids:
            if self.matched is not None:
                break
            self.num_tokens += 1
            if token_id in self._ends:
                out.append(self._end_unseen(self._ends[token_id]))
            else:
                out.append(self._scan(self._text.feed_all((token_id,)), peek=True))
        return "".join(out)

    def finish(self) -> str:
        """The rest of the text. Calling it again returns ""."""
        if self.matched is not None:
            return ""
        out = self._scan(self._text.flush(), peek=False)
        if self.matched is None:
            out, self._held = out + self._held, ""
        return out

    def _push_stop_token(self, token_id: int) -> str:
        """Its text if it ends the text by a stop string or pattern; else none. Modifies: self."""
        before = [(name, copy.copy(getattr(self, name))) for name in ("_text", "_search", "_held")]
        out, known = self.push([token_id]), self.matched is not None
        for name, value in () if known else before:
            setattr(self, name, value)
        return out if known else ""

    def _end_unseen(self, stop: str) -> str:
        """The rest of the text before a stop that shows nothing. Modifies: self."""
        out = self._scan(self._text.flush(), peek=False)
        if self.matched is None:
            self.matched = stop
            out = self._end(out + self._held)
        return out

    def _scan(self, new: str, *, peek: bool) -> str:
        """Text to give out now that `new` has come; the rest stays in `_held`. Modifies: self."""
        if not self._stops and self._search is None:
            return new
        tail = self._text.peek() if peek else ""
        if not new and not tail:
            return ""
        text = self._held + new
        for seen in (text, text + tail) if tail else (text,):
            if (match := self._find(seen)) is not None:
                end, start, self.matched = match
                return self._end(seen[: start if self._trim else end])
        if self._search is not None:
            self.matched = self._search.feed(new, tail)
            if self.matched is not None:
                return self._end(text + self._text.flush())
        keep = self._keep(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _end(self, text: str) -> str:
        """Notes that a stop has matched. Modifies: self."""
        self.matched_tokens, self._held = self.num_tokens, ""
        return text

    def _find(self, text: str) -> tuple[int, int, str] | None:
        """(end, start, stop string) of the match that ends first, the longest of those. Pure."""
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found, default=None)

    def _keep(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string. Pure."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return len(text) - start
        return 0


class TokenTexts(NamedTuple):
    """`tokens[id]`: the bytes that the id adds to a text, None for one that adds none (special, or unknown).
    `drops_space`: where a text begins with a space, that one is not shown."""

    tokens: list[bytes | None]
    drops_space: bool


def token_texts(tokenizer: Tokenizer | None, size: int) -> TokenTexts:
    """Of the ids 0 … size - 1. Pure. Errors: UnsupportedFeatureError if texts do not join as they are."""
    if tokenizer is None:
        raise UnsupportedFeatureError("grammars need the tokenizer; start without skip_tokenizer_init")
    decoding = tokenizer.decoding
    if decoding.cleanup or decoding.spaced or decoding.strip > 1 or (decoding.strip and decoding.strip_char != " "):
        raise UnsupportedFeatureError(
            "grammars need a tokenizer whose tokens join to a text as they are; the decoder of this one cleans spaces "
            "up, or puts some between tokens"
        )
    tokens = [_text(decoding, token_id) for token_id in range(size)]
    return TokenTexts(tokens, bool(decoding.strip) or decoding.first_differs)


def _text(decoding: Decoding, token_id: int) -> bytes | None:
    text = decoding.data(token_id, skip_special=True)
    if text and decoding.first_differs and b" " in text[1:]:
        return None  # as a text's first token it would lose this space, too
    return text or None
