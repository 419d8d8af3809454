"""The ways in which the hidden states of a prompt become one vector, after sentence-transformers' Pooling."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np


class Pool(NamedTuple):
    """One way to pool, in float64. `add`: what is pooled so far, the next state, its position. `finish`: what came of
    so many states."""

    add: Callable[[Any, np.ndarray, int], np.ndarray]
    finish: Callable[[np.ndarray, int], np.ndarray] = lambda total, count: total


def _sum(total: Any, row: np.ndarray, at: int) -> np.ndarray:
    return total + row


POOLS: Mapping[str, Pool] = MappingProxyType(
    {
        "cls": Pool(lambda total, row, at: total if at else row),
        "max": Pool(lambda total, row, at: np.maximum(total, row) if at else row),
        "mean": Pool(_sum, lambda total, count: total / count),
        "mean_sqrt_len_tokens": Pool(_sum, lambda total, count: total / math.sqrt(count)),
        "weightedmean": Pool(
            lambda total, row, at: total + (at + 1) * row, lambda total, count: total / (count * (count + 1) / 2)
        ),
        "last": Pool(lambda total, row, at: row),
    }
)


def pools_of(names: str) -> list[Pool]:
    """Of `Pooling.pool`. Pure."""
    return [POOLS[name] for name in names.split("+")]
