"""`fengine.evaluate(task, engine)`: an evaluation from Python, of any object that has the `Task` protocol."""

import hashlib
import inspect
from datetime import datetime
from pathlib import Path
from typing import Any

from fengine.errors import FengineError
from fengine.eval.cli import view
from fengine.eval.cli.schema import Point
from fengine.eval.cli.view import place
from fengine.eval.runs import digests, manifest
from fengine.eval.runs.config import EvalConfig, SamplingConfig, View
from fengine.eval.runs.folder import RunFolder
from fengine.eval.runs.index import index_rows, reopen
from fengine.eval.runs.run import INTERRUPTED, TERMINATED, Ended, Run, open_record
from fengine.eval.tasks.task import Task
from fengine.eval.tasks.task_config import Match, TaskConfig


def evaluate(
    task: Task,
    engine: Any,
    out: str | Path | None = None,
    *,
    sampling: dict[str, Any] | None = None,
    seed: int = 0,
    adapter: str | None = None,
    top_logprobs: int = 0,
    max_errors: int | None = None,
    show: int = 0,
) -> dict[str, Any]:
    """Runs a task's rows through an open engine; returns what metrics.json holds.

    `task` brings rows, what is asked of each, scores and metrics (`fengine.eval.tasks.task.Task`). `out` is the run
    folder, a new one below runs/ if None: the same call goes on where it was interrupted. The manifest has the SHA-256
    of the task's source. `fengine diff` and `report` read the folder; `verify` and `rerun` need the task, and say so.
    Errors: FengineError and its kinds; KeyboardInterrupt.
    """
    config = EvalConfig(
        engine=engine.config,
        sampling=SamplingConfig(**{"temperature": 0.0} | (sampling or {})),
        task=TaskConfig(task.name, task.version, target=None, match=Match.none),
        view=View.plain if show else View.quiet,
        **{"seed": seed, "adapter": adapter, "top_logprobs": top_logprobs, "max_errors": max_errors, "show": show},
    )
    point = Point(config, Path(f"runs/{datetime.now():%Y-%m-%d/%H-%M-%S-%f}" if out is None else out).absolute())
    code, metrics, record = _run(task, engine, point)
    if metrics is not None:
        return metrics
    if code in (INTERRUPTED, TERMINATED):
        raise KeyboardInterrupt
    how = record["sessions"][-1]["how"]
    raise FengineError(f"the run in {place(str(point.directory))} ended early: {how}; the same call goes on")


def _run(task: Task, engine: Any, point: Point) -> tuple[int, dict[str, Any] | None, dict[str, Any]]:
    """Exit code, metrics.json and manifest of the run in the point's folder."""
    screen, rows = view.choose(point.config.view), index_rows(task)
    with RunFolder(point.directory) as folder:
        what = manifest.identity(point.config, task, rows)
        what["task"]["source_sha256"] = source_digest(task)
        record = open_record(folder, point, what, Path.cwd())
        table = reopen(folder, rows, digests.canonical(record["identity"]), screen.note, screen.warn)
        return *_complete(Run(point.config, folder, record, rows, table), task, engine, screen), record


def _complete(run: Run, task: Task, engine: Any, screen: view.QuietView) -> Ended:
    if not run.table.left:
        return run.end(task, screen, [], 0.0)
    run.check_engine(engine)
    return run.compute(engine, task, screen, ["evaluate"])


def source_digest(task: Task) -> str | None:
    """SHA-256 of the source of a task's class; None where there is none, as in a prompt of Python."""
    try:
        return hashlib.sha256(inspect.getsource(type(task)).encode()).hexdigest()
    except (OSError, TypeError):
        return None
