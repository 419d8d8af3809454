"""`EngineContext`: what requests are checked against."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from fengine.api.request_log import RequestLog
from fengine.api.server_args import ServerArgs
from fengine.api.sessions import Sessions
from fengine.engine.parts import Parts
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
