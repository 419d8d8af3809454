"""What single tokens read as in an answer's logprobs: text, bytes, and where they stand."""

import math
from codecs import getincrementaldecoder
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fengine.api.outputs import Output
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


@dataclass(frozen=True, slots=True)
class TokenNames:
    """What tokens are called in logprobs: by their texts, or `as_ids` by token_id:ID, vLLM's way."""

    tokenizer: Tokenizer
    as_ids: bool

    def shown(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else shown(token_bytes(self.tokenizer, token))

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        """Of chats: with its bytes."""
        data = token_bytes(self.tokenizer, token)
        name = self.shown(token) if self.as_ids else data.decode("utf-8", "replace")
        return {"token": name, "bytes": list(data), "logprob": finite(logprob), "token_id": token}


def prompt_logprobs(names: TokenNames, output: Output, most: int) -> list[dict[str, Any] | None]:
    """vLLM's: at each position {id: {"logprob", "rank", "decoded_token"}} of the token and of the `most` likeliest;
    the rank of a token that is not among them is not known. Pure."""
    meta, found = output["meta_info"], list[dict[str, Any] | None]()
    entries = meta["input_token_logprobs"]
    for (logprob, token, _), top in zip(entries, meta.get("input_top_logprobs", [()] * len(entries)), strict=True):
        if logprob is None:
            found.append(None)
            continue
        ranked = {t: (p, i + 1) for i, (p, t, _) in enumerate(list(top or [])[:most])}
        told: dict[int, Any] = {token: ranked.get(token, (logprob, None))} | ranked
        found.append({str(t): {"logprob": finite(p), "rank": rank, "decoded_token": names.shown(t)}
                      for t, (p, rank) in told.items()})  # fmt: skip
    return found


def hidden_states(output: Output) -> dict[str, Any]:
    """{"hidden_states": the last one} of a complete output, if it was asked for. Pure."""
    found = output["meta_info"].get("hidden_states")
    return {} if found is None else {"hidden_states": found.tolist()}


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
