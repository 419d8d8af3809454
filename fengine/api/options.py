"""`EngineContext`: what requests are checked against; the ids of prompts, and those that end a request."""

from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from operator import countOf
from typing import Any, Protocol

import numpy as np

from fengine.api.request_log import RequestLog
from fengine.api.server_args import ServerArgs
from fengine.api.sessions import Sessions
from fengine.core.request import SamplingParams
from fengine.core.scalars import exact_int, told
from fengine.engine.parts import Parts
from fengine.errors import InvalidRequestError
from fengine.structured_output.backend import Grammars


@dataclass(frozen=True, slots=True)
class EngineContext:
    """What requests are checked against: the model, the settings, and what the caller has registered."""

    parts: Parts
    args: ServerArgs
    sessions: Sessions
    grammars: Grammars
    log: RequestLog | None  # None: nothing is to be written about requests
    preferred: Mapping[str, Any] = field(default_factory=dict)  # sampling parameters where a call gives none
    processors: dict[str, Callable[..., Any]] = field(default_factory=dict)  # custom logit processors by name
    indices: Iterator[int] = field(default_factory=count)  # of prompts: seeds that are not given derive from them


class HasContext(Protocol):
    """What the functions that are methods of `Engine` need of it."""

    _parts: Parts
    _context: EngineContext


def check_ids(ids: Any, vocab_size: int, name: str = "input_ids") -> list[int]:
    """Token ids as a list of int, each within the width of the logits. Errors: InvalidRequestError."""
    if hasattr(ids, "tolist"):
        try:
            ids = ids.tolist()
        except RuntimeError as error:  # a tensor of torch that is sparse, or holds no data
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
            f"{name}[{i}] is {told(bad)}, out of vocabulary; token ids must be in [0, {vocab_size - 1}]."
        )
    return list(ids)


def end_ids(context: EngineContext, params: SamplingParams) -> frozenset[int]:
    """The ids that end a request, unless it has ignore_eos. Pure."""
    return context.parts.eos_ids | frozenset(params.stop_token_ids)


def stop_ids(context: EngineContext, params: SamplingParams) -> frozenset[int]:
    """The ids that do end it: a grammar's text has an end in any case. Pure."""
    return frozenset() if params.ignore_eos and params.grammar_key is None else end_ids(context, params)
