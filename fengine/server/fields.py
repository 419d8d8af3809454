"""Fields of bodies: declared once, read by one function. The same declarations make /openapi.json. No torch. A field
that is null is as good as absent, as in OpenAI's API. Values that the engine checks are not checked here twice."""

import difflib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from fengine.core.parameter_kinds import OTHER_NAMES
from fengine.core.sampling_params import GRAMMARS, PARAMETERS
from fengine.server.errors import ApiError, invalid, missing, unsupported


class Field(NamedTuple):
    """`schema`: JSON Schema's words. `default`: the value of an absent field. `checked`: here, rather than by the
    engine."""

    schema: Mapping[str, Any]
    default: Any = None
    checked: bool = True


Fields = dict[str, Field]
TYPES: dict[str, tuple[type, str]] = {
    "boolean": (bool, "true or false"), "integer": (int, "an integer"), "string": (str, "a string"),
    "array": (list, "a list"), "object": (dict, "an object"),
}  # fmt: skip
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


def typed(kind: str, doc: str) -> Field:
    return Field({"type": kind, "description": doc})


text, array, record = (partial(typed, kind) for kind in ("string", "array", "object"))


def one_of(doc: str, *values: str, default: str | None = None) -> Field:
    return Field({"enum": list(values), "description": doc}, default)


def loose(doc: str, kind: Any = None) -> Field:
    """Checked by who reads it, or by the engine."""
    return Field({"description": doc} | ({"type": kind} if kind else {}), None, False)


def names(*known: str) -> Fields:
    """What an object within a body may have; who reads it checks the values."""
    return {name: loose("") for name in known}


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
    "extra_key": text("SGLang's word for cache_salt."),
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
    rows = {name: PARAMETERS[ours] for name, ours in SAMPLING.items()}
    return {name: loose(row.doc, SCHEMAS[row.kind]) for name, row in rows.items()}


PROMPTS = ("input", "messages", "prompt", "text")  # what paths call what they read
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")  # and how long an answer may be


# -- reading -----------------------------------------------------------------------------------------------------------


def take(
    body: Mapping[str, Any], known: Fields, refused: Mapping[str, str] | None = None, needed: Iterable[str] = ()
) -> dict[str, Any]:
    """Each known field's value or default. Pure. Errors: ApiError for a value, for a field that is not known, or that
    is `refused`, with the reason, and for one that is `needed` and absent."""
    refused = refused or {}
    for name, value in body.items():
        if value is None or name in known or name in NO_EFFECT or value is False and name in refused:
            continue
        if name in refused:
            raise unsupported(name, f"{name} is not built: {refused[name]}. Leave it out.")
        hint = _hint(name, known.keys() | refused.keys() | NO_EFFECT)
        raise ApiError(400, f"unknown field {name!r:.80}.{hint}", name[:80], "unknown_parameter")
    given = {n: field.default if body.get(n) is None else _value(n, field, body[n]) for n, field in known.items()}
    if absent := next((name for name in needed if given[name] is None), None):
        raise missing(absent)
    return given


def only(value: Mapping[str, Any], known: Collection[str], where: str, name: str) -> None:
    """Errors: ApiError for what is not known in an object that stands somewhere in the field `name`."""
    for key, one in value.items():
        if one is not None and key not in known:
            told = f"{where} has the unknown field {key!r:.80}; known are {', '.join(sorted(known))}."
            raise ApiError(400, told, name, "unknown_parameter")


