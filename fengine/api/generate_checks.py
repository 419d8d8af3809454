"""Arguments of a call that most calls leave out: how they are checked, and split into one for each prompt. Errors:
InvalidRequestError, UnsupportedFeatureError."""

import warnings
from collections import Counter
from typing import Any

from fengine.core.scalars import exact_int, plain, told
from fengine.errors import InvalidRequestError, UnsupportedFeatureError

PER_PROMPT_LOGPROBS = ("return_logprob", "logprob_start_len", "top_logprobs_num")
# Arguments of SGLang's generate, encode and score that are not built. Off: None, False, 0, or a list of None.
NOT_BUILT = {
    "audio_data": "audio",
    "video_data": "video",
    **dict.fromkeys(("mm_hashes", "mm_content_hashes"), "hashes of images that are made elsewhere"),
    "require_reasoning": "grammars",
    **dict.fromkeys(("return_routed_experts", "routed_experts_start_len"), "mixtures of experts"),
    **dict.fromkeys(
        ("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank"), "disaggregation"
    ),
    "kv_hints": "hints for the KV cache",
    "external_trace_header": "tracing",
    **dict.fromkeys(
        ("input_embeds", "embed_override_token_id", "embed_overrides", "query_embed_overrides", "item_embed_overrides",
         "stacked_query_item_embed_overrides"), "embeddings in place of tokens",
    ),
    "score_extraction_token_id": "scores of another token than the last",
}  # fmt: skip


def per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """One value for all prompts, or a list with one for each. Errors: InvalidRequestError."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(f"{name} has {len(value)} entries for {count} prompt{'s' * (count != 1)}.")
    return value


def image_lists(value: Any, count: int, alone: bool) -> list[Any]:
    """The images of each prompt: an image for all, or a list with an image or a list of images for each. The list of a
    prompt that stands `alone` is its images. Errors: InvalidRequestError."""
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return [None] * count
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if alone and not (len(value) == 1 and isinstance(value[0], (list, tuple))):
        return [list(value)]
    if len(value) != count:
        raise InvalidRequestError("The length of image_data should be equal to the batch size.")
    return list(value)


def id_lists(value: Any, count: int, alone: bool) -> list[Any]:
    """`token_ids_logprob`: ids for all prompts, or a list with ids (or None) for each of several."""
    if alone and is_nested(value):
        raise InvalidRequestError(
            f"token_ids_logprob of one prompt must be a flat list of integers, got {told(value)}."
        )
    return per_prompt("token_ids_logprob", value, count) if is_nested(value) else [value] * count


def is_nested(value: Any) -> bool:
    return isinstance(value, list) and any(
        isinstance(item, (list, tuple)) or getattr(item, "ndim", 0) > 0 for item in value
    )


def is_batch_of_ids(ids: Any) -> bool:
    if hasattr(ids, "ndim"):
        return ids.ndim == 2
    return (
        isinstance(ids, (list, tuple))
        and bool(ids)
        and (isinstance(ids[0], (list, tuple)) or hasattr(ids[0], "ndim") and ids[0].ndim > 0)
    )


def given_rids(rid: Any, count: int, single: bool) -> list[str]:
    if isinstance(rid, str):
        return [rid] if single else [f"{rid}_{i}" for i in range(count)]
    rids = per_prompt("rid", rid, count) if isinstance(rid, list) else []
    if not isinstance(rid, list) or any(not isinstance(r, str) for r in rids):
        raise InvalidRequestError(f"rid must be a string or a list of strings, got {told(rid)}.")
    if len(set(rids)) != len(rids):
        twice = sorted(r for r, times in Counter(rids).items() if times > 1)
        raise InvalidRequestError(f"Duplicate request IDs detected within the request: {twice[:20]}")
    return rids


def sessions_of(params: Any, name: Any, count: int, samples: int) -> list[Any]:
    """The session parameters of each prompt; `session_id` is short for `session_params={"id": ...}`."""
    if params is not None and name is not None:
        raise InvalidRequestError("session_id and session_params cannot both be set.")
    if samples > 1:
        raise InvalidRequestError(f"a session's turn has one output: n must be 1, got {samples}.")
    return per_prompt("session_params", params if name is None else {"id": name}, count)


def refuse_lists(given: dict[str, Any]) -> None:
    """Of several samples of a prompt."""
    lists = [name for name in PER_PROMPT_LOGPROBS if isinstance(given.get(name), list)]
    if is_nested(given.get("token_ids_logprob")):
        lists.append("token_ids_logprob")
    if lists:
        raise InvalidRequestError(f"Cannot use list {lists[0]} with parallel_sample_num > 1")


def routed_rank(rank: Any, deprecated: Any, size: int) -> int | None:
    """The replica that a call is pinned to, of so many."""
    if deprecated is not None:
        warnings.warn("data_parallel_rank is deprecated; use routed_dp_rank", DeprecationWarning, stacklevel=6)
        rank = deprecated if rank is None else rank
    found = exact_int(rank)
    if found is None or not 0 <= found < size:
        raise InvalidRequestError(f"routed_dp_rank={told(rank)} out of range [0, {size})")
    return found


def refuse_not_built(req: Any) -> None:
    """Errors: UnsupportedFeatureError that names all that is not built."""
    bad = [name for name in NOT_BUILT if not _off(getattr(req, name, None))]
    if bad:
        shown = ", ".join(f"{name}={told(getattr(req, name))} ({NOT_BUILT[name]})" for name in bad)
        raise UnsupportedFeatureError(f"not built: {shown}. Leave these arguments out.")


def _off(value: Any) -> bool:
    value = plain(value)
    if isinstance(value, (list, tuple)):
        return all(item is None for item in value)
    return value is None or value is False or (type(value) is int and value == 0)
