"""A tokenizer's chats: messages as text, rendered by the model's own template, and as ids. Methods of `Tokenizer`."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from fengine.errors import ChatTemplateError, ConfigError, ContextLengthError, InvalidRequestError
from fengine.tokenizer.chat import ChatTemplate, check_messages, check_roles, left_open, plain
from fengine.tokenizer.chat_ids import Marks
from fengine.tokenizer.tokenizer_files import read_template


def apply_chat_template(
    tokenizer: Any, messages: Sequence[dict[str, Any]], /, *, add_generation_prompt: bool = True, **values: Any
) -> str:
    """The chat as text, rendered by the model's own template. `values` are variables that the template reads.

    Errors: InvalidRequestError (messages, no template), UnknownParameterError (a variable with a meaning of its
    own), ContextLengthError, ChatTemplateError.
    """
    return _render(tokenizer, check_messages(messages), plain_values(values), add_generation_prompt)


def with_chat_template(tokenizer: Any, source: str | None = None, name: str | None = None) -> Any:
    """The same with another default chat template: `source` (a file, or the template itself), or that of its own
    with this `name`. Errors: ConfigError."""
    if source is None and name is None:
        return tokenizer
    if source is not None and name is not None:
        raise ConfigError("chat_template and hf_chat_template_name are two templates; give one")
    if source is not None:
        try:
            return replace(tokenizer, chat_templates={"default": compiled(read_template(source)).source})
        except ChatTemplateError as error:
            raise ConfigError(f"chat_template: {error}") from error
    if name not in tokenizer.chat_templates:
        known = ", ".join(sorted(tokenizer.chat_templates)) or "none"
        raise ConfigError(f"hf_chat_template_name is {name!r}, but the tokenizer's chat templates are: {known}")
    return replace(tokenizer, chat_templates={"default": tokenizer.chat_templates[name]})


def encode_chat(
    tokenizer: Any, messages: Sequence[dict[str, Any]], /, *, add_generation_prompt: bool = True,
    continue_final_message: bool = False, **values: Any,
) -> list[int]:  # fmt: skip
    """Ids of the rendered chat; special-token text in contents is plain text and cannot end a turn. With
    `continue_final_message` they end where the last message's text ends.

    Equals transformers' `apply_chat_template(tokenize=True)` for contents without special-token text.
    Errors: as `apply_chat_template`; InvalidRequestError if a content holds special-token text and this template
    or tokenizer leaves no exact way to keep it text.
    """
    checked, extra = check_messages(messages), plain_values(values)
    text = tokenizer.check_text(_render(tokenizer, checked, extra, add_generation_prompt), "chat")
    special = tokenizer.special_text
    marks = Marks.spare(text + repr([checked, extra]))
    marked, marked_extra = special.mark(checked, marks), special.mark(extra, marks)
    if special.in_keys([checked, extra]):
        raise InvalidRequestError("a key in messages or tools holds special-token text; rename it.")
    told = left_open(checked, text) if continue_final_message else text
    if marked == checked and marked_extra == extra:
        return tokenizer.ids_of([told], add_special_tokens=False)[0]
    found = marks.remove(_render(tokenizer, marked, marked_extra, add_generation_prompt))
    ids = special.encode(told, found[1]) if found is not None and found[0] == text else None
    if ids is None:
        raise InvalidRequestError(
            "a message's content holds special-token text, and this model's chat template or tokenizer changes it "
            "so that it cannot safely be kept as plain text; remove it from the content."
        )
    return ids


def plain_values(values: dict[str, Any]) -> dict[str, Any]:
    return {name: plain(value, name) for name, value in values.items()}


def _render(tokenizer: Any, messages: list[dict[str, Any]], values: dict[str, Any], add_generation_prompt: bool) -> str:
    if not isinstance(add_generation_prompt, bool):
        raise InvalidRequestError(f"add_generation_prompt must be True or False, got {add_generation_prompt!r:.80}.")
    size = sum(len(m["content"]) for m in messages if isinstance(m.get("content"), str))
    if size > tokenizer.max_chars:
        raise ContextLengthError(
            f"the chat's contents have {size} characters, more than the limit of {tokenizer.max_chars}, "
            "and so are longer than the model's context length; shorten them."
        )
    text = _template(tokenizer, values.get("tools") is not None).render(
        messages, tokenizer.special_tokens, values, add_generation_prompt=add_generation_prompt,
        max_chars=tokenizer.max_chars,
    )  # fmt: skip
    check_roles(messages, text)
    return text


def template_of(tokenizer: Any, tools: bool) -> tuple[str, frozenset[str]]:
    """(source, variables a caller may set) of the chat template, the one for tools if there is one.

    Errors: InvalidRequestError, ChatTemplateError.
    """
    template = _template(tokenizer, tools)
    return template.source, template.variables - tokenizer.special_tokens.keys()


def _template(tokenizer: Any, tools: bool) -> ChatTemplate:
    known = tokenizer.chat_templates
    name = "tool_use" if tools and "tool_use" in known else "default"
    if not known:
        raise InvalidRequestError(
            "this model has no chat template; pass prompt= instead of messages, or put a chat_template.jinja into "
            "the tokenizer's directory."
        )
    if name not in known:
        raise ChatTemplateError(f"this model has no default chat template, only: {', '.join(sorted(known))}.")
    return compiled(known[name])


@lru_cache(64)
def compiled(source: str) -> ChatTemplate:
    """Errors: ChatTemplateError. Pure: compiling takes milliseconds."""
    return ChatTemplate(source)
