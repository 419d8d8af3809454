"""How outputs become an answer: `Plan`, `Writer`, usage, and the events of a stream."""

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fengine.api.io_struct import EncodeReqInput, GenerateReqInput
from fengine.api.outputs import Output
from fengine.api.streams import OutputCollector
from fengine.core import request
from fengine.server.errors import ApiError, api_error_of

DONE = b"data: [DONE]\n\n"


class Writer(ABC):
    """How one call's outputs are told; a stream's state is kept between its pieces. Modifies: itself, in a stream."""

    @abstractmethod
    def whole(self, outputs: list[Output]) -> Any:
        """The answer, as JSON's values."""

    def first(self) -> bytes:
        """What a stream begins with, before there is any token."""
        return b""

    @abstractmethod
    def piece(self, index: int, output: Output) -> bytes:
        """The events of what is new in one output; none if that shows nothing yet."""

    def last(self, outputs: list[Output]) -> bytes:
        """What a stream ends with. `outputs`: the last of each, {} for one that was cut off."""
        return DONE

    def failed(self, error: ApiError) -> bytes:
        """What a stream ends with instead."""
        return event(error.body()) + DONE


@dataclass(frozen=True, slots=True)
class Plan:
    """What a body asks of the model. `whole`: its answer, from all outputs; `writer`: of a stream. `deltas`: a stream's
    outputs hold what is new, rather than everything so far. `words`: engine's word -> the body's. `hidden`: an encode
    request is asked once more, without the classifier's head."""

    request: GenerateReqInput | EncodeReqInput
    rows: int
    whole: Callable[[list[Output]], Any]
    writer: Writer | None = None
    words: Mapping[str, str] = field(default_factory=dict)
    deltas: bool = True
    hidden: bool = False


def new_id(prefix: str) -> str:
    return f"{prefix}{request.new_id()}"


def finish_reason(output: Output) -> str | None:
    """stop, length, abort; None while it runs. Pure."""
    finish = output["meta_info"]["finish_reason"]
    return None if finish is None else finish["type"]


def usage_of(outputs: list[Output], samples: int = 1) -> dict[str, Any]:
    """Tokens of prompts, each counted once, and of all their completions. Pure."""
    metas = [output["meta_info"] for output in outputs]
    prompts = sum(meta["prompt_tokens"] for meta in metas[::samples])
    completions = sum(meta.get("completion_tokens", 0) for meta in metas)
    cached = sum(meta.get("cached_tokens", 0) for meta in metas[::samples])
    told = {"prompt_tokens_details": {"cached_tokens": cached}} if cached else {}  # as SGLang and vLLM
    return counted(prompts, completions) | told


def counted(prompts: int, completions: int) -> dict[str, Any]:
    return {"prompt_tokens": prompts, "completion_tokens": completions, "total_tokens": prompts + completions}


def event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    return (f"event: {name}\n" if name else "").encode() + f"data: {json.dumps(value)}\n\n".encode()


async def events(call: OutputCollector, writer: Writer) -> AsyncIterator[tuple[bytes, bool]]:
    """The server-sent events of one call: bytes of some whole events at a time, and whether more come. An error ends
    the stream with an event that holds it. Whoever reads must abort the call behind."""
    last: list[Output] = [{}] * len(call.states)
    pieces = b""
    if first := writer.first():
        yield first, True
    while call.open:
        try:
            pieces = _piece(call, writer, last, await call.ready.get())
            while call.ready:  # all that is new by now, of any output
                pieces += _piece(call, writer, last, call.ready.pop())
        except Exception as error:
            yield writer.failed(api_error_of(error)), False
            return
        if call.open and pieces:
            yield pieces, True
    yield pieces + writer.last(last), False


def _piece(call: OutputCollector, writer: Writer, last: list[Output], index: int) -> bytes:
    """What is new of one output. Modifies: `last`. Errors: those of requests that failed."""
    output = call.read(index)
    if output is None:
        return b""
    finish = output["meta_info"]["finish_reason"]
    if finish is not None:
        if finish["type"] == "abort" and "status_code" in finish:  # it failed by itself
            code = "invalid_value" if finish["status_code"] < 500 else "request_failed"
            raise ApiError(finish["status_code"], finish["message"], code=code)
        last[index] = output
    return writer.piece(index, output)
