"""`/v1/messages`: Anthropic's bodies as chats, and chats as its answers. https://docs.anthropic.com/en/api/messages"""

import json
from collections.abc import Mapping
from typing import Any

from fengine.api.chat_images import is_image
from fengine.api.outputs import Output
from fengine.server.answers import Writer, event, new_id
from fengine.server.blocks import Block, Blocks, Step
from fengine.server.chat import ChatWriter
from fengine.server.errors import ApiError, invalid, missing, unsupported
from fengine.server.fields import MODEL, Fields, array, flag, loose, record, take

FIELDS: Fields = {
    **MODEL,
    "messages": array("The chat: role and content, which is a text or a list of blocks."),
    "max_tokens": loose("Most tokens to draw; must be given.", "integer"),
    "system": loose("A first message of the system: a text, or text blocks."),
    "stop_sequences": loose("Texts that end the output.", "array"),
    "stream": flag("Answer with events."),
    "temperature": loose("Divides the logits; 0 is greedy.", "number"),
    "top_p": loose("As in chats.", "number"),
    "top_k": loose("As in chats.", "integer"),
    "tools": array("Functions that the model may call."),
    "tool_choice": record("type: auto, any, tool (with its name), or none; disable_parallel_tool_use."),
    "thinking": record("type: enabled, adaptive or disabled; where the template knows a switch for it."),
    "chat_template_kwargs": loose("Variables of the chat template.", "object"),
}
COUNTED: Fields = {name: FIELDS[name] for name in ("model", "messages", "system", "tools", "tool_choice", "thinking")}
REFUSED = {"mcp_servers": "tools of the server", "container": "containers"}
WORDS = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences"}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_chat(body: Mapping[str, Any], counted: bool = False) -> dict[str, Any]:
    """The body of a chat that asks the same; `counted`: only its prompt. Pure. Errors: ApiError."""
    given: dict[str, Any] = dict.fromkeys(FIELDS) | take(body, COUNTED if counted else FIELDS, REFUSED)
    for name in ("messages", *(() if counted else ("max_tokens",))):
        if given[name] is None:
            raise missing(name)
    messages = [] if given["system"] is None else [{"role": "system", "content": _texts(given["system"], "system")}]
    for i, message in enumerate(given["messages"]):
        messages += _message(message, f"messages[{i}]")
    tools = given["tools"]
    chat = {name: given[name] for name in ("model", "stream", "temperature", "top_p", "top_k", "chat_template_kwargs")}
    chat |= {
        "messages": messages if given["messages"] else [],
        "max_completion_tokens": given["max_tokens"],
        "stop": given["stop_sequences"],
        "tools": None if tools is None else [_tool(tool, i) for i, tool in enumerate(tools)],
        **_choice(given["tool_choice"]),
        **_thinking(given["thinking"], given["chat_template_kwargs"]),
    }
    return {name: value for name, value in chat.items() if value is not None}


def _tool(tool: Any, i: int) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        raise unsupported("tools", f"tools[{i}] must be a function of the client: {tool!r:.80}.")
    names = {"name": "name", "description": "description", "parameters": "input_schema"}
    return {"type": "function", "function": {ours: tool[name] for ours, name in names.items() if name in tool}}


def _choice(choice: dict[str, Any] | None) -> dict[str, Any]:
    """`tool_choice` and `parallel_tool_calls` of a chat. Errors: ApiError."""
    if choice is None:
        return {}
    kind = choice.get("type")
    if kind == "tool":
        chosen: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in CHOICES:
        chosen = CHOICES[kind]
    else:
        raise invalid("tool_choice", f"tool_choice must have the type auto, any, tool or none, got {choice!r:.80}.")
    return {"tool_choice": chosen, "parallel_tool_calls": not choice.get("disable_parallel_tool_use")}


def _thinking(thinking: dict[str, Any] | None, values: Any) -> dict[str, Any]:
    """The template's switches. Errors: ApiError."""
    if thinking is None:
        return {}
    kind = thinking.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise invalid("thinking", f"thinking must have the type enabled, adaptive or disabled, got {kind!r:.80}.")
    on = kind != "disabled"
    return {"chat_template_kwargs": {"enable_thinking": on, "thinking": on, **(values or {})}, "separate_reasoning": on}


def _texts(content: Any, where: str) -> Any:
    """A text, or the texts of blocks. Errors: ApiError for any other block."""
    if not isinstance(content, list):
        return content
    if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
               for part in content):  # fmt: skip
        raise invalid(where.partition("[")[0], f"{where} must be a text or text blocks.")
    return "\n".join(part["text"] for part in content)


