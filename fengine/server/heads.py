"""What is made of a classifier's own numbers over HTTP, as its checkpoint says, and as vLLM does it; how vectors are
written."""

import base64
import math
from collections.abc import Callable, Mapping
from operator import mul
from typing import Any

import torch

from fengine.server.errors import invalid, unsupported
from fengine.server.fields import Fields, one_of, typed

Activation = Callable[[list[float]], list[float]]
ACTIVATION: Fields = {
    "activation": typed("boolean", "vLLM's: numbers as the checkpoint says, most often between 0 and 1; false: the "
                        "head's own. /v1/rerank tells these, unless it is true. A cosine has none, and is as it is."),
    "use_activation": typed("boolean", "vLLM's newer word for activation."),
}  # fmt: skip
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
          "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}  # fmt: skip
WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # bytes of a number -> what has its bits
ORDERS = {"native": "=", "little": "<", "big": ">"}
ENCODING: Fields = {
    "encoding_format": one_of("How vectors are written.", "float", "base64", default="float"),
    "embed_dtype": one_of("vLLM's: of the numbers in base64.", *DTYPES, default="float32"),
    "endianness": one_of("vLLM's: the order of their bytes.", *ORDERS, default="native"),
}


def written(vector: list[float], given: Mapping[str, Any]) -> list[float] | str:
    """As the fields of ENCODING say; those of base64 say nothing about a list. Pure."""
    if given["encoding_format"] == "float":
        return vector
    numbers = torch.tensor(vector, dtype=torch.float32).to(DTYPES[given["embed_dtype"]])
    bits: Any = numbers.view(WHOLE[numbers.itemsize]).numpy()
    return base64.b64encode(bits.astype(bits.dtype.newbyteorder(ORDERS[given["endianness"]])).tobytes()).decode()


def wanted(given: Mapping[str, Any], other: bool | None, word: str = "activation") -> Any:
    """What a body says by a word or by vLLM's newer one, or `other`. Pure. Errors: ApiError where they differ."""
    said = [given[name] for name in (word, "use_activation") if given[name] is not None]
    if len(set(said)) > 1:
        raise invalid("use_activation", f"use_activation and {word} say different things; leave one of them out.")
    return said[0] if said else other


def cosine(a: list[float], b: list[float]) -> float:
    """Between two vectors; 0 with a vector of zeros. Pure."""
    dot, first, second = (math.fsum(map(mul, x, y)) for x, y in ((a, b), (a, a), (b, b)))
    norms = math.sqrt(first) * math.sqrt(second)
    return dot / norms if norms else 0.0


def bare(vector: list[float]) -> list[float]:
    """As they are. Pure."""
    return vector


def sigmoids(vector: list[float]) -> list[float]:
    """Each between 0 and 1. Pure."""
    return [1 / (1 + math.exp(-value)) if value >= 0 else 1 - 1 / (1 + math.exp(value)) for value in vector]


def shares(vector: list[float]) -> list[float]:
    """The softmax of several labels, the sigmoid of one. Pure."""
    if len(vector) == 1:
        return sigmoids(vector)
    powers = [math.exp(value - max(vector)) for value in vector]
    return [power / math.fsum(powers) for power in powers]


OF_LABELS: dict[Any, Activation] = {
    None: shares, "single_label_classification": shares, "multi_label_classification": sigmoids, "regression": bare,
}  # fmt: skip
OF_SCORES: dict[Any, Activation] = {None: shares, "Sigmoid": shares, "Softmax": shares, "Identity": bare}


def of_labels(config: Mapping[str, Any], wanted: bool) -> Activation:
    """Of a classifier with this config.json, or `bare` if none is `wanted`. Pure. Errors: ApiError."""
    return _known(OF_LABELS, "problem_type", config.get("problem_type")) if wanted else bare


def of_scores(config: Mapping[str, Any], own: Any, wanted: bool) -> Activation:
    """Of a cross-encoder, which sentence-transformers names in its own file or in config.json; or `bare`. Pure. Errors:
    ApiError."""
    inner = config.get("sentence_transformers")
    its = inner.get("activation_fn") if isinstance(inner, dict) else None
    named = (own, its, config.get("sbert_ce_default_activation_function"))
    name = next((one for one in named if one is not None), None)
    return _known(OF_SCORES, "activation_fn", name and str(name).rpartition(".")[2]) if wanted else bare


def _known(table: Mapping[Any, Activation], name: str, value: Any) -> Activation:
    if not isinstance(value, str | None) or value not in table:
        told = f"the checkpoint's {name} {value!r:.80} is not built"
        raise unsupported("activation", f"{told}; ask with activation=false for the head's own numbers.")
    return table[value]
