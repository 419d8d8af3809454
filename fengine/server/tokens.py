"""`/tokenize` and `/detokenize`, in vLLM's words."""

from collections.abc import Mapping
from typing import Any

from fengine.server import fields
from fengine.server.chat import Encode
from fengine.server.chat_body import chat_options
from fengine.server.errors import invalid, missing
from fengine.server.token_text import shown, token_bytes
from fengine.tokenizer.tokenizer import Tokenizer

OF_TEXTS = frozenset({"model", "prompt", "add_special_tokens", "return_token_strs"})
OF_CHATS = frozenset(
    {"model", "messages", "tools", "chat_template_kwargs", "add_generation_prompt", "return_token_strs"}
)


def tokenize(body: Mapping[str, Any], tokenizer: Tokenizer, encode: Encode, context: int) -> dict[str, Any]:
    """{"count", "max_model_len", "tokens", "token_strs"} of a text or a chat. Errors: ApiError; those of `encode`."""
    with_texts = fields.flag(body, "return_token_strs")
    if body.get("messages") is not None:
        fields.check_names(body, OF_CHATS, {})
        chat = chat_options(body, has_grammar=False)
        ids = encode(chat.messages, chat.tools, chat.add_generation_prompt, chat.template_values)
    else:
        fields.check_names(body, OF_TEXTS, {})
        if body.get("prompt") is None:
            raise missing("prompt")
        text = tokenizer.check_text(body["prompt"])
        ids = tokenizer.encode(text, add_special_tokens=fields.flag(body, "add_special_tokens", True))
    texts = [shown(token_bytes(tokenizer, token)) for token in ids] if with_texts else None
    return {"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": texts}


def detokenize(body: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """{"prompt"}: the text of token ids, special tokens as they are written. Errors: ApiError."""
    fields.check_names(body, {"model", "tokens"}, {})
    ids, known = body.get("tokens"), range(tokenizer.vocab_size)
    if not isinstance(ids, list) or any(type(token) is not int or token not in known for token in ids):
        raise invalid("tokens", f"tokens must be a list of ids in [0, {known[-1]}], got {ids!r:.80}.")
    return {"prompt": tokenizer.decode(ids, skip_special_tokens=False)}
