"""`fengine serve ...` and `python -m fengine.server ...`: words -> one engine -> a server until a signal ends it. Exit
codes: 0 ended by a signal with every answer finished, 1 the server failed, 2 usage or configuration, 130 or 143 answers
were cut off by a second Ctrl-C or SIGTERM, or at the end of serve.drain_seconds."""

import logging
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType

from fengine import config as engine_config
from fengine.config import EngineConfig
from fengine.errors import MissingExtraError
from fengine.eval.cli.command import OK, composed
from fengine.eval.cli.compose import points
from fengine.eval.cli.engines import open_engine
from fengine.eval.cli.schema import Schema
from fengine.server import config as server_config
from fengine.server.config import ServerConfig, log_to_stderr

logger = logging.getLogger("fengine.server")


@dataclass(frozen=True)
class ServeRun:
    """One server; `seed` is the engine's random_seed. Users write the sections of `engine` at the top."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    seed: int = 0
    serve: ServerConfig = field(default_factory=ServerConfig)


def check(config: ServeRun) -> list[str]:
    """Every problem that can be seen without loading anything, one line each. Pure."""
    seed = engine_config.check_seed(config.seed)
    return engine_config.check(config.engine) + server_config.check(config.serve) + seed


SERVE = Schema(ServeRun, "serve", "serve_schema", check, "fengine serve", sweeps=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `fengine serve` with these arguments (default: those of this process) and returns the exit code."""
    return composed(argv, SERVE, _work)


def _work(command: Namespace) -> int:
    (point,) = points(command, SERVE)
    return run(point.config)


def run(config: ServeRun) -> int:
    """Takes the address first, so that a wrong one is told before a model is loaded."""
    server, seeded = server_module(), replace(config.engine, random_seed=config.seed)
    log_to_stderr(config.serve.log, config.serve.log_level)
    with server.listen(config.serve) as bound:
        logger.info("loading %s", config.engine.model.path)
        with open_engine(seeded) as engine:
            stopped_by = server.serve(engine, config.serve, bound)
    return OK if stopped_by is None else 128 + stopped_by


def server_module() -> ModuleType:
    """`fengine.server.server`, which imports torch and the libraries of the extra. Errors: MissingExtraError."""
    try:
        from fengine.server import server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "uvloop", "httptools"):
            raise
        raise MissingExtraError.of("fengine serve", str(error.name), "serve") from error
    return server
