"""`/generate`: SGLang's own endpoint, the arguments and outputs of `Engine.generate`."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fengine.api.hidden_states import FloatList
from fengine.api.io_struct import GenerateReqInput
from fengine.api.outputs import Output
from fengine.server.answers import Writer, event
from fengine.server.choices import finite, token_bytes
from fengine.server.fields import Fields, flag, loose, take
from fengine.tokenizer.tokenizer import Tokenizer

FIELDS: Fields = {
    **{f.name: loose("As Engine.generate's argument.") for f in fields(GenerateReqInput)},
    "model": loose("The served model or one of its adapters.", "string"),
    "stream": flag("Answer with events; each holds all text so far."),
    "return_text_in_logprobs": flag("Texts of tokens in the logprobs."),
}
OF_TOKENS = tuple(f"{side}_{kind}" for side in ("input", "output") for kind in ("token_logprobs", "top_logprobs",
                                                                               "token_ids_logprobs"))  # fmt: skip


def read(body: Mapping[str, Any], tokenizer: Tokenizer) -> "tuple[GenerateReqInput, int, GenerateWriter]":
    """(the call's arguments, how many rows it may have, how it is told). Errors: ApiError."""
    given = take(body, FIELDS)
    with_texts, _ = given.pop("return_text_in_logprobs"), given.pop("model")
    request = GenerateReqInput(**{name: value for name, value in given.items() if value is not None})
    prompts = request.input_ids if request.text is None else request.text
    several = isinstance(prompts, list) and not (prompts and isinstance(prompts[0], int))
    params = request.sampling_params if isinstance(request.sampling_params, list) else [request.sampling_params]
    counts = [one["n"] for one in params if isinstance(one, dict) and type(one.get("n")) is int]
    rows = (len(prompts) if several else 1) * max(1, *counts, 1)
    return request, rows, GenerateWriter(tokenizer, not several and rows == 1, with_texts)


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
        if isinstance(value, list):
            return [self._triples(one) for one in value]
        if value is None:
            return None
        logprob, token, _ = value
        said = token_bytes(self._tokenizer, token).decode("utf-8", "replace") if self._with_texts else None
        return finite(logprob), token, said
