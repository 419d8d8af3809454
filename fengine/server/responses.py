"""`/v1/responses`: OpenAI's newer bodies as chats, and chats as its answers. Nothing is stored.
https://platform.openai.com/docs/api-reference/responses"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fengine.api.chat_images import is_image
from fengine.api.outputs import Output
from fengine.server.answers import event, finish_reason, new_id
from fengine.server.chat import Block, BlockWriter, ChatWriter, Did
from fengine.server.errors import ApiError, invalid, missing, unsupported
from fengine.server.fields import Fields, array, flag, loose, names, one_of, only, record, sampling_fields, take, text
from fengine.server.openai_body import LIMIT, OF_CHATS

AS_IN_CHATS = ("model", "stream", "parallel_tool_calls", "top_logprobs", "chat_template_kwargs", "lora_path", "rid",
               "request_id", "cache_salt", "priority", "structured_outputs",
               *(name for name in sampling_fields() if name != "n"))  # fmt: skip
FIELDS: Fields = {name: OF_CHATS[name] for name in (*AS_IN_CHATS, "tools", "tool_choice")} | {
    "input": loose("A text, or a list of messages, calls and their results."),
    "instructions": text("A first message of the system."),
    "max_output_tokens": LIMIT,
    "stream_options": record("include_obfuscation: accepted; nothing is obfuscated."),
    "reasoning": record("effort."),
    "text": record("format: text, json_object or json_schema."),
    "include": array("message.output_text.logprobs."),
    "truncation": one_of("disabled: an input that is too long is refused.", "disabled", default="disabled"),
}
REFUSED = {
    "previous_response_id": "stored responses; send the whole conversation as input",
    "conversation": "stored conversations; send the whole conversation as input",
    "background": "answers in the background",
    "prompt": "stored prompts",
    "max_tool_calls": "tools of the server",
    "context_management": "compaction of the context",
}
OF_ANY = ("type", "id", "status")  # of items; the last two say nothing about an answer
ITEMS = {"message": ("role", "content"), "function_call": ("name", "arguments", "call_id"),
         "function_call_output": ("output", "call_id"), "reasoning": ("content", "summary")}  # fmt: skip
PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
LOGPROBS = "message.output_text.logprobs"
WORDS = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text",
         "reasoning_effort": "reasoning"}  # fmt: skip


def to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat that asks the same. Pure. Errors: ApiError."""
    given = take(body, FIELDS, REFUSED)
    take(given["stream_options"] or {}, {"include_obfuscation": flag("")})
    effort = take(given["reasoning"] or {}, names("effort", "summary", "generate_summary"))
    if given["input"] is None:
        raise missing("input")
    logprobs = _wants_logprobs(given["include"] or ())
    first = [{"role": "system", "content": given["instructions"]}] if given["instructions"] else []
    chat = {name: given[name] for name in AS_IN_CHATS}
    chat |= {
        "messages": first + _messages(given["input"]),
        "max_completion_tokens": given["max_output_tokens"],
        "tools": given["tools"] and [_tool(tool, i) for i, tool in enumerate(given["tools"])],
        "tool_choice": _choice(given["tool_choice"]),
        "response_format": _format(given["text"]),
        "reasoning_effort": effort["effort"],
        "logprobs": logprobs,
        "top_logprobs": given["top_logprobs"] if logprobs else None,
    }
    return {name: value for name, value in chat.items() if value is not None}


def _choice(choice: Any) -> Any:
    if isinstance(choice, dict) and isinstance(choice.get("tools"), list):
        return {"type": choice.get("type"), "allowed_tools": choice | {"tools": list(map(_choice, choice["tools"]))}}
    if isinstance(choice, dict) and "name" in choice:
        return {"type": choice.get("type"), "function": {"name": choice["name"]}}
    return choice


def _wants_logprobs(include: Sequence[Any]) -> bool:
    """Errors: ApiError for anything else to include."""
    for name in include:
        if name not in (LOGPROBS, "reasoning.encrypted_content"):
            raise unsupported("include", f"include may hold {LOGPROBS}; {name!r:.80} is not built.")
    return LOGPROBS in include


def _format(told: dict[str, Any] | None) -> dict[str, Any] | None:
    """As chats name it. Errors: ApiError."""
    form = take(told or {}, {"format": record(""), "verbosity": one_of("", "medium")})["format"]
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}


def _tool(tool: Any, i: int) -> dict[str, Any]:
    """As chats write it. Errors: ApiError."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise unsupported("tools", f"tools[{i}] must have the type function, got {kind!r:.80}: others are not run.")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _messages(given: Any) -> list[Any]:
    """The input as a chat: calls, and what follows a thought, join the assistant's message before. Errors: ApiError."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise invalid("input", f"input must be a text or a list of items, got {given!r:.80}.")
    messages: list[Any] = []
    for i, item in enumerate(given):
        new, last = _message(item, f"input[{i}]"), messages[-1] if messages else {}
        calls = new.get("tool_calls", [])
        follows = calls or last.get("reasoning_content") and not last["content"]
        if new["role"] == last.get("role") == "assistant" and follows:
            last["content"] = last["content"] or new["content"]
            last |= {name: last[name] + new[name] for name in ("reasoning_content",) if name in new}
            last |= {"tool_calls": last.get("tool_calls", []) + calls} if calls else {}
        elif new.get("reasoning_content") != "":  # an empty thought says nothing
            messages.append(new)
    return messages


