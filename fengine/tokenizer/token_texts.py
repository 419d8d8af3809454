"""What text each token is, as bytes: what grammars are matched against. No torch."""

from typing import NamedTuple

from fengine.errors import UnsupportedFeatureError
from fengine.tokenizer.decoding import Decoding
from fengine.tokenizer.tokenizer import Tokenizer


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
    piece = decoding.tables[True][token_id]
    text = bytes((piece,)) if isinstance(piece, int) else piece.encode() if isinstance(piece, str) else piece
    if text and decoding.first_differs and b" " in text[1:]:
        return None  # as a text's first token it would lose this space, too
    return text or None
