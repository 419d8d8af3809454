"""Answers in OpenAI's shapes: the frame around choices, usage, and the events of a stream."""

import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from fengine.api.collector import OutputCollector
from fengine.api.outputs import Output
from fengine.server.errors import ApiError, api_error_of
from fengine.server.openai_body import OpenAIRequest

DONE = b"data: [DONE]\n\n"


class Form(Protocol):
    """How one request's outputs read as choices. A stream's state, one per choice, is kept between its chunks."""

    id_prefix: str
    object: str
    chunk_object: str

    def whole(self, index: int, output: Output) -> dict[str, Any]:
        """The choice of a complete output."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a choice's stream starts with, before there is any token."""
        ...

    def chunk(self, index: int, output: Output) -> dict[str, Any] | None:
        """The choice of what is new; None if that shows nothing yet."""
        ...


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every chunk of one answer repeats."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def of(cls, form: Form, stream: bool, model: str, fingerprint: str) -> "Envelope":
        kind = form.chunk_object if stream else form.object
        return cls(f"{form.id_prefix}-{secrets.token_hex(16)}", kind, int(time.time()), model, fingerprint)

    def around(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """The whole answer. Pure."""
        head = {"id": self.id, "object": self.object, "created": self.created, "model": self.model}
        return head | {"system_fingerprint": self.system_fingerprint, "choices": choices, "usage": usage}

    def split(self, told_usage: bool) -> tuple[str, str]:
        """The text of an event before and behind its one choice. Pure."""
        text = json.dumps({k: v for k, v in self.around([]).items() if told_usage or k != "usage"})
        before, empty, behind = text.partition('"choices": []')
        assert empty, "a frame without choices"
        return f'data: {before}"choices": [', f"]{behind}\n\n"


def finish_reason(output: Output) -> str | None:
    """stop, length, abort; None while it runs. Pure."""
    finish = output["meta_info"]["finish_reason"]
    return None if finish is None else finish["type"]


def error_of(output: Output) -> ApiError | None:
    """Why a request failed by itself, if it did. Pure."""
    finish = output["meta_info"]["finish_reason"]
    if finish is None or finish["type"] != "abort" or "status_code" not in finish:
        return None
    return ApiError(finish["status_code"], finish["message"], code="request_failed")


def usage_of(outputs: list[Output], samples: int) -> dict[str, Any]:
    """Tokens of prompts, each counted once, and of all their completions. Pure."""
    metas = [output["meta_info"] for output in outputs]
    prompts = sum(meta["prompt_tokens"] for meta in metas[::samples])
    completions = sum(meta.get("completion_tokens", 0) for meta in metas)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": completions,
        "total_tokens": prompts + completions,
        "prompt_tokens_details": {"cached_tokens": sum(meta["cached_tokens"] for meta in metas[::samples])},
    }


def event(value: Any) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


class Events:
    """The server-sent events of one call: `async for` (bytes of some whole events, whether more follow). Ends with
    [DONE].

    An error ends the stream with an event that holds it. Whoever reads must abort the call behind.
    """

    def __init__(self, call: OutputCollector, request: OpenAIRequest, form: Form, envelope: Envelope) -> None:
        self.call, self.request, self.form, self.envelope = call, request, form, envelope
        self._before, self._behind = envelope.split(request.include_usage)
        self._last: list[Output] = [{}] * len(call.states)

    async def __aiter__(self) -> AsyncIterator[tuple[bytes, bool]]:
        call, pieces = self.call, b""
        openings = [self.form.opening(index) for index in range(len(call.states))]
        if first := b"".join(self._choice(choice) for choice in openings if choice is not None):
            yield first, True
        while call.open:
            try:
                pieces = self._piece(await call.ready.get()) + self._rest()
            except Exception as error:
                yield event(api_error_of(error).body()) + DONE, False
                return
            if call.open and pieces:
                yield pieces, True
        yield pieces + self._end() + DONE, False

    def _end(self) -> bytes:
        """The usage, if it was asked for and all choices have ended."""
        if not (self.request.include_usage and all(self._last)):
            return b""
        return event(self.envelope.around([], usage_of(self._last, self.request.samples)))

    def _rest(self) -> bytes:
        """All that is new by now, of any choice."""
        ready, pieces = self.call.ready, []
        while ready:
            pieces.append(self._piece(ready.pop()))
        return b"".join(pieces)

    def _piece(self, index: int) -> bytes:
        """What is new of one choice. Errors: those of requests that failed."""
        output = self.call.read(index)
        if output is None:
            return b""
        if (failure := error_of(output)) is not None:
            raise failure
        if output["meta_info"]["finish_reason"] is not None:
            self._last[index] = output
        choice = self.form.chunk(index, output)
        return b"" if choice is None else self._choice(choice)

    def _choice(self, choice: dict[str, Any]) -> bytes:
        return f"{self._before}{json.dumps(choice)}{self._behind}".encode()
