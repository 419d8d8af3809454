"""Hidden states of requests, as they are shown."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from fengine.engine.request_state import RequestState


class FloatList(np.ndarray):
    """An array that behaves as the nested list of the same floats where lists and arrays differ.

    `len`, iteration, indexing and slicing give Python floats and FloatLists; `==` compares whole values with any list,
    FloatList or array and gives a bool; `in`, `index`, `count` and truth are a list's. Everything else is numpy's:
    `.shape`, arithmetic, `numpy.asarray`, `torch.tensor` and `torch.from_numpy` work at the speed of arrays. For JSON
    call `.tolist()`, or pass `default=FloatList.tolist` to `json.dumps`. `isinstance(…, list)` says yes, for programs
    that ask."""

    __hash__ = None  # type: ignore[assignment]
    __class__ = property(lambda _: list)  # type: ignore[assignment]

    @classmethod
    def of(cls, values: Any) -> "FloatList":
        """A read view of an array, without a copy where it is one."""
        return np.asarray(values).view(cls)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """What numpy computes from it is a FloatList, too, but a single number is numpy's."""
        return array[()] if array.ndim == 0 else array.view(FloatList)

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return found if isinstance(found, np.ndarray) else found.item()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist()) if self.ndim == 1 else (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:  # type: ignore[override]
        if not isinstance(other, (list, tuple, np.ndarray)):
            return NotImplemented
        try:
            return bool(np.array_equal(np.asarray(self), np.asarray(other)))
        except ValueError:  # a ragged list
            return False

    def __ne__(self, other: object) -> bool:  # type: ignore[override]
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal

    def __bool__(self) -> bool:
        return len(self) > 0

    def __contains__(self, value: object) -> bool:
        return value in self.tolist()

    def index(self, value: Any) -> int:
        """Errors: ValueError where there is none, as a list's."""
        return self.tolist().index(value)

    def count(self, value: Any) -> int:
        return self.tolist().count(value)


def hidden_of(state: RequestState, count: int) -> Any:
    """A list with the prompt's states [tokens, D] first, then one [D] for each decode step; "last": one [D]."""
    states = state.hidden[: max(count, 1)]
    if state.request.params.hidden == "full":
        return [FloatList.of(state) for state in states]
    if not states:
        return None
    return FloatList.of(states[-1] if states[-1].ndim == 1 else states[-1][-1])
