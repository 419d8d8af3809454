"""The supported architectures, by their Hugging Face class name. A family is one file, and a line here."""

from collections.abc import Mapping
from difflib import SequenceMatcher
from types import MappingProxyType

from fengine.errors import UnsupportedArchitectureError
from fengine.models import (
    bert,
    cohere,
    exaone4,
    gemma,
    glm,
    gpt_oss,
    granite,
    hunyuan,
    llama,
    mistral,
    modernbert,
    olmo,
    phi3,
    qwen,
    smollm3,
    starcoder2,
    vision_gemma,
    vision_idefics,
    vision_internvl,
    vision_llava,
    vision_onevision,
    vision_qwen,
)
from fengine.models.family import Family, Model
from fengine.models.vision_family import VisionFamily

FAMILIES: Mapping[str, Family | VisionFamily] = MappingProxyType(  # by the names under which people know them
    {
        "Llama 1–3.x, Falcon 3, Yi, SmolLM 2": llama.FAMILY,
        "ERNIE 4.5 (dense)": llama.ERNIE,
        "Seed-OSS": llama.SEED_OSS,
        "Qwen2, Qwen2.5, gte-Qwen2": qwen.QWEN2,
        "Qwen3, Qwen3-Embedding, Qwen3-Reranker": qwen.QWEN3,
        "Mistral, Ministral (2410), Nemo": mistral.FAMILY,
        "Ministral (a class of its own)": mistral.MINISTRAL,
        "Phi-3, Phi-3.5, Phi-4": phi3.FAMILY,
        "Granite 3": granite.FAMILY,
        "OLMo 2": olmo.OLMO2,
        "OLMo 3": olmo.OLMO3,
        "EXAONE 4": exaone4.FAMILY,
        "SmolLM3": smollm3.FAMILY,
        "GLM-4-0414": glm.GLM4,
        "GLM-4-9B (2024)": glm.FIRST,
        "Gemma": gemma.GEMMA,
        "Gemma 2": gemma.GEMMA2,
        "Gemma 3 (text), EmbeddingGemma": gemma.GEMMA3,
        "StarCoder2": starcoder2.FAMILY,
        "Hunyuan (dense)": hunyuan.FAMILY,
        "Command R, Command R+": cohere.FAMILY,
        "Command R7B, Command A": cohere.FAMILY2,
        "Qwen3-MoE": qwen.QWEN3_MOE,
        "Qwen2-MoE, Qwen1.5-MoE": qwen.QWEN2_MOE,
        "Mixtral": mistral.MIXTRAL,
        "OLMoE": olmo.OLMOE,
        "Granite-MoE": granite.MOE,
        "GLM-4.5, GLM-4.5-Air, GLM-4.6": glm.MOE,
        "gpt-oss (bfloat16, MXFP4)": gpt_oss.FAMILY,
        "BERT, bge, e5, MiniLM": bert.FAMILY,
        "RoBERTa": bert.ROBERTA,
        "XLM-R, multilingual e5, bge-m3, bge-reranker": bert.XLM_R,
        "ModernBERT, gte-modernbert": modernbert.FAMILY,
        "LLaVA 1.5": vision_llava.FAMILY,
        "LLaVA-OneVision": vision_onevision.FAMILY,
        "Gemma 3 (images)": vision_gemma.FAMILY,
        "Idefics 3, SmolVLM": vision_idefics.FAMILY,
        "SmolVLM 2": vision_idefics.SMOLVLM,
        "InternVL 3": vision_internvl.FAMILY,
        "Qwen2.5-VL": vision_qwen.FAMILY,
        "Qwen3-VL (dense)": vision_qwen.QWEN3,
    }
)
MODELS: Mapping[str, Model] = MappingProxyType(
    {k: v for family in FAMILIES.values() for k, v in family.models().items()}
)


def lookup(architecture: str) -> Model:
    """Errors: UnsupportedArchitectureError, listing what is supported, the nearest name first."""
    if architecture not in MODELS:
        like = {name: SequenceMatcher(None, stem(name), stem(architecture)).ratio() for name in MODELS}
        names = ", ".join(sorted(MODELS, key=lambda name: (-like[name], len(name))))
        raise UnsupportedArchitectureError(f"architecture {architecture!r:.80} is not supported; supported: {names}.")
    return MODELS[architecture]


def stem(architecture: str) -> str:
    """The name of the family in that of a class. Pure."""
    return architecture.partition("For")[0].removesuffix("Model")
