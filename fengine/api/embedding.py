"""`encode` and `rerank`: a prompt's pooled hidden state, or what the checkpoint's head makes of it.

A pooled request is an ordinary one that draws nothing: it shares batches and cached prefixes with its neighbours, and
its vector has the same bits in any of them.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fengine.api.admission import Admitted, admit_all
from fengine.api.arguments import split
from fengine.api.calls import Call
from fengine.api.options import Door
from fengine.api.results import Output
from fengine.core.record import Record
from fengine.engine.output_processor import Ticket
from fengine.errors import InvalidRequestError, UnsupportedFeatureError
from fengine.worker.pooling import Pooling, check_dimensions, finish_vector

NOTHING_DRAWN = {"max_new_tokens": 0, "temperature": 0.0}
OF_DRAWING = ("completion_tokens", "reasoning_tokens", "first_token_latency", "decode_throughput")  # keys of meta_info


class EncodeCall:
    """One `encode` call under way: a `Call`, and how its tickets become embeddings."""

    def __init__(
        self, door: Door, arguments: Mapping[str, Any], loop: asyncio.AbstractEventLoop | None, head: bool = True
    ) -> None:
        """`arguments` are those of `Engine.encode`. A classifier's head is applied, but not with `head=False`.

        Errors: those of `admission.admit_all`; InvalidRequestError if the model is none for embeddings.
        """
        self.pooling = pooling_of(door)
        self.classifies = door.parts.spec.num_labels is not None
        self.dimensions = self._dimensions(door, arguments.get("dimensions"))
        admitted, single = admit_pooled(door, arguments, self._pool(), head and self.classifies)
        self.call = Call(door, admitted, stream=False, single=single, loop=loop)

    def _pool(self) -> str:
        return "last" if self.classifies else self.pooling.pool  # transformers' classifiers look at the last token

    def _dimensions(self, door: Door, dimensions: Any) -> int | None:
        if dimensions is not None and self.classifies:
            raise InvalidRequestError("dimensions is for embedding models; a classifier gives one number per label.")
        return check_dimensions(dimensions, self.pooling, door.parts.spec.hidden_size)

    def wait_sync(self) -> Output | list[Output]:
        return self._results(self.call.wait_sync())

    async def wait_async(self) -> Output | list[Output]:
        return self._results(await self.call.wait_async())

    def _results(self, outputs: Output | list[Output]) -> Output | list[Output]:
        found = [outputs] if isinstance(outputs, dict) else outputs
        results = [self._result(output, ticket) for output, ticket in zip(found, self.call.tickets, strict=True)]
        return results[0] if isinstance(outputs, dict) else results

    def _result(self, output: Output, ticket: Ticket) -> Output:
        record = ticket.request.record
        vector = None if record is None else record.embedding
        if vector is None:  # it was aborted, as its finish reason tells
            embedding = None
        else:
            embedding = vector.tolist() if self.classifies else finish_vector(vector, self.pooling, self.dimensions)
        meta = {key: value for key, value in output["meta_info"].items() if key not in OF_DRAWING}
        return {"embedding": embedding, "meta_info": meta}


def pooling_of(door: Door) -> Pooling:
    """Errors: InvalidRequestError if the model generates."""
    if door.parts.pooling is None:
        raise InvalidRequestError(
            "This model does not appear to be an embedding model by default. Please add `--is-embedding` when "
            "launching the server or try another model: Engine(..., is_embedding=True) reads it as one."
        )
    return door.parts.pooling


def admit_pooled(door: Door, arguments: Mapping[str, Any], pool: str, head: bool) -> tuple[list[Admitted], bool]:
    """The requests of an `encode` call, and whether it had a single prompt: text or token ids."""
    for name in ("embed_override_token_id", "embed_overrides"):
        if arguments.get(name) is not None:
            raise UnsupportedFeatureError(f"not built: {name}. Leave it out.")
    prompt = arguments["prompt"]
    ids = _are_ids(prompt)
    asked: dict[str, Any] = defaultdict(lambda: None, arguments)
    asked |= {"prompt": None if ids else prompt, "input_ids": prompt if ids else None}
    asked |= {"sampling_params": NOTHING_DRAWN, "return_logprob": False, "stream": False}
    items, single = split(asked, {})
    admitted = admit_all(replace(door, preferred={}), items, 0)
    for one in admitted:
        one.request.params, one.request.record = replace(one.request.params, pool=pool, head=head), Record()
    return admitted, single


def _are_ids(prompt: Any) -> bool:
    """Whether a prompt is token ids, or a list of such, rather than text or a list of texts."""
    if hasattr(prompt, "ndim"):
        return True
    return isinstance(prompt, (list, tuple)) and bool(prompt) and not any(isinstance(part, str) for part in prompt)


def pair_ids(door: Door, pairs: Any) -> list[list[int]]:
    """Token ids of (query, document) pairs, joined as the tokenizer joins two texts. Errors: InvalidRequestError."""
    if pooling_of(door) and door.parts.spec.num_labels is None:
        raise InvalidRequestError(
            "rerank needs a cross-encoder: a checkpoint of …ForSequenceClassification. For others use score or encode."
        )
    tokenizer = door.parts.tokenizer
    if tokenizer is None:
        raise InvalidRequestError("rerank takes texts, which skip_tokenizer_init=True cannot; use encode with ids.")
    if not isinstance(pairs, (list, tuple)):
        raise InvalidRequestError(f"prompt must be a list of [query, document], got {type(pairs).__name__}.")
    rows = []
    for i, pair in enumerate(pairs):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise InvalidRequestError(f"prompt[{i}] must be a pair [query, document] of texts, got {pair!r:.80}.")
        query, document = (tokenizer.check_text(text, f"prompt[{i}][{j}]") for j, text in enumerate(pair))
        rows.append(tokenizer.backend.encode(query, document, add_special_tokens=True).ids)
    return rows


def rerank_scores(outputs: Sequence[Output]) -> list[Output]:
    """The outputs with one number each where the model has one label. Pure."""
    return [o | {"embedding": o["embedding"][0]} if len(o["embedding"] or ()) == 1 else o for o in outputs]
