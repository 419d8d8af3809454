"""What a `generate` call asks for, checked: arguments -> items -> requests, all or none. Nothing is queued here."""

import uuid
from dataclasses import dataclass
from typing import Any

from fengine.build import Parts
from fengine.errors import (
    CapacityError,
    ContextLengthError,
    FengineError,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from fengine.request import Request, SamplingParams, derive_seed, exact_int

# Arguments of SGLang's generate that are not built, with the values that mean "off".
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "image_data": (None,),
    "audio_data": (None,),
    "video_data": (None,),
    "mm_hashes": (None,),
    "mm_content_hashes": (None,),
    "logprob_start_len": (None, -1),
    "top_logprobs_num": (None, 0),
    "token_ids_logprob": (None, []),
    "lora_path": (None,),
    "custom_logit_processor": (None,),
    "require_reasoning": (False, None),
    "return_hidden_states": (False, None),
    "return_routed_experts": (False, None),
    "bootstrap_host": (None,),
    "bootstrap_port": (None,),
    "bootstrap_room": (None,),
    "routed_dp_rank": (None, 0),
    "disagg_prefill_dp_rank": (None, 0),
    "data_parallel_rank": (None, 0),
    "kv_hints": (None,),
    "session_params": (None,),
    "session_id": (None,),
    "priority": (None,),
    "cache_salt": (None,),
}


def check_ids(ids: Any, vocab_size: int) -> list[int]:
    """Token ids as a list of int, each within the width of the logits. Errors: InvalidRequestError."""
    if hasattr(ids, "tolist"):
        try:
            ids = ids.tolist()
        except RuntimeError as error:  # a tensor of torch that is sparse, or holds no data
            raise InvalidRequestError(f"input_ids must be readable as a list of token ids: {error}") from error
    if not isinstance(ids, (list, tuple)):
        raise InvalidRequestError(f"input_ids must be a list of token ids, got {type(ids).__name__}.")
    if not ids:
        raise InvalidRequestError("input_ids cannot be empty.")
    if set(map(type, ids)) != {int}:
        exact = [exact_int(value) for value in ids]
        if None in exact:
            i = exact.index(None)
            kind = type(ids[i]).__name__
            raise InvalidRequestError(f"input_ids[{i}] must be an integer, got {ids[i]!r:.80} ({kind}).")
        ids = exact
    if min(ids) < 0 or max(ids) >= vocab_size:
        i, bad = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        raise InvalidRequestError(f"input_ids[{i}] is {bad}; token ids must be in [0, {vocab_size - 1}].")
    return list(ids)


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a call, before it is checked."""

    prompt: Any
    input_ids: Any
    sampling: Any
    rid: str
    return_logprob: bool


def _refuse(arguments: dict[str, Any]) -> None:
    bad = [
        f"{name}={arguments[name]!r}"
        for name, off in NOT_BUILT.items()
        if not any(arguments[name] is o or (type(arguments[name]) is type(o) and arguments[name] == o) for o in off)
    ]
    if bad:
        raise UnsupportedFeatureError(f"not built: {', '.join(bad)}. Leave these arguments out.")


def _is_batch_of_ids(ids: Any) -> bool:
    if hasattr(ids, "ndim"):
        return ids.ndim == 2
    return (
        isinstance(ids, (list, tuple))
        and bool(ids)
        and (isinstance(ids[0], (list, tuple)) or hasattr(ids[0], "tolist"))
    )


def split(arguments: dict[str, Any]) -> tuple[list[Item], bool]:
    """The prompts of a call and whether it was a single one. Errors: InvalidRequestError, UnsupportedFeatureError."""
    _refuse(arguments)
    prompt, ids = arguments["prompt"], arguments["input_ids"]
    if prompt is None and ids is None:
        raise InvalidRequestError("Either text, input_ids or input_embeds should be provided.")
    if prompt is not None and ids is not None:
        raise InvalidRequestError("prompt and input_ids cannot both be given: they would be two prompts.")
    if prompt is not None and not isinstance(prompt, (str, list, tuple)):
        fix = " Decode it first." if isinstance(prompt, bytes) else ""
        raise InvalidRequestError(f"prompt must be a string or a list of strings, got {type(prompt).__name__}.{fix}")
    single = isinstance(prompt, str) if prompt is not None else not _is_batch_of_ids(ids)
    given: Any = ids if prompt is None else prompt
    values = [given] if single else list(given)
    count = len(values)
    sampling = _spread("sampling_params", arguments["sampling_params"], count, single)
    logprob = _spread("return_logprob", arguments["return_logprob"], count, single)
    rids = _rids(arguments["rid"], count, single)
    for flag in logprob:
        if not isinstance(flag, bool):
            raise InvalidRequestError(f"return_logprob must be True or False, got {flag!r}.")
    text = prompt is not None
    return [
        Item(v if text else None, None if text else v, s, r, lp)
        for v, s, r, lp in zip(values, sampling, rids, logprob, strict=True)
    ], single


def _spread(name: str, value: Any, count: int, single: bool) -> list[Any]:
    """One value for all prompts, or a list with one for each."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(f"{name} has {len(value)} entries for {count} prompt{'s' * (count != 1)}.")
    return value


