"""The supported architectures, by their Hugging Face class name. A family is one file, and a line here."""

from collections.abc import Mapping
from difflib import SequenceMatcher
from types import MappingProxyType

from fengine.errors import UnsupportedArchitectureError
from fengine.models import (
    bert,
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
    modernbert,
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
    bert.FAMILY,
    bert.ROBERTA,
    bert.XLM_R,
    modernbert.FAMILY,
)
MODELS: Mapping[str, Model] = MappingProxyType({k: v for family in FAMILIES for k, v in family.models().items()})


def lookup(architecture: str) -> Model:
    """Errors: UnsupportedArchitectureError, listing what is supported, the nearest name first."""
    if architecture not in MODELS:
        names = ", ".join(sorted(MODELS, key=lambda name: (_unlike(stem(name), stem(architecture)), len(name))))
        raise UnsupportedArchitectureError(f"architecture {architecture!r:.80} is not supported; supported: {names}.")
    return MODELS[architecture]


def stem(architecture: str) -> str:
    """The name of the family in that of a class. Pure."""
    return architecture.partition("For")[0].removesuffix("Model")


def _unlike(one: str, other: str) -> float:
    return -SequenceMatcher(None, one, other).ratio()
