"""`GenerateReqInput`: the arguments of one `generate` call as one value, and how it splits into one for each prompt.

`split_batch` looks at shapes and not at the model: scalars hold for all prompts, lists have one entry for each.
"""

import uuid
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fengine.core.sampling_params import MAX_SAMPLES, SamplingParams
from fengine.core.scalars import exact_int, plain, plain_ids, told
from fengine.errors import InvalidRequestError, UnsupportedFeatureError

MAX_REQUESTS = 1 << 20  # of one call
PER_PROMPT_LOGPROBS = ("return_logprob", "logprob_start_len", "top_logprobs_num")
# Arguments of SGLang's generate and encode that are not built. Off: None, False, 0, or a list of None.
NOT_BUILT: dict[str, str] = {
    "audio_data": "audio",
    "video_data": "video",
    "mm_hashes": "hashes of images that are made elsewhere",
    "mm_content_hashes": "hashes of images that are made elsewhere",
    "require_reasoning": "grammars",
    "return_routed_experts": "mixtures of experts",
    "routed_experts_start_len": "mixtures of experts",
    "bootstrap_host": "disaggregation",
    "bootstrap_port": "disaggregation",
    "bootstrap_room": "disaggregation",
    "disagg_prefill_dp_rank": "disaggregation",
    "kv_hints": "hints for the KV cache",
    "external_trace_header": "tracing",
    "input_embeds": "embeddings in place of tokens",
    "embed_override_token_id": "embeddings in place of tokens",
    "embed_overrides": "embeddings in place of tokens",
}


@dataclass
class GenerateReqInput:
    """One `generate` call, its fields in the order of `Engine.generate`, where `text` is called `prompt`.

    Nothing is checked here; `process_input` does.
    """

    text: Any = None  # str, or a list of str
    sampling_params: Any = None  # SamplingParamsDict or SamplingParams, or a list of these
    input_ids: Any = None  # in place of text: ids, or a list of these
    image_data: Any = None  # of each prompt an image or a list of them: see `multimodal.sources`
    audio_data: Any = None
    video_data: Any = None
    mm_hashes: Any = None
    mm_content_hashes: Any = None
    return_logprob: Any = False
    logprob_start_len: Any = None
    top_logprobs_num: Any = None
    token_ids_logprob: Any = None
    lora_path: Any = None
    custom_logit_processor: Any = None
    require_reasoning: Any = False
    return_hidden_states: Any = False
    return_routed_experts: Any = False
    routed_experts_start_len: Any = 0
    stream: Any = False
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    routed_dp_rank: Any = None
    disagg_prefill_dp_rank: Any = None
    kv_hints: Any = None
    data_parallel_rank: Any = None
    external_trace_header: Any = None
    rid: Any = None
    session_params: Any = None
    priority: Any = None
    session_id: Any = None
    cache_salt: Any = field(default=None, kw_only=True)
    kv_router_hint: Any = field(default=None, kw_only=True)  # of routers in front; there is one engine
    input_embeds: Any = field(default=None, kw_only=True, metadata={"call": False})


def split_batch(req: GenerateReqInput, preferred: Mapping[str, Any]) -> tuple[list[GenerateReqInput], bool]:
    """A call of one prompt for each of them, and whether it was a single one with a single sample.

    Nothing of a prompt is checked against the model; `rid` is a tuple with one for each sample. `preferred` are
    sampling parameters that hold where the call gives none.
    Errors: InvalidRequestError, UnsupportedFeatureError.
    """
    values = {f.name: getattr(req, f.name) for f in fields(req)}
    values = {
        name: plain_ids(value) if name == "input_ids" else value if name == "image_data" else plain(value)
        for name, value in values.items()
    }
    req = replace(req, **values)
    refuse_not_built(req)
    if not isinstance(req.stream, bool):
        raise InvalidRequestError(f"stream must be True or False, got {told(req.stream)}.")
    values, text, single = _prompts(req.text, req.input_ids)
    count = len(values)
    sampling = _with_preferred(per_prompt("sampling_params", req.sampling_params, count), preferred)
    samples = _samples(sampling)
    if count * samples > MAX_REQUESTS:
        raise InvalidRequestError(f"a call may have at most {MAX_REQUESTS} results, got {count} prompts × n={samples}.")
    if samples > 1:
        _refuse_lists(req)
    columns = {name: per_prompt(name, getattr(req, name), count) for name in _PER_PROMPT}
    columns["token_ids_logprob"] = _id_lists(req.token_ids_logprob, count)
    columns["session_params"] = _sessions(req, count, samples)
    columns |= {"sampling_params": sampling, "rid": _rids(req.rid, count, samples, single)}
    columns["image_data"] = image_lists(req.image_data, count, single)
    columns["text" if text else "input_ids"] = values
    rows = zip(*columns.values(), strict=True)
    return [GenerateReqInput(**dict(zip(columns, row, strict=True))) for row in rows], single and samples == 1


