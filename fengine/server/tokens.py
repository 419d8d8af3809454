"""`/tokenize`, `/detokenize` and `/tokenizer_info`, in vLLM's and SGLang's words."""

from collections.abc import Mapping
from typing import Any

from fengine.api.engine import Engine
from fengine.server.chat import chat_ids
from fengine.server.chat_body import CHAT, chat_options
from fengine.server.errors import invalid, missing
from fengine.server.fields import MODEL, Fields, array, flag, loose, take

WITH_TEXTS = flag("The tokens' own names beside their ids.")
OF_TEXTS: Fields = {
    **MODEL, "prompt": loose("A text, or a list of texts."), "return_token_strs": WITH_TEXTS,
    "add_special_tokens": flag("With those that the tokenizer adds.", True),
}  # fmt: skip
OF_CHATS: Fields = {
    **MODEL, **{name: CHAT[name] for name in CHAT if name not in ("functions", "function_call")},
    "return_token_strs": WITH_TEXTS, "add_special_tokens": flag("With those that the tokenizer adds."),
}  # fmt: skip
TOKENIZE: Fields = OF_CHATS | OF_TEXTS
DETOKENIZE: Fields = {
    **MODEL, "tokens": array("Token ids, or lists of them."),
    "skip_special_tokens": loose("SGLang's: leave their texts out; the answer is then {text}.", "boolean"),
}  # fmt: skip


def tokenize(body: Mapping[str, Any], engine: Engine) -> dict[str, Any]:
    """{"count", "max_model_len", "tokens", "token_strs"} of a text, several or a chat. Errors: ApiError; those of
    `Engine.chat_ids`."""
    tokenizer = engine.tokenizer
    several = isinstance(body.get("prompt"), list)
    if body.get("messages") is not None:
        given = take(body, OF_CHATS)
        none = dict.fromkeys(("functions", "function_call"))
        chat = chat_options(given | none, has_grammar=False)
        rows = [chat_ids(engine, chat, chat.template_values, given["add_special_tokens"])]
    else:
        given = take(body, OF_TEXTS)
        if given["prompt"] is None:
            raise missing("prompt")
        texts = given["prompt"] if several else [given["prompt"]]
        rows = [tokenizer.encode(tokenizer.check_text(text), add_special_tokens=given["add_special_tokens"])
                for text in texts]  # fmt: skip
    names = [[tokenizer.backend.id_to_token(id) for id in ids] for ids in rows] if given["return_token_strs"] else None
    told = {"tokens": rows, "count": [len(ids) for ids in rows], "token_strs": names}
    told = told if several else {name: None if value is None else value[0] for name, value in told.items()}
    return told | {"max_model_len": engine._parts.context_length}


def detokenize(body: Mapping[str, Any], engine: Engine) -> dict[str, Any]:
    """The text of token ids: vLLM's {"prompt"}, with special tokens as they are written; SGLang's {"text"} for a body
    that has its skip_special_tokens. Errors: ApiError."""
    given, known = take(body, DETOKENIZE), range(engine.tokenizer.vocab_size)
    ids, skip = given["tokens"], given["skip_special_tokens"]
    several = bool(ids) and isinstance(ids[0], list)
    rows = ids if several else [ids]
    if not all(isinstance(row, list) and all(type(id) is int and id in known for id in row) for row in rows):
        raise invalid("tokens", f"tokens must be a list of ids in [0, {known[-1]}], got {ids!r:.80}.")
    if skip not in (None, True, False):
        raise invalid("skip_special_tokens", f"skip_special_tokens must be true or false, got {skip!r:.80}.")
    texts = [engine.tokenizer.decode(row, skip_special_tokens=skip is True) for row in rows]
    return {"prompt" if skip is None else "text": texts if several else texts[0]}


def tokenizer_info(engine: Engine) -> dict[str, Any]:
    """What vLLM's clients ask of the tokenizer."""
    tokenizer = engine.tokenizer
    added = {
        str(id): {"content": token.content, "special": token.special}
        for id, token in tokenizer.backend.get_added_tokens_decoder().items()
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": engine._parts.context_length,
        "chat_template": tokenizer.chat_templates.get("default"),
        "added_tokens_decoder": added,
        **tokenizer.special_tokens,
    }
