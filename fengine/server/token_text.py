"""What single tokens read as in an answer's logprobs: text, bytes, and where they stand."""

import math
from codecs import getincrementaldecoder
from collections.abc import Iterable

from fengine.tokenizer.tokenizer import Tokenizer

LEAST = -9999.0  # OpenAI's number for a logprob of minus infinity, which JSON cannot hold


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """What a token adds to a text in mid-sentence; special tokens as they are written. Pure."""
    piece = tokenizer.decoding.tables[False][token]
    if isinstance(piece, bytes):
        return piece
    return b"" if piece is None else bytes((piece,)) if isinstance(piece, int) else piece.encode("utf-8", "replace")


def shown(data: bytes) -> str:
    """Bytes as text; if they are not whole characters, in OpenAI's notation for bytes. Pure."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float | None) -> float | None:
    """Pure."""
    return LEAST if logprob is not None and not math.isfinite(logprob) else logprob


class Offsets:
    """Where tokens start in the text that they make, in characters. Modifies: itself, as tokens come."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def after(self, pieces: Iterable[bytes]) -> list[int]:
        """The start of each of the next pieces."""
        starts = []
        for piece in pieces:
            starts.append(self._at)
            self._at += len(self._decoder.decode(piece))
        return starts