_PER_PROMPT = (
    *PER_PROMPT_LOGPROBS, "return_hidden_states", "custom_logit_processor", "priority", "cache_salt", "lora_path",
)  # fmt: skip


# -- checks of shapes --------------------------------------------------------------------------------------------------


def routed_rank(req: GenerateReqInput, size: int) -> int | None:
    """The replica that a call is pinned to, of so many. Errors: InvalidRequestError."""
    rank = req.routed_dp_rank
    if req.data_parallel_rank is not None:
        warnings.warn("data_parallel_rank is deprecated; use routed_dp_rank", DeprecationWarning, stacklevel=6)
        rank = req.data_parallel_rank if rank is None else rank
    found = None if rank is None else exact_int(rank)
    if rank is not None and (found is None or not 0 <= found < size):
        raise InvalidRequestError(f"routed_dp_rank={told(rank)} out of range [0, {size})")
    return found


def _prompts(text: Any, ids: Any) -> tuple[list[Any], bool, bool]:
    """(one value for each prompt, whether they are texts, whether it is a single one)."""
    if text is None and ids is None:
        raise InvalidRequestError("Either text, input_ids or input_embeds should be provided.")
    if text is not None and ids is not None:
        raise InvalidRequestError("prompt and input_ids cannot both be given: they would be two prompts.")
    if text is None:
        several: Any = ids if _is_batch_of_ids(ids) else None
        return ([ids], False, True) if several is None else (list(several), False, False)
    if isinstance(text, str):
        return [text], True, True
    if not isinstance(text, (list, tuple)):
        fix = " Decode it first." if isinstance(text, bytes) else ""
        raise InvalidRequestError(f"prompt must be a string or a list of strings, got {type(text).__name__}.{fix}")
    return list(text), True, False


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
    """How many samples every prompt gets. A bad `n` counts as 1; the check of the parameters reports it."""
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


def _refuse_lists(req: GenerateReqInput) -> None:
    lists = [name for name in PER_PROMPT_LOGPROBS if isinstance(getattr(req, name), list)]
    if _is_nested(req.token_ids_logprob):
        lists.append("token_ids_logprob")
    if lists:
        raise InvalidRequestError(f"Cannot use list {lists[0]} with parallel_sample_num > 1")


def _rids(rid: Any, count: int, samples: int, single: bool) -> list[tuple[str, ...]]:
    """Request ids, one for each sample. Several samples of a prompt get new ones, as in SGLang."""
    rids = _given_rids(rid, count, single)
    if rids is not None and samples == 1:
        return [(r,) for r in rids]
    return [tuple(uuid.uuid4().hex for _ in range(samples)) for _ in range(count)]


def _given_rids(rid: Any, count: int, single: bool) -> list[str] | None:
    """One for each prompt; None where none are given. Errors: InvalidRequestError."""
    if rid is None:
        return None
    if isinstance(rid, str):
        return [rid] if single else [f"{rid}_{i}" for i in range(count)]
    rids = per_prompt("rid", rid, count) if isinstance(rid, list) else []
    if not isinstance(rid, list) or any(not isinstance(r, str) for r in rids):
        raise InvalidRequestError(f"rid must be a string or a list of strings, got {rid!r:.200}.")
    if len(set(rids)) != len(rids):
        twice = sorted(r for r, times in Counter(rids).items() if times > 1)
        raise InvalidRequestError(f"Duplicate request IDs detected within the request: {twice[:20]}")
    return rids


def _sessions(req: GenerateReqInput, count: int, samples: int) -> list[Any]:
    """The session parameters of each prompt; `session_id` is short for `session_params={"id": ...}`."""
    params, name = req.session_params, req.session_id
    if params is not None and name is not None:
        raise InvalidRequestError("session_id and session_params cannot both be set.")
    if params is None and name is None:
        return [None] * count
    if samples > 1:
        raise InvalidRequestError(f"a session's turn has one output: n must be 1, got {samples}.")
    return per_prompt("session_params", params if name is None else {"id": name}, count)


def refuse_not_built(req: Any) -> None:
    """Errors: UnsupportedFeatureError that names all that is not built."""
    bad = [name for name in NOT_BUILT if not _off(getattr(req, name, None))]
    if bad:
        shown = ", ".join(f"{name}={told(getattr(req, name))} ({NOT_BUILT[name]})" for name in bad)
        raise UnsupportedFeatureError(f"not built: {shown}. Leave these arguments out.")


def _off(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(item is None for item in value)
    return value is None or value is False or (type(value) is int and value == 0)
