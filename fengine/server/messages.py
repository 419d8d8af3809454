"""`/v1/messages`: Anthropic's bodies as chats, and chats as its answers. https://docs.anthropic.com/en/api/messages"""

import json
from collections.abc import Mapping
from typing import Any

from fengine.api.chat_images import is_image
from fengine.api.outputs import Output
from fengine.server.answers import event, new_id
from fengine.server.chat import Block, BlockWriter, ChatWriter, Did
from fengine.server.errors import ApiError, invalid, unsupported
from fengine.server.fields import Fields, array, flag, loose, names, one_of, only, record, take
from fengine.server.openai_body import OF_CHATS

AS_IN_CHATS = ("model", "stream", "temperature", "top_p", "top_k", "chat_template_kwargs", "cache_salt")
FIELDS: Fields = {name: OF_CHATS[name] for name in AS_IN_CHATS} | {
    "messages": array("The chat: role and content, which is a text or a list of blocks."),
    "max_tokens": loose("Most tokens to draw; must be given.", "integer"),
    "system": loose("A first message of the system: a text, or text blocks."),
    "stop_sequences": loose("Texts that end the output.", "array"),
    "tools": array("Functions that the model may call."),
    "tool_choice": record("type: auto, any, tool (with its name), or none; disable_parallel_tool_use."),
    "thinking": record("type: enabled, adaptive or disabled, if the template has a switch; budget_tokens is no limit."),
    "output_config": record("format: {type: json_schema, schema}; effort, if the template asks for it."),
    "cache_control": loose("Accepted: prefixes are shared anyway.", "object"),
    "context_management": record("edits: clear_thinking_20251015 that keeps all, as Claude Code asks."),
}
COUNTED: Fields = {name: FIELDS[name] for name in (
    "model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "chat_template_kwargs",
    "context_management")}  # fmt: skip
# The last two are accepted, and change nothing.
TOOL = names("type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming")
OF_ANY = ("type", "cache_control")  # of blocks; prefixes are shared anyway
BLOCKS = {"text": ("text",), "thinking": ("thinking", "signature"), "redacted_thinking": ("data",),
          "tool_use": ("id", "name", "input"), "tool_result": ("tool_use_id", "id", "content", "is_error")}  # fmt: skip
LATE = "all tools are shown at once"
LATER = {"defer_loading": LATE, "allowed_callers": "tools that code calls", "input_examples": "examples of calls"}
UNEDITED = [{"type": "clear_thinking_20251015", "keep": keep} for keep in ("all", {"type": "all"})]
REFUSED = {"mcp_servers": "tools of the server", "container": "containers"}
WORDS = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences", "reasoning_effort": "output_config",
         "response_format": "output_config", "continue_final_message": "messages"}  # fmt: skip
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}  # of one that is aborted: null
DELTAS = {"reasoning": ("thinking_delta", "thinking"), "text": ("text_delta", "text"),
          "call": ("input_json_delta", "partial_json")}  # fmt: skip
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_chat(body: Mapping[str, Any], counted: bool = False) -> dict[str, Any]:
    """The body of a chat that asks the same; `counted`: only its prompt. Pure. Errors: ApiError."""
    known, needed = (COUNTED, ("messages",)) if counted else (FIELDS, ("messages", "max_tokens"))
    given: dict[str, Any] = dict.fromkeys(FIELDS) | take(body, known, REFUSED, needed)
    _check_edits(given["context_management"] or {})
    messages = [] if given["system"] is None else [{"role": "system", "content": _texts(given["system"], "system")}]
    for i, message in enumerate(given["messages"]):
        messages += _message(message, f"messages[{i}]")
    last: Any = messages[-1] if messages and isinstance(messages[-1], dict) else {}
    begins = last.get("role") == "assistant" and "tool_calls" not in last and bool(last.get("content"))
    tools = given["tools"]
    chat = {name: given[name] for name in AS_IN_CHATS}
    chat |= {
        "messages": messages if given["messages"] else [],
        "continue_final_message": begins,
        "max_completion_tokens": given["max_tokens"],
        "stop": given["stop_sequences"],
        "tools": None if tools is None else [_tool(tool, i) for i, tool in enumerate(tools)],
        **_choice(given["tool_choice"]),
        **_thinking(given["thinking"], given["chat_template_kwargs"]),
        **_output(given["output_config"]),
    }
    return {name: value for name, value in chat.items() if value is not None}


def _check_edits(management: dict[str, Any]) -> None:
    """Errors: ApiError for what would change the context."""
    for edit in take(management, {"edits": array("")})["edits"] or ():
        if edit not in UNEDITED:
            raise unsupported("context_management", f"context_management: {edit!r:.80} is not built; leave it out.")


def _tool(tool: Any, i: int) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        raise unsupported("tools", f"tools[{i}] must be a function of the client: {tool!r:.80}.")
    take(tool, TOOL, LATER)
    names = {"name": "name", "description": "description", "parameters": "input_schema", "strict": "strict"}
    return {"type": "function", "function": {ours: tool[name] for ours, name in names.items() if name in tool}}


def _choice(choice: dict[str, Any] | None) -> dict[str, Any]:
    """`tool_choice` and `parallel_tool_calls` of a chat. Errors: ApiError."""
    if choice is None:
        return {}
    given = take(choice, {"disable_parallel_tool_use": flag(""), **names("type", "name")})
    kind = given["type"]
    if kind == "tool":
        chosen: Any = {"type": "function", "function": {"name": given["name"]}}
    elif isinstance(kind, str) and kind in CHOICES:
        chosen = CHOICES[kind]
    else:
        raise invalid("tool_choice", f"tool_choice must have the type auto, any, tool or none, got {choice!r:.80}.")
    return {"tool_choice": chosen, "parallel_tool_calls": not given["disable_parallel_tool_use"]}


