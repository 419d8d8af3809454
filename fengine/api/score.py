"""`score`: how likely each of a few label tokens comes next after query and item, or what a classifier says of them.

A language model is asked for the logprobs of the labels at the last prompt position, through `generate` with
max_new_tokens 0; a classifier for its head's outputs, through `encode`. Everything after that is float64 arithmetic on
the host, so a score has the same bits in any batch."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from fengine.api.arguments import takes
from fengine.api.encode import pair_ids, rerank_scores
from fengine.api.generate_input import GenerateReqInput, refuse_not_built
from fengine.api.io_struct import EncodeReqInput
from fengine.api.streams import OutputCollector
from fengine.api.types import EncodeOutput
from fengine.core.sampling_params import SamplingParams
from fengine.core.scalars import exact_float, exact_int, plain, told
from fengine.errors import AbortedError, InvalidRequestError


@dataclass
class ScoreReqInput:
    """The arguments of one `score` call, in SGLang's names."""

    query: Any = None  # text or token ids
    items: Any = None
    label_token_ids: Any = None
    apply_softmax: Any = False
    item_first: Any = False
    embed_override_token_id: Any = None
    query_embed_overrides: Any = None
    item_embed_overrides: Any = None
    return_pooled_hidden_states: Any = False
    score_extraction_token_id: Any = None
    temperature: Any = 1.0
    return_token_logprobs: Any = False
    stacked_query_item_embed_overrides: Any = None


