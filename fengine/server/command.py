"""`fengine serve ...` and `python -m fengine.server ...`: words -> one engine -> a server until a signal ends it.

Exit codes: 0 ended by a signal with every answer finished, 1 the server failed, 2 usage or configuration, 130 or 143
answers were cut off by a second Ctrl-C or SIGTERM, or at the end of serve.drain_seconds.
"""

import sys
from collections.abc import Sequence
from types import ModuleType

from fengine.errors import ConfigError, FengineError, MissingExtraError
from fengine.eval.runs.compose import inspect, points
from fengine.eval.runs.engines import open_engine, report
from fengine.eval.runs.words import parse
from fengine.server.config import SERVE, ServerConfig

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the words behind `fengine serve` (default: those of this process) and returns the exit code."""
    try:
        command = parse(sys.argv[1:] if argv is None else argv, SERVE.program)
        if command.inspect:
            inspect(command, SERVE)
            return OK
        if command.multirun:
            raise ConfigError("a server has one configuration: leave -m out")
        (point,) = points(command, SERVE)
        return run(point.config)
    except KeyboardInterrupt:
        print("fengine serve: interrupted", file=sys.stderr)
        return INTERRUPTED
    except FengineError as error:
        report(error)
        return USAGE


def run(config: ServerConfig) -> int:
    """Takes the address first, so that a wrong one is told before a model is loaded."""
    server = server_module()
    with server.listen(config.serve) as bound, open_engine(config.engine) as engine:
        stopped_by = server.serve(engine, config.serve, bound)
    return OK if stopped_by is None else 128 + stopped_by


def server_module() -> ModuleType:
    """`fengine.server.server`, which imports torch and the libraries of the extra. Errors: MissingExtraError."""
    try:
        from fengine.server import server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("fastapi", "starlette", "uvicorn", "uvloop", "httptools"):
            raise
        raise MissingExtraError.of("fengine serve", str(error.name), "serve") from error
    return server
