"""SGLang's records of requests, each the arguments of one call as one value: `GenerateReqInput` and `EncodeReqInput`.
The others are what programs hand to `tokenizer_manager`, and the tools of `FunctionCallParser`."""

from dataclasses import dataclass, field
from typing import Any

from fengine.api.generate_input import GenerateReqInput

__all__ = [
    "ContinueGenerationReqInput", "EncodeReqInput", "Function", "GenerateReqInput", "PauseGenerationReqInput",
    "ReleaseMemoryOccupationReqInput", "ResumeMemoryOccupationReqInput", "Tool", "UpdateWeightFromDiskReqInput",
]  # fmt: skip


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
    normalize: bool | None = field(default=None, kw_only=True)  # None: as the checkpoint says


@dataclass
class ReleaseMemoryOccupationReqInput:
    tags: list[str] | None = None


@dataclass
class ResumeMemoryOccupationReqInput(ReleaseMemoryOccupationReqInput):
    """As it."""


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
