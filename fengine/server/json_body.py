"""A request's body, read within limits of size and time, as JSON."""

import asyncio
import json
from collections import Counter
from typing import Any, NoReturn

from starlette.requests import Request

from fengine.server.config import ServerConfig
from fengine.server.errors import ApiError

BY_PAGES = ("origin", "sec-fetch-site")  # headers of what a web page sends, which needs no permission without a body


async def read_json(request: Request, limits: ServerConfig, may_be_empty: bool = False) -> dict[str, Any]:
    """The body's object; with `may_be_empty` no body is an empty one. Errors: ApiError 400 (no JSON, no object), 408
    (too slow), 413 (too large), 415 (other type); ClientDisconnect."""
    headers = request.headers
    empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
    if may_be_empty and empty and not any(name in headers for name in BY_PAGES):
        return {}
    _check_headers(request, limits.max_body_bytes)
    try:
        async with asyncio.timeout(limits.read_seconds):
            raw = await _read(request, limits.max_body_bytes)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not come within {limits.read_seconds:g} seconds (serve.read_seconds).",
            headers={"Connection": "close"},
        ) from None  # fmt: skip
    if len(raw) > 1 << 16:  # so long a text would hold up the other answers
        return await asyncio.to_thread(parse, raw)
    return parse(raw)


def _check_headers(request: Request, most: int) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # which is also what no web page can send here without being asked
        raise ApiError(415, f"Content-Type must be application/json, got {kind!r:.80}.")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "a Content-Encoding is not built; send plain JSON.")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > most:
        raise _too_large(most)


def _too_large(most: int) -> ApiError:
    message = f"the body is larger than {most} bytes (serve.max_body_bytes); send less, or start the server with more."
    return ApiError(413, message, code="body_too_large")


async def _read(request: Request, most: int) -> bytes:
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > most:
            raise _too_large(most)
        pieces.append(piece)
    return b"".join(pieces)


def parse(raw: bytes) -> dict[str, Any]:
    """Pure. Errors: ApiError."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_object)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply.", code="invalid_json") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error!s:.200}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(value).__name__}.", code="invalid_json")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are all different: which of two values is meant would be a guess."""
    if len(found := dict(pairs)) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r:.80} is there twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
