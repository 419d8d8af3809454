"""The one reader of OpenAI's bodies, for the server and for batch files: fields to the engine's words. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fengine.core.sampling_params import GRAMMARS
from fengine.server import fields
from fengine.server.chat_body import CHAT, ChatOptions, chat_options
from fengine.server.errors import invalid, missing, unsupported
from fengine.server.fields import Field, Fields, flag, loose, one_of, whole

MAX_TEXTS = 65536  # prompts of one body
MAX_LOGPROBS = 20  # OpenAI's, of chats; vLLM's of both
MAX_BAD_WORDS = 1024  # each step of all requests waits while they are looked for
DEFAULT_TOKENS = 16  # OpenAI's, of completions
LIMIT = loose("Most tokens to draw.", "integer")
TRUNCATION: Fields = {
    "truncate_prompt_tokens": whole("Most tokens of the prompt; -1: as many as the context takes.", -1, 2**31 - 1),
    "truncation_side": one_of("The side that is cut off.", "left", "right", default="left"),
}
ADD_SPECIAL: Fields = {"add_special_tokens": flag("The tokenizer adds its special tokens to texts.", True)}
SHARED: dict[str, Field] = {
    **fields.MODEL,
    "stream": flag("Answer with events."),
    "stream_options": fields.record("include_usage, continuous_usage_stats; only for streams."),
    "return_token_ids": flag("Ids of prompts and outputs beside the texts."),
    "return_prompt_token_ids": flag("Ids of prompts in the choices."),
    "return_tokens_as_token_ids": flag("Tokens of logprobs as token_id:ID."),
    "return_hidden_states": loose("true or last: the last hidden state of a choice, where the engine gives any."),
    "logprob_token_ids": fields.array("With logprobs: the ids that are told at each position, not the likeliest."),
    "prompt_logprobs": whole("Likeliest tokens at each position of the prompt.", 0, MAX_LOGPROBS),
    **TRUNCATION,
    "bad_words": Field({"type": "array", "description": "Words that are never drawn."}, []),
    "allowed_token_ids": fields.array("The only ids that are drawn."),
    **fields.sampling_fields(),
    **fields.GRAMMAR_FIELDS,
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
    "thinking_token_budget": whole("vLLM's: behind so many tokens of thought, </think> is drawn.", 0, 2**31 - 1),
    "modalities": loose('["text"].', "array"),
    "echo": flag("The last message before the text, if it is the assistant's."),
    "add_special_tokens": flag("The tokenizer adds its special tokens, too, to what the template has written."),
}  # fmt: skip
REFUSED = {"use_beam_search": "beam search", "prompt_embeds": "embeddings in place of tokens"}
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

    `given`: every field of the body, or its default; `logprobs` is how many alternatives of each token (None: no
    logprobs), `stream_options` holds all of its fields, and bad_words join the logit_bias once they are tokenized.
    `arguments`: fields of `GenerateReqInput` beside the chat, which is in `chat`. `words`: engine's word -> the field
    of the body that it came from."""

    given: dict[str, Any]
    arguments: dict[str, Any]
    words: Mapping[str, str]
    prompts: int = 1
    chat: ChatOptions | None = None

    @property
    def chat_options(self) -> ChatOptions:
        assert self.chat is not None, "a body of chat completions"
        return self.chat


def read_completion(body: Mapping[str, Any], max_samples: int) -> OpenAIRequest:
    """A body of /v1/completions. Pure. Errors: ApiError."""
    given = _given(body, OF_COMPLETIONS, REFUSED_COMPLETIONS, max_samples)
    if given["best_of"] not in (None, given["n"]) or isinstance(given["best_of"], bool):
        raise unsupported("best_of", "best_of is not built: all samples are returned; ask for them with n.")
    kind, prompts, count = texts_or_ids(body, "prompt")
    if given["max_tokens"] == 0 and not given["echo"] and given["prompt_logprobs"] is None:
        raise invalid("max_tokens", "max_tokens may be 0 only with echo=true, to score a prompt.")
    arguments = _arguments(body, given, given["echo"]) | {kind: prompts}
    most = DEFAULT_TOKENS if given["max_tokens"] is None else given["max_tokens"]
    arguments["sampling_params"]["max_new_tokens"] = most
    words = {"max_new_tokens": "max_tokens", "top_logprobs_num": "logprobs", "input_ids": "prompt",
             "token_ids_logprob": "logprob_token_ids"}  # fmt: skip
    return OpenAIRequest(given, arguments, fields.WORDS | fields.salt_word(body) | words, count)


