"""The command line: `fengine ...` and `python -m fengine.run ...`. Words -> points -> one engine -> records.

No torch is imported before the first job starts: `open_engine` is the one place that does.
Exit codes: 0 ok, 1 rows failed or the engine died, 2 usage or configuration, 130 interrupted.
"""

import asyncio
import gc
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from fengine.config import EngineConfig
from fengine.errors import ConfigError, EngineDeadError, FengineError, StorageError
from fengine.runs import generate, view
from fengine.runs.compose import inspect, points
from fengine.runs.config import Point
from fengine.runs.figures import Summary, count, duration, place
from fengine.runs.words import parse

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the words of a command line (default: of this process) and returns the exit code."""
    try:
        command = parse(sys.argv[1:] if argv is None else argv)
        if command.inspect:
            inspect(command)
            return OK
        with EngineCache(open_engine) as engines:
            return run_points(points(command), engines)
    except KeyboardInterrupt:
        print("fengine: interrupted", file=sys.stderr)
        return INTERRUPTED
    except FengineError as error:
        report(error)
        return FAILED if isinstance(error, EngineDeadError) else USAGE
    except BrokenPipeError:  # the reader of our standard output has gone: nothing is left to say, nor to be flushed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def open_engine(config: EngineConfig) -> Any:
    """An Engine. The one place where the command line imports torch. Errors: ConfigError, ModelLoadError and kinds."""
    gc.disable()  # the import makes a million objects that stay; looking for garbage among them is a tenth of the start
    try:
        from fengine.engine import Engine

        return Engine.from_config(config)
    finally:
        gc.enable()


class EngineCache:
    """At most one open engine, kept while consecutive points ask for an equal config. Closed at the end of `with`."""

    def __init__(self, open_: Callable[[EngineConfig], Any]) -> None:
        self._open = open_
        self._config: EngineConfig | None = None
        self._engine: Any = None

    def __enter__(self) -> "EngineCache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def holds(self, config: EngineConfig) -> bool:
        return self._engine is not None and self._config == config

    def get(self, config: EngineConfig) -> Any:
        """The engine of `config`; one of another config is closed first, to free its memory."""
        if not self.holds(config):
            self.close()
            self._engine = self._open(config)
            self._config = config
        return self._engine

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()


def run_points(jobs: Sequence[Point], engines: EngineCache) -> int:
    """Runs the points one after another; a point that fails does not stop the others. Returns the exit code."""
    sweep = len(jobs) > 1
    done: list[tuple[str, Summary]] = []
    code = OK
    for number, point in enumerate(jobs, 1):
        screen = view.choose(point.config.view)
        name = "  ".join(point.swept) or f"point {number}"
        if sweep:
            screen.headline(f"point {number} of {len(jobs)}: {name}")
        try:
            summary = run_point(point, engines, screen)
        except FengineError as error:
            if not sweep or isinstance(error, EngineDeadError):
                raise
            report(error)
            code = USAGE
            continue
        screen.summary(summary)
        done.append((name, summary))
        if summary.ended == "interrupted":
            return INTERRUPTED
        code = max(code, FAILED if summary.failed else OK)
    if done and sweep:
        view.choose(jobs[0].config.view).table(done)
    return code


def run_point(point: Point, engines: EngineCache, screen: view.QuietView) -> Summary:
    """One job. All that can be refused is refused before the engine is opened."""
    keep(point)
    out = point.config.out if point.config.out is not None else str(point.directory / "output.jsonl")
    with generate.open_job(point.config, out) as job:
        reused = engines.holds(point.config.engine)
        engine = engines.get(point.config.engine) if reused else load(point.config.engine, engines, screen)
        try:
            return asyncio.run(generate.run(job, engine, screen, reused))
        except EngineDeadError:
            screen.note(f"{count(job.writer.written, 'row')} finished before, in {place(str(job.writer.path))}.partial")
            raise


def load(config: EngineConfig, engines: EngineCache, screen: view.QuietView) -> Any:
    """A new engine, with a word about the time it takes."""
    with screen.opening(f"loading {config.model.path}"):
        engine = engines.get(config)
    took = duration(engine.stats()["start_seconds"])
    screen.note(f"{config.model.path} is ready on {engine.config.model.device} after {took}")
    return engine


def keep(point: Point) -> None:
    """Writes what was composed into the point's own directory. Errors: StorageError."""
    try:
        point.directory.mkdir(parents=True, exist_ok=True)
        for name, text in point.files:
            path = point.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"cannot write the run's directory {point.directory}: {error.strerror}; choose one with hydra.run.dir=DIR"
        ) from error


def report(error: FengineError) -> None:
    """The message alone; with HYDRA_FULL_ERROR=1 the traceback too."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exception(error)
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    print(f"fengine: {kind}{error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
