"""The arguments of one `generate` call, taken apart: one `Item` for each prompt. Looks at shapes, not at the model."""

import uuid
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fengine.core.request import SamplingParams
from fengine.core.sampling_params import MAX_SAMPLES
from fengine.core.scalars import exact_int
from fengine.errors import InvalidRequestError, UnsupportedFeatureError

# Arguments of SGLang's generate that are not built, with the reason. Off: None, False, 0, empty, or a list of None.
NOT_BUILT: dict[str, str] = {
    "image_data": "images",
    "audio_data": "audio",
    "video_data": "video",
    "mm_hashes": "images, audio and video",
    "mm_content_hashes": "images, audio and video",
    "require_reasoning": "grammars",
    "return_routed_experts": "mixtures of experts",
    "routed_experts_start_len": "mixtures of experts",
    "bootstrap_host": "disaggregation",
    "bootstrap_port": "disaggregation",
    "bootstrap_room": "disaggregation",
    "disagg_prefill_dp_rank": "disaggregation",
    "kv_hints": "hints for the KV cache",
    "external_trace_header": "tracing",
}
MAX_REQUESTS = 1 << 20  # of one call
PER_PROMPT_LOGPROBS = ("return_logprob", "logprob_start_len", "top_logprobs_num")


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a call, before it is checked against the model. `rids` has one entry for each of its samples."""

    prompt: Any
    input_ids: Any
    sampling: Any
    rids: tuple[str, ...]
    return_logprob: Any = False
    logprob_start: Any = None
    top_logprobs: Any = None
    logprob_ids: Any = None
    hidden: Any = False
    processor: Any = None
    session: Any = None
    priority: Any = None
    cache_salt: Any = None
    lora: Any = None


def split(arguments: Mapping[str, Any], preferred: Mapping[str, Any]) -> tuple[list[Item], bool]:
    """The prompts of a call, and whether it was a single one with a single sample.

    `preferred` are sampling parameters that hold where the call gives none. Scalars are for all prompts, lists have one
    entry for each. Errors: InvalidRequestError, UnsupportedFeatureError.
    """
    _refuse(arguments)
    values, text, single = _prompts(arguments["prompt"], arguments["input_ids"])
    count = len(values)

    def spread(name: str) -> list[Any]:
        return per_prompt(name, arguments[name], count)

    sampling = _with_preferred(spread("sampling_params"), preferred)
    samples = _samples(sampling)
    if count * samples > MAX_REQUESTS:
        raise InvalidRequestError(f"a call may have at most {MAX_REQUESTS} results, got {count} prompts × n={samples}.")
    if samples > 1:
        _refuse_lists(arguments)
    columns = {
        "sampling": sampling,
        "rids": _rids(arguments["rid"], count, samples, single),
        "return_logprob": spread("return_logprob"),
        "logprob_start": spread("logprob_start_len"),
        "top_logprobs": spread("top_logprobs_num"),
        "logprob_ids": _id_lists(arguments["token_ids_logprob"], count),
        "hidden": spread("return_hidden_states"),
        "processor": spread("custom_logit_processor"),
        "session": _sessions(arguments, count, samples),
        "priority": spread("priority"),
        "cache_salt": spread("cache_salt"),
        "lora": spread("lora_path"),
    }
    rows = zip(*columns.values(), strict=True)
    items = [
        Item(value if text else None, None if text else value, **dict(zip(columns, row, strict=True)))
        for value, row in zip(values, rows, strict=True)
    ]
    return items, single and samples == 1


def _refuse(arguments: Mapping[str, Any]) -> None:
    bad = [name for name in NOT_BUILT if not _off(arguments[name])]
    if bad:
        shown = ", ".join(f"{name}={arguments[name]!r:.80} ({NOT_BUILT[name]})" for name in bad)
        raise UnsupportedFeatureError(f"not built: {shown}. Leave these arguments out.")
    if not isinstance(arguments["stream"], bool):
        raise InvalidRequestError(f"stream must be True or False, got {arguments['stream']!r:.80}.")
    _check_rank(arguments)


def _off(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(item is None for item in value)
    return value is None or value is False or (type(value) is int and value == 0)


def _check_rank(arguments: Mapping[str, Any]) -> None:
    """There is one replica, of rank 0."""
    rank = arguments["routed_dp_rank"]
    if arguments["data_parallel_rank"] is not None:
        warnings.warn("data_parallel_rank is deprecated; use routed_dp_rank", DeprecationWarning, stacklevel=6)
        rank = arguments["data_parallel_rank"] if rank is None else rank
    if rank is not None and exact_int(rank) != 0:
        raise InvalidRequestError(f"routed_dp_rank={rank!r:.80} out of range [0, 1)")


def _prompts(prompt: Any, ids: Any) -> tuple[list[Any], bool, bool]:
    """(one value for each prompt, whether they are texts, whether it is a single one)."""
    if prompt is None and ids is None:
        raise InvalidRequestError("Either text, input_ids or input_embeds should be provided.")
    if prompt is not None and ids is not None:
        raise InvalidRequestError("prompt and input_ids cannot both be given: they would be two prompts.")
    if prompt is None:
        several: Any = ids if _is_batch_of_ids(ids) else None
        return ([ids], False, True) if several is None else (list(several), False, False)
    if isinstance(prompt, str):
        return [prompt], True, True
    if not isinstance(prompt, (list, tuple)):
        fix = " Decode it first." if isinstance(prompt, bytes) else ""
        raise InvalidRequestError(f"prompt must be a string or a list of strings, got {type(prompt).__name__}.{fix}")
    return list(prompt), True, False


def _is_batch_of_ids(ids: Any) -> bool:
    if hasattr(ids, "ndim"):
        return ids.ndim == 2
    return (
        isinstance(ids, (list, tuple))
        and bool(ids)
        and (isinstance(ids[0], (list, tuple)) or hasattr(ids[0], "ndim") and ids[0].ndim > 0)
    )


def per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """One value for all prompts, or a list with one for each. Errors: InvalidRequestError."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(f"{name} has {len(value)} entries for {count} prompt{'s' * (count != 1)}.")
    return value


