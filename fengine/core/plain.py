"""Values of the core as plain types (dict, list, str, numbers, bool, None) and back: what JSON or msgpack can carry.
What is no value stays behind: a compiled grammar is named by its text, a logit processor by its registered name, an
adapter by name and number of the load. `Handles` gives the receiver's own for them."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

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
        raise UnsupportedFeatureError(
            "a logit processor stays in this process; leave it out, or set parallel.dp_size=1"
        )


def to_plain(value: Any, handles: Handles) -> Any:
    """Dataclasses without fields that are `local` or have their default, NamedTuples and sets as lists. Pure."""
    if isinstance(value, Adapter):
        return [value.name, value.number]
    if isinstance(value, SamplingParams):
        value = _with_names(value, handles)
    if is_dataclass(value) and not isinstance(value, type):
        value = {f.name: item for f in fields(value) if _is_told(f, item := getattr(value, f.name))}
    if isinstance(value, dict):
        return {key: to_plain(item, handles) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item, handles) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UnsupportedFeatureError(f"{type(value).__name__} is no plain value")


def _is_told(f: Field[Any], item: Any) -> bool:
    """Whether a field is not `local` and has another value than its default. Pure."""
    default = f.default if f.default_factory is MISSING else f.default_factory()
    return "local" not in f.metadata and (default is MISSING or type(default) is not type(item) or default != item)


def from_plain(kind: Any, data: Any, handles: Handles) -> Any:
    """The value of this type that `to_plain` was given. Pure."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):  # of a type and None
        return None if data is None else from_plain(args[args[0] is type(None)], data, handles)
    if origin is tuple:
        each = [args[0]] * len(data) if args[-1] is Ellipsis else args
        return tuple(from_plain(one, item, handles) for one, item in zip(each, data, strict=True))
    if origin in (list, set, frozenset):
        return origin(from_plain(args[0], item, handles) for item in data)
    if kind is Adapter:
        return handles.adapter(*data)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(data)
    return _record(kind, data, handles) if is_dataclass(kind) or hasattr(kind, "_fields") else data


def _record(kind: Any, data: Any, handles: Handles) -> Any:
    """A dataclass from its fields by name, a NamedTuple from a list. Pure."""
    hints = get_type_hints(kind)
    named = data if isinstance(data, dict) else dict(zip(hints, data, strict=True))
    made = kind(**{name: from_plain(hints[name], item, handles) for name, item in named.items()})
    return _with_handles(made, handles) if isinstance(made, SamplingParams) else made


def _with_names(params: SamplingParams, handles: Handles) -> SamplingParams:
    """Names in place of the processor and the grammar, and no parameter that is made anew for each call. Pure."""
    name, own = params.processor and handles.name_of(params.processor), params.custom_params
    own = own and {key: item for key, item in own.items() if key != "__req__"}
    return replace(params, grammar=None, processor=name, custom_params=own)


def _with_handles(params: SamplingParams, handles: Handles) -> SamplingParams:
    """The receiver's own processor and grammar in place of their names. Pure."""
    key = params.grammar_key
    return replace(
        params,
        processor=None if params.processor is None else handles.processors[params.processor],
        grammar=None if key is None else handles.grammar(*key),
    )
