"""A sweep: its points run one after another with one engine, or by a launcher; what is kept of them all. No torch.

A point that fails does not stop the others. Every point is a run folder of its own that goes on where it was, so the
same command with the same folder goes on with the whole sweep. `sweep.json` and `sweep.md` tell of the points and are
written again after each; they hold no times, so that the same sweep has the same files.
"""

import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fengine.errors import ConfigError, FengineError, ResumeMismatchError, StorageError
from fengine.eval.cli import view
from fengine.eval.cli.engines import EngineCache, report
from fengine.eval.cli.launch import launch
from fengine.eval.cli.schema import BadPoint, Point, Schema
from fengine.eval.cli.view import count, place
from fengine.eval.runs.finish import METRICS
from fengine.eval.runs.folder import LOCK, RunFolder, read_object

FAILED, USAGE, INTERRUPTED, TERMINATED = 1, 2, 130, 143
Run = Callable[[Point, EngineCache, view.QuietView], tuple[int, Any]]  # one run -> its exit code, and its metrics
SWEEP, TABLE, SCHEMA = "sweep.json", "sweep.md", 1
STATUS = {0: "ok", 1: "failed", 2: "refused", 130: "interrupted", 143: "terminated"}


@dataclass
class PointStatus:
    """What `sweep.json` says of one point. `status`: waiting, ok, rows failed, failed, refused, interrupted,
    terminated, or died (the process that computed it). `metrics` is that of the point's metrics.json."""

    point: str
    folder: str | None
    status: str = "waiting"
    problem: str | None = None
    rows: int | None = None
    failed: int | None = None
    metrics: dict[str, Any] | None = None


class SweepFolder(RunFolder):
    """As a run's folder: one writer at a time. Beside its own files it holds the folders of points."""

    record, word = SWEEP, "sweep"

    def _refuse_other_files(self) -> None:
        known = {LOCK, *(f".{name}.tmp" for name in (SWEEP, TABLE))}
        others = sorted(p.name for p in self.path.iterdir() if p.name not in known and not p.is_dir())
        if others:
            raise StorageError(
                f"sweep folder {self.path} holds {others[0]!r:.80} and no {SWEEP}: it is not a sweep's. Choose another "
                "out=DIR"
            )


class Sweep:
    """What is told of a sweep's points, kept in a folder if they have one. Modified by `put`."""

    def __init__(self, folder: RunFolder | None, jobs: Sequence[Point | BadPoint]) -> None:
        """Errors: ResumeMismatchError if the folder is that of other points; StorageError."""
        self.folder = folder
        home = Path.cwd() if folder is None else folder.path
        self.places = [job.directory if isinstance(job, Point) else None for job in jobs]
        self.told = [_begin(job, number, home) for number, job in enumerate(jobs)]
        before = None if folder is None else folder.read(SWEEP)
        if before is not None:
            self._refuse_others(before, home)
        self.write()

    def _refuse_others(self, before: dict[str, Any], home: Path) -> None:
        try:
            recorded = [(one["point"], one["folder"]) for one in before["points"]]
        except (KeyError, TypeError) as error:
            raise StorageError(f"{home / SWEEP} is no sweep's; choose another out=DIR") from error
        now = [(one.point, one.folder) for one in self.told]
        if [point for point, _ in recorded] != [point for point, _ in now]:
            pairs = zip(
                [*recorded, *[("none", None)] * len(now)], [*now, *[("none", None)] * len(recorded)], strict=False
            )
            number, (old, new) = next((i, (a[0], b[0])) for i, (a, b) in enumerate(pairs) if a[0] != b[0])
            raise ResumeMismatchError(
                f"{home} holds a sweep of {len(recorded)} other points (recorded → now, of {len(now)}):\n"
                f"  point {number}: {old} → {new}\nput that back to go on with it, or choose another out=DIR"
            )

    def put(self, number: int, code: int | None, problem: str | None = None) -> None:
        """A point has ended, with this exit code; None: its process died. Errors: StorageError."""
        one = self.told[number]
        one.status, one.problem = "died" if code is None else STATUS.get(code, "failed"), problem
        metrics, place = None, self.places[number]
        if code in (0, 1) and place is not None:
            metrics = read_object(place / METRICS)
        if metrics is not None:
            one.rows, one.failed, one.metrics = (metrics.get(key) for key in ("rows", "failed", "metrics"))
            one.status = "rows failed" if code else "ok"
        self.write()

    @property
    def complete(self) -> bool:
        """Whether every point that can be computed has come to its end."""
        return all(one.status in ("ok", "rows failed", "refused") for one in self.told)

    def lines(self) -> list[tuple[str, str]]:
        """(point, figures) for a view. Pure."""
        found = []
        for one in self.told:
            figures = [f"{name} {figure(metric)}" for name, metric in (one.metrics or {}).items()]
            failed = [f"{one.failed:,} of {one.rows:,} rows failed"] if one.failed else []
            rows = [] if one.rows is None or figures or failed else [count(one.rows, "row")]
            found.append((one.point, ", ".join([*figures, *rows, *failed]) or one.status))
        return found

    def write(self) -> None:
        """Errors: StorageError."""
        if self.folder is None:
            return
        points = [asdict(one) for one in self.told]
        files = {SWEEP: {"fengine_sweep": SCHEMA, "points": points}, TABLE: markdown(self.told)}
        self.folder.write_several(files, durable=False)  # all of it is in the points' folders


