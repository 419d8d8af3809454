"""SGLang's `/generate`, and `/tokenize`, `/detokenize`, `/tokenizer_info` in vLLM's and SGLang's words."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fengine.api.engine import Engine
from fengine.api.hidden_states import FloatList
from fengine.api.io_struct import GenerateReqInput
from fengine.api.outputs import Output
from fengine.server.answers import Plan, Writer, event
from fengine.server.chat import chat_prompt
from fengine.server.chat_body import CHAT, chat_options, refuse_chat
from fengine.server.choices import finite
from fengine.server.errors import invalid, missing
from fengine.server.fields import MODEL, Fields, array, flag, loose, salt_word, salted, take, typed
from fengine.tokenizer.tokenizer import Tokenizer

GENERATE: Fields = {
    **{f.name: loose("As Engine.generate's argument.") for f in fields(GenerateReqInput)}, **MODEL,
    "stream": flag("Answer with events; each holds all text so far."),
    "extra_key": loose("SGLang's word for cache_salt; of a list one for each."),
    "return_text_in_logprobs": flag("Texts of tokens in the logprobs."),
}  # fmt: skip
OF_TOKENS = tuple(f"{side}_{kind}" for side in ("input", "output")
                  for kind in ("token_logprobs", "top_logprobs", "token_ids_logprobs"))  # fmt: skip
WITH_TEXTS = flag("The tokens' own names beside their ids.")
TOKENIZE: Fields = {
    **MODEL, **CHAT, "prompt": loose("A text, or a list of texts."), "return_token_strs": WITH_TEXTS,
    "add_special_tokens": typed("boolean", "With those that the tokenizer adds: to texts."),
}  # fmt: skip
DETOKENIZE: Fields = {
    **MODEL, "tokens": array("Token ids, or lists of them."),
    "skip_special_tokens": typed("boolean", "SGLang's: leave their texts out; the answer is then {text}."),
}  # fmt: skip


def generate(body: Mapping[str, Any], engine: Engine, model: str) -> Plan:
    """The arguments and outputs of `Engine.generate`. Errors: ApiError."""
    given = salted(take(body, GENERATE))
    with_texts, _ = given.pop("return_text_in_logprobs"), given.pop("model")
    request = GenerateReqInput(**{name: value for name, value in given.items() if value is not None})
    if with_texts and engine._parts.tokenizer is None:
        raise invalid("return_text_in_logprobs", "return_text_in_logprobs needs a server with a tokenizer.")
    prompts = request.input_ids if request.text is None else request.text
    several = isinstance(prompts, list) and not (prompts and isinstance(prompts[0], int))
    params = request.sampling_params if isinstance(request.sampling_params, list) else [request.sampling_params]
    counts = [one["n"] for one in params if isinstance(one, dict) and type(one.get("n")) is int]
    rows = (len(prompts) if several else 1) * max([1, *counts])
    writer = GenerateWriter(engine.tokenizer, not several and rows == 1, with_texts)
    return Plan(request, rows, writer.whole, writer, salt_word(body), deltas=False)


class GenerateWriter(Writer):
    """`with_texts`: logprobs' third member is the token's text."""

    def __init__(self, tokenizer: Tokenizer, single: bool, with_texts: bool) -> None:
        self._tokenizer, self._single, self._with_texts = tokenizer, single, with_texts

    def whole(self, outputs: list[Output]) -> Any:
        told = [self._json_output(output) for output in outputs]
        return told[0] if self._single else told

    def piece(self, index: int, output: Output) -> bytes:
        return event(self._json_output(output))

    def _json_output(self, output: Output) -> Output:
        """With values that JSON can hold."""
        meta = output["meta_info"]
        changed = {name: self._triples(meta[name]) for name in OF_TOKENS if name in meta}
        if (hidden := meta.get("hidden_states")) is not None:
            changed["hidden_states"] = json.loads(json.dumps(hidden, default=FloatList.tolist))
        return output | {"meta_info": meta | changed}

    def _triples(self, value: Any) -> Any:
        """Of (logprob, id, None), in lists of any depth."""
        if value is None or isinstance(value, list):
            return value and [self._triples(one) for one in value]
        logprob, token, _ = value
        said = self._tokenizer.decoding.data(token).decode("utf-8", "replace") if self._with_texts else None
        return finite(logprob), token, said


def tokenize(body: Mapping[str, Any], engine: Engine, tokenizer: Tokenizer) -> dict[str, Any]:
    """{"count", "max_model_len", "tokens", "token_strs"} of a text, several or a chat. Errors: ApiError; those of
    `Engine.chat_ids`."""
    given, several = take(body, TOKENIZE), isinstance(body.get("prompt"), list)
    special = given["add_special_tokens"]
    if given["prompt"] is None:
        if given["messages"] is None:
            raise missing("prompt")
        rows = [chat_prompt(engine, chat_options(given, has_grammar=False), special is True)[0]]
    else:
        refuse_chat(body, "prompt")
        texts = map(tokenizer.check_text, given["prompt"] if several else [given["prompt"]])
        rows = [tokenizer.encode(text, add_special_tokens=special is not False) for text in texts]
    names = [[tokenizer.backend.id_to_token(id) for id in ids] for ids in rows] if given["return_token_strs"] else None
    told = {"tokens": rows, "count": [len(ids) for ids in rows], "token_strs": names}
    told = told if several else {name: None if value is None else value[0] for name, value in told.items()}
    return told | {"max_model_len": engine._parts.context_length}


def detokenize(body: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """The text of token ids: vLLM's {"prompt"}, with special tokens as they are written; SGLang's {"text"} for a body
    that has its skip_special_tokens. Errors: ApiError."""
    given, known = take(body, DETOKENIZE), range(tokenizer.vocab_size)
    ids, skip = given["tokens"], given["skip_special_tokens"]
    several = bool(ids) and isinstance(ids[0], list)
    rows = ids if several else [ids]
    if not all(isinstance(row, list) and all(type(id) is int and id in known for id in row) for row in rows):
        raise invalid("tokens", f"tokens must be a list of ids in [0, {known[-1]}], got {ids!r:.80}.")
    texts = [tokenizer.decode(row, skip_special_tokens=skip is True) for row in rows]
    return {"prompt" if skip is None else "text": texts if several else texts[0]}


def tokenizer_info(tokenizer: Tokenizer, context: int) -> dict[str, Any]:
    """What vLLM's clients ask of the tokenizer."""
    added = tokenizer.backend.get_added_tokens_decoder()
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "chat_template": tokenizer.chat_templates.get("default"),
        "added_tokens_decoder": {
            str(id): {"content": token.content, "special": token.special} for id, token in added.items()
        },
        **tokenizer.special_tokens,
    }
