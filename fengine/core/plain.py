"""Values of the core as plain types (dict, list, str, numbers, bool, None) and back: what JSON or msgpack can carry.

What is no value stays behind: a compiled grammar is named by its text, a logit processor by its registered name, an
adapter by name and number of the load. `Handles` gives the receiver's own for them.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from enum import Enum
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from fengine.core.request import Adapter
from fengine.core.sampling_params import SamplingParams
from fengine.errors import UnsupportedFeatureError


@dataclass(frozen=True)
class Handles:
    """What names stand for in the process that reads. `names`: of logit processors, in the one that writes."""

    processors: Mapping[str, Callable[..., Any]]
    grammar: Callable[[str, str], Any]  # of kind and text
    adapter: Callable[[str, int], Adapter]

    def name_of(self, processor: Callable[..., Any]) -> str:
        """Errors: UnsupportedFeatureError for one that has no name."""
        for name, known in self.processors.items():
            if known is processor:
                return name
        raise UnsupportedFeatureError("a logit processor that is not registered by name stays in its process")


def to_plain(value: Any, handles: Handles) -> Any:
    """Dataclasses without fields that have their default, NamedTuples and sets as lists. Pure."""
    if isinstance(value, SamplingParams):
        name, own = value.processor and handles.name_of(value.processor), value.custom_params
        own = own and {key: item for key, item in own.items() if key != "__req__"}  # what is made anew for each call
        value = replace(value, grammar=None, processor=name, custom_params=own)
    if isinstance(value, Adapter):
        return [value.name, value.number]
    if is_dataclass(value) and not isinstance(value, type):
        given = ((f, getattr(value, f.name)) for f in fields(value))
        return {f.name: to_plain(item, handles) for f, item in given if _differs(f, item)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [to_plain(item, handles) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, dict):
        return {key: to_plain(item, handles) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UnsupportedFeatureError(f"{type(value).__name__} is no plain value")


def _differs(f: Field[Any], item: Any) -> bool:
    """Whether a field has another value than its default. Pure."""
    default = f.default if f.default_factory is MISSING else f.default_factory()
    return default is MISSING or type(default) is not type(item) or default != item


def from_plain(kind: Any, data: Any, handles: Handles) -> Any:
    """The value of this type that `to_plain` was given. Pure."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Adapter:
        return handles.adapter(*data)
    if origin in (Union, UnionType):
        return None if data is None else from_plain(next(one for one in args if one is not type(None)), data, handles)
    if is_dataclass(kind):
        hints, make = get_type_hints(kind), cast(Callable[..., Any], kind)
        made = make(**{name: from_plain(hints[name], item, handles) for name, item in data.items()})
        return _with_handles(made, handles) if isinstance(made, SamplingParams) else made
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(data)
    if isinstance(kind, type) and hasattr(kind, "_fields"):  # a NamedTuple
        return kind(*(from_plain(hint, item, handles) for hint, item in zip(_hints(kind), data, strict=True)))
    if origin is tuple:
        each = [args[0]] * len(data) if args[-1] is Ellipsis else args
        return tuple(from_plain(one, item, handles) for one, item in zip(each, data, strict=True))
    if origin in (list, set, frozenset):
        return origin(from_plain(args[0], item, handles) for item in data)
    return data


def _hints(kind: Any) -> list[Any]:
    return list(get_type_hints(kind).values())


def _with_handles(params: SamplingParams, handles: Handles) -> SamplingParams:
    """The receiver's own processor and grammar in place of their names. Pure."""
    key = params.grammar_key
    return replace(
        params,
        processor=None if params.processor is None else handles.processors[params.processor],
        grammar=None if key is None else handles.grammar(*key),
    )