def _rids(rid: Any, count: int, single: bool) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str):
        return [rid] if single else [f"{rid}_{i}" for i in range(count)]
    rids = _spread("rid", rid, count, single) if isinstance(rid, list) else []
    if not isinstance(rid, list) or any(not isinstance(r, str) for r in rids):
        raise InvalidRequestError(f"rid must be a string or a list of strings, got {rid!r}.")
    twice = sorted({r for r in rids if rids.count(r) > 1}) if len(set(rids)) != len(rids) else []
    if twice:
        raise InvalidRequestError(f"Duplicate request IDs detected within the request: {twice}")
    return rids


def _prompt_ids(parts: Parts, item: Item) -> list[int]:
    """The prompt as ids within the width of the logits."""
    vocab_size, tokenizer = parts.spec.vocab_size, parts.tokenizer
    if item.input_ids is not None:
        return check_ids(item.input_ids, vocab_size)
    if tokenizer is None:
        raise InvalidRequestError(
            "The engine initialized with skip_tokenizer_init=True cannot accept text prompts; give input_ids."
        )
    ids = tokenizer.encode(item.prompt)
    if not ids:
        raise InvalidRequestError("the prompt is empty and this model has no bos token to start from.")
    return check_ids(ids, vocab_size)


def admit(parts: Parts, item: Item, index: int) -> Request:
    """A checked request. Errors: InvalidRequestError and its kinds, naming value, limit and remedy."""
    context = parts.context_length
    params = SamplingParams.of(item.sampling, parts.spec.vocab_size)
    ids = _prompt_ids(parts, item)
    if params.stop and parts.tokenizer is None:
        raise InvalidRequestError("stop is unavailable when skip_tokenizer_init=True: there is no text to search.")
    count = len(ids)
    if count >= context:
        raise ContextLengthError(
            f"The input ({count} tokens) is longer than the model's context length ({context} tokens), of which one is "
            "needed for the answer; shorten the prompt or raise context_length."
        )
    room = context - count
    wanted = room if params.max_new_tokens is None else params.max_new_tokens
    explicit = isinstance(item.sampling, SamplingParams) or "max_new_tokens" in (item.sampling or {})
    if wanted > room and explicit:
        raise ContextLengthError(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a "
            f"total of {count + wanted} tokens: {count} of the input and {wanted} for the completion. "
            "Lower max_new_tokens."
        )
    if count >= parts.pool_tokens:
        raise CapacityError(
            f"Input length ({count} tokens) exceeds the maximum allowed length ({parts.pool_tokens - 1} tokens). "
            "Use a shorter input or raise max_total_tokens."
        )
    stop_ids = frozenset() if params.ignore_eos else parts.eos_ids | frozenset(params.stop_token_ids)
    seed = params.sampling_seed
    return Request(
        rid=item.rid,
        prompt_len=count,
        token_ids=ids,
        params=params,
        seed=derive_seed(parts.config.random_seed, index) if seed is None else seed,
        max_new_tokens=min(wanted, room, parts.pool_tokens - count),
        stop_ids=stop_ids,
    )


def admit_all(parts: Parts, items: list[Item], first_index: int) -> list[Request]:
    """Checks every prompt before any is queued and reports all that fail, with their index."""
    requests, errors = [], []
    for i, item in enumerate(items):
        try:
            requests.append(admit(parts, item, first_index + i))
        except FengineError as error:
            errors.append((i, error))
    if errors:
        if len(items) == 1:
            raise errors[0][1]
        kinds = {type(error) for _, error in errors}
        kind = kinds.pop() if len(kinds) == 1 else InvalidRequestError
        shown = [f"prompt {i}: {error}" for i, error in errors[:20]] + ["..."] * (len(errors) > 20)
        raise kind("\n".join(shown))
    return requests
