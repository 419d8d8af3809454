"""Values of classes that derive from str, dict, list and tuple, as the same of Python's own classes. No torch."""

from collections.abc import Callable
from typing import Any

ATOMS = frozenset((int, float, bool, str, bytes, type(None)))
_OWN: dict[type, Callable[[Any], Any]] = {  # the base classes' own methods: overridden ones do not run
    str: lambda text: str.__add__(text, ""),
    dict: lambda values: dict(dict.items(values)),
    list: lambda values: list.__getitem__(values, slice(None)),
    tuple: lambda values: tuple.__getitem__(values, slice(None)),
}
_DEEPEST = 200  # what is nested deeper is left to those who read it


def own_class(value: Any) -> Any:
    """A copy in Python's own class of what is of a subclass; its entries stay as they are. Pure."""
    if type(value) in _OWN or hasattr(type(value), "_fields"):
        return value
    return next((copy(value) for kind, copy in _OWN.items() if isinstance(value, kind)), value)


def without_subclasses(value: Any, seen: dict[int, Any], depth: int = 0) -> Any:
    """`value` with them at any depth; `seen`: what its parts have become. Named tuples stay: they are records. Pure."""
    if type(value) in ATOMS or depth > _DEEPEST:
        return value
    if id(value) in seen:  # shared parts are walked once; a part that holds itself ends here
        return seen[id(value)]
    seen[id(value)] = own = own_class(value)
    if type(own) is dict and not (ATOMS.issuperset(map(type, own)) and ATOMS.issuperset(map(type, own.values()))):
        own = {
            without_subclasses(key, seen, depth + 1): without_subclasses(entry, seen, depth + 1)
            for key, entry in own.items()
        }
    elif type(own) in (list, tuple) and not ATOMS.issuperset(map(type, own)):
        found = [without_subclasses(entry, seen, depth + 1) for entry in own]
        if any(new is not old for new, old in zip(found, own, strict=True)):
            own = type(own)(found)
    seen[id(value)] = own
    return own
