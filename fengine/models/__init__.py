"""The supported architectures, by their Hugging Face class name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from fengine.errors import UnsupportedArchitectureError
from fengine.models import llama, qwen2, qwen3
from fengine.models.llama import Weight
from fengine.spec import Config, ModelSpec
from fengine.state import KVState, Params, StepBatch


class Model(NamedTuple):
    """One architecture as pure functions; see `models/llama.py` for the contract of each."""

    spec_from_hf: Callable[[Config], ModelSpec]
    forward: Callable[[Params, ModelSpec, KVState, StepBatch], tuple[KVState, Tensor]]
    unembed: Callable[[Params, ModelSpec, Tensor], Tensor]
    weights: Callable[[ModelSpec], list[Weight]]


MODELS: Mapping[str, Model] = MappingProxyType(
    {
        family.ARCHITECTURE: Model(family.spec_from_hf, llama.forward, llama.unembed, llama.weights)
        for family in (llama, qwen2, qwen3)
    }
)


def lookup(architecture: str) -> Model:
    """Errors: UnsupportedArchitectureError, listing what is supported."""
    if architecture not in MODELS:
        raise UnsupportedArchitectureError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(MODELS)}."
        )
    return MODELS[architecture]
