"""The dicts of SGLang's API as types: sampling parameters, options of a call, and what comes back. Nothing reads these
at run time. A key that comes only on request is declared like the others, so that a program which asked for it may read
it."""

from collections.abc import Callable
from typing import Any, Literal, TypedDict

HiddenStates = bool | Literal["full", "last"]
TokenLogprob = tuple[float | None, int, None]  # logprob (None: the first of a prompt), token id, None
Message = dict[str, Any]  # {"role", "content", ...}


class SamplingParamsDict(TypedDict, total=False):
    """`sampling_params` of a call; `core/sampling_params.py` has ranges and defaults."""

    max_new_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_new_tokens: int
    n: int
    stop: str | list[str] | None
    stop_token_ids: list[int] | None
    stop_regex: str | list[str] | None
    ignore_eos: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    no_stop_trim: bool
    stream_interval: int | None
    logit_bias: dict[str, float] | dict[int, float] | None
    sampling_seed: int | None
    custom_params: dict[str, Any] | None
    json_schema: str | dict[str, Any] | None
    regex: str | None
    ebnf: str | None
    structural_tag: str | dict[str, Any] | None


class FinishReason(TypedDict):
    """`matched` with type "stop", `length` with "length", the others with "abort"."""

    type: Literal["stop", "length", "abort"]
    matched: int | str
    length: int
    message: str
    status_code: int
    err_type: str


class WeightSpan(TypedDict):
    """Output tokens [start, end) were drawn with the weights `version`."""

    version: str
    start: int
    end: int


class MetaInfo(TypedDict):
    """`output["meta_info"]`. Keys of images, logprobs, hidden states, `spec_…` and metrics come where these are."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int
    cached_tokens_details: dict[str, int]
    weight_version: str
    weight_versions: list[WeightSpan]
    num_retractions: int
    image_tokens: int
    pixels_sha256: str
    e2e_latency: float
    response_sent_to_client_ts: float
    input_token_logprobs: list[TokenLogprob]
    output_token_logprobs: list[TokenLogprob]
    output_token_logprobs_length: int
    input_top_logprobs: list[list[TokenLogprob] | None]
    output_top_logprobs: list[list[TokenLogprob]]
    input_token_ids_logprobs: list[list[TokenLogprob] | None]
    output_token_ids_logprobs: list[list[TokenLogprob]]
    hidden_states: Any
    spec_accept_rate: float
    spec_accept_length: float
    spec_num_correct_drafts: int
    spec_num_proposed_drafts: int
    spec_verify_ct: int
    spec_correct_drafts_histogram: list[int]
    request_received_ts: float
    api_server_dispatch_finish_ts: float
    request_finished_ts: float
    queue_time: float
    forward_entry_time: float
    first_token_latency: float
    prefill_finished_time: float
    decode_throughput: float


class GenerateOutput(TypedDict):
    """One completion, or one chunk of a stream. No `text` with skip_tokenizer_init; `index` in streams of several."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int


class EncodeOutput(TypedDict):
    """One embedding: a list of floats; a number for `rerank` with one label; None if the prompt was aborted."""

    embedding: Any
    meta_info: MetaInfo


class CallOptions(TypedDict, total=False):
    """Arguments of `generate` behind prompt, sampling_params, input_ids and stream. A list has one entry a prompt.
    Those of SGLang's that are not built are refused at run time, too."""

    image_data: Any
    return_logprob: bool | list[bool]
    logprob_start_len: int | list[int] | None
    top_logprobs_num: int | list[int] | None
    token_ids_logprob: list[int] | list[list[int]] | None
    lora_path: str | list[str | None] | None
    custom_logit_processor: Callable[..., Any] | str | list[Any] | None
    return_hidden_states: HiddenStates | list[HiddenStates]
    routed_dp_rank: int | None
    data_parallel_rank: int | None
    rid: str | list[str] | None
    session_params: dict[str, Any] | list[dict[str, Any]] | None
    priority: int | list[int] | None
    session_id: str | None
    cache_salt: str | list[str] | None
    kv_router_hint: Any
