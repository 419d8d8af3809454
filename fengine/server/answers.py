"""Answers in OpenAI's shapes: the frame around choices, usage, and the events of a stream."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from fengine.api.calls import Call
from fengine.api.results import Output
from fengine.server.fields import Wishes
from fengine.server.refusals import Refusal, refusal_of

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
class Ask:
    """One body in the engine's words: arguments of `Generation.begin`, and how the answer reads.

    `words`: engine's word -> the field of the body that it came from, where their names differ.
    """

    arguments: dict[str, Any]
    prompts: int
    wishes: Wishes
    form: Form
    words: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Frame:
    """What every chunk of one answer repeats."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def of(cls, form: Form, stream: bool, model: str, fingerprint: str) -> "Frame":
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


def finish_word(output: Output) -> str | None:
    """stop, length, abort; None while it runs. Pure."""
    finish = output["meta_info"]["finish_reason"]
    return None if finish is None else finish["type"]


def failure_of(output: Output) -> Refusal | None:
    """Why a request failed by itself, if it did. Pure."""
    finish = output["meta_info"]["finish_reason"]
    if finish is None or finish["type"] != "abort" or "status_code" not in finish:
        return None
    return Refusal(finish["status_code"], finish["message"], code="request_failed")


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

    What comes in mid-answer is offered to `write` as it comes; only what that does not take (False) gets to the reader,
    whom it would cost the most to wake. An error ends the stream with an event that holds it. Whoever reads must abort
    the call behind.
    """

    def __init__(self, call: Call, ask: Ask, frame: Frame, write: Callable[[bytes], bool]) -> None:
        self.call, self.ask, self.frame, self.write = call, ask, frame, write
        self._before, self._behind = frame.split(ask.wishes.include_usage)
        self._last: list[Output] = [{}] * len(call.tickets)

    async def __aiter__(self) -> AsyncIterator[tuple[bytes, bool]]:
        call, pieces = self.call, b""
        openings = [self.ask.form.opening(index) for index in range(len(call.tickets))]
        if first := b"".join(self._choice(choice) for choice in openings if choice is not None):
            yield first, True
        while call.open:
            try:
                pieces = self._read() if call.mail else await self._written()
            except Exception as error:
                yield event(refusal_of(error).body()) + DONE, False
                return
            if call.open and pieces:
                yield pieces, True
        yield pieces + self._end() + DONE, False

    def _end(self) -> bytes:
        """The usage, if it was asked for and all choices have ended."""
        if not (self.ask.wishes.include_usage and all(self._last)):
            return b""
        return event(self.frame.around([], usage_of(self._last, self.ask.wishes.samples)))

    async def _written(self) -> bytes:
        """Writes what comes, and returns the first pieces that are not written. Errors: as `_read`."""
        loop, mail = asyncio.get_running_loop(), self.call.mail
        left: asyncio.Future[bytes] = loop.create_future()

        def pass_on() -> None:
            if left.done():
                return  # the reader will see it
            try:
                pieces = self._read()
                if not self.call.open or pieces and not self.write(pieces):
                    left.set_result(pieces)
            except Exception as error:
                left.set_exception(error)

        def gather() -> None:
            if len(mail) == 1:  # what comes with this news goes into the same piece
                loop.call_soon(pass_on)

        mail.wake = pass_on if len(self.call.tickets) == 1 else gather
        try:
            return await left
        finally:
            mail.wake = None

    def _read(self) -> bytes:
        """All that is new by now, of any choice. Errors: those of requests that failed."""
        mail, pieces = self.call.mail, []
        while mail:
            index = mail.pop()
            output = self.call.read(index)
            if output is None:
                continue
            if (failure := failure_of(output)) is not None:
                raise failure
            if output["meta_info"]["finish_reason"] is not None:
                self._last[index] = output
            if (choice := self.ask.form.chunk(index, output)) is not None:
                pieces.append(self._choice(choice))
        return b"".join(pieces)

    def _choice(self, choice: dict[str, Any]) -> bytes:
        return f"{self._before}{json.dumps(choice)}{self._behind}".encode()
