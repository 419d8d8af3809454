"""The command line: `fengine ...`, `python -m fengine.run ...`, and verbs such as `fengine eval`, each a module.

Words -> points -> one engine -> records.

No torch is imported before the first job starts: `runs/engines.py` is the one place that does.
Exit codes: 0 ok, 1 rows failed or the engine died, 2 usage or configuration, 130 interrupted.
"""

import asyncio
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from fengine.config import EngineConfig
from fengine.errors import EngineDeadError, FengineError, StorageError
from fengine.eval import evaluate
from fengine.eval.cli import view
from fengine.eval.cli.command import FAILED, INTERRUPTED, OK, TERMINATED, USAGE, composed
from fengine.eval.cli.compose import points
from fengine.eval.cli.engines import EngineCache, open_engine, report
from fengine.eval.cli.figures import Summary, count, duration, place
from fengine.eval.cli.schema import Point
from fengine.eval.commands import diff, lm_eval, merge, rerun, serve, verify
from fengine.eval.commands.report import main as report_verb
from fengine.eval.runs import generate
from fengine.eval.runs.config import RUN

__all__ = ["FAILED", "INTERRUPTED", "OK", "TERMINATED", "USAGE", "main"]
# The first word, and who takes those behind it. Their modules import no torch (tests/test_verbs.py).
COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "eval": evaluate.main,
    "merge": merge.main,
    "diff": diff.main,
    "lm-eval": lm_eval.main,
    "report": report_verb,
    "rerun": rerun.main,
    "verify": verify.main,
    "serve": serve.main,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the words of a command line (default: of this process) and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        return COMMANDS[words[0]](words[1:])

    def work(command: Namespace) -> int:
        with EngineCache(open_engine) as engines:
            return run_points(points(command, RUN), engines)

    return composed(words, RUN, work)


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
        kept = point.directory / ".hydra"
        kept.mkdir(parents=True, exist_ok=True)
        config = yaml.safe_dump(evaluate.nested(point.config), sort_keys=False, allow_unicode=True)
        (kept / "config.yaml").write_text(config, encoding="utf-8")
        (kept / "overrides.yaml").write_text(
            yaml.safe_dump(list(point.overrides), allow_unicode=True), encoding="utf-8"
        )
    except OSError as error:
        raise StorageError(
            f"cannot write the run's directory {point.directory}: {error.strerror}; choose one with hydra.run.dir=DIR"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
