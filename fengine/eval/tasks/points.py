"""Runs the points of a sweep: one after another with one engine, or by a launcher. No torch.

A point that fails does not stop the others. Every point is a run folder of its own that goes on where it was, so the
same command with the same folder goes on with the whole sweep.
"""

import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fengine.errors import ConfigError, FengineError
from fengine.eval.cli import view
from fengine.eval.cli.engines import EngineCache, report
from fengine.eval.cli.figures import count, place
from fengine.eval.cli.launch import launch
from fengine.eval.cli.schema import BadPoint, Point
from fengine.eval.tasks.config import EVAL
from fengine.eval.tasks.sweep import TABLE, Sweep, SweepFolder, home_of

FAILED, USAGE, INTERRUPTED, TERMINATED = 1, 2, 130, 143
Run = Callable[[Point, EngineCache, view.QuietView], tuple[int, Any]]  # one run -> its exit code, and its metrics


def how_to_go_on(folder: Path) -> str:
    return f"to go on, run the same command with out={place(str(folder))}"


def run_sweep(
    command: Namespace,
    jobs: Sequence[Point | BadPoint],
    engines: EngineCache,
    run: Run,
    alone: Callable[[Point], int],
) -> int:
    """Returns the worst exit code of the points. `alone` is `run` for a process of its own, and is pickled by name.

    Errors: ConfigError, ResumeMismatchError, StorageError, with nothing computed.
    """
    home, first = home_of(jobs), next(job for job in jobs if isinstance(job, Point))
    screen = view.choose(first.config.view)
    if home is None:
        raise ConfigError("the points of a sweep must have one folder in common: give out=DIR, or leave it out")
    with SweepFolder(home) as folder:
        sweep = Sweep(folder, jobs)
        for job in jobs:
            if isinstance(job, BadPoint):
                report(ConfigError(f"{'  '.join(job.swept)} is left out: {job.message}"))
        try:
            if first.launcher == "basic":
                code = _in_turn(jobs, sweep, engines, run)
            else:
                code = _launched(command, jobs, sweep, screen, alone)
        except KeyboardInterrupt:
            print("fengine eval: interrupted", file=sys.stderr)
            code = INTERRUPTED
        screen.figures([*sweep.lines(), ("sweep", place(str(home / TABLE)))])
        if not sweep.complete:
            screen.note(how_to_go_on(home))
        return max(code, USAGE) if any(isinstance(job, BadPoint) for job in jobs) else code


def _in_turn(jobs: Sequence[Point | BadPoint], sweep: Sweep, engines: EngineCache, run: Run) -> int:
    """In this process. Points that share an engine follow one another, so that each engine is loaded once."""
    kinds = list(dict.fromkeys(job.config.engine for job in jobs if isinstance(job, Point)))
    points = [(number, job) for number, job in enumerate(jobs) if isinstance(job, Point)]
    worst = 0
    for number, point in sorted(points, key=lambda item: kinds.index(item[1].config.engine)):
        screen = view.choose(point.config.view)
        screen.headline(f"point {number + 1} of {len(jobs)}: {sweep.told[number].point}")
        code, problem = guarded(point, engines, run, screen)
        sweep.put(number, code, problem)
        worst = max(worst, code)
        if code in (INTERRUPTED, TERMINATED):
            break
    return worst


def guarded(point: Point, engines: EngineCache, run: Run, screen: view.QuietView) -> tuple[int, str | None]:
    """One point of several: whatever fails is told and is its own. (exit code, what was wrong)."""
    try:
        return run(point, engines, screen)[0], None
    except FengineError as error:
        report(error)
        return USAGE, f"{type(error).__name__}: {error}"
    except Exception as error:  # a fault of this program, or memory that ran out: the next point may be spared
        traceback.print_exception(error)
        engines.close()
        return FAILED, f"{type(error).__name__}: {error}"


def _launched(
    command: Namespace,
    jobs: Sequence[Point | BadPoint],
    sweep: Sweep,
    screen: view.QuietView,
    alone: Callable[[Point], int],
) -> int:
    """Each in a process of its own, with an engine of its own."""
    points = {number: job for number, job in enumerate(jobs) if isinstance(job, Point)}
    name = next(iter(points.values())).launcher
    screen.note(f"{count(len(points), 'point')} by {name}; each loads the model in a process of its own")
    codes: list[int | None]
    try:
        codes = launch(command, EVAL, sweep.folder.path, list(points.values()), alone)
    except FengineError:
        raise
    except Exception as error:  # the launcher's: one process that was killed may take the others with it
        print(f"fengine: {name} failed: {type(error).__name__}: {error}", file=sys.stderr)
        codes = [None] * len(points)
    for number, code in zip(points, codes, strict=True):
        sweep.put(number, code)
    return max(FAILED if code is None else code for code in codes)
