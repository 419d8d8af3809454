"""Token ids of a chat whose contents hold special-token text, which must stay text.

Tokenizing is: cut the text at added tokens, then tokenize each piece on its own. Here a cut is not made where the
special token's text came from a message's content. Marks (two characters that occur nowhere else) are put around such
text before the template runs, and show where it ended up; a template that changes them is refused, not trusted."""

import copy
import re
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tokenizers import Tokenizer as Backend

from fengine.errors import InvalidRequestError

Span = tuple[int, int]


def _either(texts: list[str]) -> re.Pattern[str]:
    """Leftmost, then longest, as the tokenizers library matches added tokens."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


@dataclass(frozen=True, slots=True)
class Marks:
    """Two characters that occur in no content of a chat."""

    first: str
    last: str

    @classmethod
    def spare(cls, text: str) -> "Marks":
        """Errors: InvalidRequestError if `text` leaves no two private-use characters."""
        spare = list(islice((c for c in map(chr, range(0xE000, 0xF900)) if c not in text), 2))
        if len(spare) < 2:
            raise InvalidRequestError("the chat uses every private-use character; none is left to mark contents with.")
        return cls(spare[0], spare[1])

    def remove(self, rendered: str) -> tuple[str, list[Span]] | None:
        """(text without marks, spans of what was marked); None if the template tore a pair of marks apart. Pure."""
        text: list[str] = []
        spans: list[Span] = []
        start, position = None, 0
        for piece in re.split(f"([{self.first}{self.last}])", rendered):
            if piece == self.first and start is None:
                start = position
            elif piece == self.last and start is not None:
                spans.append((start, position))
                start = None
            elif piece in (self.first, self.last):
                return None
            else:
                text.append(piece)
                position += len(piece)
        return None if start is not None else ("".join(text), spans)


class SpecialText:
    """Finds special-token text in contents, and encodes rendered chats around it. Immutable."""

    def __init__(self, backend: Backend) -> None:
        added = backend.get_added_tokens_decoder()
        special = [token.content for token in added.values() if token.special]
        self._backend = backend
        self._id_of = {token.content: index for index, token in added.items()}
        self._special, self._special_re, self._added_re = frozenset(special), _either(special), _either([*self._id_of])
        self._heads = tuple({s[:n] for s in special for n in range(1, len(s))})
        self._tails = tuple({s[n:] for s in special for n in range(1, len(s))})

    def mark(self, value: Any, marks: Marks) -> Any:
        """A copy of strings, lists and dicts (values, not keys and roles) with marks around special-token text. Pure. A
        pair of marks around nothing stands at the edge of a string that begins or ends with a part of a special token,
        so that the token cannot form across that edge. White space outside is left outside: templates trim."""
        if value == {"type": "image"}:  # a part that templates look for
            return value
        if isinstance(value, dict):
            return {key: item if key == "role" else self.mark(item, marks) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mark(item, marks) for item in value]
        if not isinstance(value, str) or not (core := value.strip()):
            return value
        start, edge = value.index(core), marks.first + marks.last
        marked = self._special_re.sub(f"{marks.first}\\g<0>{marks.last}", core)
        head = edge if core.startswith(self._tails) else ""
        tail = edge if core.endswith(self._heads) else ""
        return value[:start] + head + marked + tail + value[start + len(core) :]

    def in_keys(self, value: Any) -> bool:
        """Whether a dict key, which `mark` leaves alone, holds special-token text. Pure."""
        if isinstance(value, dict):
            return any(self._special_re.search(key) or self.in_keys(item) for key, item in value.items())
        return isinstance(value, list) and any(map(self.in_keys, value))

    def encode(self, text: str, spans: list[Span]) -> list[int] | None:
        """Ids of `text` in which special-token text inside `spans` is plain text. No special tokens are added. None if
        this tokenizer's cuts at added tokens cannot be reproduced exactly (checked on this very text), or if plain text
        still gives a special token's id."""
        if self._encode(text, [])[0] != self._backend.encode(text, add_special_tokens=False).ids:
            return None
        ids, cuts = self._encode(text, spans)
        special = {self._id_of[content] for content in self._special}
        # a Unigram vocabulary may spell a special token out of plain text: then there are more of them than cuts
        return ids if sum(i in special for i in ids) == cuts else None

    def _encode(self, text: str, spans: list[Span]) -> tuple[list[int], int]:
        """(ids, number of cuts at special tokens)."""
        ids: list[int] = []
        done = at = cuts = 0
        while (match := self._added_re.search(text, at)) is not None:
            a, b = match.span()
            if match.group() in self._special and any((s < b and a < e) if s < e else (a < s < b) for s, e in spans):
                at = a + 1
                continue
            ids += self._plain(text[done:a], done == 0)
            ids.append(self._id_of[match.group()])
            cuts += match.group() in self._special
            done = at = b
        return ids + self._plain(text[done:], done == 0), cuts

    def _plain(self, text: str, first: bool) -> list[int]:
        """Ids of a piece between added tokens; `first` tells whether it begins the whole text."""
        if not text:
            return []
        backend = self._backend
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        pieces = [text]
        if (splitter := backend.pre_tokenizer) is not None:
            if not first:
                splitter = _inner(splitter)
            pieces = [piece for piece, _ in splitter.pre_tokenize_str(text)]
        return [token.id for piece in pieces for token in backend.model.tokenize(piece)]


def _inner(splitter: Any) -> Any:
    """The pre-tokenizer as it acts behind an added token: Metaspace's prefix "first" is then no prefix. Pure."""
    state = splitter.__getstate__()
    if b'"prepend_scheme":"first"' not in state:
        return splitter
    splitter = copy.deepcopy(splitter)
    splitter.__setstate__(state.replace(b'"prepend_scheme":"first"', b'"prepend_scheme":"never"'))
    return splitter
