"""Fields of bodies: declared once, read by one function. The same declarations make /openapi.json. No torch.

A field that is null is as good as absent, as in OpenAI's API. Values that the engine checks are not checked here twice.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fengine.core.sampling_params import PARAMETERS
from fengine.server.errors import ApiError, invalid, unsupported


class Field(NamedTuple):
    """`schema`: JSON Schema's words. `default`: the value of an absent field. `checked`: here, rather than by the
    engine."""

    schema: Mapping[str, Any]
    default: Any = None
    checked: bool = True


Fields = dict[str, Field]
TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "boolean": ((bool,), "true or false"),
    "integer": ((int,), "an integer"),
    "string": ((str,), "a string"),
    "array": ((list,), "a list"),
    "object": ((dict,), "an object"),
}
SCHEMAS = {  # by the kind of a sampling parameter
    "flag": "boolean", "number": "number", "integer": "integer", "grammar": "string", "token ids": "array",
    "json": "object", "biases": "object", "stop strings": ["string", "array"], "patterns": ["string", "array"],
    "json grammar": ["string", "object"],
}  # fmt: skip


def flag(doc: str, default: bool = False) -> Field:
    return Field({"type": "boolean", "description": doc, "default": default}, default)


def whole(doc: str, least: int, most: int, default: int | None = None) -> Field:
    """An integer in [least, most]."""
    return Field({"type": "integer", "minimum": least, "maximum": most, "description": doc}, default)


def text(doc: str, default: str | None = None) -> Field:
    return Field({"type": "string", "description": doc}, default)


def array(doc: str) -> Field:
    return Field({"type": "array", "description": doc})


def record(doc: str) -> Field:
    return Field({"type": "object", "description": doc})


def one_of(doc: str, *values: str, default: str | None = None) -> Field:
    return Field({"enum": list(values), "description": doc}, default)


def loose(doc: str, kind: Any = None) -> Field:
    """Checked by who reads it, or by the engine."""
    return Field({"description": doc} | ({"type": kind} if kind else {}), None, False)


# -- fields that several bodies have -----------------------------------------------------------------------------------

OWN_LIMIT = frozenset({"max_new_tokens", "stream_interval"})  # the first has defaults of its own, the second no field
SAMPLING: dict[str, str] = {  # of both kinds of completions; field -> the engine's sampling parameter
    row.openai or name: name for name, row in PARAMETERS.items() if name not in OWN_LIMIT
} | {"no_stop_trim": "no_stop_trim"}
WORDS = {ours: name for name, ours in SAMPLING.items() if ours != name}  # how messages must call them
MODEL: Fields = {"model": loose("The served model, which is the default, or one of its adapters.", "string")}
CALL: Fields = {  # arguments of `generate`
    "lora_path": text("The name of an adapter."),
    "custom_logit_processor": text("The name of a registered processor; code is never taken."),
    "cache_salt": text("Prefixes are shared only with requests of the same salt."),
    "priority": whole("Higher goes first.", -(2**31), 2**31 - 1),
    "rid": text("The request's id, for /abort_request."),
    "request_id": text("Another word for rid."),
}
# Fields that say nothing about the answer: accepted and left alone.
NO_EFFECT = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention log_metrics "
    "guided_decoding_backend stream_reasoning".split()
)


def sampling_fields() -> dict[str, Field]:
    """Of the table of sampling parameters, by the names that bodies have for them. Pure."""
    return {
        name: loose(PARAMETERS[ours].doc, SCHEMAS[PARAMETERS[ours].kind])
        for name, ours in SAMPLING.items()
    }  # fmt: skip


# -- reading -----------------------------------------------------------------------------------------------------------


def check_names(body: Mapping[str, Any], known: Iterable[str], refused: Mapping[str, str]) -> None:
    """Errors: ApiError for a field that is not known, or that is `refused`, with the reason."""
    known = set(known)
    for name, value in body.items():
        if value is None or name in known or name in NO_EFFECT:
            continue
        if name in refused:
            if value is False:
                continue
            raise unsupported(name, f"{name} is not built: {refused[name]}. Leave it out.")
        near = difflib.get_close_matches(name[:80], sorted(known | refused.keys() | NO_EFFECT), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ApiError(400, f"unknown field {name!r:.80}.{hint}", name[:80], "unknown_parameter")


def take(body: Mapping[str, Any], known: Fields, refused: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Each known field's value or default. Pure. Errors: ApiError."""
    check_names(body, known, refused or {})
    return {name: _value(name, field, body.get(name)) for name, field in known.items()}


def _value(name: str, field: Field, value: Any) -> Any:
    if value is None:
        return field.default
    schema = field.schema
    if not field.checked:
        return value
    if "enum" in schema:
        if value not in schema["enum"]:
            raise invalid(name, f"{name} must be one of {', '.join(schema['enum'])}, got {value!r:.80}.")
        return value
    types, told = TYPES[schema["type"]]
    low, high = schema.get("minimum"), schema.get("maximum")
    if type(value) not in types or low is not None and high is not None and not low <= value <= high:
        told = told if low is None else f"{told} in [{low}, {high}]"
        raise invalid(name, f"{name} must be {told}, got {value!r:.80}.")
    return value


def sampling_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's sampling parameters, not checked yet. Pure."""
    return {ours: body[name] for name, ours in SAMPLING.items() if body.get(name) is not None}


def call_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` beside prompt and sampling, of a body that was taken. Pure. Errors: ApiError."""
    found = {name: given[name] for name in CALL if given[name] is not None}
    if found.get("cache_salt") == "":
        raise invalid("cache_salt", "cache_salt must be a string that is not empty; leave it out for none.")
    alias = found.pop("request_id", None)
    return found if alias is None else {"rid": alias, **found}
