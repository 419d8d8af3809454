"""`GenerateReqInput`: the arguments of one `generate` call as one value, and how it splits into one for each prompt.
`split_batch` looks at shapes and not at the model: scalars hold for all prompts, lists have one entry for each."""

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fengine.api.sglang_args import CALLS
from fengine.core.request import new_id
from fengine.core.sampling_params import MAX_SAMPLES, SamplingParams
from fengine.core.scalars import exact_int, plain, plain_ids, told
from fengine.errors import InvalidRequestError, UnsupportedFeatureError

MAX_REQUESTS = 1 << 20  # of one call
NOTHING_DRAWN = {"max_new_tokens": 0, "temperature": 0.0}  # sampling parameters of prompts that are only read
PER_PROMPT = (
    "return_logprob", "logprob_start_len", "top_logprobs_num", "return_hidden_states", "custom_logit_processor",
    "priority", "cache_salt", "lora_path",
)  # fmt: skip
PER_PROMPT_LOGPROBS = ("return_logprob", "logprob_start_len", "top_logprobs_num")
NOT_BUILT = {name: reason for reason, names in CALLS.items() for name in names}


@dataclass
class GenerateReqInput:
    """One `generate` call, its fields in the order of `Engine.generate`, where `text` is called `prompt`. Nothing is
    checked here; `process_input` does."""

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


DEFAULTS = {f.name: f.default for f in fields(GenerateReqInput)}


def split_batch(req: GenerateReqInput, preferred: Mapping[str, Any]) -> tuple[list[GenerateReqInput], bool]:
    """A call of one prompt for each of them, and whether it was a single one with a single sample. Nothing of a prompt
    is checked against the model; `rid` is a tuple with one for each sample. `preferred` are sampling parameters that
    hold where the call gives none. Errors: InvalidRequestError, UnsupportedFeatureError."""
    given: dict[str, Any] = {name: v for name, default in DEFAULTS.items() if (v := getattr(req, name)) is not default}
    own = {"input_ids": plain_ids, "image_data": plain_ids}
    given = {name: own.get(name, plain)(value) for name, value in given.items()}
    if not NOT_BUILT.keys().isdisjoint(given):
        refuse_not_built(req)
    if not isinstance(stream := given.get("stream", False), bool):
        raise InvalidRequestError(f"stream must be True or False, got {told(stream)}.")
    values, text, single = _prompts(given.get("text"), given.get("input_ids"))
    count = len(values)
    sampling = with_preferred(per_prompt("sampling_params", given.get("sampling_params"), count), preferred)
    samples = _samples(sampling)
    if count * samples > MAX_REQUESTS:
        raise InvalidRequestError(f"a call may have at most {MAX_REQUESTS} results, got {count} prompts × n={samples}.")
    if samples > 1:
        refuse_lists(given)
    columns = {"sampling_params": sampling, "text" if text else "input_ids": values}
    columns |= {name: per_prompt(name, given[name], count) for name in PER_PROMPT if name in given}
    columns |= _rare(given, count, samples, single)
    rows = zip(*columns.values(), strict=True)
    return [GenerateReqInput(**dict(zip(columns, row, strict=True))) for row in rows], single and samples == 1


def _rare(given: dict[str, Any], count: int, samples: int, single: bool) -> dict[str, list[Any]]:
    """Columns that are not simply one value or a list; request ids, one for each sample."""
    columns: dict[str, list[Any]] = {}
    if "token_ids_logprob" in given:
        columns["token_ids_logprob"] = id_lists(given["token_ids_logprob"], count, single)
    if "session_params" in given or "session_id" in given:
        names = given.get("session_params"), given.get("session_id")
        columns["session_params"] = sessions_of(*names, count, samples)
    if "image_data" in given:
        columns["image_data"] = image_lists(given["image_data"], count, single)
    rids = None if (rid := given.get("rid")) is None else given_rids(rid, count, single)
    if rids is not None and samples == 1:
        columns["rid"] = [(rid,) for rid in rids]
    else:  # several samples of a prompt get new ones, as in SGLang
        columns["rid"] = [tuple(new_id() for _ in range(samples)) for _ in range(count)]
    return columns


def _prompts(text: Any, ids: Any) -> tuple[list[Any], bool, bool]:
    """(one value for each prompt, whether they are texts, whether it is a single one)."""
    if text is None and ids is None:
        raise InvalidRequestError("Either text, input_ids or input_embeds should be provided.")
    if text is not None and ids is not None:
        raise InvalidRequestError("prompt and input_ids cannot both be given: they would be two prompts.")
    if text is None:
        several: Any = ids if is_batch_of_ids(ids) else None
        return ([ids], False, True) if several is None else (list(several), False, False)
    if isinstance(text, str):
        return [text], True, True
    if not isinstance(text, (list, tuple)):
        fix = " Decode it first." if isinstance(text, bytes) else ""
        raise InvalidRequestError(f"prompt must be a string or a list of strings, got {type(text).__name__}.{fix}")
    return list(text), True, False


def with_preferred(sampling: list[Any], preferred: Mapping[str, Any]) -> list[Any]:
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
        wrong = "The parallel_sample_num should be the same for all samples in sample params"
        raise InvalidRequestError(f"{wrong}. Here n is {', '.join(map(str, sorted(counts)))}.")
    return counts.pop() if counts else 1


# -- arguments that most calls leave out: how they are checked, and split into one for each prompt ---------------------


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
    name = "token_ids_logprob"
    if alone and is_nested(value):
        raise InvalidRequestError(f"{name} of one prompt must be a flat list of integers, got {told(value)}.")
    return per_prompt(name, value, count) if is_nested(value) else [value] * count


def _has_several(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) > 0


def is_nested(value: Any) -> bool:
    return isinstance(value, list) and any(map(_has_several, value))


def is_batch_of_ids(ids: Any) -> bool:
    if hasattr(ids, "ndim"):
        return ids.ndim == 2
    return isinstance(ids, (list, tuple)) and bool(ids) and _has_several(ids[0])


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
    """The replica that a call is pinned to, of so many; None: to none."""
    if deprecated is not None:
        warnings.warn("data_parallel_rank is deprecated; use routed_dp_rank", DeprecationWarning, stacklevel=6)
        rank = deprecated if rank is None else rank
    if rank is None:
        return None
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
