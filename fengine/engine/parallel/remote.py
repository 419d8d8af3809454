"""`Remote`: a part of an engine that its replicas have, such as its weights; and one answer of those of all."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

from fengine.engine.weights.updates import UpdateResult
from fengine.errors import UnsupportedFeatureError

METHODS = {  # of parts of an engine, asked of every replica
    "weights": ("nbytes",),
    "updates": ("update_from_disk", "begin", "end", "read"),
    "memory": ("release", "resume", "keep_weights"),
}


class Asked(Protocol):
    """What asks all replicas."""

    @property
    def size(self) -> int: ...

    def ask(self, part: str, name: str, given: Sequence[Any], arguments: dict[str, Any]) -> Any: ...


def joined(values: Sequence[Any]) -> Any:
    """One answer of those of all replicas: counters are added, flags hold if all do. Pure."""
    first = values[0] if values else None
    if isinstance(first, dict):
        return {key: _added(key, [value[key] for value in values]) for key in first}
    if isinstance(first, bool):
        return all(values)
    if isinstance(first, list) and len(first) == 2 and isinstance(first[0], bool):
        return UpdateResult(*next((value for value in values if not value[0]), first))
    return first


def _added(key: str, values: Sequence[Any]) -> Any:
    if isinstance(values[0], bool):
        return any(values)
    if isinstance(values[0], (int, float)):
        return sum(values)
    return {name: why for value in values for name, why in value.items()} if isinstance(values[0], dict) else values[0]


class Remote:
    """A part of the replicas' engines: METHODS are asked of all."""

    def __init__(self, core: Asked, part: str, facts: dict[str, Any]) -> None:
        self._core, self._part = core, part
        self.places = {
            name: SimpleNamespace(shape=shape, leaf=SimpleNamespace(dtype=kind))
            for name, shape, kind in facts["weights"]
        }

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in METHODS.get(self._part, ()):
            raise UnsupportedFeatureError(f"{name} with parallel.dp_size={self._core.size} is not built; use dp_size=1")
        return lambda *given, **arguments: self._core.ask(self._part, name, given, arguments)

    def close(self) -> None:
        """With its replicas."""
