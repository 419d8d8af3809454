"""What is read from a model's hidden states: `/v1/embeddings`, `/encode`, `/classify`, `/v1/score`, `/v1/rerank`.
Bodies to the arguments of `Engine.encode` or `generate`, outputs to OpenAI's, SGLang's and vLLM's lists."""

import base64
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from fengine.api.chat import is_chat, rendered, with_images
from fengine.api.encode import longest_text, pair_ids, pooling_of
from fengine.api.engine import Engine
from fengine.api.info import hf_config
from fengine.api.io_struct import EncodeReqInput
from fengine.api.outputs import Output
from fengine.api.score import ScoreReqInput, Scoring
from fengine.server import heads
from fengine.server.answers import Plan, counted, new_id
from fengine.server.chat import chat_prompt
from fengine.server.chat_body import CHAT, chat_options, refuse_chat
from fengine.server.errors import ApiError, invalid, missing, unsupported
from fengine.server.fields import MODEL, Field, Fields, flag, loose, one_of, take, typed, whole
from fengine.server.openai_body import ADD_SPECIAL, TRUNCATION, Truncation, prompt_ids, texts_or_ids

CUT: Fields = TRUNCATION | {
    "truncation_side": one_of("The side that is cut off.", "left", "right", default="right"),  # as vLLM's
}  # fmt: skip
INPUT: Fields = {**MODEL, "input": loose("A text, token ids, or a list of either; or messages."), **CHAT, **CUT,
                 **ADD_SPECIAL}  # fmt: skip
EMBEDDINGS: Fields = {
    **INPUT,
    "encoding_format": one_of("How vectors are written.", "float", "base64", default="float"),
    "dimensions": loose("The first ones, normalised.", "integer"),
    "normalize": typed("boolean", "vLLM's: vectors of length 1, or not; else as the checkpoint says."),
    "use_activation": typed("boolean", "vLLM's newer word for normalize."),
}
CLASSIFY: Fields = INPUT | heads.ACTIVATION
PAIRS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))  # vLLM's words
SCORING: dict[str, Field] = {  # SGLang's
    "query": loose("A text, or token ids."), "items": loose("Texts, or lists of token ids."),
    "label_token_ids": loose("The ids whose probabilities are asked for.", "array"),
    "apply_softmax": loose("The labels' probabilities add up to 1.", "boolean"),
    "item_first": loose("The item stands before the query.", "boolean"),
    "temperature": loose("Of the softmax.", "number"),
    "return_pooled_hidden_states": loose("Of a classifier: what its head reads of each item, too.", "boolean"),
}  # fmt: skip
OF_PAIRS: Fields = dict.fromkeys(sum(PAIRS, ()), loose("vLLM's: a text, or a list; the second of as many, or more."))
SCORE: Fields = {**MODEL, **OF_PAIRS, **SCORING, **heads.ACTIVATION, **CUT}
RERANK: Fields = {
    **MODEL,
    "query": typed("string", "A text."),
    "documents": loose("A text, or a list of texts."),
    "top_n": whole("So many of the best; 0: all.", 0, 1 << 20, 0),
    "return_documents": flag("The documents beside their scores.", True),
    **heads.ACTIVATION,
    **CUT,
}
ENCODE: Fields = MODEL | {
    f.name: loose("As Engine.encode's argument.") for f in fields(EncodeReqInput) if f.name != "external_trace_header"
}  # fmt: skip
WORDS = {"prompt": "input", "text": "input", "input_ids": "input"}


def _complete(outputs: list[Output]) -> list[Output]:
    """Errors: ApiError if a prompt was aborted."""
    for index, output in enumerate(outputs):
        if output.get("embedding", ()) is None:
            raise ApiError(503, f"input {index} was aborted by the server.", code="aborted")
    return outputs


def _usage(outputs: list[Output]) -> dict[str, Any]:
    return counted(sum(output["meta_info"]["prompt_tokens"] for output in outputs), 0)


def _head(prefix: str, model: str) -> dict[str, Any]:
    return {"id": new_id(prefix), "object": "list", "created": int(time.time()), "model": model}


def _prompts(body: Mapping[str, Any], given: Mapping[str, Any], engine: Engine) -> tuple[Any, int, Any]:
    """(texts or ids, how many, images) of the input or of a chat. Errors: ApiError; those of the tokenizer."""
    if given["messages"] is None or given["input"] is not None:
        refuse_chat(body, "input")
        return *_inputs(given, engine), None
    cut, chat = _cut(given, engine), chat_options(given, has_grammar=False)
    ids, images = chat_prompt(engine, chat, body.get("add_special_tokens") is True)
    return cut.cut(ids, engine._parts.context_length, images) if cut else ids, 1, images or None


