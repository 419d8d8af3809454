"""The fields of a request's body: which there are, what they are called in the engine, and which are refused by name.

A field that is null is as good as absent, as in OpenAI's API. Values that the engine checks are not checked here twice.
"""

import difflib
import json
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from fengine.server.errors import ApiError, invalid, missing, unsupported

SAMPLING: dict[str, str] = {  # of both kinds of completions; field -> the engine's sampling parameter
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
    "seed": "sampling_seed",
    "n": "n",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "stop_regex": "stop_regex",
    "min_tokens": "min_new_tokens",
    "ignore_eos": "ignore_eos",
    "include_stop_str_in_output": "no_stop_trim",
    "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens",
    "custom_params": "custom_params",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "structural_tag": "structural_tag",
}
WORDS = {ours: name for name, ours in SAMPLING.items() if ours != name}  # how messages must call them
CALL: dict[str, str] = {  # field -> argument of `generate`
    "lora_path": "lora_path",
    "custom_logit_processor": "custom_logit_processor",
    "cache_salt": "cache_salt",
    "priority": "priority",
}
# Fields that say nothing about the answer: accepted and left alone.
NO_EFFECT = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention".split()
)
SHARED = frozenset({"model", "stream", "stream_options", "return_token_ids"}) | SAMPLING.keys() | CALL.keys()
FORMATS = {  # response_format's types -> their fields
    "text": {"type"},
    "json_object": {"type"},
    "json_schema": {"type", "json_schema"},
    "structural_tag": {"type", "structures", "triggers"},
}
STREAM_OPTIONS = frozenset({"include_usage", "include_obfuscation"})
MAX_TEXTS = 65536  # prompts of one body


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a body asks of the answer's form."""

    stream: bool
    include_usage: bool
    return_token_ids: bool
    samples: int


def check_names(body: Mapping[str, Any], known: frozenset[str], refused: Mapping[str, str]) -> None:
    """Errors: ApiError for a field that is not known, or that is `refused`, with the reason."""
    for name, value in body.items():
        if value is None or name in known or name in NO_EFFECT:
            continue
        if name in refused:
            raise unsupported(name, f"{name} is not built: {refused[name]}. Leave it out.")
        near = difflib.get_close_matches(name[:80], sorted(known | refused.keys() | NO_EFFECT), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ApiError(400, f"unknown field {name!r:.80}.{hint}", name[:80], "unknown_parameter")


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Errors: ApiError if a field is there and is neither true nor false."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise invalid(name, f"{name} must be true or false, got {value!r:.80}.")
    return value


def whole_number(body: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    """Errors: ApiError if a field is there and is no integer in [least, most]."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not least <= value <= most:
        raise invalid(name, f"{name} must be an integer in [{least}, {most}], got {value!r:.80}.")
    return value


def wishes_of(body: Mapping[str, Any], max_samples: int) -> Wishes:
    """Errors: ApiError."""
    stream, options = flag(body, "stream"), body.get("stream_options")
    if options is not None:
        if not isinstance(options, dict):
            raise invalid("stream_options", f"stream_options must be an object, got {options!r:.80}.")
        if not stream:
            raise invalid("stream_options", "stream_options is only for stream=true.")
        check_names(options, STREAM_OPTIONS, {})
        flag(options, "include_obfuscation")
    samples = whole_number(body, "n", 1, max_samples) or 1
    return Wishes(stream, flag(options or {}, "include_usage"), flag(body, "return_token_ids"), samples)


def sampling_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's sampling parameters, not checked yet. Pure. Errors: ApiError (a grammar that is no text)."""
    sampling = {ours: body[name] for name, ours in SAMPLING.items() if body.get(name) is not None}
    for name in ("json_schema", "structural_tag"):  # the engine takes them as JSON texts
        if isinstance(sampling.get(name), dict):
            sampling[name] = json.dumps(sampling[name])
    return sampling | _response_format(body.get("response_format"), sampling)


def _response_format(value: Any, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's way to ask for a grammar, as a sampling parameter. Pure. Errors: ApiError."""
    if value is None:
        return {}
    name = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in FORMATS:
        _check_inside(name, value, FORMATS[kind])
    if kind == "text":
        return {}
    if kind == "json_object":
        grammar = {"json_schema": '{"type": "object"}'}
    elif kind == "json_schema":
        outer = value.get("json_schema")
        if not isinstance(outer, dict) or not isinstance(outer.get("schema"), (dict, bool)):
            raise invalid(name, 'response_format must have {"json_schema": {"schema": {…}}}.')
        _check_inside(f"{name}.json_schema", outer, {"name", "description", "schema", "strict"})
        grammar = {"json_schema": json.dumps(outer["schema"])}
    elif kind == "structural_tag":
        grammar = {"structural_tag": json.dumps(value)}
    else:
        raise invalid(
            name, f"response_format must have the type text, json_object, json_schema or structural_tag: {value!r:.80}."
        )
    if taken := [key for key in ("json_schema", "regex", "ebnf", "structural_tag") if key in sampling]:
        raise invalid(name, f"response_format and {taken[0]} are two grammars; give one.")
    return grammar


def _check_inside(where: str, value: Mapping[str, Any], known: Set[str]) -> None:
    """Errors: ApiError for a field of a response_format that would otherwise be ignored."""
    for name, inner in value.items():
        if inner is not None and name not in known:
            told = f"{where} has the unknown field {name!r:.80}; known are {', '.join(sorted(known))}."
            raise ApiError(400, told, "response_format", "unknown_parameter")


def call_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` beside prompt and sampling. Pure. Errors: ApiError."""
    for name in ("lora_path", "custom_logit_processor", "cache_salt"):
        if not isinstance(body.get(name), str | None):
            raise invalid(name, f"{name} must be a string, got {body[name]!r:.80}.")
    whole_number(body, "priority", -(2**31), 2**31 - 1)  # `generate` takes a list, too
    return {ours: body[name] for name, ours in CALL.items() if body.get(name) is not None}


def texts_or_ids(body: Mapping[str, Any], name: str) -> tuple[str, Any, int]:
    """What a field that holds prompts holds: ("prompt" or "input_ids", its value, how many), a list of one as such.

    Texts, or token ids that the engine checks. Errors: ApiError (empty, mixed, or neither).
    """
    value = body.get(name)
    if value is None:
        raise missing(name)
    if isinstance(value, str):
        return "prompt", value, 1
    if not isinstance(value, list) or not value:
        raise invalid(name, f"{name} must be a string, a list of strings, or token ids; got {value!r:.80}.")
    kinds = {type(part) for part in value}
    if kinds == {int}:
        return "input_ids", value, 1
    if kinds not in ({str}, {list}):
        raise invalid(name, f"{name} must hold strings only, token ids only, or lists of token ids only.")
    if len(value) > MAX_TEXTS:
        raise invalid(name, f"{name} may hold at most {MAX_TEXTS} prompts, got {len(value)}.")
    for i, part in enumerate(value):
        if isinstance(part, list) and {type(token) for token in part} != {int}:
            raise invalid(name, f"{name}[{i}] must be a list of token ids that is not empty, got {part!r:.80}.")
    return ("prompt" if kinds == {str} else "input_ids"), value, len(value)