def _begin(job: Point | BadPoint, number: int, home: Path) -> PointStatus:
    name = "  ".join(job.swept) or f"point {number}"
    if isinstance(job, BadPoint):
        return PointStatus(name, None, "refused", job.message)
    return PointStatus(name, os.path.relpath(job.directory, home))


def home_of(jobs: Sequence[Point | BadPoint]) -> Path | None:
    """The folder that holds those of all points; None if they are in several. Pure."""
    parents = {job.directory.parent for job in jobs if isinstance(job, Point)}
    return parents.pop() if len(parents) == 1 else None


def figure(metric: dict[str, Any] | None) -> str:
    """value ± standard error. Pure."""
    if metric is None or metric["value"] is None:
        return "–"
    error = "" if metric["stderr"] is None else f" ± {metric['stderr']:.4f}"
    return f"{metric['value']:.4f}{error}"


def markdown(told: Sequence[PointStatus]) -> str:
    """The points as a table, aligned for the eye. Pure."""
    names = list(dict.fromkeys(name for one in told for name in one.metrics or {}))
    lines = [["point", "status", "rows", "failed", *names, "folder"]]
    for one in told:
        counts = ["" if value is None else f"{value:,}" for value in (one.rows, one.failed)]
        figures = ["" if one.metrics is None else figure(one.metrics.get(name)) for name in names]
        lines.append([one.point, one.status, *counts, *figures, one.folder or ""])
    cells = [[" ".join(cell.replace("|", "\\|").split()) for cell in line] for line in lines]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    rule = ["-" * width for width in widths]
    rows = [cells[0], rule, *cells[1:]]
    table = "".join(
        "| " + " | ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)) + " |\n" for line in rows
    )
    problems = "".join(f"\n{one.point}: {one.problem}\n" for one in told if one.problem)
    return table + problems


# -- running -----------------------------------------------------------------------------------------------------------


def how_to_go_on(folder: Path, schema: Schema) -> str:
    key = "hydra.sweep.dir" if schema.one_file else "out"
    return f"to go on, run the same command with {key}={place(str(folder))}"


def run_sweep(
    command: Namespace,
    schema: Schema,
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
    if schema.one_file and first.config.out is not None:  # their files lie where they were asked for
        home = None
    elif home is None:
        raise ConfigError("the points of a sweep must have one folder in common: give out=DIR, or leave it out")
    with nullcontext() if home is None else SweepFolder(home) as folder:
        sweep = Sweep(folder, jobs)
        for job in jobs:
            if isinstance(job, BadPoint):
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
            screen.note(how_to_go_on(home, schema))
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
    schema: Schema,
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
        codes = launch(command, schema, next(iter(points.values())).directory.parent, list(points.values()), alone)
    except FengineError:
        raise
    except Exception as error:  # the launcher's: one process that was killed may take the others with it
        print(f"fengine: {name} failed: {type(error).__name__}: {error}", file=sys.stderr)
        codes = [None] * len(points)
    for number, code in zip(points, codes, strict=True):
        sweep.put(number, code)
    return max(FAILED if code is None else code for code in codes)
