"""SGLang's records of requests: `GenerateReqInput` and `EncodeReqInput` are the arguments of one call as one value.

The others are what programs hand to `tokenizer_manager`, and the tools of `FunctionCallParser`.
"""

from dataclasses import dataclass, field
from typing import Any

from fengine.core.scalars import told
from fengine.errors import UnsupportedFeatureError

# Arguments of SGLang's generate and encode that are not built. Off: None, False, 0, or a list of None.
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
    image_data: Any = None
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


@dataclass
class EncodeReqInput:
    """One `encode` call: text, a chat, token ids, or a list of these. SGLang's EmbeddingReqInput."""

    text: Any
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    dimensions: Any = None
    lora_path: Any = None
    embed_override_token_id: Any = None
    embed_overrides: Any = None
    external_trace_header: Any = None
    rid: Any = None
    input_ids: Any = field(default=None, kw_only=True, metadata={"call": False})


@dataclass
class ReleaseMemoryOccupationReqInput:
    tags: list[str] | None = None


@dataclass
class ResumeMemoryOccupationReqInput:
    tags: list[str] | None = None


@dataclass
class PauseGenerationReqInput:
    mode: str = "abort"


@dataclass
class ContinueGenerationReqInput:
    """Has no arguments."""


@dataclass
class UpdateWeightFromDiskReqInput:
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None


@dataclass
class Function:
    """What a tool does, in OpenAI's words."""

    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


@dataclass
class Tool:
    function: Function
    type: str = "function"


# -- what is not built -------------------------------------------------------------------------------------------------


def refuse_not_built(req: GenerateReqInput | EncodeReqInput) -> None:
    """Errors: UnsupportedFeatureError that names all that is not built."""
    bad = [name for name in NOT_BUILT if not _off(getattr(req, name, None))]
    if bad:
        shown = ", ".join(f"{name}={told(getattr(req, name))} ({NOT_BUILT[name]})" for name in bad)
        raise UnsupportedFeatureError(f"not built: {shown}. Leave these arguments out.")


def _off(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(item is None for item in value)
    return value is None or value is False or (type(value) is int and value == 0)
