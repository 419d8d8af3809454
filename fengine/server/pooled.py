"""What is read from a model's hidden states: `/v1/embeddings`, `/encode`, `/classify`, `/pooling`. Bodies to the
arguments of `Engine.encode`, outputs to OpenAI's, SGLang's and vLLM's lists."""

import time
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from fengine.api.chat import is_chat, rendered, with_images
from fengine.api.encode import longest_text, pooling_of
from fengine.api.engine import Engine
from fengine.api.info import hf_config
from fengine.api.io_struct import EncodeReqInput
from fengine.api.outputs import Output
from fengine.server import heads
from fengine.server.answers import Plan, new_id, usage_of
from fengine.server.chat import chat_prompt
from fengine.server.chat_body import CHAT, chat_options, refuse_chat
from fengine.server.errors import ApiError, invalid, tokenizer_of, unsupported
from fengine.server.fields import MODEL, Fields, loose, one_of, take, typed
from fengine.server.openai_body import ADD_SPECIAL, TRUNCATION, Truncation, prompt_ids, texts_or_ids

CUT: Fields = TRUNCATION | {
    "truncation_side": one_of("The side that is cut off.", "left", "right", default="right"),  # as vLLM's
    "padding": one_of("vLLM's: nothing is padded here.", "do_not_pad"),
}  # fmt: skip
INPUT: Fields = {**MODEL, "input": loose("A text, token ids, or a list of either; or messages."), **CHAT, **CUT,
                 **ADD_SPECIAL}  # fmt: skip
EMBEDDINGS: Fields = {
    **INPUT,
    **heads.ENCODING,
    "dimensions": loose("The first ones, normalised.", "integer"),
    "normalize": typed("boolean", "vLLM's: vectors of length 1, or not; else as the checkpoint says."),
    "use_activation": typed("boolean", "vLLM's newer word for normalize."),
}
CLASSIFY: Fields = INPUT | heads.ACTIVATION
POOLING: Fields = CLASSIFY | EMBEDDINGS | {"task": loose("embed or classify: what the model does.", "string")}
ENCODE: Fields = MODEL | {
    f.name: loose("As Engine.encode's argument.") for f in fields(EncodeReqInput) if f.name != "external_trace_header"
}  # fmt: skip
WORDS = {"prompt": "input", "text": "input", "input_ids": "input"}


def complete(outputs: list[Output]) -> list[Output]:
    """Errors: ApiError if a prompt was aborted."""
    for index, output in enumerate(outputs):
        if output.get("embedding", ()) is None:
            raise ApiError(503, f"input {index} was aborted by the server.", code="aborted")
    return outputs


def list_head(prefix: str, model: str) -> dict[str, Any]:
    return {"id": new_id(prefix), "object": "list", "created": int(time.time()), "model": model}


def _prompts(body: Mapping[str, Any], given: Mapping[str, Any], engine: Engine) -> tuple[Any, int, Any]:
    """(texts or ids, how many, images) of the input or of a chat. Errors: ApiError; those of the tokenizer."""
    if given["messages"] is None or given["input"] is not None:
        refuse_chat(body, "input")
        return *_inputs(given, engine), None
    cut, chat = cut_of(given, engine), chat_options(given, has_grammar=False)
    ids, images = chat_prompt(engine, chat, body.get("add_special_tokens") is True)
    return cut.cut(ids, engine._parts.context_length, images) if cut else ids, 1, images or None


def _inputs(given: Mapping[str, Any], engine: Engine) -> tuple[Any, int]:
    """(texts or ids, how many) of the field `input`. Errors: ApiError; those of the tokenizer."""
    kind, prompts, count = texts_or_ids(given, "input")
    if not prompts or isinstance(prompts, list) and "" in prompts:
        raise invalid("input", "input must be no empty text, and have none.")
    add_special, cut = given["add_special_tokens"], cut_of(given, engine)
    if cut and kind == "input_ids":
        return prompt_ids(engine.tokenizer, kind, prompts, add_special, cut, engine._parts.context_length), count
    if cut or not add_special:
        prompts = ids_of([prompts] if isinstance(prompts, str) else prompts, engine, add_special, cut)
    return prompts, count


def cut_of(given: Mapping[str, Any], engine: Engine) -> Truncation | None:
    """Nothing is drawn, so the whole context is the prompt's. Errors: ApiError."""
    cut = Truncation.of(given)
    return Truncation(cut.most(engine._parts.context_length, 0), cut.side) if cut else None


