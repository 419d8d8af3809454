"""The fields of a body that ask for a grammar, in OpenAI's, vLLM's and SGLang's words, as one sampling parameter.

No torch.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from fengine.core.sampling_params import GRAMMARS
from fengine.server.errors import ApiError, invalid
from fengine.server.fields import Field, loose

GUIDED = {  # vLLM's older fields -> the key of structured_outputs
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
}  # fmt: skip
FIELDS: dict[str, Field] = {
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
    for field in FIELDS:
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
        texts = isinstance(one, list) and all(isinstance(text, str) and text for text in one)
        if not texts or not 0 < len(one) <= MAX_CHOICES:
            raise invalid(field, f"{field}: choice must be a list of 1 to {MAX_CHOICES} texts, got {one!r:.80}.")
        return {"regex": f"(?:{'|'.join(re.sub(r'[^A-Za-z0-9 ]', _escaped, text) for text in one)})"}
    if key == "json_object":
        if one is not True:
            raise invalid(field, f"{field}.json_object must be true, got {one!r:.80}.")
        return {"json_schema": ANY_OBJECT}
    if key in ("json", "structural_tag"):
        one = json.dumps(one) if isinstance(one, (dict, bool)) else one
    if not isinstance(one, str) or not one:
        raise invalid(field, f"{field}: {key} must be a string that is not empty, got {one!r:.80}.")
    return {{"json": "json_schema", "grammar": "ebnf"}.get(key, key): one}


def _escaped(found: re.Match[str]) -> str:
    """A character that stands for itself in a pattern."""
    return found[0] if ord(found[0]) > 127 else f"\\x{ord(found[0]):02x}"


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
    inside = {"name", "description", "schema", "strict"}
    for where, found, known in ((name, value, FORMATS[kind]), (f"{name}.json_schema", outer or {}, inside)):
        for field, inner in found.items():
            if inner is not None and field not in known:
                told = f"{where} has the unknown field {field!r:.80}; known are {', '.join(sorted(known))}."
                raise ApiError(400, told, name, "unknown_parameter")
    if kind == "structural_tag":
        return {kind: json.dumps(value)}
    schema = {"json_object": ANY_OBJECT, "json_schema": json.dumps((outer or {}).get("schema"))}
    return {} if kind == "text" else {"json_schema": schema[kind]}
