"""What a token adds to the text: the decoder of a `tokenizer.json` as tables, for exact streaming.

The library's decoder is asked for each token once, behind another one and alone. Two families add up so, the rest is
refused by name:
- bytes: ByteLevel (GPT-2, Llama 3, Qwen). A token is some bytes.
- pieces: Replace, ByteFallback, Fuse, Strip (Llama 2, Gemma), Metaspace (SentencePiece), WordPiece (BERT), or no
  decoder. A token is text, or one byte of a run of byte tokens."""

import json
import re

from tokenizers import Tokenizer as Backend

from fengine.errors import UnsupportedFeatureError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CLEAN = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
          (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))  # fmt: skip


def clean_up(text: str) -> str:
    """transformers' `clean_up_tokenization`. Pure."""
    for old, new in _CLEAN:
        text = text.replace(old, new)
    return text


def clean_cut(text: str) -> int:
    """How much of `text` can be cleaned without seeing what follows. Pure. A pattern begins with a space and has at
    most 4 characters. No match reaches over a cut before a space that follows none of space, apostrophe and n, nor over
    one behind 8 characters without a space."""
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
    """A tokenizer's decoder in the terms of this file. Immutable but for the memo tables. `spaced`: a space stands
    between tokens. `first_differs`: the first token of a text reads otherwise than behind another one. Errors:
    UnsupportedFeatureError for a decoder of neither family."""

    def __init__(self, backend: Backend, cleanup: bool) -> None:
        self._backend, self.cleanup = backend, cleanup
        self._special = {
            t.content for i, t in backend.get_added_tokens_decoder().items() if t.special or self._skips(i)
        }
        self._bytes = _byte_table()
        decoder = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        stages = decoder.get("decoders", [decoder] if decoder else [])
        kinds = " ".join(stage["type"] for stage in stages)
        strip = stages[-1] if kinds.endswith("Strip") else {"start": 0, "stop": 0, "content": " "}
        known = r"(ByteLevel( Fuse)?|Metaspace|WordPiece|(Replace )*(ByteFallback )?Fuse( Strip)?)?"
        if not re.fullmatch(known, kinds) or strip["stop"]:
            raise UnsupportedFeatureError(
                f"decoder {' + '.join(kinds.split())} of tokenizer.json is not built; built are ByteLevel, Metaspace, "
                "WordPiece, and Replace + ByteFallback + Fuse + Strip at the start."
            )
        self.as_bytes, self.byte_fallback = kinds.startswith("ByteLevel"), "ByteFallback" in kinds
        self.spaced = kinds in ("", "WordPiece")
        self.first_differs = self.spaced or (kinds == "Metaspace" and stages[0]["prepend_scheme"] != "never")
        self.strip, self.strip_char = strip["start"], strip["content"]  # how much of it a text loses at its beginning
        self._before = next((c for c in "xyz" if self._shown(c) == c), "")
        self.tables = {skip: PieceTable(self, skip) for skip in (False, True)}

    def _skips(self, token_id: int) -> bool:
        """Whether the library leaves it out as special: so it does where one of two files called it special once."""
        return (
            not self._backend.decode([token_id]) and self._backend.decode([token_id], skip_special_tokens=False) != ""
        )

    def _shown(self, *tokens: str) -> str:
        return " ".join(tokens) if self._backend.decoder is None else self._backend.decoder.decode(list(tokens))

    def piece(self, token_id: int, skip_special: bool) -> Piece:
        """What it adds behind another token. Pure. An id outside the vocabulary shows nothing, as in the library."""
        token = self._backend.id_to_token(token_id)
        if token is None or (skip_special and token in self._special):
            return b"" if self.as_bytes else None
        if self.as_bytes:
            if all(ord(c) in self._bytes for c in token):
                return bytes(self._bytes[ord(c)] for c in token)
            return token.encode()
        shown = self._shown(self._before, token)[len(self._before) :]
        is_byte = self.byte_fallback and len(shown) == 1 and _BYTE_TOKEN.fullmatch(token)
        return int(is_byte[1], 16) if is_byte else shown

    def data(self, token_id: int, skip_special: bool = False) -> bytes:
        """What it adds behind another token, as bytes. Pure."""
        piece = self.tables[skip_special][token_id]
        if isinstance(piece, bytes):
            return piece
        return b"" if piece is None else bytes((piece,)) if isinstance(piece, int) else piece.encode("utf-8", "replace")

    def first_piece(self, token_id: int, piece: str) -> str:
        """`piece` as it reads when it is the first one. Pure."""
        return self._shown(self._backend.id_to_token(token_id) or "") if self.first_differs else piece
