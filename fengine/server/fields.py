"""The fields that bodies share: what they are called in the engine, and checks of names, flags and numbers. No torch.

A field that is null is as good as absent, as in OpenAI's API. Values that the engine checks are not checked here twice.
"""

import difflib
import json
from collections.abc import Mapping, Set
from typing import Any

from fengine.core.sampling_params import GRAMMARS, PARAMETERS
from fengine.server.errors import ApiError, invalid, missing, unsupported

OWN_LIMIT = frozenset({"max_new_tokens", "stream_interval"})  # the first has defaults of its own, the second no field
SAMPLING: dict[str, str] = {  # of both kinds of completions; field -> the engine's sampling parameter
    row.openai or name: name for name, row in PARAMETERS.items() if name not in OWN_LIMIT
}
WORDS = {ours: name for name, ours in SAMPLING.items() if ours != name}  # how messages must call them
CALL = frozenset({"lora_path", "custom_logit_processor", "cache_salt", "priority"})  # arguments of `generate`
# Fields that say nothing about the answer: accepted and left alone.
NO_EFFECT = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention".split()
)
SHARED = (
    frozenset({"model", "stream", "stream_options", "return_token_ids", "response_format"}) | SAMPLING.keys() | CALL
)
FORMATS = {  # response_format's types -> their fields
    "text": {"type"},
    "json_object": {"type"},
    "json_schema": {"type", "json_schema"},
    "structural_tag": {"type", "structures", "triggers", "format"},
}
MAX_TEXTS = 65536  # prompts of one body


def check_names(body: Mapping[str, Any], known: Set[str], refused: Mapping[str, str]) -> None:
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


def sampling_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's sampling parameters, not checked yet. Pure. Errors: ApiError (a grammar that is no text)."""
    sampling = {ours: body[name] for name, ours in SAMPLING.items() if body.get(name) is not None}
    for name, row in PARAMETERS.items():  # the engine takes them as JSON texts
        if row.kind == "json grammar" and isinstance(sampling.get(name), dict):
            sampling[name] = json.dumps(sampling[name])
    grammar = _response_format(body.get("response_format"))
    if grammar and (taken := [key for key in GRAMMARS if key in sampling]):
        raise invalid("response_format", f"response_format and {taken[0]} are two grammars; give one.")
    return sampling | grammar


def _response_format(value: Any) -> dict[str, Any]:
    """OpenAI's way to ask for a grammar, as a sampling parameter. Pure. Errors: ApiError."""
    name = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in FORMATS:
        _check_inside(name, value, FORMATS[kind])
    if value is None or kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    if kind == "structural_tag":
        return {"structural_tag": json.dumps(value)}
    if kind != "json_schema":
        told = "response_format must have the type text, json_object, json_schema or structural_tag"
        raise invalid(name, f"{told}: {value!r:.80}.")
    outer = value.get("json_schema")
    if not isinstance(outer, dict) or not isinstance(outer.get("schema"), (dict, bool)):
        raise invalid(name, 'response_format must have {"json_schema": {"schema": {…}}}.')
    _check_inside(f"{name}.json_schema", outer, {"name", "description", "schema", "strict"})
    return {"json_schema": json.dumps(outer["schema"])}


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
    return {name: body[name] for name in CALL if body.get(name) is not None}


def texts_or_ids(body: Mapping[str, Any], name: str) -> tuple[str, Any, int]:
    """What a field that holds prompts holds: ("text" or "input_ids", its value, how many), a list of one as such.

    Texts, or token ids that the engine checks. Errors: ApiError (empty, mixed, or neither).
    """
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
    for i, part in enumerate(value):
        if isinstance(part, list) and {type(token) for token in part} != {int}:
            raise invalid(name, f"{name}[{i}] must be a list of token ids that is not empty, got {part!r:.80}.")
    return ("text" if kinds == {str} else "input_ids"), value, len(value)
