"""OpenAI's batch format: one request a line, {"custom_id", "method", "url", "body"}. No torch.

The server's reader reads the bodies. What of them a run has no place for is refused by name; the body's "model" is kept
and not compared, since a run has one model.
"""

from typing import Any

from fengine.server.errors import ApiError
from fengine.server.openai_body import OpenAIRequest, read_body

PROMPTS = frozenset({"messages", "prompt", "input_ids"})
LOGPROBS = {"return_logprob", "top_logprobs_num", "logprob_start_len"}  # a run records its own
Parsed = tuple[int, dict[str, Any] | str]  # line; columns, or what is wrong


def from_openai(line: Parsed) -> Parsed:
    """The request with what a task reads beside it: "messages" or "prompt" or "input_ids", and "sampling". Pure."""
    number, request = line
    if isinstance(request, str):
        return line
    try:
        if request.get("method", "POST") != "POST":
            raise ApiError(400, f"method must be POST, got {request['method']!r:.40}")
        body = request.get("body")
        return number, {**request, **_columns(read_body(request.get("url"), body, 1), body)}
    except ApiError as error:
        return number, f"line {number} ({request.get('custom_id')!r:.80}): {error.message}"


def _columns(read: OpenAIRequest, body: Any) -> dict[str, Any]:
    """Errors: ApiError for what a run cannot do."""
    arguments = {name: value for name, value in read.arguments.items() if name not in LOGPROBS}
    sampling = arguments.pop("sampling_params")
    sampling.pop("n", None)
    if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
        del sampling["max_new_tokens"]  # the run's own holds
    chat = read.chat
    if chat is not None:
        template = {"chat_template_kwargs": chat.template_values, "reasoning_effort": chat.reasoning_effort}
        told = {"tools": chat.callable, "add_generation_prompt": not chat.add_generation_prompt, **template}
        arguments["messages"] = chat.messages
    else:
        told = {"echo": read.echo}
        if read.prompts > 1 or isinstance(arguments.get("input_ids", [0])[0], list):
            raise ApiError(400, "body.prompt holds several prompts, which is not supported: give each a line")
        if "text" in arguments:
            text = arguments.pop("text")
            arguments["prompt"] = text if isinstance(text, str) else text[0]
    told["stream"] = read.stream
    for name, value in (told | {k: v for k, v in arguments.items() if k not in PROMPTS}).items():
        if value:
            raise ApiError(400, f"body.{name} is not supported in a run")
    return {**{name: value for name, value in arguments.items() if name in PROMPTS}, "sampling": sampling}
