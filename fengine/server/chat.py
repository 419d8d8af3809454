"""`/v1/chat/completions`: a body to the engine's words, outputs to choices."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fengine.api.outputs import Output
from fengine.server import fields
from fengine.server.errors import ApiError, invalid, missing, unsupported
from fengine.server.responses import Parsed, finish_reason
from fengine.server.token_text import finite, token_bytes
from fengine.tokenizer.tokenizer import Tokenizer

OWN = "messages max_tokens max_completion_tokens logprobs top_logprobs response_format tools tool_choice"
OWN += " parallel_tool_calls chat_template_kwargs add_generation_prompt modalities"
KNOWN = fields.SHARED | frozenset(OWN.split())
REFUSED = {
    "functions": "OpenAI's older form of tools; use tools",
    "function_call": "OpenAI's older form of tool_choice; use tool_choice",
    "audio": "audio",
    "prediction": "predicted outputs",
    "reasoning_effort": "reasoning efforts; a template that has them takes them in chat_template_kwargs",
    "verbosity": "verbosity",
    "web_search_options": "searching the web",
    "continue_final_message": "continuing the last message",
    "chat_template": "templates of a request: the template is the model's own, or the server's",
}
MAX_TOP_LOGPROBS = 20  # OpenAI's
Encode = Callable[[Any, Any, bool, Any], list[int]]  # messages, tools, add_generation_prompt, template values


def read(body: Mapping[str, Any], tokenizer: Tokenizer, max_samples: int, encode: Encode) -> Parsed:
    """Errors: ApiError; those of `encode`, the engine's way from a chat to ids."""
    fields.check_names(body, KNOWN, REFUSED)
    wishes = fields.wishes_of(body, max_samples)
    logprobs, top = fields.flag(body, "logprobs"), fields.whole_number(body, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not logprobs:
        raise invalid("top_logprobs", "top_logprobs is only for logprobs=true.")
    if body.get("modalities") not in (None, ["text"]):
        raise unsupported("modalities", 'modalities other than ["text"] are not built.')
    if body.get("messages") is None:
        raise missing("messages")
    ids = encode(messages_of(body["messages"]), tools_of(body), fields.flag(body, "add_generation_prompt", True),
                 body.get("chat_template_kwargs"))  # fmt: skip
    sampling, most = fields.sampling_of(body), _most(body)
    sampling["max_new_tokens"] = None if most is None else body[most]
    arguments = {"input_ids": ids, "sampling_params": sampling, "stream": wishes.stream, **fields.call_arguments(body)}
    if logprobs:
        arguments |= {"return_logprob": True, "top_logprobs_num": top or 0}
    words = fields.WORDS | {"max_new_tokens": most or "max_tokens", "top_logprobs_num": "top_logprobs"}
    return Parsed(arguments, 1, wishes, ChatForm(tokenizer, logprobs, wishes.return_token_ids), words)


def _most(body: Mapping[str, Any]) -> str | None:
    """The field that limits the answer's length; None: only the context does."""
    given = [name for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    if len(given) == 2:
        raise invalid("max_tokens", "max_tokens and max_completion_tokens are two limits; give one.")
    if given and body[given[0]] == 0:
        raise invalid(given[0], f"{given[0]} must be at least 1, got 0.")
    return given[0] if given else None


def messages_of(messages: Any) -> Any:
    """Messages as templates read them: parts of text joined, arguments of tool calls as objects. Pure.

    What is wrong with them is left for the engine to tell. Errors: ApiError for parts that are no text.
    """
    if not isinstance(messages, list):
        return messages
    return [_message(m, f"messages[{i}]") if isinstance(m, dict) else m for i, m in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not texts or any(not isinstance(text, str) for text in texts):
            raise invalid("messages", f'{where}.content must be a string or {{"type": "text", "text": …}} parts; '
                          "images and other media are not built.")  # fmt: skip
        message = {**message, "content": "\n".join(text for text in texts if text is not None)}
    if isinstance(calls, list):
        message = {**message, "tool_calls": [_tool_call(call) for call in calls]}
    return message


def _tool_call(call: Any) -> Any:
    """A call whose arguments are an object, as templates want them, rather than its JSON text. Pure."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def tools_of(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools that the template is shown; None: none. Errors: ApiError."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    fields.flag(body, "parallel_tool_calls")
    if choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", f"tool_choice must be none or auto, got {choice!r:.80}: a call is not forced.")
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise invalid("tools", f"tools must be a list, got {tools!r:.80}.")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, f'tools[{i}] must be {{"type": "function", "function": {{"name": …}}}}.', "tools",
                          "invalid_value")  # fmt: skip
    return None if choice == "none" else tools


@dataclass(slots=True)
class ChatForm:
    tokenizer: Tokenizer
    logprobs: bool
    return_token_ids: bool
    id_prefix: str = "chatcmpl"
    object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"

    def whole(self, index: int, output: Output) -> dict[str, Any]:
        message = {"role": "assistant", "content": output["text"], "refusal": None}
        return self._choice(index, output, {"message": message})

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, index: int, output: Output) -> dict[str, Any] | None:
        delta = {"content": output["text"]} if output["text"] else {}
        choice = self._choice(index, output, {"delta": delta})
        shows = delta or choice["finish_reason"] or self.logprobs or self.return_token_ids
        return choice if shows else None

    def _choice(self, index: int, output: Output, said: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, **said, "logprobs": None, "finish_reason": finish_reason(output)}
        if self.logprobs:
            choice["logprobs"] = {"content": self._logprobs(output), "refusal": None}
        if self.return_token_ids:
            choice["token_ids"] = output["output_ids"]
        return choice

    def _logprobs(self, output: Output) -> list[dict[str, Any]]:
        meta, count = output["meta_info"], len(output["output_ids"])
        tops = meta.get("output_top_logprobs", [[]] * count)
        pairs = zip(meta["output_token_logprobs"][:count], tops[:count], strict=True)
        return [
            self._entry(token, logprob) | {"top_logprobs": [self._entry(t, p) for p, t, _ in top]}
            for (logprob, token, _), top in pairs
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(self.tokenizer, token)
        return {"token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": finite(logprob)}
