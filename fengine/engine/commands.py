"""Commands: all that may be asked of the loop, as values that a log or another process can receive.

What cannot be a value (tensors, a callback, the states of requests) is attached beside the command, see `Inbox`.
"""

from dataclasses import dataclass
from typing import ClassVar

from fengine.core.request import Request


@dataclass(frozen=True, slots=True)
class Command:
    """Executed by the loop between two steps. `in_step`: also inside of one, for a logit processor that asks."""

    in_step: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Add(Command):
    """Queue these requests, all of them new. Attached: their states."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Abort(Command):
    """End the requests with these rids (None: all), in whatever state they are; an unknown rid is left alone.

    Attached: the states that are meant, where a rid may have come again.
    """

    rids: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Pause(Command):
    """Schedule no step from here on. "abort" ends all requests, "retract" sends those that run back to the queue,
    "in_place" leaves them."""

    mode: str


@dataclass(frozen=True, slots=True)
class Resume(Command):
    """Schedule steps again."""


@dataclass(frozen=True, slots=True)
class FlushCache(Command):
    """Empty the prefix cache, if no request runs. Answer: whether it was emptied."""


@dataclass(frozen=True, slots=True)
class GetStats(Command):
    """Answer: counters, and what is refused, between two steps."""

    in_step: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Ping(Command):
    """Answer as soon as the loop can."""

    in_step: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class WatchSteps(Command):
    """Tell of every step from here on. Attached: the function that is called with each `StepRecord`."""

    key: str


@dataclass(frozen=True, slots=True)
class UnwatchSteps(Command):
    """Tell no more. Answer: what the function raised, or None."""

    key: str


@dataclass(frozen=True, slots=True)
class LabelWeights(Command):
    """The weights that steps run with have this label from here on."""

    version: str


@dataclass(frozen=True, slots=True)
class UpdateWeights(Command):
    """Write these tensors; what the old weights computed is forgotten. Attached: the checked changes, their origin.

    Answer: how many requests ran, and go on with the new weights.
    """

    names: tuple[str, ...]
    version: str | None


@dataclass(frozen=True, slots=True)
class ReadWeights(Command):
    """Answer: the first `rows` rows of a tensor (None: all), as a tensor; None for a name that the model has not."""

    in_step: ClassVar[bool] = True
    name: str
    rows: int | None


@dataclass(frozen=True, slots=True)
class ReleaseMemory(Command):
    """Give the memory of these tags back. `everything`: those that are released already do not matter."""

    tags: tuple[str, ...]
    everything: bool


@dataclass(frozen=True, slots=True)
class ResumeMemory(Command):
    """Take the memory of these tags again. `everything`: those that are not released do not matter."""

    tags: tuple[str, ...]
    everything: bool


@dataclass(frozen=True, slots=True)
class StartProfile(Command):
    """Record steps [start, start + count) from now on to the file `path`; a count of None means until stopped."""

    path: str
    start: int
    count: int | None
    activities: tuple[str, ...]  # of "CPU", "GPU"
    with_stack: bool
    record_shapes: bool


@dataclass(frozen=True, slots=True)
class StopProfile(Command):
    """Write what was recorded. Answer: the path."""
