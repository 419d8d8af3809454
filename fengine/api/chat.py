"""Chats to prompts: messages rendered by the model's template, as text or as token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from fengine.api.options import EngineContext
from fengine.api.types import Message
from fengine.core.scalars import plain, told
from fengine.errors import InvalidRequestError
from fengine.tokenizer.chat import RESERVED
from fengine.tokenizer.tokenizer import Tokenizer

Chat = Sequence[Message]


def is_chat(value: Any) -> bool:
    """Whether it is a chat (messages), or a list of chats."""
    first = value[0] if isinstance(value, (list, tuple)) and value else None
    return isinstance(first, dict) or isinstance(first, (list, tuple)) and bool(first) and isinstance(first[0], dict)


def render_chat(
    context: EngineContext, messages: Chat, tools: Any, add_generation_prompt: bool, tokenize: bool, values: Any
) -> str | list[int]:
    """One chat as the text that the model sees, or as its ids. Errors: InvalidRequestError, ChatTemplateError."""
    values = _template_values(context, tools, values)
    tokenizer = _tokenizer_of(context)
    render = tokenizer.encode_chat if tokenize else tokenizer.apply_chat_template
    return render(messages, add_generation_prompt=add_generation_prompt, **values)


def chat_ids(
    context: EngineContext, messages: Any, tools: Any = None, add_generation_prompt: bool = True, values: Any = None
) -> Any:
    """The ids of a chat, or of each of several. `values`: variables of the template. Errors: as `render_chat`."""
    tokenizer, values = _tokenizer_of(context), _template_values(context, tools, values)

    def ids(chat: Any) -> list[int]:
        return tokenizer.encode_chat(chat, add_generation_prompt=add_generation_prompt, **values)

    messages = plain(messages)
    several = isinstance(messages, (list, tuple)) and bool(messages) and isinstance(messages[0], (list, tuple))
    return [ids(chat) for chat in messages] if several else ids(messages)


def _template_values(context: EngineContext, tools: Any, values: Any) -> dict[str, Any]:
    values = plain(values)
    if values is not None and not (isinstance(values, dict) and all(isinstance(name, str) for name in values)):
        raise InvalidRequestError(f"chat_template_kwargs must be a dict of values by name, got {told(values)}.")
    if reserved := RESERVED.intersection(values or ()):
        raise InvalidRequestError(f"chat_template_kwargs cannot set {', '.join(sorted(reserved))}.")
    given = {} if tools is None else {"tools": plain(tools)}
    return {**(context.args.default_chat_template_kwargs or {}), **given, **(values or {})}


def _tokenizer_of(context: EngineContext) -> Tokenizer:
    if context.parts.tokenizer is None:
        raise InvalidRequestError("chats need the tokenizer; start without skip_tokenizer_init, or pass input_ids.")
    return context.parts.tokenizer


def further(more: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` behind a chat. Errors: InvalidRequestError for those that would give a second prompt."""
    for name in ("prompt", "input_ids"):
        if more.get(name) is not None:
            raise InvalidRequestError(f"chat takes its prompt from messages; leave {name} out.")
    return {name: value for name, value in more.items() if name not in ("prompt", "input_ids")}
