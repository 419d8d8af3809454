"""A sweep: its points run one after another with one engine, or by a launcher; what is kept of them all. No torch.

A point that fails does not stop the others. Every point is a run folder of its own that goes on where it was, so the
same command with the same folder goes on with the whole sweep. `sweep.json`, `sweep.md` and `sweep.csv` tell of the
points and are written again after each; they hold no times, so that the same sweep has the same files."""

import csv
import io
import os
import re
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from fengine.errors import ConfigError, FengineError, ResumeMismatchError, StorageError
from fengine.eval.cli import view
from fengine.eval.cli.command import FAILED, INTERRUPTED, TERMINATED, USAGE, reported
from fengine.eval.cli.engines import EngineCache, report
from fengine.eval.cli.recompose import launch
from fengine.eval.cli.schema import BadPoint, Point, Schema
from fengine.eval.cli.view import count, place
from fengine.eval.runs.folder import LOCK, RunFolder, read_object
from fengine.eval.runs.record import METRICS
from fengine.eval.tasks.statistics import mean

Job = Point | BadPoint
Work = Callable[[Point, EngineCache, view.QuietView], tuple[int, Any]]  # one run -> its exit code, and its metrics
SWEEP, TABLE, CSV, SCHEMA = "sweep.json", "sweep.md", "sweep.csv", 1
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

    def _is_own(self, path: Path) -> bool:
        return path.name in {LOCK, *(f".{name}.tmp" for name in (SWEEP, TABLE, CSV))} or path.is_dir()


class Sweep:
    """The status of a sweep's points, kept in a folder if they have one. Modified by `put`."""

    def __init__(self, folder: RunFolder | None, jobs: Sequence[Job]) -> None:
        """Errors: ResumeMismatchError if the folder is that of other points; StorageError."""
        self.folder, home = folder, Path.cwd() if folder is None else folder.path
        self.places = [job.directory if isinstance(job, Point) else None for job in jobs]
        self.points = []
        for number, job in enumerate(jobs):
            one = PointStatus("  ".join(job.swept) or f"point {number}", None)
            if isinstance(job, BadPoint):
                one.status, one.problem = "refused", job.message
            else:
                one.folder = os.path.relpath(job.directory, home)
            self.points.append(one)
        if folder is not None and (before := read_object(home / SWEEP)) is not None:
            self._refuse_others(before, home)
        self.write()

    def _refuse_others(self, before: dict[str, Any], home: Path) -> None:
        try:
            recorded = [one["point"] for one in before["points"]]
        except (KeyError, TypeError) as error:
            raise StorageError(f"{home / SWEEP} is no sweep's; choose another out=DIR") from error
        now = [one.point for one in self.points]
        if recorded != now:
            same = [a == b for a, b in zip(recorded, now, strict=False)]
            number = same.index(False) if False in same else len(same)
            old, new = ([*names, *["none"] * (number + 1)][number] for names in (recorded, now))
            raise ResumeMismatchError(
                f"{home} holds a sweep of {len(recorded)} other points (recorded → now, of {len(now)}):\n"
                f"  point {number}: {old} → {new}\nput that back to go on with it, or choose another out=DIR"
            )

    def put(self, number: int, code: int | None, problem: str | None = None) -> None:
        """A point has ended, with this exit code; None: its process died. Errors: StorageError."""
        one, folder = self.points[number], self.places[number]
        one.status, one.problem = "died" if code is None else STATUS.get(code, "failed"), problem
        metrics = read_object(folder / METRICS) if code in (0, 1) and folder is not None else None
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
        if self.folder is not None:
            files = {SWEEP: {"fengine_sweep": SCHEMA, "points": [asdict(one) for one in self.points]}}
            files |= {TABLE: markdown(self.points), CSV: as_csv(self.points)}
            self.folder.write_several(files, durable=False)  # all is in the points' folders


def figure(metric: dict[str, Any] | None) -> str:
    """value ± standard error. Pure."""
    if metric is None or metric["value"] is None:
        return "–"
    return f"{metric['value']:.4f}" + ("" if metric["stderr"] is None else f" ± {metric['stderr']:.4f}")


def words_of(point: str) -> list[str]:
    """The overrides in a point's name, whose values may have blanks in them. Pure."""
    return re.split(r"  (?=[+~\w./@]+=)", point)


def without_seed(point: str) -> str:
    """A point's name without the word that gives its seed. Pure."""
    return "  ".join(word for word in words_of(point) if not word.lstrip("+").startswith("seed="))


def over_seeds(points: Sequence[PointStatus]) -> list[PointStatus]:
    """Points that differ in their seed only as one: the means of their metrics with the standard errors over seeds.
    None where no two of them do. Pure."""
    groups: dict[str, list[PointStatus]] = {}
    for one in points:
        groups.setdefault(without_seed(one.point), []).append(one)
    return [] if len(groups) == len(points) else [_mean_of(name, group) for name, group in groups.items()]


def _mean_of(name: str, group: Sequence[PointStatus]) -> PointStatus:
    figures: dict[str, list[float]] = {}
    for one in group:
        for key, metric in (one.metrics or {}).items():
            figures.setdefault(key, []).extend([] if metric["value"] is None else [metric["value"]])
    metrics = {key: mean(values).as_dict() for key, values in figures.items()}
    states = list(dict.fromkeys(one.status for one in group))
    rows, failed = (sum(getattr(one, key) or 0 for one in group) for key in ("rows", "failed"))
    label = f"{name}  {count(len(group), 'seed')}".strip()
    return PointStatus(label, None, ", ".join(states), None, rows, failed, metrics or None)


