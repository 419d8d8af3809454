"""A sweep: its points run one after another with one engine, or by a launcher; what is kept of them all. No torch.

A point that fails does not stop the others. Every point is a run folder of its own that goes on where it was, so the
same command with the same folder goes on with the whole sweep. `sweep.json`, `sweep.md` and `sweep.csv` tell of the
points and are written again after each; they hold no times, so that the same sweep has the same files.
"""

import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fengine.errors import ConfigError, FengineError, ResumeMismatchError, StorageError
from fengine.eval.cli import view
from fengine.eval.cli.engines import EngineCache, report
from fengine.eval.cli.recompose import launch
from fengine.eval.cli.schema import BadPoint, Point, Schema
from fengine.eval.cli.view import count, place
from fengine.eval.runs.finish import METRICS
from fengine.eval.runs.folder import LOCK, RunFolder, read_object
from fengine.eval.runs.sweep_tables import PointStatus, as_csv, figure, markdown, over_seeds

FAILED, USAGE, INTERRUPTED, TERMINATED = 1, 2, 130, 143
Job = Point | BadPoint
Work = Callable[[Point, EngineCache, view.QuietView], tuple[int, Any]]  # one run -> its exit code, and its metrics
SWEEP, TABLE, CSV, SCHEMA = "sweep.json", "sweep.md", "sweep.csv", 1
STATUS = {0: "ok", 1: "failed", 2: "refused", 130: "interrupted", 143: "terminated"}


def begun(job: Job, number: int, home: Path) -> PointStatus:
    """A point of a sweep in the folder `home`, before anything is computed. Pure."""
    name = "  ".join(job.swept) or f"point {number}"
    if isinstance(job, BadPoint):
        return PointStatus(name, None, "refused", job.message)
    return PointStatus(name, os.path.relpath(job.directory, home))


class SweepFolder(RunFolder):
    """As a run's folder: one writer at a time. Beside its own files it holds the folders of points."""

    record, word = SWEEP, "sweep"

    def _is_own(self, path: Path) -> bool:
        return path.name in {LOCK, *(f".{name}.tmp" for name in (SWEEP, TABLE, CSV))} or path.is_dir()


class Sweep:
    """The status of a sweep's points, kept in a folder if they have one. Modified by `put`."""

    def __init__(self, folder: RunFolder | None, jobs: Sequence[Job]) -> None:
        """Errors: ResumeMismatchError if the folder is that of other points; StorageError."""
        self.folder = folder
        home = Path.cwd() if folder is None else folder.path
        self.places = [job.directory if isinstance(job, Point) else None for job in jobs]
        self.points = [begun(job, number, home) for number, job in enumerate(jobs)]
        before = None if folder is None else folder.read(SWEEP)
        if before is not None:
            self._refuse_others(before, home)
        self.write()

    def _refuse_others(self, before: dict[str, Any], home: Path) -> None:
        try:
            recorded = [one["point"] for one in before["points"]]
        except (KeyError, TypeError) as error:
            raise StorageError(f"{home / SWEEP} is no sweep's; choose another out=DIR") from error
        now = [one.point for one in self.points]
        if recorded != now:
            number = next((i for i, (a, b) in enumerate(zip(recorded, now, strict=False)) if a != b), None)
            number = min(len(recorded), len(now)) if number is None else number
            old, new = ([*names, *["none"] * (number + 1)][number] for names in (recorded, now))
            raise ResumeMismatchError(
                f"{home} holds a sweep of {len(recorded)} other points (recorded → now, of {len(now)}):\n"
                f"  point {number}: {old} → {new}\nput that back to go on with it, or choose another out=DIR"
            )

    def put(self, number: int, code: int | None, problem: str | None = None) -> None:
        """A point has ended, with this exit code; None: its process died. Errors: StorageError."""
        one = self.points[number]
        one.status, one.problem = "died" if code is None else STATUS.get(code, "failed"), problem
        metrics, folder = None, self.places[number]
        if code in (0, 1) and folder is not None:
            metrics = read_object(folder / METRICS)
        if metrics is not None:
            one.rows, one.failed, one.metrics = (metrics.get(key) for key in ("rows", "failed", "metrics"))
            one.status = "rows failed" if code else "ok"
        self.write()

    @property
    def complete(self) -> bool:
        """Whether every point that can be computed has come to its end."""
        return all(one.status in ("ok", "rows failed", "refused") for one in self.points)

    def lines(self) -> list[tuple[str, str]]:
        """(point, figures) for a view; points that differ in their seed only are one. Pure."""
        lines = []
        for one in over_seeds(self.points) or self.points:
            figures = [f"{name} {figure(metric)}" for name, metric in (one.metrics or {}).items()]
            failed = [f"{one.failed:,} of {one.rows:,} rows failed"] if one.failed else []
            rows = [] if one.rows is None or figures or failed else [count(one.rows, "row")]
            lines.append((one.point, ", ".join([*figures, *rows, *failed]) or one.status))
        return lines

    def write(self) -> None:
        """Errors: StorageError."""
        if self.folder is None:
            return
        points = [asdict(one) for one in self.points]
        files = {SWEEP: {"fengine_sweep": SCHEMA, "points": points}, TABLE: markdown(self.points)}
        self.folder.write_several(files | {CSV: as_csv(self.points)}, durable=False)  # all is in the points' folders


