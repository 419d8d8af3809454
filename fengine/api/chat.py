"""Chats to prompts: messages rendered by the model's template, as text or as token ids."""

from collections.abc import Sequence
from typing import Any, Unpack

from fengine.api.chat_images import without_images
from fengine.api.options import EngineContext
from fengine.api.types import CallOptions, Message
from fengine.core.scalars import plain, told
from fengine.errors import InvalidRequestError
from fengine.tokenizer.chat import RESERVED
from fengine.tokenizer.tokenizer import Tokenizer

Chat = Sequence[Message]


def is_chat(value: Any) -> bool:
    """Whether it is a chat (messages), or a list of chats."""
    first = value[0] if isinstance(value, (list, tuple)) and value else None
    return isinstance(first, dict) or isinstance(first, (list, tuple)) and bool(first) and isinstance(first[0], dict)


# -- methods of `Engine` -----------------------------------------------------------------------------------------------


def chat(
    engine: Any, messages: Chat | Sequence[Chat], sampling_params: Any = None, tools: Any = None,
    add_generation_prompt: bool = True, chat_template_kwargs: dict[str, Any] | None = None, stream: bool = False,
    **more: Unpack[CallOptions],
) -> Any:  # fmt: skip
    """`generate` for a chat, or a list of chats, rendered by the model's template (`chat_template_kwargs` are its
    variables). Special-token text in a message stays text. Contents may have images: `chat_images`.
    `more` are further arguments of `generate`.

    Errors: as `generate`; ChatTemplateError, UnknownParameterError (a variable with a meaning of its own).
    """
    messages, more = with_images(messages, more)
    ids = chat_ids(engine, messages, tools, add_generation_prompt, chat_template_kwargs)
    return engine.generate(None, sampling_params, ids, stream=stream, **more)


async def async_chat(
    engine: Any, messages: Chat | Sequence[Chat], sampling_params: Any = None, tools: Any = None,
    add_generation_prompt: bool = True, chat_template_kwargs: dict[str, Any] | None = None, stream: bool = False,
    **more: Unpack[CallOptions],
) -> Any:  # fmt: skip
    """As `chat`, in any event loop."""
    messages, more = with_images(messages, more)
    ids = chat_ids(engine, messages, tools, add_generation_prompt, chat_template_kwargs)
    return await engine.async_generate(None, sampling_params, ids, stream=stream, **more)


def apply_chat_template(
    engine: Any, messages: Chat, tools: Any = None, add_generation_prompt: bool = True, tokenize: bool = False,
    **chat_template_kwargs: Any,
) -> Any:  # fmt: skip
    """A chat as the text that the model sees, or with `tokenize` as its ids. Errors: as `chat`."""
    context = engine._context
    values, tokenizer = _template_values(context, tools, chat_template_kwargs), _tokenizer_of(context)
    render = tokenizer.encode_chat if tokenize else tokenizer.apply_chat_template
    return render(messages, add_generation_prompt=add_generation_prompt, **values)


def chat_ids(
    engine: Any, messages: Chat | Sequence[Chat], tools: Any = None, add_generation_prompt: bool = True,
    chat_template_kwargs: dict[str, Any] | None = None, continue_final_message: bool = False,
) -> Any:  # fmt: skip
    """The ids of a chat, or of each of several; `continue_final_message`: up to where the last message's text ends.

    Errors: as `chat`.
    """
    return ids_of(engine._context, messages, tools, add_generation_prompt, chat_template_kwargs, continue_final_message)


def with_images(messages: Any, more: Any) -> tuple[Any, Any]:
    """Chats without their images, and the arguments of `generate` with these. Pure. Errors: InvalidRequestError."""
    several = _are_several(messages)
    found = [without_images(one) for one in (messages if several else [messages])]
    if not any(images for _, images in found):
        return messages, more
    if more.get("image_data") is not None:
        raise InvalidRequestError("image_data is given, and the messages have images, too; give one.")
    chats, images = [one for one, _ in found], [own or None for _, own in found]
    return (chats, {**more, "image_data": images}) if several else (chats[0], {**more, "image_data": images[0]})


def _are_several(messages: Any) -> bool:
    return isinstance(messages, (list, tuple)) and bool(messages) and isinstance(messages[0], (list, tuple))


# -- their parts -------------------------------------------------------------------------------------------------------


def ids_of(
    context: EngineContext, messages: Any, tools: Any = None, add_generation_prompt: bool = True, values: Any = None,
    continue_final_message: bool = False,
) -> Any:  # fmt: skip
    """The ids of a chat, or of each of several. `values`: variables of the template. Errors: as `chat`."""
    tokenizer, values = _tokenizer_of(context), _template_values(context, tools, values)

    def ids(one: Any) -> list[int]:
        return tokenizer.encode_chat(
            one, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message, **values
        )

    if _are_several(messages):
        return [ids(plain(without_images(one)[0])) for one in messages]
    return ids(plain(without_images(messages)[0]))


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