def read_chat(body: Mapping[str, Any], max_samples: int) -> OpenAIRequest:
    """A body of /v1/chat/completions. Pure. Errors: ApiError."""
    given = _given(body, OF_CHATS, REFUSED_CHATS, max_samples)
    if given["top_logprobs"] and not given["logprobs"]:
        raise invalid("top_logprobs", "top_logprobs is only for logprobs=true.")
    if given["modalities"] not in (None, ["text"]):
        raise unsupported("modalities", 'modalities other than ["text"] are not built.')
    given["logprobs"] = (given["top_logprobs"] or 0) if given["logprobs"] else None
    most, arguments = _length_field(body), _arguments(body, given, False)
    sampling = arguments["sampling_params"]
    sampling["max_new_tokens"] = None if most is None else body[most]
    chat = chat_options(given, has_grammar=any(name in sampling for name in GRAMMARS))
    words = {"max_new_tokens": most or "max_tokens", "top_logprobs_num": "top_logprobs",
             "token_ids_logprob": "logprob_token_ids"}  # fmt: skip
    if chat.forced:
        words["json_schema"] = "function_call" if chat.legacy else "tool_choice"
    return OpenAIRequest(given, arguments, fields.WORDS | fields.salt_word(body) | words, chat=chat)


READERS = {"/v1/completions": read_completion, "/v1/chat/completions": read_chat}


def read_body(url: Any, body: Any, max_samples: int) -> OpenAIRequest:
    """A body of one of the paths of READERS. Pure. Errors: ApiError."""
    if not isinstance(url, str) or url not in READERS:
        raise invalid("url", f"url must be one of {', '.join(READERS)}, got {url!r:.80}.")
    if not isinstance(body, Mapping):
        raise invalid("body", f"the body must be a JSON object, got {type(body).__name__}.")
    return READERS[url](body, max_samples)


def _given(body: Mapping[str, Any], known: Fields, refused: Mapping[str, str], max_samples: int) -> dict[str, Any]:
    """Every field of a body, or its default. Errors: ApiError."""
    given = fields.take(body, known | {"n": whole("", 1, max_samples, 1)}, refused)
    if given["stream_options"] is not None and not given["stream"]:
        raise invalid("stream_options", "stream_options is only for stream=true.")
    given["stream_options"] = fields.take(given["stream_options"] or {}, STREAM_OPTIONS)
    _check_drawn(given["bad_words"], given["allowed_token_ids"])
    if given["stream"] and given["prompt_logprobs"] is not None:
        raise invalid("prompt_logprobs", "prompt_logprobs are not told in streams; leave stream out.")
    prompts = given["return_prompt_token_ids"] or given["return_token_ids"]
    return given | {"truncation": Truncation.of(given), "return_prompt_token_ids": prompts}


def _check_drawn(words: list[Any], ids: list[Any] | None) -> None:
    """Errors: ApiError."""
    if len(words) > MAX_BAD_WORDS or not all(isinstance(word, str) and word for word in words):
        told = f"bad_words must be a list of at most {MAX_BAD_WORDS} texts, none empty"
        raise invalid("bad_words", f"{told}, got {len(words)}: {words!r:.80}.")
    if ids is not None and not (ids and all(type(id) is int and id >= 0 for id in ids)):
        raise invalid("allowed_token_ids", f"allowed_token_ids must be token ids, and not empty, got {ids!r:.80}.")


