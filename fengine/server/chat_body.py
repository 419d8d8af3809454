"""The part of a body that only chats have: messages, tools and how they may be called, reasoning. No torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fengine.api.chat_images import IMAGE
from fengine.core.json_text import parse_json
from fengine.server.errors import invalid, missing, unsupported
from fengine.server.fields import Fields, array, flag, loose, one_of, record, typed

MAX_TOOLS = 128  # OpenAI's
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
CHAT: Fields = {
    "messages": loose("The chat: role and content, tool_calls, …", "array"),
    "tools": array("Functions that the model may call."),
    "tool_choice": loose("auto, none, required, or a function by name."),
    "parallel_tool_calls": flag("More than the first call is told.", True),
    "functions": array("OpenAI's older tools."),
    "function_call": loose("OpenAI's older tool_choice."),
    "chat_template_kwargs": record("Variables of the chat template."),
    "add_generation_prompt": typed("boolean", "The template begins the answer; default true."),
    "continue_final_message": flag("The answer goes on where the last message ends."),
    "reasoning_effort": one_of("How much thought, where the template asks for it.", *EFFORTS),
    "separate_reasoning": flag("Thoughts as reasoning_content.", True),
    "include_reasoning": flag("Thoughts are told at all.", True),
    "stream_reasoning": flag("A stream tells them piece by piece; false: each when it is whole.", True),
}
_NAME = re.compile(r"[\w.:-]{1,128}")


Functions = tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """`tools`: what the template is shown, None: nothing. `callable`: the functions whose calls are looked for.

    `forced`: the output must be a call of one of these, and nothing else. `legacy`: the body has OpenAI's older
    `functions`. `separate_reasoning`: thoughts are told apart from the content; `include_reasoning`: they are told at
    all; `stream_reasoning`: piece by piece. `continue_final`: the last message is the beginning of the answer."""

    messages: Any
    tools: list[dict[str, Any]] | None
    callable: Functions
    forced: Functions
    parallel: bool
    legacy: bool
    template_values: dict[str, Any]
    reasoning_effort: str | None
    add_generation_prompt: bool
    continue_final: bool
    separate_reasoning: bool
    include_reasoning: bool
    stream_reasoning: bool


def chat_options(given: Mapping[str, Any], has_grammar: bool) -> ChatOptions:
    """`given`: the fields of CHAT, taken. Pure. Errors: ApiError."""
    if given["messages"] is None:
        raise missing("messages")
    values = given["chat_template_kwargs"] or {}
    if "tools" in values:
        said = "chat_template_kwargs may not hold 'tools', which has a field of its own."
        raise invalid("chat_template_kwargs", said)
    legacy = any(given[name] is not None for name in ("functions", "function_call"))
    choice, tools = _allowed(given["tool_choice"], _tools(given, legacy))
    functions = tuple(tool["function"] for tool in tools)
    choice, forced = _choice(given["function_call"] if legacy else choice, legacy, functions, has_grammar)
    shown, messages = bool(tools) and choice != "none", messages_of(given["messages"])
    return ChatOptions(
        messages=messages, tools=tools if shown else None, callable=functions if shown else (), forced=forced,
        parallel=given["parallel_tool_calls"] and not legacy and not isinstance(choice, dict), legacy=legacy,
        template_values=values, reasoning_effort=given["reasoning_effort"],
        add_generation_prompt=given["add_generation_prompt"] is not False and not given["continue_final_message"],
        continue_final=_continued(given, messages),
        separate_reasoning=given["separate_reasoning"], include_reasoning=given["include_reasoning"],
        stream_reasoning=given["stream_reasoning"],
    )  # fmt: skip


def refuse_chat(body: Mapping[str, Any], name: str) -> None:
    """Errors: ApiError for a field of chats beside `name`, a text: it would go for nothing."""
    for field, known in CHAT.items():
        if body.get(field) not in (None, known.default):
            told = "give one" if field == "messages" else f"leave {field} out"
            raise invalid(field, f"{field} is for chats, and {name} is a text; {told}.")


def _continued(given: Mapping[str, Any], messages: Any) -> bool:
    """Whether the answer goes on where the last message ends. Errors: ApiError."""
    name, last = "continue_final_message", messages[-1] if isinstance(messages, list) and messages else None
    if not given[name]:
        return False
    if given["add_generation_prompt"]:
        raise invalid(name, "Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    if not isinstance(last, dict) or last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise invalid(name, f"{name} needs a last message of the assistant with text as its content.")
    return True


def messages_of(messages: Any) -> Any:
    """Messages as templates read them: parts of text joined, arguments of tool calls as objects. Pure. What else is
    wrong with them is left for the engine to tell. Errors: ApiError for tool calls that are none, and for images that
    are none."""
    if not isinstance(messages, list):
        return messages
    return [_message(m, f"messages[{i}]") if isinstance(m, dict) else m for i, m in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        message = {**message, "content": _joined(content, where)}
    calls = message.get("tool_calls")
    if message.get("function_call") is not None:
        if calls is not None:
            raise invalid("messages", f"{where} has tool_calls and function_call; give one.")
        calls = [{"type": "function", "function": message["function_call"]}]
        message = {key: value for key, value in message.items() if key != "function_call"}
    if calls is None:
        return message
    if not isinstance(calls, list):
        raise invalid("messages", f"{where}.tool_calls must be a list, got {calls!r:.80}.")
    read = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "tool_calls": read} if read else rest


def _joined(parts: list[Any], where: str) -> Any:
    """The texts of a message's parts, a line each; the parts, if any is none. Pure. Errors: ApiError for the place of
    an image, as templates see it: no body has what belongs there."""
    if IMAGE in parts:
        raise invalid("messages", f"{where}.content has a part {IMAGE} without an image; send it as image_url.")
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    is_text = len(texts) == len(parts) > 0 and all(isinstance(text, str) for text in texts)
    return "\n".join(map(str, texts)) if is_text else parts


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """A call whose arguments are an object, as templates want them, rather than its JSON text. Pure."""
    function = call.get("function") if isinstance(call, dict) and call.get("type", "function") == "function" else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not isinstance(arguments, (str, dict, type(None)))
        or not isinstance(call.get("id"), (str, type(None)))
    ):
        raise invalid("messages", f'{where} must be {{"id": text, "type": "function", "function": {{"name": text, '
                      f'"arguments": JSON text}}}}, got {call!r:.80}.')  # fmt: skip
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError:
            return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _tools(given: Mapping[str, Any], legacy: bool) -> list[dict[str, Any]]:
    """The tools, as chats write them. Errors: ApiError."""
    if legacy and any(given[name] is not None for name in ("tools", "tool_choice")):
        said = "functions and function_call are the older form of tools and tool_choice; give one."
        raise invalid("functions", said)
    name = "functions" if legacy else "tools"
    tools = given[name] or []
    if len(tools) > MAX_TOOLS:
        raise invalid(name, f"{name} must be a list of at most {MAX_TOOLS}, got {tools!r:.80}.")
    return tools_of([{"type": "function", "function": one} for one in tools] if legacy else tools, name)


def tools_of(found: list[Any], name: str) -> list[dict[str, Any]]:
    """The tools, as chats write them, of the field `name`. Pure. Errors: ApiError."""
    for i, tool in enumerate(found):
        if told := _problem(tool):
            raise invalid(name, f"{name}[{i}]{told}")
    return list(found)


def _problem(tool: Any) -> str:
    """What is wrong with a tool; "": nothing. Pure."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return ' must be {"type": "function", "function": {"name": …}}.'
    if not _NAME.fullmatch(function["name"]):
        return f": a function's name has letters, digits and _ . : -, got {function['name']!r:.80}."
    if not isinstance(function.get("parameters"), dict | None):
        return f": parameters must be a JSON schema, got {function['parameters']!r:.80}."
    return ""


