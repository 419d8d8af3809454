"""Tool calls in a model's text, in the two forms that chat templates teach. No torch.

tagged   <tool_call>{"name": …, "arguments": {…}}</tool_call>, any number of them (Hermes, Qwen2.5, Qwen3)
bare     {"name": …, "parameters": {…}} and nothing else (Llama 3.1 and 3.2)
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from fengine.errors import UnsupportedFeatureError

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
MAX_CALLS = 128


@dataclass(frozen=True, slots=True)
class Call:
    """`problem` tells what is wrong with a call that cannot be read; it has no name then."""

    name: str
    arguments: dict[str, Any]
    problem: str | None = None


def form_of(template: str | None) -> str:
    """Which form a chat template teaches. Pure. Errors: UnsupportedFeatureError if it is none of these."""
    source = template or ""
    if "tools" in source and "<tool_call>" in source and "<function=" not in source:
        return "tagged"
    if "tools" in source and '"parameters"' in source and "<tool_call>" not in source:
        return "bare"
    raise UnsupportedFeatureError(
        "tools: the model's chat template describes no tools, or in a form whose calls are not read here; read are "
        '<tool_call>{"name", "arguments"}</tool_call> and {"name", "parameters"}'
    )


def split_calls(text: str, form: str) -> tuple[str, list[Call]]:
    """The text around the calls, and the calls in order. Pure."""
    if form == "tagged":
        found = [_read(body) for body in _TAGGED.findall(text)[:MAX_CALLS]]
        return (_TAGGED.sub("", text).strip() if found else text), found
    body = text.strip().removeprefix("<|python_tag|>")
    if not (body.startswith("{") and '"name"' in body):
        return text, []
    return "", [_read(body)]


def _read(body: str) -> Call:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        return Call("", {}, f"the tool call is no JSON ({error}): {body.strip()!r:.200}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call("", {}, f'the tool call is no object with a "name": {body.strip()!r:.200}')
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return Call(value["name"], {}, f"the arguments of {value['name']} are no object: {arguments!r:.200}")
    return Call(value["name"], arguments)