def _arguments(body: Mapping[str, Any], given: Mapping[str, Any], echo: bool) -> dict[str, Any]:
    """Arguments of `generate` beside the prompt. Errors: ApiError."""
    sampling = fields.sampling_of(body)
    options = {"sampling_params": sampling | fields.grammar_of(body, sampling)} | fields.call_arguments(given)
    if (hidden := given["return_hidden_states"]) not in (None, True, False, "last"):
        raise invalid("return_hidden_states", f"return_hidden_states must be true, false or last, got {hidden!r:.80}.")
    if hidden:
        options["return_hidden_states"] = "last"
    logprobs, of_prompt, ids = given["logprobs"], given["prompt_logprobs"], given["logprob_token_ids"]
    if ids is not None and logprobs is None:
        raise invalid("logprob_token_ids", "logprob_token_ids says which logprobs are told; ask for logprobs, too.")
    if logprobs is None and of_prompt is None:
        return options
    start = 0 if of_prompt is not None or echo else None
    top = max(logprobs or 0 if ids is None else 0, of_prompt or 0)
    asked = {"return_logprob": True, "top_logprobs_num": top, "logprob_start_len": start, "token_ids_logprob": ids}
    return options | asked


def _length_field(body: Mapping[str, Any]) -> str | None:
    """The field that limits a chat's answer; None: only the context does."""
    given = [name for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    if len(given) == 2:
        raise invalid("max_tokens", "max_tokens and max_completion_tokens are two limits; give one.")
    if given and body[given[0]] == 0:
        raise invalid(given[0], f"{given[0]} must be at least 1, got 0.")
    return given[0] if given else None


# -- prompts, and how they become ids ----------------------------------------------------------------------------------


def texts_or_ids(body: Mapping[str, Any], name: str) -> tuple[str, Any, int]:
    """What a field that holds prompts holds: ("text" or "input_ids", its value, how many), a list of one as such.
    Texts, or token ids that the engine checks. Errors: ApiError (empty, mixed, or neither)."""
    value = body.get(name)
    if value is None:
        raise missing(name)
    if isinstance(value, str):
        return "text", value, 1
    if not isinstance(value, list) or not value:
        raise invalid(name, f"{name} must be a string, a list of strings, or token ids; got {value!r:.80}.")
    kinds = {type(part) for part in value}
    if kinds == {int}:
        return "input_ids", value, 1
    if kinds not in ({str}, {list}):
        raise invalid(name, f"{name} must hold strings only, token ids only, or lists of token ids only.")
    if len(value) > MAX_TEXTS:
        raise invalid(name, f"{name} may hold at most {MAX_TEXTS} prompts, got {len(value)}.")
    return ("text" if kinds == {str} else "input_ids"), value, len(value)


@dataclass(frozen=True, slots=True)
class Truncation:
    """At most `tokens` of a prompt (-1: as many as fit), cut on a `side`."""

    tokens: int
    side: str

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Truncation | None":
        """Of the fields of TRUNCATION, taken. Pure. Errors: ApiError."""
        most = given["truncate_prompt_tokens"]
        if most == 0:
            raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or at least 1, got 0.")
        return None if most is None else cls(most, given["truncation_side"])

    def cut(self, ids: list[int], context: int, images: Sequence[Any] = ()) -> list[int]:
        """Pure. Errors: ApiError."""
        if images:
            raise unsupported("truncate_prompt_tokens", "truncate_prompt_tokens of a chat with images is not built.")
        most = self.most(context, 1)
        return ids[:most] if self.side == "right" else ids[-most:]

    def most(self, context: int, drawn: int) -> int:
        """How many tokens are left, with room for those that are drawn. Pure. Errors: ApiError."""
        if self.tokens > context:
            raise invalid("truncate_prompt_tokens", f"truncate_prompt_tokens value is greater than max_model_len "
                          f"({context}). Please, select a smaller truncation size.")  # fmt: skip
        return context - drawn if self.tokens == -1 else self.tokens


def prompt_ids(
    tokenizer: Any, kind: str, prompts: Any, add_special: bool, cut: Truncation | None, context: int
) -> list[list[int]]:
    """The ids of each of the prompts that `texts_or_ids` read. Errors: InvalidRequestError and its kinds; ApiError."""
    if kind == "text":
        texts = [prompts] if isinstance(prompts, str) else prompts
        rows = tokenizer.encode_batch(texts, add_special_tokens=add_special, cut=cut is not None)
    else:
        rows = prompts if isinstance(prompts[0], list) else [prompts]
    return [cut.cut(row, context) for row in rows] if cut else rows
