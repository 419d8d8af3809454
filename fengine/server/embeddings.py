"""`/v1/embeddings`: a body to the arguments of `Engine.encode`, outputs to OpenAI's list."""

import base64
import struct
from collections.abc import Mapping
from typing import Any

from fengine.api.outputs import Output
from fengine.server import fields
from fengine.server.errors import ApiError, invalid

KNOWN = frozenset({"model", "input", "encoding_format", "dimensions"})
WORDS = {"prompt": "input", "text": "input", "input_ids": "input"}


def read(body: Mapping[str, Any]) -> tuple[dict[str, Any], int, bool]:
    """(arguments of `encode`, how many prompts, whether base64 is wanted). Errors: ApiError."""
    fields.check_names(body, KNOWN, {})
    encoding = body.get("encoding_format")
    if encoding not in (None, "float", "base64"):
        raise invalid("encoding_format", f"encoding_format must be float or base64, got {encoding!r:.80}.")
    _, prompts, count = fields.texts_or_ids(body, "input")
    return {"text": prompts, "dimensions": body.get("dimensions")}, count, encoding == "base64"


def answer(outputs: list[Output], model: str, as_base64: bool) -> dict[str, Any]:
    """Errors: ApiError if a prompt was aborted. Pure."""
    data = []
    for index, output in enumerate(outputs):
        if output["embedding"] is None:
            raise ApiError(503, f"input {index} was aborted by the server.", code="aborted")
        vector = output["embedding"]
        value = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if as_base64 else vector
        data.append({"object": "embedding", "index": index, "embedding": value})
    tokens = sum(output["meta_info"]["prompt_tokens"] for output in outputs)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}
