"""The supported architectures, by their Hugging Face class name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from fengine.errors import UnsupportedArchitectureError
from fengine.models import llama, qwen2, qwen3
from fengine.models.kv_state import KVState, Params, StepBatch
from fengine.models.llama import Weight
from fengine.models.spec import Config, ModelSpec, classifier_spec, embedding_spec


class Model(NamedTuple):
    """One architecture as pure functions; see `models/llama.py` for the contract of each."""

    spec_from_hf: Callable[[Config], ModelSpec]
    forward: Callable[[Params, ModelSpec, KVState, StepBatch], tuple[KVState, Tensor]]
    unembed: Callable[[Params, ModelSpec, Tensor], Tensor]
    weights: Callable[[ModelSpec], list[Weight]]


def _variants(family: Any) -> dict[str, Model]:
    """A family's language model, its decoder alone (an embedding model), and its classifier or reward model."""
    read, base = family.spec_from_hf, family.ARCHITECTURE.removesuffix("ForCausalLM")
    body, classifier = f"{base}Model", f"{base}ForSequenceClassification"
    readers: dict[str, Callable[[Config], ModelSpec]] = {
        family.ARCHITECTURE: read,
        body: lambda config: embedding_spec(read(config), body),
        classifier: lambda config: classifier_spec(read(config), classifier, config),
    }
    return {name: Model(reader, llama.forward, llama.unembed, llama.weights) for name, reader in readers.items()}


MODELS: Mapping[str, Model] = MappingProxyType(_variants(llama) | _variants(qwen2) | _variants(qwen3))


def lookup(architecture: str) -> Model:
    """Errors: UnsupportedArchitectureError, listing what is supported."""
    if architecture not in MODELS:
        raise UnsupportedArchitectureError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(MODELS)}."
        )
    return MODELS[architecture]
