"""fengine: an LLM inference engine that is functional and exact. `from fengine import Engine`.

Names are loaded on first use (PEP 562), so that `import fengine` and the command line's `--help` need no torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
# pyright: reportUnsupportedDunderAll=false
__all__ = ["Engine", "EngineConfig", "SamplingParams", "ServerArgs", "__version__", "evaluate"]

_HOME = {
    "Engine": "fengine.api.engine",
    "EngineConfig": "fengine.config",
    "SamplingParams": "fengine.core.request",
    "ServerArgs": "fengine.api.server_args",
    "evaluate": "fengine.eval.evaluate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fengine' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