def _inputs(given: Mapping[str, Any], engine: Engine) -> tuple[Any, int]:
    """(texts or ids, how many) of the field `input`. Errors: ApiError; those of the tokenizer."""
    kind, prompts, count = texts_or_ids(given, "input")
    if not prompts or isinstance(prompts, list) and "" in prompts:
        raise invalid("input", "input must be no empty text, and have none.")
    add_special, cut = given["add_special_tokens"], _cut(given, engine)
    if cut and kind == "input_ids":
        return prompt_ids(engine.tokenizer, kind, prompts, add_special, cut, engine._parts.context_length), count
    if cut or not add_special:
        prompts = _ids([prompts] if isinstance(prompts, str) else prompts, engine, add_special, cut)
    return prompts, count


def _cut(given: Mapping[str, Any], engine: Engine) -> Truncation | None:
    """Nothing is drawn, so the whole context is the prompt's. Errors: ApiError."""
    cut = Truncation.of(given)
    return Truncation(cut.most(engine._parts.context_length, 0), cut.side) if cut else None


def _ids(texts: list[str], engine: Engine, add_special: bool, cut: Truncation | None) -> list[list[int]]:
    """Of texts that are cut, with the special tokens that the tokenizer adds left whole, as transformers does. Errors:
    InvalidRequestError and its kinds."""
    pooling = pooling_of(engine._context)
    limits = [most for most in (longest_text(engine._context), cut and cut.tokens) if most is not None]
    how: Any = {"max_length": min(limits, default=None), "side": cut and cut.side, "add_special_tokens": add_special}
    return [engine.tokenizer.encode(text, **how) for text in pooling.dressed(texts)]


def embeddings(body: Mapping[str, Any], engine: Engine, model: str) -> Plan:
    """Errors: ApiError."""
    given = take(body, EMBEDDINGS)
    as_base64 = given["encoding_format"] == "base64"
    prompts, count, images = _prompts(body, given, engine)

    def answer(outputs: list[Output]) -> dict[str, Any]:
        data = []
        for index, output in enumerate(_complete(outputs)):
            vector = output["embedding"]
            value = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if as_base64 else vector
            data.append({"object": "embedding", "index": index, "embedding": value})
        return {**_head("embd-", model), "data": data, "usage": _usage(outputs)}

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
        for index, output in enumerate(_complete(outputs)):
            found = output["embedding"]
            best = max(range(len(found)), key=lambda i: found[i])
            data.append({"index": index, "label": names.get(str(best), f"LABEL_{best}"), "probs": activation(found),
                         "num_classes": len(found)})  # fmt: skip
        return {**_head("classify-", model), "data": data, "usage": _usage(outputs)}

    return Plan(
        EncodeReqInput(prompts, images), max(count, 1), answer, words=WORDS if given["messages"] is None else {}
    )


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


def score(body: Mapping[str, Any], engine: Engine, model: str) -> Plan:
    """SGLang's words (query, items) or vLLM's, of pairs. Errors: ApiError; those of Engine.score."""
    given = take(body, SCORE)
    asked = {name: given[name] for name in (*SCORING, *OF_PAIRS) if given[name] is not None}
    named = max(PAIRS, key=lambda pair: (pair[0] in asked, pair[1] in asked))
    form = tuple(SCORING) if "query" in asked or asked.keys() <= SCORING.keys() else named
    for name in sorted(asked.keys() - set(form)):
        raise unsupported(name, f"{name} does not go with {form[0]}; leave it out.")
    if form == named:
        return _pairs(given, engine, model, *named)
    if given["truncate_prompt_tokens"] is not None:
        raise unsupported("truncate_prompt_tokens", "truncate_prompt_tokens is for text_1 and text_2; cut the items.")
    if not heads.wanted(given, True):
        raise unsupported("activation", "activation is for text_1 and text_2; of items apply_softmax says it.")
    spec = engine._parts.spec
    scoring = Scoring.of(ScoreReqInput(**asked), spec.num_labels is None, spec.vocab_size)
    if not scoring.prompts:
        raise invalid("items", "items must not be empty.")

    def answer(outputs: list[Output]) -> dict[str, Any]:
        found, count = scoring.result(outputs), len(scoring.prompts)
        told = {"scores": list(found), "model": model, "usage": _usage(outputs[:count]), "object": "scoring"}
        pooled = found.pooled_hidden_states
        return told if pooled is None else told | {"pooled_hidden_states": [one.tolist() for one in pooled]}

    hidden = scoring.req.return_pooled_hidden_states
    return Plan(scoring.input(), len(scoring.prompts) * (1 + hidden), answer, hidden=hidden)


