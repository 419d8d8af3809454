"""inspect-ai's messages as chats for the template, and its GenerateConfig as sampling parameters. Duck-typed: no
inspect_ai here, and no torch."""

from collections.abc import Sequence
from typing import Any

from fengine.core.sampling_params import PARAMETERS
from fengine.errors import InvalidRequestError, UnsupportedFeatureError

DEFAULT_MAX_TOKENS = 2048  # as inspect-ai's other local providers
SAMPLING = {row.openai: name for name, row in PARAMETERS.items() if row.openai and name != "max_new_tokens"}
SAMPLING |= {"top_k": "top_k", "stop_seqs": SAMPLING.pop("stop"), "num_choices": SAMPLING.pop("n")}  # its own words
READ = {"max_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "extra_body"}
# What inspect-ai does itself around a provider, and hints that no bit of an output depends on.
OUTSIDE = {
    "max_retries", "timeout", "attempt_timeout", "stream_idle_timeout", "max_connections", "adaptive_connections",
    "system_message", "max_tool_output", "reasoning_history", "fail_on_refusal", "cache", "cache_prompt",
    "internal_tools",
}  # fmt: skip
OFF = {  # values with which a field says nothing
    "best_of": 1, "batch": False, "reasoning_effort": "none", "modalities": [], "extra_headers": {},
    "parallel_tool_calls": True,
}  # fmt: skip


def sampling_of(config: Any) -> dict[str, Any]:
    """The sampling parameters of a call, without its length. Pure. `extra_body` holds more of them, such as min_p,
    beside `chat_template_kwargs`. Errors: UnsupportedFeatureError for fields that would change the output and are not
    built, all at once; InvalidRequestError."""
    given = {name: value for name in type(config).model_fields if (value := getattr(config, name)) is not None}
    bad = [
        f"{name}={value!r:.80}"
        for name, value in given.items()
        if name not in {*SAMPLING, *READ, *OUTSIDE} and not (name in OFF and value == OFF[name])
    ]
    if bad:
        raise UnsupportedFeatureError(f"not built: {', '.join(bad)}. Leave these fields out of GenerateConfig.")
    extra = dict(given.get("extra_body", {}))
    extra.pop("chat_template_kwargs", None)
    sampling = {SAMPLING[name]: value for name, value in given.items() if name in SAMPLING}
    if twice := sorted(sampling.keys() & extra.keys()):
        raise InvalidRequestError(f"extra_body has {', '.join(twice)}, which GenerateConfig has, too; give it once")
    if sampling.get("top_k") == 0:
        del sampling["top_k"]
    return sampling | extra


def logprob_arguments(config: Any) -> dict[str, Any]:
    """What `Engine.generate` is asked for about logprobs. Pure."""
    asked = bool(config.logprobs) or config.prompt_logprobs is not None
    tops = [config.top_logprobs or 0 if config.logprobs else 0, config.prompt_logprobs or 0]
    top = max(tops[0], tops[1] if tops[1] > 1 else 0)
    start = -1 if config.prompt_logprobs is None else 0
    return {"return_logprob": True, "top_logprobs_num": top, "logprob_start_len": start} if asked else {}


def template_message(message: Any, where: str) -> dict[str, Any]:
    """What `Engine.chat` takes. Pure. Errors: UnsupportedFeatureError for what is not text."""
    text, thoughts = _parts(message, where)
    found: dict[str, Any] = {"role": message.role, "content": text}
    if message.role == "assistant":
        if thoughts:
            found["reasoning_content"] = "\n".join(thoughts)
        if message.tool_calls:
            found["tool_calls"] = [
                {"type": "function", "id": c.id, "function": {"name": c.function, "arguments": c.arguments}}
                for c in message.tool_calls
            ]
    if message.role == "tool":
        found |= {"name": message.function, "tool_call_id": message.tool_call_id}
        if message.error is not None:
            found["content"] = f"Error: {message.error.message}"
    return found


def _parts(message: Any, where: str) -> tuple[str, list[str]]:
    if isinstance(message.content, str):
        return message.content, []
    texts, thoughts = [], []
    for part in message.content:
        if part.type == "text":
            texts.append(part.text)
        elif part.type == "reasoning":
            thoughts.append(part.reasoning)
        else:
            raise UnsupportedFeatureError(f"{where} holds a part of type {part.type!r}; only text is built")
    return "\n".join(texts), thoughts


def raw_prompt(messages: Sequence[Any]) -> str | list[int]:
    """The text of a single user message as it is, or the ids that its metadata["prompt_token_ids"] holds. Pure. Errors:
    InvalidRequestError, UnsupportedFeatureError."""
    if len(messages) != 1 or messages[0].role != "user":
        raise InvalidRequestError(
            "use_chat_template=false takes a single user message, such as Sample(input='text') gives, not "
            f"{len(messages)} of roles {', '.join(message.role for message in messages)}"
        )
    ids = (messages[0].metadata or {}).get("prompt_token_ids")
    if ids is not None and not isinstance(ids, list):
        raise InvalidRequestError(f'metadata["prompt_token_ids"] must be a list of token ids, got {ids!r:.80}')
    return _parts(messages[0], "messages[0]")[0] if ids is None else ids


def tool_schemas(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Tools as chat templates expect them. Pure."""
    found = []
    for tool in tools:
        parameters = tool.parameters.model_dump(mode="json", exclude_none=True)
        function = {"name": tool.name, "description": tool.description, "parameters": parameters}
        found.append({"type": "function", "function": function})
    return found
