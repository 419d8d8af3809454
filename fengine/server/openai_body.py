"""The one reader of OpenAI's bodies, for the server and for batch files: fields to the engine's words. No torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fengine.server import fields
from fengine.server.chat_body import ChatOptions, chat_options
from fengine.server.errors import ApiError, invalid, unsupported

OF_COMPLETIONS = fields.SHARED | {"prompt", "max_tokens", "echo", "logprobs", "best_of"}
OF_CHATS = fields.SHARED | frozenset(
    "messages max_tokens max_completion_tokens logprobs top_logprobs tools tool_choice parallel_tool_calls functions "
    "function_call chat_template_kwargs add_generation_prompt modalities reasoning_effort separate_reasoning "
    "include_reasoning".split()
)
REFUSED_COMPLETIONS = {"suffix": "text behind the completion"}
REFUSED_CHATS = {
    "audio": "audio",
    "prediction": "predicted outputs",
    "verbosity": "verbosity",
    "web_search_options": "searching the web",
    "continue_final_message": "continuing the last message",
    "chat_template": "templates of a request: the template is the model's own, or the server's",
}
STREAM_OPTIONS = frozenset({"include_usage", "include_obfuscation"})
DEFAULT_TOKENS = 16  # OpenAI's, of completions
MAX_LOGPROBS = 20  # OpenAI's, of chats; vLLM's of both


@dataclass(frozen=True, slots=True)
class OpenAIRequest:
    """One body in the engine's words; nothing is tokenized yet, and values that the engine checks are not checked.

    `arguments`: fields of `GenerateReqInput` beside the chat, which is in `chat`. `logprobs`: how many alternatives of
    each token; None: no logprobs. `words`: engine's word -> the field of the body that it came from.
    """

    arguments: dict[str, Any]
    samples: int
    stream: bool
    include_usage: bool
    return_token_ids: bool
    logprobs: int | None
    prompts: int = 1
    echo: bool = False
    chat: ChatOptions | None = None
    words: dict[str, str] = field(default_factory=dict)


def read_completion(body: Mapping[str, Any], max_samples: int) -> OpenAIRequest:
    """A body of /v1/completions. Pure. Errors: ApiError."""
    fields.check_names(body, OF_COMPLETIONS, REFUSED_COMPLETIONS)
    common = _common(body, max_samples)
    if fields.whole_number(body, "best_of", 1, max_samples) not in (None, common["samples"]):
        raise unsupported("best_of", "best_of is not built: all samples are returned; ask for them with n.")
    kind, prompts, count = fields.texts_or_ids(body, "prompt")
    echo, logprobs = fields.flag(body, "echo"), fields.whole_number(body, "logprobs", 0, MAX_LOGPROBS)
    if body.get("max_tokens") == 0 and not echo:
        raise invalid("max_tokens", "max_tokens may be 0 only with echo=true, to score a prompt.")
    sampling = fields.sampling_of(body)
    sampling["max_new_tokens"] = DEFAULT_TOKENS if body.get("max_tokens") is None else body["max_tokens"]
    arguments = {kind: prompts, "sampling_params": sampling, **fields.call_arguments(body)}
    if logprobs is not None:
        start = 0 if echo else None
        arguments |= {"return_logprob": True, "top_logprobs_num": logprobs, "logprob_start_len": start}
    words = {"max_new_tokens": "max_tokens", "top_logprobs_num": "logprobs", "input_ids": "prompt", "text": "prompt"}
    return OpenAIRequest(arguments, logprobs=logprobs, prompts=count, echo=echo, words=fields.WORDS | words, **common)


def read_chat(body: Mapping[str, Any], max_samples: int) -> OpenAIRequest:
    """A body of /v1/chat/completions. Pure. Errors: ApiError."""
    fields.check_names(body, OF_CHATS, REFUSED_CHATS)
    common = _common(body, max_samples)
    logprobs, top = fields.flag(body, "logprobs"), fields.whole_number(body, "top_logprobs", 0, MAX_LOGPROBS)
    if top is not None and not logprobs:
        raise invalid("top_logprobs", "top_logprobs is only for logprobs=true.")
    if body.get("modalities") not in (None, ["text"]):
        raise unsupported("modalities", 'modalities other than ["text"] are not built.')
    sampling, most = fields.sampling_of(body), _length_field(body)
    sampling["max_new_tokens"] = None if most is None else body[most]
    chat = chat_options(body, has_grammar=any(name in sampling for name in fields.GRAMMARS))
    arguments = {"sampling_params": sampling, **fields.call_arguments(body)}
    if logprobs:
        arguments |= {"return_logprob": True, "top_logprobs_num": top or 0}
    words = fields.WORDS | {"max_new_tokens": most or "max_tokens", "top_logprobs_num": "top_logprobs"}
    return OpenAIRequest(arguments, logprobs=(top or 0) if logprobs else None, chat=chat, words=words, **common)


READERS: dict[str, Callable[[Mapping[str, Any], int], OpenAIRequest]] = {
    "/v1/completions": read_completion,
    "/v1/chat/completions": read_chat,
}


def read_body(url: Any, body: Any, max_samples: int) -> OpenAIRequest:
    """A body of one of the paths of READERS. Pure. Errors: ApiError."""
    if not isinstance(url, str) or url not in READERS:
        raise ApiError(400, f"url must be one of {', '.join(READERS)}, got {url!r:.80}.", "url", "invalid_value")
    if not isinstance(body, Mapping):
        raise ApiError(400, f"the body must be a JSON object, got {type(body).__name__}.", "body", "invalid_value")
    return READERS[url](body, max_samples)


def _common(body: Mapping[str, Any], max_samples: int) -> dict[str, Any]:
    """What both kinds ask of the response's form. Errors: ApiError."""
    stream, options = fields.flag(body, "stream"), body.get("stream_options")
    if options is not None:
        if not isinstance(options, dict):
            raise invalid("stream_options", f"stream_options must be an object, got {options!r:.80}.")
        if not stream:
            raise invalid("stream_options", "stream_options is only for stream=true.")
        fields.check_names(options, STREAM_OPTIONS, {})
        fields.flag(options, "include_obfuscation")
    return {
        "samples": fields.whole_number(body, "n", 1, max_samples) or 1,
        "stream": stream,
        "include_usage": fields.flag(options or {}, "include_usage"),
        "return_token_ids": fields.flag(body, "return_token_ids"),
    }


def _length_field(body: Mapping[str, Any]) -> str | None:
    """The field that limits a chat's answer; None: only the context does."""
    given = [name for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    if len(given) == 2:
        raise invalid("max_tokens", "max_tokens and max_completion_tokens are two limits; give one.")
    if given and body[given[0]] == 0:
        raise invalid(given[0], f"{given[0]} must be at least 1, got 0.")
    return given[0] if given else None
