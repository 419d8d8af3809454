"""How outputs become an answer: `Writer`, OpenAI's frame around choices, usage, and the events of a stream."""

import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from fengine.api.collector import OutputCollector
from fengine.api.outputs import Output
from fengine.server.errors import ApiError, api_error_of
from fengine.server.openai_body import OpenAIRequest

DONE = b"data: [DONE]\n\n"


class Writer(Protocol):
    """How one call's outputs are told. A stream's state is kept between its pieces."""

    def whole(self, outputs: list[Output]) -> Any:
        """The answer, as JSON's values."""
        ...

    def first(self) -> bytes:
        """What a stream begins with, before there is any token."""
        ...

    def piece(self, index: int, output: Output) -> bytes:
        """The events of what is new in one output; none if that shows nothing yet."""
        ...

    def last(self, outputs: list[Output]) -> bytes:
        """What a stream ends with. `outputs`: the last of each, {} for one that was cut off."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """What a stream ends with instead."""
        ...


class Form(Protocol):
    """How one request's outputs read as choices. A stream's state, one per choice, is kept between its chunks.

    `prompt_ids`: of each prompt, None where nobody asks for them.
    """

    id_prefix: str
    object: str
    chunk_object: str
    prompt_ids: list[list[int]] | None

    def whole(self, index: int, output: Output) -> dict[str, Any]:
        """The choice of a complete output."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a choice's stream starts with, before there is any token."""
        ...

    def chunk(self, index: int, output: Output) -> dict[str, Any] | None:
        """The choice of what is new; None if that shows nothing yet."""
        ...

    def beside(self, outputs: list[Output]) -> dict[str, Any]:
        """What stands beside the choices: of complete outputs, or with none in the first chunk."""
        ...


# -- parts of answers --------------------------------------------------------------------------------------------------


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(16)}"


def finish_reason(output: Output) -> str | None:
    """stop, length, abort; None while it runs. Pure."""
    finish = output["meta_info"]["finish_reason"]
    return None if finish is None else finish["type"]


def stopped_by(output: Output, eos_ids: frozenset[int]) -> dict[str, Any]:
    """SGLang's `matched_stop` and vLLM's `stop_reason`, which is none for the model's own end. Pure."""
    matched = (output["meta_info"]["finish_reason"] or {}).get("matched")
    return {"matched_stop": matched, "stop_reason": None if matched in eos_ids else matched}


def error_of(output: Output) -> ApiError | None:
    """Why a request failed by itself, if it did. Pure."""
    finish = output["meta_info"]["finish_reason"]
    if finish is None or finish["type"] != "abort" or "status_code" not in finish:
        return None
    return ApiError(finish["status_code"], finish["message"], code="request_failed")


def usage_of(outputs: list[Output], samples: int = 1) -> dict[str, Any]:
    """Tokens of prompts, each counted once, and of all their completions. Pure."""
    metas = [output["meta_info"] for output in outputs]
    prompts = sum(meta["prompt_tokens"] for meta in metas[::samples])
    completions = sum(meta.get("completion_tokens", 0) for meta in metas)
    cached = {"cached_tokens": sum(meta["cached_tokens"] for meta in metas[::samples])}
    return counted(prompts, completions) | {"prompt_tokens_details": cached}


def counted(prompts: int, completions: int) -> dict[str, Any]:
    """Pure."""
    return {"prompt_tokens": prompts, "completion_tokens": completions, "total_tokens": prompts + completions}


def event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    return (f"event: {name}\n" if name else "").encode() + f"data: {json.dumps(value)}\n\n".encode()


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
        return cls(new_id(f"{form.id_prefix}-"), kind, int(time.time()), model, fingerprint)

    def around(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """The whole answer. Pure."""
        head = {"id": self.id, "object": self.object, "created": self.created, "model": self.model}
        return head | {"system_fingerprint": self.system_fingerprint, "choices": choices, "usage": usage}

    def split(self, told_usage: bool) -> tuple[str, str]:
        """The text of an event before and behind its one choice. Pure."""
        text = json.dumps({k: v for k, v in self.around([]).items() if told_usage or k != "usage"})
        before, _, behind = text.partition('"choices": []')
        return f'data: {before}"choices": [', f"]{behind}\n\n"


class ChoiceWriter:
    """OpenAI's answers. Modifies: itself, in a stream."""

    def __init__(self, form: Form, envelope: Envelope, request: OpenAIRequest) -> None:
        self.form, self.envelope, self.request = form, envelope, request
        self._before, self._behind = envelope.split(request.include_usage)
        self._drawn = [0] * (request.prompts * request.samples)  # tokens of each choice so far

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        choices = [self.form.whole(i, output) for i, output in enumerate(outputs)]
        return self.envelope.around(choices, usage_of(outputs, self.request.samples)) | self.form.beside(outputs)

    def first(self) -> bytes:
        openings = [self.form.opening(index) for index in range(len(self._drawn))]
        found, beside = [choice for choice in openings if choice is not None], self.form.beside([])
        return b"".join(self._event(choice, beside if i == 0 else {}) for i, choice in enumerate(found))

    def piece(self, index: int, output: Output) -> bytes:
        self._drawn[index] += len(output["output_ids"])
        choice = self.form.chunk(index, output)
        return b"" if choice is None else self._event(choice)

    def last(self, outputs: list[Output]) -> bytes:
        """With the usage, if it was asked for and all choices have ended."""
        if not (self.request.include_usage and all(outputs)):
            return DONE
        return event(self.envelope.around([], usage_of(outputs, self.request.samples))) + DONE

    def failed(self, error: ApiError) -> bytes:
        return event(error.body()) + DONE

    def _event(self, choice: dict[str, Any], beside: dict[str, Any] | None = None) -> bytes:
        if not (beside or self.request.continuous_usage):  # most are such, and there are many
            return f"{self._before}{json.dumps(choice)}{self._behind}".encode()
        usage, index = None, choice["index"]
        if self.request.continuous_usage and self.form.prompt_ids is not None:
            usage = counted(len(self.form.prompt_ids[index // self.request.samples]), self._drawn[index])
        frame = self.envelope.around([choice], usage) | (beside or {})
        return event({k: v for k, v in frame.items() if self.request.include_usage or k != "usage"})


@dataclass(slots=True)
class Events:
    """The server-sent events of one call: `async for` (bytes of some whole events, whether more follow).

    An error ends the stream with an event that holds it. Whoever reads must abort the call behind.
    """

    call: OutputCollector
    writer: Writer
    last: list[Output] = field(default_factory=list)

    async def __aiter__(self) -> AsyncIterator[tuple[bytes, bool]]:
        call, pieces = self.call, b""
        self.last = [{}] * len(call.states)
        if first := self.writer.first():
            yield first, True
        while call.open:
            try:
                pieces = self._piece(await call.ready.get()) + self._rest()
            except Exception as error:
                yield self.writer.failed(api_error_of(error)), False
                return
            if call.open and pieces:
                yield pieces, True
        yield pieces + self.writer.last(self.last), False

    def _rest(self) -> bytes:
        """All that is new by now, of any output."""
        ready, pieces = self.call.ready, []
        while ready:
            pieces.append(self._piece(ready.pop()))
        return b"".join(pieces)

    def _piece(self, index: int) -> bytes:
        """What is new of one output. Errors: those of requests that failed."""
        output = self.call.read(index)
        if output is None:
            return b""
        if (failure := error_of(output)) is not None:
            raise failure
        if output["meta_info"]["finish_reason"] is not None:
            self.last[index] = output
        return self.writer.piece(index, output)
