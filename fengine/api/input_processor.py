"""From `GenerateReqInput` to requests: normalised, tokenized, checked against model and settings; all or none. Nothing
is queued here. Every error names value, limit and remedy; those of several prompts are told together."""

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from fengine.api import call_options
from fengine.api.context import EngineContext
from fengine.api.generate_input import GenerateReqInput, routed_rank, split_batch
from fengine.api.sessions import Turn
from fengine.core.request import Request, SamplingParams, derive_seed
from fengine.core.sampling_params import GRAMMARS
from fengine.core.scalars import check_ids, plain
from fengine.engine.parts import Parts
from fengine.errors import CapacityError, ContextLengthError, FengineError, InvalidRequestError
from fengine.structured_output.backend import Source
from fengine.tokenizer.stop_regex import compile_patterns

PLAIN = frozenset((int, float, bool, str, type(None)))  # equal values of one of these types mean the same


def process_input(
    context: EngineContext, req: GenerateReqInput, pooled: dict[str, Any] | None = None
) -> tuple[list[Request], dict[str, Turn], bool]:
    """The requests of a call, prompt-major; the turns of sessions among them, by rid; and whether it was a single
    prompt with a single sample.

    Every prompt is checked before any is queued; all that fail are reported with their index. `pooled`: they are for
    embeddings, and these are their further parameters. Modifies: `context.indices`.
    Errors: InvalidRequestError and its kinds, UnsupportedFeatureError."""
    prompts, single = split_batch(req, {} if pooled else context.preferred)
    indices = range(len(prompts)) if pooled else list(islice(context.indices, len(prompts)))
    requests: list[Request] = []
    turns: dict[str, Turn] = {}
    errors: list[tuple[int, FengineError]] = []
    given = plain(req.sampling_params)  # without those that are preferred
    known: dict[Hashable, SamplingParams] = {}  # most calls give all prompts the same ones
    for i, (index, prompt) in enumerate(zip(indices, prompts, strict=True)):
        try:
            if (key := _key(prompt.sampling_params)) not in known:
                known[key] = SamplingParams.of(prompt.sampling_params, context.parts.spec.vocab_size)
                if known[key].stop_regex:
                    compile_patterns(known[key].stop_regex)
            own = given[i] if isinstance(given, list) else given
            explicit = isinstance(own, SamplingParams) or "max_new_tokens" in (own or {})
            requests += _check(context, prompt, known[key], index, turns, explicit)
        except FengineError as error:
            errors.append((i, error))
    if errors:
        raise _together(errors, len(prompts))
    rank = routed_rank(req.routed_dp_rank, req.data_parallel_rank, context.parts.config.parallel.dp_size)
    for i, request in enumerate(requests):
        request.params = replace(request.params, **pooled) if pooled else request.params
        request.dp_rank = rank
        request.call_rid = req.rid[i * len(prompts) // len(requests)] if isinstance(req.rid, list) else req.rid
    return requests, turns, single


def _together(errors: Sequence[tuple[int, FengineError]], count: int) -> FengineError:
    """One error for those of several prompts, of their common kind."""
    if count == 1:
        return errors[0][1]
    kinds = {type(error) for _, error in errors}
    kind = kinds.pop() if len(kinds) == 1 else InvalidRequestError
    return kind("\n".join([f"prompt {i}: {error}" for i, error in errors[:20]] + ["..."] * (len(errors) > 20)))


def _key(sampling: Any) -> Hashable:
    """Equal only for sampling parameters that come to the same. Pure."""
    if type(sampling) is dict and PLAIN.issuperset(map(type, sampling.values())):
        return tuple((name, type(value), value) for name, value in sampling.items())
    return id(sampling)


def _check(
    context: EngineContext, prompt: GenerateReqInput, params: SamplingParams, index: int, turns: dict[str, Turn],
    explicit: bool,
) -> list[Request]:  # fmt: skip
    """The requests of one prompt, one for each sample. `params` are `prompt.sampling_params`, checked. `explicit`: the
    call says how many tokens. Modifies: `turns`. Errors: InvalidRequestError and its kinds."""
    parts = context.parts
    _refuse_without_text(parts, params)
    ids, spans, rope = prompt_ids(parts, prompt, context.args.allow_auto_truncate), (), None
    if prompt.session_params is not None or prompt.image_data is not None or parts.images is not None:
        ids, spans, rope = call_options.prompt_in_place(context, prompt, ids, turns)
    ids = _fitting(context, ids, params.max_new_tokens == 0, cut=not spans)
    most = _room(context, params, len(ids), explicit)
    asked = [_asked(context, prompt, params, len(ids)) for _ in prompt.rid]
    if asked[0].top_logprobs or asked[0].logprob_ids:
        call_options.check_amount(asked[0], len(asked), len(ids), most)
    early_ids = params.end_ids(parts.eos_ids) if params.min_new_tokens and params.ignore_eos else frozenset[int]()
    queued = call_options.queue_options(parts, context.args, prompt)
    return [
        Request(
            rid=rid,
            prompt_len=len(ids),
            token_ids=list(ids) if sample else ids,
            params=own,
            seed=_seed(parts.config.random_seed, params, index, sample),
            max_new_tokens=most,
            stop_ids=params.stop_ids(parts.eos_ids),
            early_ids=early_ids,
            images=spans,
            rope=rope,
            **queued,
        )
        for sample, (rid, own) in enumerate(zip(prompt.rid, asked, strict=True))
    ]


def _asked(context: EngineContext, prompt: GenerateReqInput, params: SamplingParams, count: int) -> SamplingParams:
    """`params` with what the call's other arguments ask for, a request's own copy. Errors: InvalidRequestError."""
    asked: dict[str, Any] = {}
    options = (prompt.logprob_start_len, prompt.top_logprobs_num, prompt.token_ids_logprob)
    if prompt.return_logprob is not False or any(value is not None for value in options):
        asked |= call_options.logprobs_asked(prompt, count, context.parts.spec.vocab_size)
    if prompt.custom_logit_processor is not None:
        asked |= call_options.processor_asked(context, prompt.custom_logit_processor, params)
    if params.grammar_key is not None:
        asked["grammar"] = call_options.grammar_asked(context, params, Source(*params.grammar_key))
    if (hidden := call_options.hidden_asked(context.args, prompt.return_hidden_states)) is not None:
        asked["hidden"] = hidden
    return replace(params, **asked) if asked else params


def _seed(engine_seed: int, params: SamplingParams, index: int, sample: int) -> int:
    """A given seed is the first sample's own; whatever is not given derives, so no two samples draw alike. Pure."""
    if params.sampling_seed is not None:
        return derive_seed(params.sampling_seed, sample) if sample else params.sampling_seed
    return derive_seed(engine_seed, index) if params.n == 1 else derive_seed(engine_seed, index, sample)


def prompt_ids(parts: Parts, prompt: GenerateReqInput, cut: bool) -> list[int]:
    """The prompt as ids within the width of the logits; `cut`: they may be too many."""
    vocab_size, tokenizer = parts.spec.input_ids, parts.tokenizer
    if prompt.input_ids is not None:
        return check_ids(prompt.input_ids, vocab_size)
    if tokenizer is None:
        why = "The engine initialized with skip_tokenizer_init=True cannot accept text prompts"
        raise InvalidRequestError(f"{why}; give input_ids.")
    ids = tokenizer.ids_of([tokenizer.check_text(prompt.text, cut=cut)], add_special_tokens=True)[0]
    if not ids:
        raise InvalidRequestError("the prompt is empty and this model has no bos token to start from.")
    return check_ids(ids, vocab_size)


def _fitting(context: EngineContext, ids: list[int], read_only: bool, cut: bool = True) -> list[int]:
    """The prompt if it fits the context; with allow_auto_truncate, as much of its beginning as fits it and the pool,
    where it may be `cut`: not where images stand.
    One that is `read_only`, for logprobs or a vector, may fill the context: harnesses score whole windows."""
    most, pool, count = context.parts.context_length, context.parts.pool_tokens, len(ids)
    if count < min(most + read_only, pool):
        return ids
    if context.args.allow_auto_truncate and cut:
        keep = min(most + read_only, pool) - 1
        warnings.warn(f"the input ({count} tokens) was truncated to its first {keep} tokens", stacklevel=2)
        return ids[:keep]
    if count >= most + read_only:
        answer = "" if read_only else ", of which one is needed for the answer"
        raise ContextLengthError(
            f"The input ({count} tokens) is longer than the model's context length ({most} tokens){answer}; shorten "
            "the prompt or raise context_length."
        )
    return ids


def _room(context: EngineContext, params: SamplingParams, count: int, explicit: bool) -> int:
    """How many tokens may be drawn behind `count`. An explicit demand must fit the context; the default is clamped to
    it, and all to what the pool has room for."""
    parts, args = context.parts, context.args
    room = parts.context_length - count
    wanted = room if params.max_new_tokens is None else params.max_new_tokens
    if wanted > room and explicit and not args.allow_auto_truncate:
        raise ContextLengthError(
            f"Requested token count exceeds the model's maximum context length of {parts.context_length} tokens. You "
            f"requested a total of {count + wanted} tokens: {count} of the input and {wanted} for the completion. "
            "Lower max_new_tokens."
        )
    if count >= parts.pool_tokens:
        raise CapacityError(
            f"Input length ({count} tokens) exceeds the maximum allowed length ({parts.pool_tokens - 1} tokens). Use a "
            "shorter input, raise max_total_tokens, or enable --allow-auto-truncate (allow_auto_truncate=True)."
        )
    most = min(wanted, room, parts.pool_tokens - count)
    if params.min_new_tokens > most:
        raise InvalidRequestError(
            f"min_new_tokens must be in [0, max_new_tokens({most})], got {params.min_new_tokens}: of "
            f"{parts.context_length} tokens of context and {parts.pool_tokens} of cache the prompt takes {count}."
        )
    return most


def _refuse_without_text(parts: Parts, params: SamplingParams) -> None:
    if parts.tokenizer is not None:
        return
    for name in ("stop", "stop_regex", "min_new_tokens", *GRAMMARS):
        if getattr(params, name):
            why = f"{name} is unavailable when skip_tokenizer_init=True: it needs the tokenizer"
            raise InvalidRequestError(f"{why}. Leave {name} out.")
