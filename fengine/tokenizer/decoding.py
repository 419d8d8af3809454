"""What a token adds to the text: the decoder of a `tokenizer.json` as tables, for exact streaming.

Two families are known, the rest is refused by name:
- bytes: ByteLevel (GPT-2, Llama 3, Qwen). A token is some bytes.
- pieces: Replace, ByteFallback, Fuse, Strip (Llama 2, Gemma), Metaspace (SentencePiece), WordPiece (BERT), or no
  decoder. A token is text, or one byte of a run of byte tokens.
"""

import json
import re
from typing import Any

from tokenizers import Tokenizer as Backend

from fengine.errors import UnsupportedFeatureError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CLEAN = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
          (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))  # fmt: skip
_WORDPIECE_CLEAN = (*_CLEAN[:7], (" do not", " don't"), *_CLEAN[7:])  # of each token


def clean_up(text: str) -> str:
    """transformers' `clean_up_tokenization`. Pure."""
    for old, new in _CLEAN:
        text = text.replace(old, new)
    return text


def clean_cut(text: str) -> int:
    """How much of `text` can be cleaned without seeing what follows. Pure.

    A pattern begins with a space and has at most 4 characters. No match reaches over a cut before a space that follows
    none of space, apostrophe and n, nor over one behind 8 characters without a space.
    """
    if " " not in text[-8:] and len(text) >= 8:
        return len(text)
    return next((i for i in range(len(text) - 1, 0, -1) if text[i] == " " and text[i - 1] not in " 'n"), 0)


def _byte_table() -> dict[int, int]:
    """GPT-2's character for each byte, inverted: code point -> byte (openai/gpt-2 encoder.py)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return {**{b: b for b in shown}, **{256 + i: b for i, b in enumerate(hidden)}}


Piece = bytes | str | int | None  # bytes family: bytes. pieces family: text, or a byte. None: not shown at all


class PieceTable(dict[int, Piece]):
    """id -> what it adds to the text. A memo of a pure function: entries are computed at first use, never changed."""

    def __init__(self, decoding: "Decoding", skip_special: bool) -> None:
        super().__init__()
        self._decoding, self._skip = decoding, skip_special

    def __missing__(self, token_id: int) -> Piece:
        piece = self[token_id] = self._decoding.piece(token_id, self._skip)
        return piece


class Decoding:
    """A tokenizer's decoder in the terms of this file. Immutable but for the memo tables.

    Errors: UnsupportedFeatureError for a decoder of neither family.
    """

    def __init__(self, backend: Backend, cleanup: bool) -> None:
        self._backend, self.cleanup = backend, cleanup
        self._special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
        self._bytes = _byte_table()
        self.as_bytes = self.byte_fallback = False
        self.replace: list[tuple[str, str]] = []
        self.separator, self.strip, self.strip_char = "", 0, " "
        self.first_drops: str | None = None  # character that the first piece loses everywhere
        self.continues: str | None = None  # what begins a token that no space stands before
        self._piece_clean: tuple[tuple[str, str], ...] = ()
        self._read(None if backend.decoder is None else json.loads(backend.decoder.__getstate__()))
        self.tables = {skip: PieceTable(self, skip) for skip in (False, True)}

    def _read(self, decoder: dict[str, Any] | None) -> None:
        if decoder is None:
            self.separator = " "
            return
        stages = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        kinds = [stage["type"] for stage in stages]
        if kinds == ["ByteLevel"] or kinds == ["ByteLevel", "Fuse"]:
            self.as_bytes = True
        elif kinds == ["Metaspace"]:
            self.replace = [(stages[0]["replacement"], " ")]
            self.first_drops = None if stages[0]["prepend_scheme"] == "never" else stages[0]["replacement"]
        elif kinds == ["WordPiece"]:
            self.continues = stages[0]["prefix"]
            self._piece_clean = _WORDPIECE_CLEAN if stages[0]["cleanup"] else ()
        elif re.fullmatch(r"(Replace )*(ByteFallback )?Fuse (Strip )?", "".join(f"{k} " for k in kinds)):
            self._read_pieces(stages, kinds)
        else:
            raise UnsupportedFeatureError(
                f"decoder {' + '.join(kinds)} of tokenizer.json is not built; built are ByteLevel, Metaspace, "
                "WordPiece, and Replace + ByteFallback + Fuse + Strip."
            )

    def _read_pieces(self, stages: list[dict[str, Any]], kinds: list[str]) -> None:
        for stage in stages:
            if stage["type"] == "Replace":
                if "String" not in stage["pattern"]:
                    raise UnsupportedFeatureError("a Replace decoder with a regular expression is not built.")
                self.replace.append((stage["pattern"]["String"], stage["content"]))
            elif stage["type"] == "Strip":
                if stage["stop"]:
                    raise UnsupportedFeatureError("a Strip decoder that cuts at the end is not built.")
                self.strip, self.strip_char = stage["start"], stage["content"]
        self.byte_fallback = "ByteFallback" in kinds

    def piece(self, token_id: int, skip_special: bool) -> Piece:
        """Pure. An id outside the vocabulary shows nothing, as in the tokenizers library."""
        token = self._backend.id_to_token(token_id)
        shown = token is not None and not (skip_special and token in self._special)
        if not shown:
            return b"" if self.as_bytes else None
        assert token is not None
        if self.as_bytes:
            if all(ord(c) in self._bytes for c in token):
                return bytes(self._bytes[ord(c)] for c in token)
            return token.encode()
        if self.continues is not None:
            token = token.removeprefix(self.continues) if token.startswith(self.continues) else f" {token}"
        for old, new in (*self.replace, *self._piece_clean):
            token = token.replace(old, new)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return int(match[1], 16)
        return token

    def first_piece(self, token_id: int, piece: str) -> str:
        """`piece` as it reads when it is the first one. Pure."""
        if self.first_drops is None and self.continues is None:
            return piece
        token = self._backend.id_to_token(token_id) or ""
        if self.first_drops is not None:
            return token.replace(self.first_drops, "")
        for old, new in self._piece_clean:
            token = token.replace(old, new)
        return token