class ScoreResult(list[list[float]]):
    """`result[i][j]`: item i, label j. A list, with the attributes of SGLang's result, too."""

    def __init__(
        self, scores: Sequence[list[float]] = (), prompt_tokens: int = 0, pooled_hidden_states: list[Any] | None = None,
        token_logprobs: list[list[float]] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(scores)
        self.prompt_tokens = prompt_tokens
        self.pooled_hidden_states = pooled_hidden_states  # one tensor [D] per item, in CPU memory
        self.token_logprobs = token_logprobs  # as scores: the logprobs they were made from

    @property
    def scores(self) -> list[list[float]]:
        return self


@dataclass(frozen=True, slots=True)
class Scoring:
    """A checked `score` call. `labels` has one list per prompt; None for a classifier, whose labels are its own."""

    req: ScoreReqInput
    prompts: list[Any]  # str, or lists of token ids
    labels: list[list[int]] | None
    temperature: float

    @classmethod
    def of(cls, req: ScoreReqInput, generates: bool, vocab_size: int) -> "Scoring":
        """Errors: InvalidRequestError, UnsupportedFeatureError."""
        refuse_not_built(req)
        for name in ("apply_softmax", "item_first", "return_pooled_hidden_states", "return_token_logprobs"):
            if not isinstance(getattr(req, name), bool):
                raise InvalidRequestError(f"{name} must be True or False, got {told(getattr(req, name))}.")
        temperature = _temperature(req.temperature, req.apply_softmax)
        if req.return_pooled_hidden_states and generates:
            why = "return_pooled_hidden_states is not supported for CausalLM models"
            raise InvalidRequestError(f"{why}; classifiers have them.")
        if req.return_token_logprobs and not generates:
            raise InvalidRequestError("return_token_logprobs needs a CausalLM model: a classifier scores no tokens.")
        labels = plain(req.label_token_ids)
        if labels is None and generates:
            raise InvalidRequestError("label_token_ids is required for generation (CausalLM) models.")
        prompts = join(plain(req.query), plain(req.items), req.item_first)
        return cls(req, prompts, check_labels(labels, len(prompts), vocab_size) if generates else None, temperature)

    def input(self) -> GenerateReqInput | EncodeReqInput:
        """What is asked. A language model gets checked sampling parameters: the engine's preferred ones are not mixed
        in."""
        if self.labels is None:
            return EncodeReqInput(self.prompts)
        text, params = isinstance(self.prompts[0], str), SamplingParams(max_new_tokens=0, top_k=1)
        req = GenerateReqInput(self.prompts if text else None, params, None if text else self.prompts)
        req.return_logprob, req.token_ids_logprob = True, self.labels
        return req

    def asked(self, engine: Any, loop: asyncio.AbstractEventLoop | None = None) -> OutputCollector:
        return engine.submit(self.input(), loop, self.req.return_pooled_hidden_states)

    def result(self, outputs: Any) -> ScoreResult:
        """The result, from what the call returned: behind a classifier's heads hidden states, where they are wanted.
        Pure. Errors: AbortedError."""
        if any((one["meta_info"].get("finish_reason") or {}).get("type") == "abort" for one in outputs):
            raise AbortedError("a request of this score call was aborted, so its scores are not known; call it again.")
        outputs, hidden = outputs[: len(self.prompts)], outputs[len(self.prompts) :]
        rows = [self._row(output) for output in outputs]
        tokens = sum(output["meta_info"]["prompt_tokens"] for output in outputs)
        pooled = [torch.tensor(output["embedding"]) for output in hidden]
        kept = rows if self.req.return_token_logprobs else None
        return ScoreResult([self._score(row) for row in rows], tokens, pooled or None, kept)

    def _row(self, output: Any) -> list[float]:
        """The labels' logits, or logprobs."""
        if self.labels is None:
            return output["embedding"]
        return [entry[0] for entry in output["meta_info"]["output_token_ids_logprobs"][0]]

    def _score(self, row: list[float]) -> list[float]:
        if not self.req.apply_softmax:
            return row if self.labels is None else [math.exp(value) for value in row]
        top = max(row)
        powers = [math.exp((value - top) / self.temperature) for value in row]
        total = math.fsum(powers)
        return [power / total for power in powers]


def rerank(engine: Any, prompt: list[list[str]]) -> list[EncodeOutput]:
    """[{"embedding": score, "meta_info"}] of [[query, document], …] by a …ForSequenceClassification. A model of several
    labels gives a list of scores instead of one."""
    pairs = pair_ids(engine._context, prompt)
    outputs: Any = pairs and engine.submit(EncodeReqInput(pairs)).wait()
    return cast(list[EncodeOutput], rerank_scores(outputs or []))


@takes(ScoreReqInput)
def score(engine: Any, *args: Any, **kwargs: Any) -> ScoreResult:
    """For each item, each label's probability right after query + item; a list of lists, with more attributes.

    With `apply_softmax` the labels' probabilities (at `temperature`) add up to 1. `label_token_ids` is one list for
    all items or one for each. A classifier gives its labels' logits, or their softmax; it looks at no tokens.
    Errors: AbortedError if one of its requests is aborted."""
    scoring = _scoring(engine, args, kwargs)
    return scoring.result(scoring.prompts and scoring.asked(engine).wait())


@takes(ScoreReqInput)
async def async_score(engine: Any, *args: Any, **kwargs: Any) -> ScoreResult:
    """As `score`. Works in any event loop."""
    scoring, loop = _scoring(engine, args, kwargs), asyncio.get_running_loop()
    return scoring.result(scoring.prompts and await scoring.asked(engine, loop).wait_async())


def _scoring(engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scoring:
    spec = engine._parts.spec
    return Scoring.of(ScoreReqInput(*args, **kwargs), spec.num_labels is None, spec.vocab_size)


def _temperature(value: Any, softmax: bool) -> float:
    number = exact_float(value)
    if number is None or not (math.isfinite(number) and number > 0):
        raise InvalidRequestError(f"temperature must be finite and greater than zero, got {told(value)}.")
    if number != 1 and not softmax:
        raise InvalidRequestError(f"temperature requires apply_softmax=True (got {value!r} without).")
    return number


def join(query: Any, items: Any, item_first: bool) -> list[Any]:
    """One prompt per item: query + item, or item + query; all of text or all of token ids. Pure. Errors:
    InvalidRequestError."""
    if items is None:
        raise InvalidRequestError("items must be provided")
    items = [items] if isinstance(items, str) else items
    if not isinstance(items, (list, tuple)):
        raise InvalidRequestError(f"items must be a string or a list, got {type(items).__name__}.")
    if not items:
        return []
    text = isinstance(query, str) and all(isinstance(item, str) for item in items)
    if not text and not all(isinstance(part, (list, tuple)) for part in (query, *items)):
        kinds = ", ".join(sorted({type(item).__name__ for item in items}))
        raise InvalidRequestError(
            "Invalid combination of query/items types for score_request. Give text for both or token ids for both, "
            f"got a query of {type(query).__name__} and items of {kinds}."
        )
    pairs: Any = ((item, query) if item_first else (query, item) for item in items)
    return [first + second if text else [*first, *second] for first, second in pairs]


def check_labels(labels: Any, count: int, vocab_size: int) -> list[list[int]]:
    """One list of label ids per prompt, from one list for all or one each. Errors: InvalidRequestError."""
    if not isinstance(labels, (list, tuple)) or not labels:
        raise InvalidRequestError(f"label_token_ids must be a nonempty list, got {told(labels)}.")
    if not any(isinstance(entry, (list, tuple)) for entry in labels):
        return [_check_row(labels, vocab_size)] * count
    if len(labels) != count or not all(isinstance(entry, (list, tuple)) and entry for entry in labels):
        needed = "label_token_ids must be a list of token ids or one list per item, none empty"
        raise InvalidRequestError(f"{needed}, got {len(labels)} entries for {count} items.")
    return [_check_row(row, vocab_size) for row in labels]


def _check_row(row: Sequence[Any], vocab_size: int) -> list[int]:
    ids = [exact_int(label) for label in row]
    for label, given in zip(ids, row, strict=True):
        if label is None or label < 0:
            raise InvalidRequestError(f"label_token_ids must be nonnegative integers, got {told(given)}.")
        if label >= vocab_size:
            raise InvalidRequestError(f"Token ID {label} is out of vocabulary (vocab size: {vocab_size})")
    if len(set(ids)) < len(ids):
        raise InvalidRequestError(f"label_token_ids must not contain duplicate tokens, got {list(row)}.")
    return [label for label in ids if label is not None]
