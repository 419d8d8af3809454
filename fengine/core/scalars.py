"""Numbers, flags and lists of ids that callers pass, of any library, as Python's own; what is none is refused; and
values of classes that derive from str, dict, list and tuple. No torch."""

from array import array
from collections.abc import Callable
from contextlib import suppress
from operator import countOf
from typing import Any

import numpy as np

from fengine.errors import InvalidRequestError

MAX_BITS = 1024  # of an integer: its digits fit into a message


def exact_int(value: Any) -> int | None:
    """The int that `value` is: an int, or an integer scalar of numpy or torch. None for bool and all else. Pure."""
    try:
        value = value.tolist() if hasattr(value, "tolist") else value
        return None if isinstance(value, bool) else value.__index__()
    except Exception:  # no integer; a tensor that holds no data; a class whose methods raise
        return None


def exact_float(value: Any) -> float | None:
    """The float of an int, a float, or a scalar of numpy or torch. None for bool, str, arrays and all else. Pure."""
    try:
        scalar = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(scalar, (bool, str, bytes)) and hasattr(scalar, "__float__"):
            return float(scalar)
    except Exception:  # as above
        pass
    return None


def told(value: Any) -> str:
    """The beginning of its repr, for a message; of what has none (an int of 5,000 digits has none) its type. Pure."""
    try:
        return f"{value!r:.80}"
    except Exception:
        return f"one that cannot be shown ({type(value).__name__})"


def number(name: str, value: Any) -> float:
    found = exact_float(value)
    if found is None:
        raise InvalidRequestError(f"{name} must be a number, got {told(value)} of type {type(value).__name__}.")
    return found


def integer(name: str, value: Any) -> int:
    found = exact_int(value)
    if found is None or found.bit_length() > MAX_BITS:
        kind = "an integer" if found is None else f"an integer of at most {MAX_BITS} bits"
        raise InvalidRequestError(f"{name} must be {kind}, got {told(value)} of type {type(value).__name__}.")
    return found


def flag(name: str, value: Any) -> bool:
    """A bool, or one of numpy or torch; never a number."""
    with suppress(Exception):  # as above
        plain = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(plain, bool):
            return plain
    raise InvalidRequestError(f"{name} must be True or False, got {told(value)}.")


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


def plain(value: Any) -> Any:
    """`value` with subclasses of str, dict, list and tuple, at any depth, as the same of Python's own classes. Pure. A
    value that holds none comes back itself; so do named tuples, which are records."""
    if type(value) in ATOMS or (type(value) is dict and ATOMS.issuperset(map(type, (*value, *value.values())))):
        return value
    return without_subclasses(value, {})


def plain_ids(value: Any) -> Any:
    """As `plain`, of token ids or lists of them: a million ids, which others check, are not looked at here. Pure."""
    if value is None:
        return None
    own = own_class(value)
    nested = type(own) in (list, tuple) and len(own) > 0 and isinstance(own[0], (list, tuple))
    return type(own)(map(own_class, own)) if nested else own


def check_ids(ids: Any, vocab_size: int, name: str = "input_ids") -> list[int]:
    """Token ids as a list of int, each within the width of the logits. Errors: InvalidRequestError."""
    try:
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
    except Exception as error:  # a tensor of torch that is sparse, or holds no data; a class whose methods raise
        raise InvalidRequestError(f"{name} must be readable as a list of token ids: {error}") from error
    if not isinstance(ids, (list, tuple)):
        raise InvalidRequestError(f"{name} must be a list of token ids, got {type(ids).__name__}.")
    if not ids:
        raise InvalidRequestError(f"{name} cannot be empty.")
    if countOf(map(type, ids), int) != len(ids):
        exact = [exact_int(value) for value in ids]
        if None in exact:
            i = exact.index(None)
            kind = type(ids[i]).__name__
            raise InvalidRequestError(f"{name}[{i}] must be an integer, got {told(ids[i])} ({kind}).")
        ids = exact
    try:  # a call may bring a million ids, before which no step can start: one pass over the objects, not two
        fit = np.frombuffer(array("I", ids), np.uintc).max() < vocab_size
    except OverflowError:
        fit = False
    if not fit:
        i, bad = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        raise InvalidRequestError(
            f"{name}[{i}] is {told(bad)}, out-of-vocabulary; token ids must be in [0, {vocab_size - 1}]."
        )
    return list(ids)
