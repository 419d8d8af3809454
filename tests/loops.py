"""Functions that a test has run in an engine's loop, between two steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fengine.engine.commands import Command
from fengine.engine.engine_core import EngineCore


@dataclass(frozen=True, slots=True)
class Run(Command):
    """Attached: a function."""


def in_loop(core: EngineCore, function: Callable[[], Any] = lambda: None) -> Any:
    """What the function returns or raises; by default one that does nothing."""
    core.handle(Run, lambda command, attached: attached())
    return core.call(Run(), function)
