"""Functions that a test has run in an engine's loop, between two steps."""

from collections.abc import Callable
from typing import Any

from fengine.engine.engine_core import EngineCore


def in_loop(core: EngineCore, function: Callable[[], Any] = lambda: None) -> Any:
    """What the function returns or raises; by default one that does nothing."""
    core.handlers["run"] = lambda attached: attached()
    return core.call("run", function)