def _id_lists(value: Any, count: int) -> list[Any]:
    """`token_ids_logprob`: ids for all prompts, or a list with ids (or None) for each."""
    return per_prompt("token_ids_logprob", value, count) if _is_nested(value) else [value] * count


def _is_nested(value: Any) -> bool:
    return isinstance(value, list) and any(
        isinstance(item, (list, tuple)) or getattr(item, "ndim", 0) > 0 for item in value
    )


def _with_preferred(sampling: list[Any], preferred: Mapping[str, Any]) -> list[Any]:
    """`preferred` under each of them; one that many prompts share stays one, so that it is checked once."""
    if not preferred:
        return sampling
    merged = {
        key: {**preferred, **(value or {})} if value is None or isinstance(value, dict) else value
        for key, value in {id(value): value for value in sampling}.items()
    }
    return [merged[id(value)] for value in sampling]


def _samples(sampling: list[Any]) -> int:
    """How many samples every prompt gets. A bad `n` counts as 1 and is told when the parameters are checked."""
    counts = set()
    for value in sampling:
        n = value.n if isinstance(value, SamplingParams) else value.get("n") if isinstance(value, dict) else None
        counts.add(n if (n := exact_int(n)) is not None and 1 <= n <= MAX_SAMPLES else 1)
    if len(counts) > 1:
        raise InvalidRequestError(
            "The parallel_sample_num should be the same for all samples in sample params. "
            f"Here n is {', '.join(map(str, sorted(counts)))}."
        )
    return counts.pop() if counts else 1


def _refuse_lists(arguments: Mapping[str, Any]) -> None:
    lists = [name for name in PER_PROMPT_LOGPROBS if isinstance(arguments[name], list)]
    if _is_nested(arguments["token_ids_logprob"]):
        lists.append("token_ids_logprob")
    if lists:
        raise InvalidRequestError(f"Cannot use list {lists[0]} with parallel_sample_num > 1")


def _rids(rid: Any, count: int, samples: int, single: bool) -> list[tuple[str, ...]]:
    """Request ids, one for each sample. Several samples of a prompt get new ones, as in SGLang."""
    rids: list[str]
    if rid is None:
        rids = [uuid.uuid4().hex for _ in range(count)]
    elif isinstance(rid, str):
        rids = [rid] if single else [f"{rid}_{i}" for i in range(count)]
    else:
        rids = per_prompt("rid", rid, count) if isinstance(rid, list) else []
        if not isinstance(rid, list) or any(not isinstance(r, str) for r in rids):
            raise InvalidRequestError(f"rid must be a string or a list of strings, got {rid!r:.200}.")
        if len(set(rids)) != len(rids):
            twice = sorted(r for r, times in Counter(rids).items() if times > 1)
            raise InvalidRequestError(f"Duplicate request IDs detected within the request: {twice[:20]}")
    if samples == 1:
        return [(r,) for r in rids]
    return [tuple(uuid.uuid4().hex for _ in range(samples)) for _ in range(count)]


def _sessions(arguments: Mapping[str, Any], count: int, samples: int) -> list[Any]:
    """The session parameters of each prompt; `session_id` is short for `session_params={"id": ...}`."""
    params, name = arguments["session_params"], arguments["session_id"]
    if params is not None and name is not None:
        raise InvalidRequestError("session_id and session_params cannot both be set.")
    if params is None and name is None:
        return [None] * count
    if samples > 1:
        raise InvalidRequestError(f"a session's turn has one output: n must be 1, got {samples}.")
    return per_prompt("session_params", params if name is None else {"id": name}, count)