def _result(block: dict[str, Any], where: str) -> dict[str, Any]:
    """A tool's result as a message of a chat. Errors: ApiError."""
    content, call_id = _texts(block.get("content"), where), block.get("tool_use_id") or block.get("id")
    return {"role": "tool", "tool_call_id": call_id, "content": content or ""}


def _call(block: dict[str, Any]) -> dict[str, Any]:
    """A call of a tool as those of chats. Pure."""
    function = {"name": block.get("name"), "arguments": block.get("input")}
    return {"id": block.get("id"), "type": "function", "function": function}


def _message(message: Any, where: str) -> list[Any]:
    """One message as those of a chat: results of tools are messages of their own. Errors: ApiError."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return [message]
    told: dict[str, Any] = {"role": message.get("role")}
    parts: list[Any] = []
    calls, results = [], []
    for i, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        at = f"{where}.content[{i}]"
        if kind == "text":
            parts.append({"type": "text", "text": _texts([block], at)})
        elif is_image(block):
            parts.append(block)
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind == "tool_result":
            results.append(_result(block, at))
        elif kind == "thinking":
            told["reasoning_content"] = block.get("thinking")
        elif kind != "redacted_thinking":
            raise invalid(
                "messages", f"{at} has the type {kind!r:.80}, not text, image, tool_use, tool_result, thinking."
            )
    if calls:
        told["tool_calls"] = calls
    if parts or calls or not results:
        results.append(told | {"content": _content(parts)})
    return results


def _content(parts: list[dict[str, Any]]) -> Any:
    """The parts if there are images, else their texts. Pure."""
    return parts if any(map(is_image, parts)) else "\n".join(part["text"] for part in parts)


# -- the answer --------------------------------------------------------------------------------------------------------


class MessageWriter(Writer):
    """Modifies: itself, in a stream."""

    def __init__(self, form: ChatWriter, model: str) -> None:
        self._form, self._blocks = form, Blocks(form)
        self._head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model}

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        for _ in self._blocks.feed(outputs[0]):
            pass
        content = [_block(block, whole=True) for block in self._blocks.found]
        return self._head | {"content": content, **self._ending(outputs[0])}

    def first(self) -> bytes:
        usage = {"input_tokens": len(self._form.ids), "output_tokens": 0}
        head = self._head | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event({"type": "message_start", "message": head})

    def piece(self, index: int, output: Output) -> bytes:
        return b"".join(_step(step) for step in self._blocks.feed(output))

    def last(self, outputs: list[Output]) -> bytes:
        if not outputs[0]:
            return b""
        ending = self._ending(outputs[0])
        usage = ending.pop("usage")
        return _event({"type": "message_delta", "delta": ending, "usage": usage}) + _event({"type": "message_stop"})

    def failed(self, error: ApiError) -> bytes:
        return _event(error_body(error))

    def _ending(self, output: Output) -> dict[str, Any]:
        meta = output["meta_info"]
        finish = meta["finish_reason"] or {}
        matched, called = finish.get("matched"), any(block.kind == "call" for block in self._blocks.found)
        reason = REASONS.get("tool_calls" if called and finish.get("type") == "stop" else finish.get("type", "stop"))
        stop = matched if isinstance(matched, str) and not called else None
        cached = meta["cached_tokens"]
        usage = {"input_tokens": meta["prompt_tokens"] - cached, "output_tokens": meta["completion_tokens"],
                 "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}  # fmt: skip
        return {"stop_reason": "stop_sequence" if stop else reason, "stop_sequence": stop, "usage": usage}


def error_body(error: ApiError) -> dict[str, Any]:
    """Anthropic's body of an error. Pure."""
    told = error.body()["error"]
    return {"type": "error", "error": {"type": told["type"], "message": told["message"]}}


def _event(value: dict[str, Any]) -> bytes:
    return event(value, value["type"])


def _block(block: Block, whole: bool) -> dict[str, Any]:
    """One block of the content, or with nothing in it yet. Pure."""
    said = block.text if whole else ""
    if block.kind == "call":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": json.loads(said or "{}")}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": said, "signature": ""}
    return {"type": "text", "text": said}


DELTAS = {"reasoning": ("thinking_delta", "thinking"), "text": ("text_delta", "text"),
          "call": ("input_json_delta", "partial_json")}  # fmt: skip


def _step(step: Step) -> bytes:
    did, block, said = step
    if did == "open":
        begun = _block(block, whole=False)
        return _event({"type": "content_block_start", "index": block.index, "content_block": begun})
    if did == "close":
        return _event({"type": "content_block_stop", "index": block.index})
    kind, name = DELTAS[block.kind]
    return _event({"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: said}})