# -- running -----------------------------------------------------------------------------------------------------------


def home_of(jobs: Sequence[Job]) -> Path:
    """The folder that holds those of all points. Pure. Errors: ConfigError if they are in several."""
    parents = {job.directory.parent for job in jobs if isinstance(job, Point)}
    if len(parents) > 1:
        raise ConfigError("the points of a sweep must have one folder in common: give out=DIR, or leave it out")
    return parents.pop()


def how_to_go_on(folder: Path, schema: Schema, out: str | None = None, key: str = "hydra.run.dir") -> str:
    """What to type for a run or a sweep in `folder` that has not come to its end; `out` is a file that it was given."""
    if schema.one_file and out is not None:
        return "to go on, run the same command"
    return f"to go on, run the same command with {key if schema.one_file else 'out'}={place(str(folder))}"


def run_sweep(
    command: Namespace,
    schema: Schema,
    jobs: Sequence[Job],
    engines: EngineCache,
    run: Work,
    alone: Callable[[Point], int],
) -> int:
    """Returns the worst exit code of the points. `alone` is `run` for a process of its own, and is pickled by name.

    Errors: ConfigError, ResumeMismatchError, StorageError, with nothing computed.
    """
    first = next(job for job in jobs if isinstance(job, Point))
    own_places = schema.one_file and first.config.out is not None  # their files lie where they were asked for
    home = None if own_places else home_of(jobs)
    screen, bad = view.choose(first.config.view), [job for job in jobs if isinstance(job, BadPoint)]
    with nullcontext() if home is None else SweepFolder(home) as folder:
        sweep = Sweep(folder, jobs)
        for job in bad:
            report(ConfigError(f"{'  '.join(job.swept)} is left out: {job.message}"))
        try:
            if first.launcher == "basic":
                code = _in_turn(jobs, sweep, engines, run)
            else:
                code = _launched(command, schema, jobs, sweep, screen, alone)
        except KeyboardInterrupt:
            print(f"{schema.program}: interrupted", file=sys.stderr)
            code = INTERRUPTED
        screen.figures([*sweep.lines(), *([] if home is None else [("sweep", place(str(home / TABLE)))])])
        if not sweep.complete and home is not None:
            screen.note(how_to_go_on(home, schema, key="hydra.sweep.dir"))
        return max(code, USAGE) if bad else code


def _in_turn(jobs: Sequence[Job], sweep: Sweep, engines: EngineCache, run: Work) -> int:
    """In this process. Points that share an engine follow one another, so that each engine is loaded once."""
    kinds = list(dict.fromkeys(job.config.engine for job in jobs if isinstance(job, Point)))
    points = [(number, job) for number, job in enumerate(jobs) if isinstance(job, Point)]
    worst = 0
    for number, point in sorted(points, key=lambda item: kinds.index(item[1].config.engine)):
        screen = view.choose(point.config.view)
        screen.headline(f"point {number + 1} of {len(jobs)}: {sweep.points[number].point}")
        code, problem = guarded(point, engines, run, screen)
        sweep.put(number, code, problem)
        worst = max(worst, code)
        if code in (INTERRUPTED, TERMINATED):
            break
    return worst


def guarded(point: Point, engines: EngineCache, run: Work, screen: view.QuietView) -> tuple[int, str | None]:
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
    schema: Schema,
    jobs: Sequence[Job],
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
        codes = launch(command, schema, next(iter(points.values())).directory.parent, list(points.values()), alone)
    except FengineError:
        raise
    except Exception as error:  # the launcher's: one process that was killed may take the others with it
        print(f"fengine: {name} failed: {type(error).__name__}: {error}", file=sys.stderr)
        codes = [None] * len(points)
    for number, code in zip(points, codes, strict=True):
        sweep.put(number, code)
    return max(FAILED if code is None else code for code in codes)
