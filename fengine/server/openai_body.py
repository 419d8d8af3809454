"""The one reader of OpenAI's bodies, for the server and for batch files: fields to the engine's words. No torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fengine.core.sampling_params import GRAMMARS
from fengine.server import fields
from fengine.server.chat_body import CHAT, ChatOptions, chat_options
from fengine.server.errors import ApiError, invalid, unsupported
from fengine.server.fields import Field, Fields, flag, loose, whole
from fengine.server.grammar_fields import FIELDS as GRAMMAR_FIELDS
from fengine.server.grammar_fields import grammar_of
from fengine.server.prompts import ADD_SPECIAL, TRUNCATION, Truncation, texts_or_ids, truncation_of

MAX_LOGPROBS = 20  # OpenAI's, of chats; vLLM's of both
DEFAULT_TOKENS = 16  # OpenAI's, of completions
LIMIT = loose("Most tokens to draw.", "integer")
SHARED: dict[str, Field] = {
    **fields.MODEL,
    "stream": flag("Answer with events."),
    "stream_options": fields.record("include_usage, continuous_usage_stats; only for streams."),
    "return_token_ids": flag("Ids of prompts and outputs beside the texts."),
    "return_prompt_token_ids": flag("Ids of prompts in the choices."),
    "return_tokens_as_token_ids": flag("Tokens of logprobs as token_id:ID."),
    "return_hidden_states": flag("The last hidden state of a choice, where the engine gives any."),
    "prompt_logprobs": whole("Likeliest tokens at each position of the prompt.", 0, MAX_LOGPROBS),
    **TRUNCATION,
    "bad_words": fields.array("Words that are never drawn; each must be one token."),
    **fields.sampling_fields(),
    **GRAMMAR_FIELDS,
    **fields.CALL,
}
OF_COMPLETIONS: Fields = SHARED | {
    "prompt": loose("A text, token ids, or a list of either."),
    "max_tokens": LIMIT,
    "echo": flag("The prompt before the text."),
    "logprobs": whole("Likeliest tokens at each position.", 0, MAX_LOGPROBS),
    "best_of": loose("As n.", "integer"),
    **ADD_SPECIAL,
}
OF_CHATS: Fields = SHARED | CHAT | {
    "max_completion_tokens": LIMIT,
    "max_tokens": LIMIT,
    "logprobs": flag("Logprobs of the tokens."),
    "top_logprobs": whole("Likeliest tokens at each position, with logprobs.", 0, MAX_LOGPROBS),
    "modalities": loose('["text"].', "array"),
    "echo": flag("The last message before the text, if it is the assistant's."),
    "add_special_tokens": flag("The tokenizer adds its special tokens, too, to what the template has written."),
}  # fmt: skip
REFUSED = {
    "use_beam_search": "beam search",
    "allowed_token_ids": "a list of allowed ids; a regex, a choice or logit_bias says what may be drawn",
    "prompt_embeds": "embeddings in place of tokens",
}
REFUSED_COMPLETIONS = REFUSED | {"suffix": "text behind the completion"}
REFUSED_CHATS = REFUSED | {
    "audio": "audio",
    "prediction": "predicted outputs",
    "verbosity": "verbosity",
    "web_search_options": "searching the web",
    "chat_template": "templates of a request: the template is the model's own, or the server's",
}
STREAM_OPTIONS: Fields = {
    "include_usage": flag("A last event tells the usage."),
    "continuous_usage_stats": flag("With include_usage, every event does."),
    "include_obfuscation": flag("Accepted; nothing is obfuscated."),
}


@dataclass(frozen=True, slots=True)
class OpenAIRequest:
    """One body in the engine's words; nothing is tokenized yet, and values that the engine checks are not checked.

    `arguments`: fields of `GenerateReqInput` beside the chat, which is in `chat`. `logprobs`, `prompt_logprobs`: how
    many alternatives of each token; None: no logprobs. `words`: engine's word -> the field of the body that it came
    from. `bad_words` join the logit_bias once they are tokenized.
    """

    arguments: dict[str, Any]
    samples: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    return_prompt_ids: bool
    tokens_as_ids: bool
    logprobs: int | None
    prompt_logprobs: int | None
    truncation: Truncation | None
    bad_words: tuple[str, ...]
    add_special_tokens: bool = True
    prompts: int = 1
    echo: bool = False
    chat: ChatOptions | None = None
    words: dict[str, str] = field(default_factory=dict)


def read_completion(body: Mapping[str, Any], max_samples: int) -> OpenAIRequest:
    """A body of /v1/completions. Pure. Errors: ApiError."""
    if body.get("prompt") is None and body.get("prompt_embeds") == []:
        raise invalid("prompt", "Either prompt or prompt_embeds must be provided and non-empty.")
    given = fields.take(body, OF_COMPLETIONS, REFUSED_COMPLETIONS)
    common = _common(given, max_samples)
    if given["best_of"] not in (None, common["samples"]) or isinstance(given["best_of"], bool):
        raise unsupported("best_of", "best_of is not built: all samples are returned; ask for them with n.")
    kind, prompts, count = texts_or_ids(body, "prompt")
    echo, logprobs = given["echo"], given["logprobs"]
    if given["max_tokens"] == 0 and not echo and given["prompt_logprobs"] is None:
        raise invalid("max_tokens", "max_tokens may be 0 only with echo=true, to score a prompt.")
    sampling = fields.sampling_of(body)
    sampling |= grammar_of(body, sampling)
    sampling["max_new_tokens"] = DEFAULT_TOKENS if given["max_tokens"] is None else given["max_tokens"]
    arguments = {kind: prompts, "sampling_params": sampling, **_options(given, logprobs, echo)}
    words = {"max_new_tokens": "max_tokens", "top_logprobs_num": "logprobs", "input_ids": "prompt", "text": "prompt"}
    return OpenAIRequest(
        arguments, logprobs=logprobs, prompts=count, echo=echo, add_special_tokens=given["add_special_tokens"],
        words=fields.WORDS | words, **common,
    )  # fmt: skip


def read_chat(body: Mapping[str, Any], max_samples: int) -> OpenAIRequest:
    """A body of /v1/chat/completions. Pure. Errors: ApiError."""
    given = fields.take(body, OF_CHATS, REFUSED_CHATS)
    common, top = _common(given, max_samples), given["top_logprobs"]
    if top and not given["logprobs"]:
        raise invalid("top_logprobs", "top_logprobs is only for logprobs=true.")
    if given["modalities"] not in (None, ["text"]):
        raise unsupported("modalities", 'modalities other than ["text"] are not built.')
    sampling, most = fields.sampling_of(body), _length_field(body)
    sampling |= grammar_of(body, sampling)
    sampling["max_new_tokens"] = None if most is None else body[most]
    chat = chat_options(given, has_grammar=any(name in sampling for name in GRAMMARS))
    logprobs = (top or 0) if given["logprobs"] else None
    arguments = {"sampling_params": sampling, **_options(given, logprobs, False)}
    words = fields.WORDS | {"max_new_tokens": most or "max_tokens", "top_logprobs_num": "top_logprobs"}
    return OpenAIRequest(
        arguments, logprobs=logprobs, chat=chat, echo=given["echo"], add_special_tokens=given["add_special_tokens"],
        words=words, **common,
    )  # fmt: skip


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


def _common(given: Mapping[str, Any], max_samples: int) -> dict[str, Any]:
    """What both kinds ask of the response's form. Errors: ApiError."""
    stream, options = given["stream"], given["stream_options"]
    if options is not None and not stream:
        raise invalid("stream_options", "stream_options is only for stream=true.")
    asked = fields.take(options or {}, STREAM_OPTIONS)
    words = given["bad_words"] or ()
    if not all(isinstance(word, str) and word for word in words):
        raise invalid("bad_words", f"bad_words must be a list of texts, none empty, got {words!r:.80}.")
    if stream and given["prompt_logprobs"] is not None:
        raise invalid("prompt_logprobs", "prompt_logprobs are not told in streams; leave stream out.")
    samples = fields.take({"n": given["n"]}, {"n": whole("", 1, max_samples, 1)})["n"]
    return {
        "samples": samples,
        "stream": stream,
        "include_usage": asked["include_usage"],
        "continuous_usage": asked["include_usage"] and asked["continuous_usage_stats"],
        "return_token_ids": given["return_token_ids"],
        "return_prompt_ids": given["return_prompt_token_ids"] or given["return_token_ids"],
        "tokens_as_ids": given["return_tokens_as_token_ids"],
        "prompt_logprobs": given["prompt_logprobs"],
        "truncation": truncation_of(given),
        "bad_words": tuple(words),
    }


def _options(given: Mapping[str, Any], logprobs: int | None, echo: bool) -> dict[str, Any]:
    """Arguments of `generate` beside prompt and sampling. Pure."""
    options, of_prompt = fields.call_arguments(given), given["prompt_logprobs"]
    if given["return_hidden_states"]:
        options["return_hidden_states"] = "last"
    if logprobs is None and of_prompt is None:
        return options
    start = 0 if of_prompt is not None or echo else None
    top = max(logprobs or 0, of_prompt or 0)
    return options | {"return_logprob": True, "top_logprobs_num": top, "logprob_start_len": start}


def _length_field(body: Mapping[str, Any]) -> str | None:
    """The field that limits a chat's answer; None: only the context does."""
    given = [name for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    if len(given) == 2:
        raise invalid("max_tokens", "max_tokens and max_completion_tokens are two limits; give one.")
    if given and body[given[0]] == 0:
        raise invalid(given[0], f"{given[0]} must be at least 1, got 0.")
    return given[0] if given else None
