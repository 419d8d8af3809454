"""Chats to prompts: messages rendered by the model's template, as text or as token ids."""

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

from fengine.api.chat_images import has_places, without_images
from fengine.api.context import EngineContext
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


def chat(
    engine: Any, messages: Chat | Sequence[Chat], sampling_params: Any = None, tools: Any = None,
    add_generation_prompt: bool = True, chat_template_kwargs: dict[str, Any] | None = None, stream: bool = False,
    **more: Unpack[CallOptions],
) -> Any:  # fmt: skip
    """`generate` for a chat, or a list of chats, rendered by the model's template (`chat_template_kwargs` are its
    variables). Special-token text in a message stays text. Contents may have images: `chat_images`. `more` are further
    arguments of `generate`. Errors: as `generate`; ChatTemplateError, UnknownParameterError (a variable with a meaning
    of its own)."""
    ids, images = rendered(engine._context, messages, tools, add_generation_prompt, chat_template_kwargs)
    return engine.generate(None, sampling_params, ids, stream=stream, **with_images(more, images))


async def async_chat(
    engine: Any, messages: Chat | Sequence[Chat], sampling_params: Any = None, tools: Any = None,
    add_generation_prompt: bool = True, chat_template_kwargs: dict[str, Any] | None = None, stream: bool = False,
    **more: Unpack[CallOptions],
) -> Any:  # fmt: skip
    """As `chat`, in any event loop."""
    ids, images = rendered(engine._context, messages, tools, add_generation_prompt, chat_template_kwargs)
    return await engine.async_generate(None, sampling_params, ids, stream=stream, **with_images(more, images))


# fmt: off
@overload
def apply_chat_template(engine: Any, messages: Chat, tools: Any = None, add_generation_prompt: bool = True,
                        tokenize: Literal[False] = False, **chat_template_kwargs: Any) -> str: ...
@overload
def apply_chat_template(engine: Any, messages: Chat, tools: Any = None, add_generation_prompt: bool = True, *,
                        tokenize: Literal[True], **chat_template_kwargs: Any) -> list[int]: ...
# fmt: on
def apply_chat_template(
    engine: Any, messages: Chat, tools: Any = None, add_generation_prompt: bool = True, tokenize: bool = False,
    **chat_template_kwargs: Any,
) -> Any:  # fmt: skip
    """A chat as the text that the model sees, or with `tokenize` as its ids. Errors: as `chat`."""
    tokenizer, values = _template(engine._context, tools, chat_template_kwargs)
    render = tokenizer.encode_chat if tokenize else tokenizer.apply_chat_template
    return render(_shown(engine._context, plain(messages))[0], add_generation_prompt=add_generation_prompt, **values)


def chat_ids(
    engine: Any, messages: Chat | Sequence[Chat], tools: Any = None, add_generation_prompt: bool = True,
    chat_template_kwargs: dict[str, Any] | None = None, continue_final_message: bool = False,
) -> Any:  # fmt: skip
    """The ids of a chat, or of each of several; `continue_final_message`: up to where the last message's text ends.
    Errors: as `chat`."""
    values = chat_template_kwargs
    return rendered(engine._context, messages, tools, add_generation_prompt, values, continue_final_message)[0]


def rendered(
    context: EngineContext, messages: Any, tools: Any = None, add_generation_prompt: bool = True, values: Any = None,
    continue_final_message: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """(ids, images; None: no images) of a chat, or of each of several. `values`: variables of the template. Errors: as
    `chat`."""
    (tokenizer, values), messages = _template(context, tools, values), plain(messages)
    several = isinstance(messages, (list, tuple)) and bool(messages) and isinstance(messages[0], (list, tuple))
    how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    ids, images = [], []
    for one in messages if several else [messages]:
        said, own = _shown(context, one)
        ids.append(tokenizer.encode_chat(said, **values, **how))
        images.append(own or None)
    return (ids, images if any(images) else None) if several else (ids[0], images[0])


def _shown(context: EngineContext, messages: Any) -> tuple[Any, list[Any]]:
    """(a plain chat as its template sees it, its images). Errors: InvalidRequestError."""
    messages, images = without_images(messages)
    said = plain(messages)
    if context.parts.images is None and has_places(said):  # its template would write the part as text
        raise InvalidRequestError("messages have the place of an image, but this model takes none; leave it out.")
    return said, images


def with_images(more: Any, images: Any) -> Any:
    """The arguments of `generate` with the images of chats. Pure. Errors: InvalidRequestError."""
    if images is not None and more.get("image_data") is not None:
        raise InvalidRequestError("image_data is given, and the messages have images, too; give one.")
    return more if images is None else {**more, "image_data": images}


def _template(context: EngineContext, tools: Any, values: Any) -> tuple[Tokenizer, dict[str, Any]]:
    """(the tokenizer, variables of its template). Errors: InvalidRequestError."""
    values = plain(values)
    if values is not None and not (isinstance(values, dict) and all(isinstance(name, str) for name in values)):
        raise InvalidRequestError(f"chat_template_kwargs must be a dict of values by name, got {told(values)}.")
    if reserved := RESERVED.intersection(values or ()):
        raise InvalidRequestError(f"chat_template_kwargs cannot set {', '.join(sorted(reserved))}.")
    if context.parts.tokenizer is None:
        raise InvalidRequestError("chats need the tokenizer; start without skip_tokenizer_init, or pass input_ids.")
    given = {} if tools is None else {"tools": plain(tools)}
    return context.parts.tokenizer, {**(context.args.default_chat_template_kwargs or {}), **given, **(values or {})}
