"""inspect-ai's messages as chats for the template, and texts as its messages' parts. Duck-typed: no inspect_ai here."""

from collections.abc import Sequence
from typing import Any

from fengine.errors import InvalidRequestError, UnsupportedFeatureError


def template_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """What `Engine.chat` takes. Pure. Errors: UnsupportedFeatureError for what is not text."""
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    text, thoughts = _parts(message, where)
    found: dict[str, Any] = {"role": message.role, "content": text}
    if message.role == "assistant":
        if thoughts:
            found["reasoning_content"] = "\n".join(thoughts)
        if message.tool_calls:
            found["tool_calls"] = [
                {"type": "function", "id": c.id, "function": {"name": c.function, "arguments": c.arguments}}
                for c in message.tool_calls
            ]
    if message.role == "tool":
        found |= {"name": message.function, "tool_call_id": message.tool_call_id}
        if message.error is not None:
            found["content"] = f"Error: {message.error.message}"
    return found


def _parts(message: Any, where: str) -> tuple[str, list[str]]:
    if isinstance(message.content, str):
        return message.content, []
    texts, thoughts = [], []
    for part in message.content:
        if part.type == "text":
            texts.append(part.text)
        elif part.type == "reasoning":
            thoughts.append(part.reasoning)
        else:
            raise UnsupportedFeatureError(f"{where} holds a part of type {part.type!r}; only text is built")
    return "\n".join(texts), thoughts


def raw_prompt(messages: Sequence[Any]) -> str | list[int]:
    """The text of a single user message as it is, or the ids that its metadata["prompt_token_ids"] holds. Pure.

    Errors: InvalidRequestError, UnsupportedFeatureError.
    """
    if len(messages) != 1 or messages[0].role != "user":
        raise InvalidRequestError(
            "use_chat_template=false takes a single user message, such as Sample(input='text') gives, not "
            f"{len(messages)} of roles {', '.join(message.role for message in messages)}"
        )
    ids = (messages[0].metadata or {}).get("prompt_token_ids")
    if ids is not None and not isinstance(ids, list):
        raise InvalidRequestError(f'metadata["prompt_token_ids"] must be a list of token ids, got {ids!r:.80}')
    return _parts(messages[0], "messages[0]")[0] if ids is None else ids


def tool_schemas(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Tools as chat templates expect them. Pure."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters.model_dump(mode="json", exclude_none=True),
            },
        }
        for tool in tools
    ]
