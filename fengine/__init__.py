"""fengine: an LLM inference engine that is functional and exact. `from fengine import Engine`. Names are loaded on
first use (PEP 562), so that `import fengine` and the command line's `--help` need no torch. `__init__.pyi` tells type
checkers what they are."""

from fengine.compat import find_moved, install_as_sglang, moved_names

__version__ = "0.1.0"
# pyright: reportUnsupportedDunderAll=false
__all__ = [
    "Engine",
    "EngineConfig",
    "Runtime",
    "SamplingParams",
    "ServerArgs",
    "__version__",
    "evaluate",
    "install_as_sglang",
]

_HOME = {
    "Engine": "fengine.api.engine",
    "EngineConfig": "fengine.config",
    "Runtime": "fengine.server.runtime",
    "SamplingParams": "fengine.core.sampling_params",
    "ServerArgs": "fengine.api.server_args",
    "evaluate": "fengine.eval.commands.evaluate",
}
find_moved()


__getattr__ = moved_names(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(__all__)
