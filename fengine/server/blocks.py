"""A chat's output as blocks, as OpenAI's responses and Anthropic's messages tell it: thoughts, texts, tool calls."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from fengine.api.outputs import Output
from fengine.server.answers import Writer, finish_reason
from fengine.server.chat import ChatWriter

Kind = Literal["reasoning", "text", "call"]
Did = Literal["open", "delta", "close"]
Step = tuple[Did, "Block", str]


@dataclass(slots=True)
class Block:
    """One block: its place among the others, and what it says so far; of a call its JSON arguments."""

    kind: Kind
    index: int
    id: str = ""  # of a call
    name: str = ""
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class BlockWriter(Writer):
    """An answer that tells the one choice of a chat as blocks. Modifies: itself, in a stream."""

    def __init__(self, chat: ChatWriter) -> None:
        self.chat, self.found = chat, list[Block]()
        self._open = False  # the last one

    def answer(self, output: Output) -> dict[str, Any]:
        """The whole answer, once all blocks are found."""
        raise NotImplementedError

    def step(self, did: Did, block: Block, said: str) -> bytes:
        """The events of one step of a block."""
        raise NotImplementedError

    def ending(self, output: Output) -> bytes:
        """The events behind the last block."""
        raise NotImplementedError

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        for _ in self._steps(outputs[0]):
            pass
        return self.answer(outputs[0])

    def piece(self, index: int, output: Output) -> bytes:
        return b"".join(self.step(*step) for step in self._steps(output))

    def last(self, outputs: list[Output]) -> bytes:
        return self.ending(outputs[0]) if outputs[0] else b""

    def _steps(self, output: Output) -> Iterator[Step]:
        """What a piece adds, or a whole output."""
        parts = self.chat.parts(0, output, streamed=True)
        kinds: tuple[tuple[Kind, str], ...] = (("reasoning", "reasoning_content"), ("text", "content"))
        for kind, name in kinds:
            if parts.get(name):
                yield from self._add(Block(kind, len(self.found)), parts[name])
        for call in parts.get("tool_calls", ()):
            function = call["function"]
            yield from self._close()
            yield from self._add(Block("call", len(self.found), call["id"], function["name"]), function["arguments"])
            yield from self._close()
        if self.chat.given["logprobs"] is not None and self.found and self.found[-1].kind == "text":
            self.found[-1].logprobs += self.chat.logprobs(output)
        if finish_reason(output) is not None:
            if not self.found:
                yield from self._add(Block("text", 0), "")
            yield from self._close()

    def _add(self, block: Block, text: str) -> Iterator[Step]:
        if not self._open or self.found[-1].kind != block.kind:
            yield from self._close()
            self.found.append(block)
            self._open = True
            yield "open", block, ""
        self.found[-1].text += text
        yield "delta", self.found[-1], text

    def _close(self) -> Iterator[Step]:
        if self._open:
            self._open = False
            yield "close", self.found[-1], self.found[-1].text