def _hint(name: str, known: Collection[str]) -> str:
    """What may be meant by a field that is not known: another path's word, or one that is nearly it. Pure."""
    if name in ("extra_body", "sampling_params"):
        return " Its fields stand in the body itself."
    ours = OTHER_NAMES.get(name, SAMPLING.get(name, name))
    if "sampling_params" in known and ours in PARAMETERS:
        return f" It stands in sampling_params, as {ours!r}."
    if name == "enable_thinking" and "chat_template_kwargs" in known:
        return " It stands in chat_template_kwargs."
    near = [ours for words in (PROMPTS, LENGTHS) if name in words for ours in words if ours in known]
    near = near or difflib.get_close_matches(name[:80], sorted(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _value(name: str, field: Field, value: Any) -> Any:
    schema = field.schema
    if not field.checked:
        return value
    if "enum" in schema:
        if value not in schema["enum"]:
            raise invalid(name, f"{name} must be one of {', '.join(schema['enum'])}, got {value!r:.80}.")
        return value
    kind, told = TYPES[schema["type"]]
    low, high = schema.get("minimum"), schema.get("maximum")
    if type(value) is not kind or low is not None and high is not None and not low <= value <= high:
        told = told if low is None else f"{told} in [{low}, {high}]"
        raise invalid(name, f"{name} must be {told}, got {value!r:.80}.")
    return value


def sampling_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's sampling parameters, not checked yet. Pure."""
    return {ours: body[name] for name, ours in SAMPLING.items() if body.get(name) is not None}


def call_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` beside prompt and sampling, of a body that was taken. Pure. Errors: ApiError."""
    found = salted({name: given[name] for name in CALL if given[name] is not None})
    alias = found.pop("request_id", None)
    return found if alias is None else {"rid": alias, **found}


def salted(given: dict[str, Any]) -> dict[str, Any]:
    """With one word for the salt. Pure. Errors: ApiError for both, or an empty one."""
    named = [name for name in ("extra_key", "cache_salt") if given.get(name) is not None]
    if len(named) > 1:
        raise invalid("extra_key", "extra_key and cache_salt are two words for one thing; give one.")
    if named and given[named[0]] == "":
        raise invalid(named[0], f"{named[0]} must be a string that is not empty; leave it out for none.")
    rest = {name: value for name, value in given.items() if name != "extra_key"}
    return rest | {"cache_salt": given[named[0]]} if named else rest


def salt_word(body: Mapping[str, Any]) -> dict[str, str]:
    """As WORDS, of a body's own word for the salt. Pure."""
    return {} if body.get("extra_key") is None else {"cache_salt": "extra_key"}


# -- grammars, in OpenAI's, vLLM's and SGLang's words, as one sampling parameter --------------------------------------

GUIDED = {  # vLLM's older fields -> the key of structured_outputs
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
}  # fmt: skip
GRAMMAR_FIELDS: dict[str, Field] = {
    "response_format": loose("OpenAI's: the type text, json_object, json_schema or structural_tag.", "object"),
    "structured_outputs": loose("vLLM's: one of json, json_object, regex, choice, grammar, structural_tag.", "object"),
} | {name: loose(f"structured_outputs={{{key!r}: …}}.") for name, key in GUIDED.items()}
FORMATS = {  # response_format's types -> their fields
    "text": {"type"},
    "json_object": {"type"},
    "json_schema": {"type", "json_schema"},
    "structural_tag": {"type", "structures", "triggers", "format"},
}
ANY_OBJECT = '{"type": "object"}'
MAX_CHOICES = 1024


def grammar_of(body: Mapping[str, Any], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """What `sampling` gets from the grammar fields: one grammar, as text. Pure. Errors: ApiError (two; odd forms)."""
    asked = [(name, name, sampling[name]) for name in GRAMMARS if name in sampling]
    own = len(asked)
    for field in GRAMMAR_FIELDS:
        if (given := body.get(field)) is not None:
            value = {GUIDED[field]: given} if field in GUIDED else given
            read = _response_format(given) if field == "response_format" else _structured(field, value)
            asked += [(field, name, value) for name, value in read.items()]
    if len(asked) > max(own, 1):
        raise invalid(asked[-1][0], f"{asked[-1][0]} and {asked[0][0]} are two grammars; give one.")
    return {name: value for _, name, value in asked}


def _structured(field: str, value: Any) -> dict[str, Any]:
    """vLLM's way to ask for a grammar, as a sampling parameter. Pure. Errors: ApiError."""
    known = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
    given = {key: one for key, one in value.items() if one is not None} if isinstance(value, dict) else {}
    if len(given) != 1 or next(iter(given)) not in known:
        raise invalid(field, f"{field} must have one of {', '.join(known)}, and nothing else; got {value!r:.80}.")
    ((key, one),) = given.items()
    if key == "choice":
        return {"regex": _one_of(field, one)}
    if key == "json_object":
        if one is not True:
            raise invalid(field, f"{field}.json_object must be true, got {one!r:.80}.")
        return {"json_schema": ANY_OBJECT}
    if key in ("json", "structural_tag"):
        one = json.dumps(one) if isinstance(one, (dict, bool)) else one
    if not isinstance(one, str) or not one:
        raise invalid(field, f"{field}: {key} must be a string that is not empty, got {one!r:.80}.")
    return {{"json": "json_schema", "grammar": "ebnf"}.get(key, key): one}


def _one_of(field: str, texts: Any) -> str:
    """A pattern of these texts and no others. Errors: ApiError."""
    known = isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)
    if not known or not 0 < len(texts) <= MAX_CHOICES:
        raise invalid(field, f"{field}: choice must be a list of 1 to {MAX_CHOICES} texts, got {texts!r:.80}.")
    return f"(?:{'|'.join(map(re.escape, texts))})"


def _response_format(value: Any) -> dict[str, Any]:
    """OpenAI's way to ask for a grammar, as a sampling parameter. Pure. Errors: ApiError."""
    name = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in FORMATS:
        told = "response_format must have the type text, json_object, json_schema or structural_tag"
        raise invalid(name, f"{told}: {value!r:.80}.")
    outer = value.get("json_schema")
    if kind == "json_schema" and not (isinstance(outer, dict) and isinstance(outer.get("schema"), (dict, bool))):
        raise invalid(name, 'response_format must have {"json_schema": {"schema": {…}}}.')
    only(value, FORMATS[kind], name, name)
    only(outer or {}, {"name", "description", "schema", "strict"}, f"{name}.json_schema", name)
    if kind == "structural_tag":
        return {kind: json.dumps(value)}
    schema = {"json_object": ANY_OBJECT, "json_schema": json.dumps((outer or {}).get("schema"))}
    return {} if kind == "text" else {"json_schema": schema[kind]}