def _pairs(given: Mapping[str, Any], engine: Engine, model: str, one: str, other: str) -> Plan:
    """vLLM's scores: of a cross-encoder its label, of an embedding model the cosine."""
    first, second = _texts(given, one), _texts(given, other)
    first = first * len(second) if len(first) == 1 else first
    if len(first) != len(second):
        raise invalid(other, f"{other} must have as many texts as {one} ({len(first)}), got {len(second)}.")
    request, rows, scores = _scored(engine, first, second, given, True)

    def answer(outputs: list[Output]) -> dict[str, Any]:
        data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores(outputs))]
        return {**_head("score-", model), "data": data, "usage": _usage(outputs)}

    return Plan(request, rows, answer)


def _scored(
    engine: Engine, first: list[str], second: list[str], given: Mapping[str, Any], activated: bool
) -> tuple[EncodeReqInput, int, Callable[[list[Output]], list[float]]]:
    """(what is asked of the model, how many prompts, the scores in its outputs) of as many texts on either side: labels
    of a cross-encoder, cosines of an embedding model. Errors: ApiError; those of the tokenizer."""
    cut, count, wanted = _cut(given, engine), len(first), heads.wanted(given, activated)
    if engine._parts.spec.num_labels is not None or not activated:  # SGLang's rerank takes no embedding model
        ids = _pair_ids(engine, list(zip(first, second, strict=True)), cut)
        label = _activation(engine, wanted)
        return (
            EncodeReqInput(ids),
            count,
            lambda outputs: [_label(one["embedding"], label) for one in _complete(outputs)],
        )
    for i, text in enumerate(texts := first + second):
        engine.tokenizer.check_text(text, f"prompt[{i % count}][{i // count}]")

    def cosines(outputs: list[Output]) -> list[float]:
        vectors = [output["embedding"] for output in _complete(outputs)]
        return [heads.cosine(a, b) for a, b in zip(vectors[:count], vectors[count:], strict=True)]

    return EncodeReqInput(_ids(texts, engine, True, cut) if cut else texts), 2 * count, cosines


def _pair_ids(engine: Engine, pairs: list[Any], cut: Truncation | None) -> list[list[int]]:
    return pair_ids(engine._context, pairs, cut.tokens, cut.side) if cut else pair_ids(engine._context, pairs)


def _texts(given: Mapping[str, Any], name: str) -> list[str]:
    """Errors: ApiError."""
    value = [given[name]] if isinstance(given[name], str) else given[name]
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise invalid(name, f"{name} must be a text or a list of texts, got {value!r:.80}.")
    return value


def _activation(engine: Engine, wanted: bool) -> heads.Activation:
    """What makes a score of a cross-encoder's label. Errors: ApiError."""
    return heads.of_scores(hf_config(engine._parts), pooling_of(engine._context).activation, wanted)


def _label(vector: list[float], activation: heads.Activation) -> float:
    """The one label of a cross-encoder. Pure. Errors: ApiError."""
    if len(vector) != 1:
        raise ApiError(400, f"this classifier has {len(vector)} labels; a score is one.", code="unsupported_feature")
    return activation(vector)[0]


def rerank(body: Mapping[str, Any], engine: Engine, model: str, jina: bool) -> Plan:
    """Documents, the best first: [{"score", "document", "index"}] as SGLang's with the scores of `Engine.rerank`, or
    `jina`'s {"results": [{"index", "document", "relevance_score"}]} with scores between 0 and 1, or as the checkpoint
    says, as vLLM's; of an embedding model cosines. Errors: ApiError; those of Engine.rerank."""
    given = take(body, RERANK)
    for name in ("query", "documents"):
        if given[name] is None:
            raise missing(name)
    documents, shows = _texts(given, "documents"), given["return_documents"]
    request, rows, scored = _scored(engine, [given["query"]] * len(documents), documents, given, jina)

    def answer(outputs: list[Output]) -> Any:
        scores = scored(outputs)
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: given["top_n"] or None]
        if not jina:
            return [{"score": scores[i], "document": documents[i] if shows else None, "index": i,
                     "meta_info": outputs[i]["meta_info"]} for i in order]  # fmt: skip
        results = [{"index": i, "relevance_score": scores[i]} for i in order]
        if shows:
            results = [{**one, "document": {"text": documents[one["index"]]}} for one in results]
        return {"id": new_id("rerank-"), "model": model, "usage": _usage(outputs), "results": results}

    return Plan(request, rows, answer)
