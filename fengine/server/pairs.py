"""Pairs of texts: `/v1/score` and `/v1/rerank`, of a cross-encoder, an embedding model or labels."""

from collections.abc import Callable, Mapping
from typing import Any

from fengine.api.encode import pair_ids, pooling_of
from fengine.api.engine import Engine
from fengine.api.info import hf_config
from fengine.api.io_struct import EncodeReqInput
from fengine.api.outputs import Output
from fengine.api.score import ScoreReqInput, Scoring
from fengine.server import heads
from fengine.server.answers import Plan, new_id, usage_of
from fengine.server.errors import ApiError, invalid, tokenizer_of, unsupported
from fengine.server.fields import MODEL, Field, Fields, flag, loose, take, typed, whole
from fengine.server.pooled import CUT, complete, cut_of, ids_of, list_head

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
    "max_tokens_per_doc": whole("Most tokens of a document; 0: all.", 0, 1 << 31, 0),
    "return_documents": flag("The documents beside their scores.", True),
    **heads.ACTIVATION,
    **CUT,
}


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
        told = {"scores": list(found), "model": model, "usage": usage_of(outputs[:count]), "object": "scoring"}
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
        return {**list_head("score-", model), "data": data, "usage": usage_of(outputs)}

    return Plan(request, rows, answer)


def _scored(
    engine: Engine, first: list[str], second: list[str], given: Mapping[str, Any], activated: bool
) -> tuple[EncodeReqInput, int, Callable[[list[Output]], list[float]]]:
    """(what is asked of the model, how many prompts, the scores in its outputs) of as many texts on either side: labels
    of a cross-encoder, cosines of an embedding model. Errors: ApiError; those of the tokenizer."""
    cut, count, wanted = cut_of(given, engine), len(first), heads.wanted(given, activated)
    if engine._parts.spec.num_labels is not None or not activated:  # SGLang's rerank takes no embedding model
        most, side = (cut.tokens, cut.side) if cut else (None, None)
        ids = pair_ids(engine._context, list(zip(first, second, strict=True)), most, side)
        score = heads.of_scores(hf_config(engine._parts), pooling_of(engine._context).activation, wanted)
        return EncodeReqInput(ids), count, lambda told: [_label(one["embedding"], score) for one in complete(told)]
    for i, text in enumerate(texts := first + second):
        tokenizer_of(engine).check_text(text, f"prompt[{i % count}][{i // count}]", True)

    def cosines(outputs: list[Output]) -> list[float]:
        vectors = [output["embedding"] for output in complete(outputs)]
        return [heads.cosine(a, b) for a, b in zip(vectors[:count], vectors[count:], strict=True)]

    return EncodeReqInput(ids_of(texts, engine, True, cut) if cut else texts), 2 * count, cosines


def _texts(given: Mapping[str, Any], name: str) -> list[str]:
    """Errors: ApiError."""
    value = [given[name]] if isinstance(given[name], str) else given[name]
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise invalid(name, f"{name} must be a text or a list of texts, got {value!r:.80}.")
    return value


def _label(vector: list[float], activation: heads.Activation) -> float:
    """The one label of a cross-encoder. Pure. Errors: ApiError."""
    if len(vector) != 1:
        raise ApiError(400, f"this classifier has {len(vector)} labels; a score is one.", code="unsupported_feature")
    return activation(vector)[0]


def _shortened(texts: list[str], most: int, engine: Engine) -> list[str]:
    """Each up to the end of so many of its tokens. Errors: InvalidRequestError and its kinds."""
    tokenizer = tokenizer_of(engine)
    checked = [tokenizer.check_text(text, f"documents[{i}]", True) for i, text in enumerate(texts)]
    places = [tokenizer.backend.encode(text, add_special_tokens=False).offsets for text in checked]
    return [text[: at[most - 1][1]] if len(at) > most else text for text, at in zip(texts, places, strict=True)]


def rerank(body: Mapping[str, Any], engine: Engine, model: str, jina: bool) -> Plan:
    """Documents, the best first: [{"score", "document", "index"}] as SGLang's with the scores of `Engine.rerank`, or
    `jina`'s {"results": [{"index", "document", "relevance_score"}]} with scores between 0 and 1, or as the checkpoint
    says, as vLLM's; of an embedding model cosines. Errors: ApiError; those of Engine.rerank."""
    given = take(body, RERANK, needed=("query", "documents"))
    documents, shows = _texts(given, "documents"), given["return_documents"]
    read = _shortened(documents, given["max_tokens_per_doc"], engine) if given["max_tokens_per_doc"] else documents
    request, rows, scored = _scored(engine, [given["query"]] * len(read), read, given, jina)

    def answer(outputs: list[Output]) -> Any:
        scores = scored(outputs)
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: given["top_n"] or None]
        if not jina:
            return [{"score": scores[i], "document": documents[i] if shows else None, "index": i,
                     "meta_info": outputs[i]["meta_info"]} for i in order]  # fmt: skip
        results = [{"index": i, "relevance_score": scores[i]} for i in order]
        if shows:
            results = [{**one, "document": {"text": documents[one["index"]]}} for one in results]
        return {"id": new_id("rerank-"), "model": model, "usage": usage_of(outputs), "results": results}

    return Plan(request, rows, answer)
