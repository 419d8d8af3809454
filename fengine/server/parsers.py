"""SGLang's parsers of whole or streamed answers, `ReasoningParser` and `FunctionCallParser`, by SGLang's names."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from fengine.api.io_struct import Function, Tool
from fengine.errors import UnsupportedFeatureError
from fengine.server.chat_body import tools_of
from fengine.server.fields import Fields, array, take, text
from fengine.server.output_parser import THINKING, Delta, OutputParser, Thought
from fengine.server.tool_calls import FORMS

OPENED = ("deepseek-r1", "qwen3-thinking", "step3", "minimax", "cohere_command4")  # whose answers begin as thoughts
THINKS = dict.fromkeys((*THINKING, *OPENED, "deepseek-v3", "glm45", "nano_v3", "interns1", "gpt-oss"))
CALLS: Fields = {"text": text("An answer."), "tools": array("Functions that may be called."),
                 "tool_call_parser": text("The name of their format.")}  # fmt: skip
THOUGHTS: Fields = {"text": CALLS["text"], "reasoning_parser": text("The model's kind.")}


class ReasoningParser:
    """Tells thoughts, which end with </think> or alike (gpt-oss: are a channel), from the answer. Modifies: itself."""

    def __init__(
        self, model_type: str | None = None, stream_reasoning: bool = True, force_reasoning: bool | None = None,
        tokenizer: Any = None,
    ) -> None:  # fmt: skip
        """`tokenizer` has no effect. Errors: UnsupportedFeatureError for a type that is not built."""
        model_type = model_type and model_type.lower()
        if model_type not in THINKS:
            told = f"ReasoningParser({model_type!r:.80}) is not built"
            raise UnsupportedFeatureError(f"{told}; there are {', '.join(THINKS)}.")
        self._held: str | None = None if stream_reasoning else ""  # a thought that is told when it has ended
        form, opened = None, model_type in OPENED if force_reasoning is None else force_reasoning
        if model_type == "gpt-oss":
            form, opened = FORMS["gpt-oss"], False
        self.detector = THINKING.get(model_type, Thought()) if form is None else None
        self._new = partial(OutputParser, form, thinks=form is None, opened=opened, thought=self.detector)
        self._parser = self._new()

    def parse_non_stream(self, full_text: str) -> tuple[str, str]:
        """(the thoughts, the answer). Pure."""
        found = self._new().feed(full_text, last=True)
        return found.reasoning, found.content

    def parse_stream_chunk(self, chunk_text: str) -> tuple[str, str]:
        """(what a piece adds to the thoughts, and to the answer)."""
        found = self._parser.feed(chunk_text)
        if self._held is None:
            return found.reasoning, found.content
        self._held += found.reasoning
        told, self._held = (self._held, "") if found.content else ("", self._held)
        return told, found.content


@dataclass
class ToolCallItem:
    """A call: which of the tools, its name, and its arguments as JSON."""

    tool_index: int
    name: str | None
    parameters: str


class FunctionCallParser:
    """Tells calls of tools from the rest of an answer. Modifies: itself."""

    def __init__(self, tools: Sequence[Tool], tool_call_parser: str) -> None:
        """Errors: UnsupportedFeatureError for a format that is not built."""
        if tool_call_parser not in FORMS:
            told = f"tool_call_parser={tool_call_parser!r:.80} is not built"
            raise UnsupportedFeatureError(f"{told}; there are {', '.join(FORMS)}.")
        self._names = [tool.function.name for tool in tools]
        functions = [{"name": tool.function.name, "parameters": tool.function.parameters} for tool in tools]
        self._form = FORMS[tool_call_parser]
        self._new = partial(OutputParser, self._form, functions=functions)
        self._parser = self._new()
        self._text, self._count = "", 0  # of a stream so far; its calls that are told

    def has_tool_call(self, text: str) -> bool:
        return bool(self.parse_non_stream(text)[1])

    def parse_non_stream(self, full_text: str) -> tuple[str, list[ToolCallItem]]:
        """(the text beside the calls, the calls of tools that there are). One that cannot be read is text. Pure."""
        return self._told(self._new().feed(full_text, last=True))

    def parse_stream_chunk(self, chunk_text: str) -> tuple[str, list[ToolCallItem]]:
        """What a piece adds; a call comes as a whole, with its last piece."""
        found = self._parser.feed(chunk_text)
        self._text += chunk_text
        tail = "".join(self._text[-40:].split()).removesuffix("<|python_end|>")
        if not self._form.end and (found.calls or tail.endswith(self._form.closes or ("}", "]"))):
            whole = self._new().feed(self._text, last=True)  # nobody tells which piece is the last
            calls = tuple(call for call in whole.calls if call.problem is None)[self._count :]
            self._count, found = self._count + len(calls), replace(found, calls=calls)
        return self._told(found)

    def _told(self, found: Delta) -> tuple[str, list[ToolCallItem]]:
        items = [
            ToolCallItem(self._names.index(call.name), call.name, json.dumps(call.arguments, ensure_ascii=False))
            for call in found.calls
            if call.problem is None and call.name in self._names
        ]
        return found.content, items


def parse_function_call(body: Mapping[str, Any]) -> dict[str, Any]:
    """{"normal_text", "calls": [{"tool_index", "name", "parameters"}]} of a whole answer. Pure. Errors: ApiError,
    UnsupportedFeatureError."""
    given = take(body, CALLS, needed=CALLS)
    functions = [tool["function"] for tool in tools_of(given["tools"], "tools")]
    tools = [Tool(Function(one["name"], parameters=one.get("parameters"))) for one in functions]
    rest, calls = FunctionCallParser(tools, given["tool_call_parser"]).parse_non_stream(given["text"])
    return {"normal_text": rest, "calls": [asdict(call) for call in calls]}


def separate_reasoning(body: Mapping[str, Any]) -> dict[str, Any]:
    """{"reasoning_text", "text"} of a whole answer. Pure. Errors: ApiError, UnsupportedFeatureError."""
    given = take(body, THOUGHTS, needed=THOUGHTS)
    thoughts, rest = ReasoningParser(given["reasoning_parser"]).parse_non_stream(given["text"])
    return {"reasoning_text": thoughts, "text": rest}