def _thinking(thinking: dict[str, Any] | None, values: Any) -> dict[str, Any]:
    """The template's switches. Errors: ApiError."""
    if thinking is None:
        return {}
    kind = take(thinking, names("type", "budget_tokens", "display"))["type"]
    if kind not in ("enabled", "adaptive", "disabled"):
        raise invalid("thinking", f"thinking must have the type enabled, adaptive or disabled, got {kind!r:.80}.")
    on = kind != "disabled"
    return {"chat_template_kwargs": {"enable_thinking": on, "thinking": on, **(values or {})}, "separate_reasoning": on}


def _output(config: dict[str, Any] | None) -> dict[str, Any]:
    """The grammar and the effort of a chat. Errors: ApiError."""
    given = take(config or {}, {"format": record(""), **names("effort")})
    form = take(given["format"] or {}, {"type": one_of("", "json_schema"), **names("schema")})
    schema = given["format"] and {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
    return {"response_format": schema, "reasoning_effort": given["effort"]}


def _texts(content: Any, where: str) -> Any:
    """A text, or the texts of blocks. Errors: ApiError for any other block."""
    if not isinstance(content, list):
        return content
    if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
               for part in content):  # fmt: skip
        raise invalid(where.partition("[")[0], f"{where} must be a text or text blocks.")
    for part in content:
        only(part, (*OF_ANY, *BLOCKS["text"]), where, where.partition("[")[0])
    return "\n".join(part["text"] for part in content)


def _message(message: Any, where: str) -> list[Any]:
    """One message as those of a chat: results of tools are messages of their own. Errors: ApiError."""
    if not isinstance(message, dict):
        return [message]
    only(message, ("role", "content"), where, "messages")
    content = message.get("content")
    if not isinstance(content, list):
        return [message]
    told, results = dict[str, Any](role=message.get("role")), list[Any]()
    for i, block in enumerate(content):
        kind = _kind(block, at := f"{where}.content[{i}]")
        if kind in ("text", "image"):
            told.setdefault("content", []).append(_part(block, at))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            told.setdefault("tool_calls", []).append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            results.append(_result(block, at))
        elif kind == "thinking":
            thought = _texts([{"type": "text", "text": block.get("thinking")}], at)
            told["reasoning_content"] = told.get("reasoning_content", "") + thought
    if {"content", "tool_calls"} & told.keys() or not results:
        told.setdefault("content", "")
        results.append(told)
    return results


def _kind(block: Any, at: str) -> str:
    """Errors: ApiError for a block of no known type, or with a field that its type has not."""
    if is_image(block):
        return "image"
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or kind not in BLOCKS:
        raise invalid("messages", f"{at} has the type {kind!r:.80}, not {', '.join(BLOCKS)} or image.")
    only(block, (*OF_ANY, *BLOCKS[kind]), at, "messages")
    return kind


def _part(block: Any, at: str) -> Any:
    """An image, or a text. Errors: ApiError for any other block."""
    return block if is_image(block) else {"type": "text", "text": _texts([block], at)}


def _result(block: dict[str, Any], at: str) -> dict[str, Any]:
    """`is_error` is the template's to read."""
    said, call_id = block.get("content"), block.get("tool_use_id") or block.get("id")
    said = [_part(part, at) for part in said] if isinstance(said, list) else said
    failed = {"is_error": True} if block.get("is_error") else {}
    return {"role": "tool", "tool_call_id": call_id, "content": "" if said in (None, []) else said, **failed}


class MessageWriter(BlockWriter):
    """Modifies: itself, in a stream."""

    def __init__(self, chat: ChatWriter, body: Mapping[str, Any], model: str) -> None:
        super().__init__(chat)
        self._head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model}

    def answer(self, output: Output) -> dict[str, Any]:
        content = [_block(block, block.text) for block in self.found]
        return self._head | {"content": content, **self._told(output)}

    def first(self) -> bytes:
        usage = {"input_tokens": len(self.chat.ids), "output_tokens": 0}
        head = self._head | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message=head)

    def step(self, did: Did, block: Block, said: str) -> bytes:
        if did == "open":
            return _event("content_block_start", index=block.index, content_block=_block(block, ""))
        if did == "close":
            signed = _delta(block, "signature_delta", signature="") if block.kind == "reasoning" else b""
            return signed + _event("content_block_stop", index=block.index)
        kind, name = DELTAS[block.kind]
        return _delta(block, kind, **{name: said})

    def ending(self, output: Output) -> bytes:
        told = self._told(output)
        return _event("message_delta", usage=told.pop("usage"), delta=told) + _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        return _event(**error.anthropic())

    def _told(self, output: Output) -> dict[str, Any]:
        meta = output["meta_info"]
        finish = meta["finish_reason"] or {}
        matched, called = finish.get("matched"), any(block.kind == "call" for block in self.found)
        reason = REASONS.get("tool_calls" if called and finish.get("type") == "stop" else finish.get("type", "stop"))
        stop = matched if isinstance(matched, str) and not called else None
        cached = meta["cached_tokens"]
        usage = {"input_tokens": meta["prompt_tokens"] - cached, "output_tokens": meta["completion_tokens"],
                 "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}  # fmt: skip
        return {"stop_reason": "stop_sequence" if stop else reason, "stop_sequence": stop, "usage": usage}


def _event(type: str, **more: Any) -> bytes:
    return event({"type": type, **more}, type)


def _delta(block: Block, kind: str, **said: str) -> bytes:
    return _event("content_block_delta", index=block.index, delta={"type": kind, **said})


def _block(block: Block, said: str) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": json.loads(said or "{}")}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": said, "signature": ""}
    return {"type": "text", "text": said}