def _message(item: Any, where: str) -> dict[str, Any]:
    """One item as a message of a chat. Errors: ApiError."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if not isinstance(kind, str) or kind not in ITEMS:
        raise invalid("input", f"{where} has the type {kind!r:.80}; known are {', '.join(ITEMS)}.")
    only(item, (*OF_ANY, *ITEMS[kind]), where, "input")
    if kind == "message":
        return {"role": item.get("role"), "content": _content(item.get("content"), where)}
    if kind == "function_call_output":
        told = _content(item.get("output"), where)
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": told}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    parts = _content(item.get("content") or item.get("summary") or [], where)
    if isinstance(parts, list) and any(is_image(part) for part in parts):
        raise invalid("input", f"{where}: a thought must be a text or text parts; it has no images.")
    thought = parts if isinstance(parts, str) else "".join(part["text"] for part in parts)
    return {"role": "assistant", "reasoning_content": thought, "content": ""}


def _content(content: Any, where: str) -> Any:
    """Parts as chats write them. Errors: ApiError for what is no text."""
    if isinstance(content, str) or content is None:
        return content
    told = f"{where}: content must be a text, input_text or input_image parts; no files."
    if not isinstance(content, list):
        raise invalid("input", told)
    for part in content:
        text = isinstance(part, dict) and part.get("type") in PARTS and isinstance(part.get("text"), str)
        if not text and not is_image(part):
            raise invalid("input", told)
        if text:
            only(part, ("type", "text", "annotations", "logprobs"), f"{where}: a text", "input")
    return [part if is_image(part) else {"type": "text", "text": part["text"]} for part in content]


ECHOED: dict[str, Any] = {  # what an answer repeats of its body -> what it tells where the body has nothing
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True, "temperature": 1.0,
    "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": 1.0, "user": None,
    "reasoning": {"effort": None, "summary": None}, "truncation": "disabled",
}  # fmt: skip


class ResponseWriter(BlockWriter):
    """Modifies: itself, in a stream."""

    def __init__(self, chat: ChatWriter, body: Mapping[str, Any], model: str) -> None:
        super().__init__(chat)
        self._ids, self._number = dict[int, str](), 0
        echoed = {name: other if body.get(name) is None else body[name] for name, other in ECHOED.items()}
        self._head = {"id": new_id("resp_"), "object": "response", "created_at": int(time.time()), "model": model,
                      "background": False, "store": False, "previous_response_id": None, "error": None}  # fmt: skip
        self._head |= echoed

    def answer(self, output: Output) -> dict[str, Any]:
        finish, usage = finish_reason(output), self.chat.usage([output])
        whole = finish in ("stop", None)
        reason = {"length": "max_output_tokens"}.get(finish or "", finish)
        told = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}
                | usage.get("prompt_tokens_details", {}),
                "output_tokens_details": {"reasoning_tokens": usage.get("reasoning_tokens", 0)}}  # fmt: skip
        return self._head | {
            "status": "completed" if whole else "incomplete",
            "incomplete_details": None if whole else {"reason": reason},
            "output": [self._item(block) for block in self.found],
            "usage": usage | told,
        }

    def first(self) -> bytes:
        head = self._head | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        return self._event("response.created", response=head) + self._event("response.in_progress", response=head)

    def step(self, did: Did, block: Block, said: str) -> bytes:
        call, item = block.kind == "call", self._item(block)
        at: dict[str, Any] = {"item_id": item["id"], "output_index": block.index}
        inside = at if call else at | {"content_index": 0}
        named = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}[block.kind]
        if did == "delta":
            more = {"logprobs": block.logprobs[block.streamed :]} if block.kind == "text" else {}
            block.streamed = len(block.logprobs)
            return self._event(f"response.{named}.delta", **inside, delta=said, **more)
        if did == "open":
            opened = self._event("response.output_item.added", output_index=block.index, item=item)
            return opened if call else opened + self._event("response.content_part.added", **inside, part=_part(block))
        told: dict[str, Any] = {"arguments": said, "name": block.name} if call else {"text": said}
        if block.kind == "text":
            told["logprobs"] = block.logprobs
        done = self._event(f"response.{named}.done", **inside, **told)
        if not call:
            done += self._event("response.content_part.done", **inside, part=_part(block))
        return done + self._event("response.output_item.done", output_index=block.index, item=item)

    def ending(self, output: Output) -> bytes:
        answer = self.answer(output)
        return self._event(f"response.{answer['status']}", response=answer)

    def failed(self, error: ApiError) -> bytes:
        told = error.body()["error"]
        return self._event("error", code=told["code"], message=told["message"], param=told["param"])

    def _event(self, kind: str, **more: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **more}, kind)

    def _item(self, block: Block) -> dict[str, Any]:
        """One item of the output, as far as it has come. Modifies: the ids, when an item is new."""
        kind = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}[block.kind]
        head = {"id": self._ids.setdefault(block.index, new_id(kind)), "status": block.status}
        if block.kind == "call":
            return {**head, "type": "function_call", "call_id": block.id, "name": block.name, "arguments": block.text}
        content = [] if block.status == "in_progress" else [_part(block)]
        if block.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}


def _part(block: Block) -> dict[str, Any]:
    """The one part of a thought's or a message's content. Pure."""
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.logprobs}
