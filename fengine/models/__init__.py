"""The supported architectures, by their Hugging Face class name. A family is one file, and a line here."""

from collections.abc import Mapping
from types import MappingProxyType

from fengine.errors import UnsupportedArchitectureError
from fengine.models import (
    cohere,
    exaone4,
    gemma2,
    gemma3,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    hunyuan,
    llama,
    mistral,
    mixtral,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
    starcoder2,
)
from fengine.models.family import Model

FAMILIES = (
    llama.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    mistral.FAMILY,
    phi3.FAMILY,
    granite.FAMILY,
    olmo2.FAMILY,
    olmo2.FAMILY3,
    exaone4.FAMILY,
    smollm3.FAMILY,
    glm4.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    starcoder2.FAMILY,
    hunyuan.FAMILY,
    cohere.FAMILY,
    cohere.FAMILY2,
    qwen3_moe.FAMILY,
    qwen2_moe.FAMILY,
    mixtral.FAMILY,
    olmoe.FAMILY,
    granite.MOE,
    glm4_moe.FAMILY,
    gpt_oss.FAMILY,
)
MODELS: Mapping[str, Model] = MappingProxyType({k: v for family in FAMILIES for k, v in family.models().items()})


def lookup(architecture: str) -> Model:
    """Errors: UnsupportedArchitectureError, listing what is supported."""
    if architecture not in MODELS:
        raise UnsupportedArchitectureError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(MODELS)}."
        )
    return MODELS[architecture]