def _allowed(choice: Any, tools: list[dict[str, Any]]) -> tuple[Any, list[dict[str, Any]]]:
    """(the choice, the tools): of the type `allowed_tools` its mode, and the tools that it names. Pure. Errors:
    ApiError."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return choice, tools
    inner = choice.get("allowed_tools")
    wanted = inner.get("tools") if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or not isinstance(wanted, list) or inner.get("mode") not in ("auto", "required"):
        said = 'of the type allowed_tools must have {"mode": "auto" or "required", "tools": [a function by name, …]}'
        raise invalid("tool_choice", f"tool_choice {said}, got {inner!r:.80}.")
    names = {_chosen(one, "tool_choice") for one in wanted}
    if unknown := names.difference(tool["function"]["name"] for tool in tools):
        raise invalid("tool_choice", f"tool_choice allows {min(unknown)!r:.80}, which is no function in tools.")
    return inner["mode"], [tool for tool in tools if tool["function"]["name"] in names]


def _choice(choice: Any, legacy: bool, functions: Functions, has_grammar: bool) -> tuple[Any, Functions]:
    """(the choice as it stands in the body, the functions of which one must be called; none: no call is forced).
    Errors: ApiError."""
    name, field = ("function_call", "functions") if legacy else ("tool_choice", "tools")
    choice = "auto" if choice is None else choice
    if choice == "none" or choice == "auto" and not (functions and has_grammar):
        return choice, ()
    if choice == "auto":
        raise invalid(
            field, f"{field} are given, and a grammar, under which none can be called; give one, or {name} none."
        )
    wanted = None if choice == "required" and not legacy else _chosen(choice, name)
    found = tuple(function for function in functions if wanted in (None, function["name"]))
    if not found:
        raise invalid(name, f"{name} is {choice!r:.80}, and there is no such function in {field}.")
    if has_grammar:
        raise invalid(name, f"{name} forces a call, and the body has a grammar, too; give one.")
    return choice, found


def _chosen(choice: Any, name: str) -> str:
    """The name of a function that a choice has. Errors: ApiError."""
    inner = choice
    if name == "tool_choice" and isinstance(choice, dict):
        if choice.get("type") not in (None, "function"):
            raise unsupported(name, f"{name} of the type {choice['type']!r:.80} is not built.")
        inner = choice.get("function")
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        known = "auto, none" if name == "function_call" else "auto, none, required"
        raise invalid(name, f"{name} must be {known}, or name a function, got {choice!r:.80}.")
    return inner["name"]