def markdown(points: Sequence[PointStatus]) -> str:
    """The points as a table, aligned for the eye; before it, where there are several seeds, means over them. Pure."""
    folded, table = over_seeds(points), _table(points)
    table += "".join(f"\n{one.point}: {one.problem}\n" for one in points if one.problem)
    return f"Means over seeds ± their standard errors:\n\n{_table(folded)}\nAll points:\n\n{table}" if folded else table


def _table(points: Sequence[PointStatus]) -> str:
    names = list(dict.fromkeys(name for one in points for name in one.metrics or {}))
    lines = [["point", "status", "rows", "failed", *names, "folder"]]
    for one in points:
        counts = ["" if value is None else f"{value:,}" for value in (one.rows, one.failed)]
        figures = [figure(one.metrics.get(name)) if one.metrics else "" for name in names]
        lines.append([one.point, one.status, *counts, *figures, one.folder or ""])
    return _aligned(lines)


def _aligned(lines: list[list[str]]) -> str:
    """A table in Markdown, its first line the names of the columns. Pure."""
    cells = [[" ".join(cell.replace("|", "\\|").split()) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    rows = [" | ".join(map(str.ljust, line, widths)) for line in cells]
    return "".join(f"| {row} |\n" for row in rows)


def as_csv(points: Sequence[PointStatus]) -> str:
    """A line for each point: what was swept, each key a column, and every metric's value and standard error. Pure."""
    text, lines = io.StringIO(), []
    for one in points:
        pairs = [word.lstrip("+").partition("=") for word in words_of(one.point)]
        line: dict[str, Any] = {key: value for key, sign, value in pairs if sign}
        line |= {"folder": one.folder, "status": one.status, "rows": one.rows, "failed": one.failed}
        for name, metric in (one.metrics or {}).items():
            line |= {name: metric["value"], f"{name} stderr": metric["stderr"]}
        lines.append(line)
    writer = csv.DictWriter(text, list(dict.fromkeys(key for line in lines for key in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


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
    return f"to go on, run the same command with {key if schema.one_file else 'out'}={quote(place(str(folder)))}"


def run_sweep(
    command: Namespace, schema: Schema, jobs: Sequence[Job], engines: EngineCache, run: Work,
    alone: Callable[[Point], int],
) -> int:  # fmt: skip
    """Returns the worst exit code of the points. `alone` is `run` for a process of its own, and is pickled by name.
    Errors: ConfigError, ResumeMismatchError, StorageError, with nothing computed."""
    points = {number: job for number, job in enumerate(jobs) if isinstance(job, Point)}
    first = next(iter(points.values()))
    own_places = schema.one_file and first.config.out is not None  # their files lie where they were asked for
    home, screen = None if own_places else home_of(jobs), view.choose(first.config.view)
    with nullcontext() if home is None else SweepFolder(home) as folder:
        sweep, bad = Sweep(folder, jobs), [job for job in jobs if isinstance(job, BadPoint)]
        for job in bad:
            report(ConfigError(f"{'  '.join(job.swept)} is left out: {job.message}"))
        try:
            if first.launcher == "basic":
                code = _in_turn(points, sweep, engines, run)
            else:
                several = f"{count(len(points), 'point')} by {first.launcher}"
                screen.note(f"{several}; each loads the model in a process of its own")
                code = _launched(command, schema, points, sweep, alone)
        except KeyboardInterrupt:
            view.say(f"{schema.program}: interrupted", stream=sys.stderr)
            code = INTERRUPTED
        figures = sweep.lines()
        if home is not None:
            figures += [("sweep", place(str(home / TABLE))), ("report", f"fengine report {quote(place(str(home)))}")]
        screen.figures(figures)
        if not sweep.complete:
            screen.note(how_to_go_on(home or Path(), schema, first.config.out, "hydra.sweep.dir"))
        return max(code, USAGE) if bad else code


def _in_turn(points: dict[int, Point], sweep: Sweep, engines: EngineCache, run: Work) -> int:
    """In this process. Points that share an engine follow one another, so that each engine is loaded once."""
    kinds, worst = list(dict.fromkeys(point.config.engine for point in points.values())), 0
    for number, point in sorted(points.items(), key=lambda item: kinds.index(item[1].config.engine)):
        screen = view.choose(point.config.view)
        screen.headline(f"point {number + 1} of {len(sweep.points)}: {sweep.points[number].point}")
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
        return reported(error), f"{type(error).__name__}: {error}"
    except BrokenPipeError:  # nobody reads what any point would show
        raise
    except Exception as error:  # a fault of this program, or memory that ran out: the next point may be spared
        traceback.print_exception(error)
        engines.close()
        return FAILED, f"{type(error).__name__}: {error}"


def _launched(
    command: Namespace, schema: Schema, points: dict[int, Point], sweep: Sweep, alone: Callable[[Point], int]
) -> int:
    """Each in a process of its own, with an engine of its own."""
    codes: list[int | None] = [None] * len(points)
    first = next(iter(points.values()))
    try:
        codes = launch(command, schema, first.directory.parent, list(points.values()), alone)
    except FengineError:
        raise
    except Exception as error:  # the launcher's: one process that was killed may take the others with it
        view.say(f"fengine: {first.launcher} failed: {type(error).__name__}: {error}", stream=sys.stderr)
    for number, code in zip(points, codes, strict=True):
        sweep.put(number, code)
    return max(FAILED if code is None else code for code in codes)
