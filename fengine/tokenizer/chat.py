"""A tokenizer's chats: messages as text, rendered by the model's own template, and as ids. Methods of `Tokenizer`.

A template comes from a checkpoint, so it is untrusted code: it is rendered in a bounded process (`templates.py`), and
whatever goes wrong in it is a `ChatTemplateError` of this request alone. Rendered text equals that of transformers'
`apply_chat_template`, but for contents in a form that the template does not read, of which that would lose the text."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from fengine.core.parameter_kinds import json_like
from fengine.errors import (
    ChatTemplateError,
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    UnknownParameterError,
    UnsupportedFeatureError,
)
from fengine.tokenizer.chat_ids import Marks
from fengine.tokenizer.tokenizer_files import read_template
from fengine.tokenizer.trial import Limits, Refused, shared

logger = logging.getLogger(__name__)
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
MAX_ROLE = 64  # characters
MAX_SOURCE = 1 << 18  # characters of a template
TEMPLATES = "fengine.tokenizer.templates"  # what the children run
RENDERERS = 2  # chats rendered at once
LIMITS = Limits(1.0, 256 << 20)  # of one rendering
RESERVED = frozenset(("messages", "add_generation_prompt", "continue_final_message", "self"))
FIXED = {"tools": None, "documents": None}  # transformers always passes these two, as None where unset
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names that chats use; templates read the first two

UNSAID = frozenset(("tool_call_id", *_REASONING))  # what most templates leave out, and no one expects to be read


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Validated plain copies of chat messages, normalised as transformers does: keys with None are dropped and
    reasoning is offered under each of its names. Pure. Errors: InvalidRequestError."""
    if not isinstance(messages, (list, tuple)) or not messages:
        got = type(messages).__name__ + (" of length 0." if isinstance(messages, (list, tuple)) else ".")
        raise InvalidRequestError(f'messages must be a non-empty list of {{"role", "content"}}, got {got}')
    return [_checked(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{where} must be a dict, got {type(message).__name__}.")
    message = {key: value for key, value in json_like(message, where).items() if value is not None}
    _check_names(message, where)
    content = message.get("content")
    if content is None and "tool_calls" not in message:
        raise InvalidRequestError(f"{where} has no content (missing or None); pass a string.")
    if content is not None and not isinstance(content, str):
        _check_parts(content, f"{where}['content']")
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _check_names(message: dict[str, Any], where: str) -> None:
    role = message.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= MAX_ROLE:
        found = "no role" if "role" not in message else f"the role {role!r:.80}"
        raise InvalidRequestError(f"{where} has {found}; use one of {', '.join(ROLES)}.")
    for name in ("name", "tool_call_id", *_REASONING):
        if not isinstance(message.get(name, ""), str):
            raise InvalidRequestError(f"{where}[{name!r}] must be a string, got {message[name]!r:.80}.")


def _check_parts(content: Any, where: str) -> None:
    if not isinstance(content, list) or not content:
        raise InvalidRequestError(f"{where} must be a string or a list of text parts, got {content!r:.80}.")
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and any(other in kind for other in ("video", "audio", "file")):
            raise UnsupportedFeatureError(
                f"{where}[{i}]: a part of type {kind!r:.80} is not built; send text or images."
            )
        text = kind == "text" and isinstance(part.get("text"), str)
        if not text and part != {"type": "image"}:
            raise InvalidRequestError(
                f'{where}[{i}] must be {{"type": "text", "text": str}}, got {part!r:.80}; of other parts only images '
                "are built."
            )


def check_written(messages: list[dict[str, Any]], rendered: str, render: Callable[[Any], str]) -> None:
    """A template may pass over a message of a role that it does not know, or in such a place, and nobody would hear of
    it. What does not stand in `rendered` as it is may be written otherwise: then another text there changes it. Mistral
    leaves the system out where no user has the last word, by intent: a line of the log. Errors: InvalidRequestError."""
    known = {"user", "assistant"}  # roles that need no look, or were seen to be written otherwise
    for i, message in enumerate(messages):
        content, role = message.get("content"), message["role"]
        if role in known or not isinstance(content, str) or content.strip() in rendered:
            continue
        known.add(role)
        with suppress(ChatTemplateError):
            if render([*messages[:i], {**message, "content": "x"}, *messages[i + 1 :]]) == rendered:
                told = f"messages[{i}] has the role {role!r}, and this model's chat template writes nothing of it there"
                if role != "system":
                    raise InvalidRequestError(f"{told}; give it another role, join it to another, or leave it out.")
                logger.warning(told)


def left_open(messages: list[dict[str, Any]], rendered: str, render: Callable[[Any], str]) -> str:
    """`rendered` up to where the text of its last message ends, as transformers' continue_final_message. That is where
    a mark behind this text is written: what the template writes behind it may read alike. Errors:
    InvalidRequestError."""
    *before, last = messages
    content, mark = last.get("content"), Marks.spare(rendered + repr(messages)).first
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    at = max((i for i, part in enumerate(parts) if part["type"] == "text" and part["text"].strip()), default=None)
    shown, core = "", ""
    if at is not None:
        core = parts[at]["text"].strip()
        parts = [*parts[:at], {"type": "text", "text": f"{parts[at]['text']}{mark} "}, *parts[at + 1 :]]
        marked = render([*before, {**last, "content": parts if isinstance(content, list) else parts[0]["text"]}])
        shown, _, behind = marked.rpartition(mark)
        if not behind.startswith(" ") or not rendered.startswith(shown):  # the template trims
            shown = shown.rstrip()
    if not core or core not in shown or not rendered.startswith(shown):
        raise InvalidRequestError(
            "continue_final_message needs a last message with a text that the model's chat template writes as it is."
        )
    return shown


def _listed(names: list[str]) -> str:
    """For one line of a log, however many there are. Pure."""
    return ", ".join(repr(name[:80]) for name in names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


class ChatTemplate:
    """A chat template that compiles. Rendering is a function of its arguments (and of the clock if it asks for it)."""

    def __init__(self, source: str) -> None:
        """Errors: ChatTemplateError if `source` is not a valid template."""
        if len(source) > MAX_SOURCE:
            raise ChatTemplateError(f"the chat template has {len(source)} characters, more than {MAX_SOURCE}")
        self.source = source
        names, reserved = self._ask(None, 0)
        self._reserved = RESERVED | set(reserved)
        self.variables = frozenset(names) - self._reserved  # names that it reads and a caller may set

    def render(
        self, messages: list[dict[str, Any]], special_tokens: dict[str, str], values: dict[str, Any], *,
        add_generation_prompt: bool, max_chars: int,
    ) -> str:  # fmt: skip
        """Renders checked messages. A value for a name that the template does not read is ignored, with a line in the
        log, as transformers does; one for a name with a meaning of its own is refused. Errors: UnknownParameterError,
        ChatTemplateError (the template raised, used something undefined, took too much, or wrote more than
        `max_chars`)."""
        known = ", ".join(sorted(self.variables - special_tokens.keys())) or "none"
        for name in values:
            if name in self._reserved or name in special_tokens:
                raise UnknownParameterError(
                    f"the chat template's variable {name!r:.80} has a meaning of its own; others are: {known}."
                )
        self._tell_unread(values, known)
        keys = sorted({key for message in messages for key in message} - UNSAID)
        if unnamed := [key for key in keys if key not in self.source]:
            logger.info("The chat template does not name %s, which a message has.", _listed(unnamed))
        given = {**special_tokens, **FIXED, "add_generation_prompt": add_generation_prompt, **values}
        return self._ask(given | {"messages": messages}, max_chars)

    def _tell_unread(self, values: dict[str, Any], known: str) -> None:
        unread = [name for name in values if name not in self.variables and (values[name] or name not in FIXED)]
        if unread:
            level = logging.INFO if FIXED.keys().isdisjoint(unread) else logging.WARNING  # of tools nobody is told
            told = "The chat template does not read %s, which is ignored; it takes: %s."
            logger.log(level, told, _listed(unread), known)

    def _ask(self, given: dict[str, Any] | None, max_chars: int) -> Any:
        try:
            return shared(TEMPLATES, RENDERERS, LIMITS).ask([self.source, given, max_chars])
        except Refused as error:
            raise ChatTemplateError(f"the chat template {str(error).removeprefix('it ')}.") from None


def apply_chat_template(
    tokenizer: Any, messages: Sequence[dict[str, Any]], /, *, add_generation_prompt: bool = True,
    continue_final_message: bool = False, **values: Any,
) -> str:  # fmt: skip
    """The chat as text, rendered by the model's own template. `values` are variables that the template reads. With
    `continue_final_message` it ends where the last message's text ends. Errors:
    InvalidRequestError (messages, no template), UnknownParameterError (a variable with a meaning of its own),
    ContextLengthError, ChatTemplateError."""
    checked, extra = check_messages(messages), plain_values(values)
    return _shown(tokenizer, checked, extra, add_generation_prompt, continue_final_message)[1]


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
    or tokenizer leaves no exact way to keep it text."""
    checked, extra = check_messages(messages), plain_values(values)
    text, shown = _shown(tokenizer, checked, extra, add_generation_prompt, continue_final_message)
    tokenizer.check_text(text, "chat")
    special = tokenizer.special_text
    marks = Marks.spare(text + repr([checked, extra]))
    marked, marked_extra = special.mark(checked, marks), special.mark(extra, marks)
    if special.in_keys([checked, extra]):
        raise InvalidRequestError("a key in messages or tools holds special-token text; rename it.")
    if marked == checked and marked_extra == extra:
        return tokenizer.ids_of([shown], add_special_tokens=False)[0]
    found = marks.remove(_render(tokenizer, marked, marked_extra, add_generation_prompt))
    ids = special.encode(shown, found[1]) if found is not None and found[0] == text else None
    if ids is None:
        raise InvalidRequestError(
            "a message's content holds special-token text, and this model's chat template or tokenizer changes it "
            "so that it cannot safely be kept as plain text; remove it from the content."
        )
    return ids


def plain_values(values: dict[str, Any]) -> dict[str, Any]:
    return {name: json_like(value, name) for name, value in values.items()}


def _shown(
    tokenizer: Any, messages: list[dict[str, Any]], values: dict[str, Any], add_generation_prompt: bool, go_on: bool
) -> tuple[str, str]:
    """(the whole chat, what is wanted of it)."""
    text = _render(tokenizer, messages, values, add_generation_prompt)
    if not go_on:
        return text, text
    return text, left_open(messages, text, lambda said: _render(tokenizer, said, values, add_generation_prompt))


def _render(tokenizer: Any, messages: list[dict[str, Any]], values: dict[str, Any], add_generation_prompt: bool) -> str:
    if not isinstance(add_generation_prompt, bool):
        raise InvalidRequestError(f"add_generation_prompt must be True or False, got {add_generation_prompt!r:.80}.")
    size = sum(len(m["content"]) for m in messages if isinstance(m.get("content"), str))
    if size > tokenizer.max_chars:
        raise ContextLengthError(
            f"the chat's contents have {size} characters, more than the limit of {tokenizer.max_chars}, "
            "and so are longer than the model's context length; shorten them."
        )
    render = partial(
        _template(tokenizer, values.get("tools") is not None).render, special_tokens=tokenizer.special_tokens,
        values=values, add_generation_prompt=add_generation_prompt, max_chars=tokenizer.max_chars,
    )  # fmt: skip
    text = render(messages)
    check_written(messages, text, render)
    return text


def template_of(tokenizer: Any, tools: bool) -> tuple[str, frozenset[str]]:
    """(source, variables a caller may set) of the chat template, the one for tools if there is one. Errors:
    InvalidRequestError, ChatTemplateError."""
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