def ids_of(texts: list[str], engine: Engine, add_special: bool, cut: Truncation | None) -> list[list[int]]:
    """Of texts that are cut, with the special tokens that the tokenizer adds left whole, as transformers does. Errors:
    InvalidRequestError and its kinds."""
    pooling, tokenizer = pooling_of(engine._context), tokenizer_of(engine)
    limits = [most for most in (longest_text(engine._context), cut and cut.tokens) if most is not None]
    how: Any = {"max_length": min(limits, default=None), "side": cut and cut.side, "add_special_tokens": add_special}
    return [tokenizer.encode(text, **how) for text in pooling.dressed(texts)]


def embeddings(body: Mapping[str, Any], engine: Engine, model: str) -> Plan:
    """Errors: ApiError."""
    given = take(body, EMBEDDINGS)
    prompts, count, images = _prompts(body, given, engine)

    def answer(outputs: list[Output]) -> dict[str, Any]:
        found = [heads.written(output["embedding"], given) for output in complete(outputs)]
        data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(found)]
        return {**list_head("embd-", model), "data": data, "usage": usage_of(outputs)}

    normalize = heads.wanted(given, None, "normalize")
    asked = EncodeReqInput(prompts, images, dimensions=given["dimensions"], normalize=normalize)
    return Plan(asked, count, answer, words=WORDS if given["messages"] is None else {})


def classify(body: Mapping[str, Any], engine: Engine, model: str) -> Plan:
    """vLLM's: of each text the likeliest label and the probabilities of all. Errors: ApiError."""
    given, parts = take(body, CLASSIFY), engine._parts
    if parts.spec.num_labels is None:
        told = "this model is no classifier; serve a checkpoint of …ForSequenceClassification."
        raise ApiError(400, told, "model", "unsupported_feature")
    if given["input"] == []:
        refuse_chat(body, "input")
    prompts, count, images = ([], 0, None) if given["input"] == [] else _prompts(body, given, engine)
    config = hf_config(parts)
    names, activation = config.get("id2label") or {}, heads.of_labels(config, heads.wanted(given, True))

    def answer(outputs: list[Output]) -> dict[str, Any]:
        data = []
        for index, output in enumerate(complete(outputs)):
            found = output["embedding"]
            best = max(range(len(found)), key=lambda i: found[i])
            data.append({"index": index, "label": names.get(str(best), f"LABEL_{best}"), "probs": activation(found),
                         "num_classes": len(found)})  # fmt: skip
        return {**list_head("classify-", model), "data": data, "usage": usage_of(outputs)}

    words = WORDS if given["messages"] is None else {}
    return Plan(EncodeReqInput(prompts, images), max(count, 1), answer, words=words)


def pooling(body: Mapping[str, Any], engine: Engine, model: str) -> Plan:
    """vLLM's: the vectors of `embeddings`, or the numbers of `classify`, in one form. Errors: ApiError."""
    given, classifies = take(body, POOLING), engine._parts.spec.num_labels is not None
    own, name = ("classify", "probs") if classifies else ("embed", "embedding")
    if given["task"] not in (None, own):
        told = f"task of this model is {own}, got {given['task']!r:.80}; vectors of single tokens are not built: "
        raise unsupported("task", f"{told}return_hidden_states of /generate gives the hidden state of each.")
    rest = {name: value for name, value in body.items() if name not in ("task", *heads.ENCODING)}
    plan = (classify if classifies else embeddings)(rest, engine, model)

    def answer(outputs: list[Output]) -> dict[str, Any]:
        told = plan.whole(outputs)
        found = [heads.written(one[name], given) for one in told["data"]]
        data = [{"index": index, "object": "pooling", "data": vector} for index, vector in enumerate(found)]
        return told | {"id": new_id("pool-"), "data": data}

    return replace(plan, whole=answer)


def encode(body: Mapping[str, Any], engine: Engine, model: str) -> Plan:
    """SGLang's `/encode`: the outputs as `Engine.encode` gives them. Errors: ApiError."""
    given = {name: value for name, value in take(body, ENCODE).items() if name != "model"}
    if given["text"] is None:
        given |= {"text": given["input_ids"], "input_ids": None}
    text = given["text"]
    several = isinstance(text, list) and (not text or not isinstance(text[0], (int, dict)))
    count = max(len(text), 1) if several else 1
    if is_chat(text):  # its images are image_data, whose paths are not those of this machine
        ids, images = rendered(engine._context, text)
        given |= with_images({"text": ids, "image_data": given["image_data"]}, images)
    words = {"prompt": "text"}
    return Plan(EncodeReqInput(**given), count, lambda outputs: outputs if several else outputs[0], words=words)
