"""`encode` and `rerank`: a prompt's pooled hidden state, or what the checkpoint's head makes of it. A pooled request is
an ordinary one that draws nothing: it shares batches and cached prefixes with its neighbours, and its vector has the
same bits in any of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, overload

from fengine.api.arguments import described_by, record_of
from fengine.api.chat import is_chat, rendered, with_images
from fengine.api.context import EngineContext
from fengine.api.generate_input import NOTHING_DRAWN, GenerateReqInput, refuse_not_built
from fengine.api.input_processor import process_input
from fengine.api.io_struct import EncodeReqInput
from fengine.api.outputs import Output, Result
from fengine.api.sessions import Turn
from fengine.api.types import EncodeOutput
from fengine.core.request import Request
from fengine.core.scalars import plain, told
from fengine.engine.request_state import RequestState
from fengine.errors import InvalidRequestError
from fengine.worker.pooling import Pooling, check_dimensions, finish_vector

OF_DRAWING = ("completion_tokens", "reasoning_tokens", "first_token_latency", "decode_throughput")  # keys of meta_info


@overload
def encode(engine: Any, prompt: str, **options: Any) -> EncodeOutput: ...
@overload
def encode(engine: Any, prompt: list[str], **options: Any) -> list[EncodeOutput]: ...
@overload
def encode(engine: Any, prompt: Any, *args: Any, **options: Any) -> Any: ...
@described_by(EncodeReqInput)
def encode(engine: Any, *args: Any, **kwargs: Any) -> Any:
    """{"embedding": list of float, "meta_info"} of a prompt: text, token ids or a chat; a list of these for a list.

    Pooled and normalised as the checkpoint says, else its last token, normalised; `dimensions` keeps the first ones
    and normalises them; `normalize` says otherwise. A classifier or reward model gives its head's outputs, one for
    each label. A prompt that is aborted has the embedding None."""
    return engine.submit(record_of(EncodeReqInput, args, kwargs)).wait()


@overload
async def async_encode(engine: Any, prompt: str, **options: Any) -> EncodeOutput: ...
@overload
async def async_encode(engine: Any, prompt: list[str], **options: Any) -> list[EncodeOutput]: ...
@overload
async def async_encode(engine: Any, prompt: Any, *args: Any, **options: Any) -> Any: ...
@described_by(EncodeReqInput)
async def async_encode(engine: Any, *args: Any, **kwargs: Any) -> Any:
    """As `encode`. Works in any event loop."""
    return await engine._answered(record_of(EncodeReqInput, args, kwargs))


def encode_requests(
    engine: Any, req: EncodeReqInput, hidden: bool = False
) -> tuple[list[Request], dict[str, Turn], bool, Result]:
    """As `process_input`, and what makes a result of an output. With `hidden` all prompts of a list stand there once
    more, without the classifier's head. Errors: those of `process_input`; InvalidRequestError if the model is none for
    embeddings."""
    context: EngineContext = engine._context
    pooling, classifies = pooling_of(context), context.parts.spec.num_labels is not None
    if req.dimensions is not None and classifies:
        raise InvalidRequestError("dimensions is for embedding models; a classifier gives one number per label.")
    if req.normalize is not None:
        if classifies or not isinstance(req.normalize, bool):
            told_of = "for embedding models" if classifies else f"True or False, got {told(req.normalize)}"
            raise InvalidRequestError(f"normalize is {told_of}.")
        pooling = replace(pooling, normalize=req.normalize)
    dimensions = check_dimensions(req.dimensions, pooling, context.parts.spec.hidden_size)

    def embedding(output: Output, state: RequestState) -> Output:
        """None as the vector of one that was aborted, as its finish reason tells."""
        vector = None if state.embedding is None else state.embedding.tolist()
        if state.embedding is not None and not classifies:
            vector = finish_vector(state.embedding, pooling, dimensions)
        meta = {key: value for key, value in output["meta_info"].items() if key not in OF_DRAWING}
        return {"embedding": vector, "meta_info": meta}

    pool = context.parts.spec.score_pool if classifies else pooling.pool
    requests, turns, single = process_input(context, as_generate(context, req), {"pool": pool, "head": classifies})
    if hidden:
        requests += process_input(context, as_generate(context, req), {"pool": pool, "head": False})[0]
    return requests, turns, single, embedding


def pooling_of(context: EngineContext) -> Pooling:
    """Errors: InvalidRequestError if the model generates."""
    if context.parts.pooling is None:
        raise InvalidRequestError(
            "This model does not appear to be an embedding model by default. Please add `--is-embedding` when "
            "launching the server or try another model: Engine(..., is_embedding=True), or fengine serve "
            "model.is_embedding=true, reads it as one."
        )
    return context.parts.pooling


def as_generate(context: EngineContext, req: EncodeReqInput) -> GenerateReqInput:
    """The same prompts as requests that draw nothing. Chats are rendered. Errors: InvalidRequestError and kinds."""
    refuse_not_built(req)
    text, ids, image_data = plain(req.text), req.input_ids, req.image_data
    if is_chat(text):
        ids, images = rendered(context, text)
        text, image_data = None, with_images({"image_data": image_data}, images)["image_data"]
    elif hasattr(text, "ndim") or isinstance(text, (list, tuple)) and text and not any(type(p) is str for p in text):
        text, ids = None, text
    else:
        text, ids = _prepared(context, text, ids)
    return GenerateReqInput(text, NOTHING_DRAWN, ids, image_data, lora_path=req.lora_path, rid=req.rid)


def _prepared(context: EngineContext, text: Any, ids: Any) -> tuple[Any, Any]:
    """(texts, ids) as sentence-transformers tokenizes: with its prompt, in lower case, cut to its length. What is no
    text is left as it is. Errors: InvalidRequestError and its kinds."""
    pooling, tokenizer, several = pooling_of(context), context.parts.tokenizer, isinstance(text, (list, tuple))
    texts = list(text) if several else [text]
    if not all(isinstance(part, str) for part in texts):
        return text, ids
    texts, most = pooling.dressed(texts), longest_text(context)
    if most is None or tokenizer is None or ids is not None:
        return (texts if several else texts[0]), ids
    cut = [tokenizer.encode(part, max_length=most) for part in texts]
    return None, (cut if several else cut[0])


def longest_text(context: EngineContext) -> int | None:
    """How many tokens of a text count, as sentence-transformers cuts it; None: all do, and too many are refused. Pure.
    Errors: as `pooling_of`."""
    most, parts = pooling_of(context).max_length, context.parts
    if most is None or parts.spec.num_labels is not None:  # of a classifier only pairs are cut
        return None
    return min(most, parts.context_length)


def pair_ids(context: EngineContext, pairs: Any, most: int | None = None, side: str | None = None) -> list[list[int]]:
    """Token ids of (query, document) pairs, joined as the tokenizer joins two texts; the longer of both is cut first
    where they are too long, as sentence-transformers' CrossEncoder does: than `most`, too, on a `side`. Errors:
    InvalidRequestError."""
    parts = context.parts
    own = min(parts.context_length, pooling_of(context).max_length or parts.context_length)
    most = own if most is None else min(own, most)
    if parts.spec.num_labels is None:
        needed = "rerank needs a cross-encoder: a checkpoint of …ForSequenceClassification"
        raise InvalidRequestError(f"{needed}. For others use score or encode.")
    tokenizer, spec = parts.tokenizer, parts.spec
    if tokenizer is None:
        raise InvalidRequestError("rerank takes texts, which skip_tokenizer_init=True cannot; use encode with ids.")
    pairs = plain(pairs)
    if not isinstance(pairs, (list, tuple)):
        raise InvalidRequestError(f"prompt must be a list of [query, document], got {type(pairs).__name__}.")
    rows = []
    for i, pair in enumerate(pairs):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise InvalidRequestError(f"prompt[{i}] must be a pair [query, document] of texts, got {told(pair)}.")
        query, document = (tokenizer.check_text(text, f"prompt[{i}][{j}]", True) for j, text in enumerate(pair))
        encoded = tokenizer.encode_pair(query, document, most, side)
        kinds = encoded.type_ids if tokenizer.typed and spec.token_types > 1 else [0] * len(encoded.ids)
        rows.append([token + kind * spec.vocab_size for token, kind in zip(encoded.ids, kinds, strict=True)])
    return rows


def rerank_scores(outputs: Sequence[Output]) -> list[Output]:
    """The outputs with one number each where the model has one label. Pure."""
    return [o | {"embedding": o["embedding"][0]} if len(o["embedding"] or ()) == 1 else o for o in outputs]
