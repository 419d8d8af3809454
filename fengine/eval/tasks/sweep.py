"""A sweep's folder: the run folders of its points, and `sweep.json` and `sweep.md`, which tell of them all. No torch.

Both are written again after every point. They hold no times, so that the same sweep has the same files.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fengine.errors import ResumeMismatchError, StorageError
from fengine.eval.cli.schema import BadPoint, Point
from fengine.eval.tasks.finish import METRICS
from fengine.eval.tasks.folder import LOCK, RunFolder, read_if_there

SWEEP, TABLE, SCHEMA = "sweep.json", "sweep.md", 1
STATUS = {0: "ok", 1: "failed", 2: "refused", 130: "interrupted", 143: "terminated"}


@dataclass
class Told:
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
    """What is told of a sweep's points, kept in a folder. Modified by `put`."""

    def __init__(self, folder: RunFolder, jobs: Sequence[Point | BadPoint]) -> None:
        """Errors: ResumeMismatchError if the folder is that of other points; StorageError."""
        self.folder = folder
        self.told = [_begin(job, number, folder.path) for number, job in enumerate(jobs)]
        self._refuse_others()
        self.write()

    def _refuse_others(self) -> None:
        before = self.folder.read(SWEEP)
        if before is None:
            return
        try:
            recorded = [(one["point"], one["folder"]) for one in before["points"]]
        except (KeyError, TypeError) as error:
            raise StorageError(f"{self.folder.path / SWEEP} is no sweep's; choose another out=DIR") from error
        now = [(one.point, one.folder) for one in self.told]
        if [point for point, _ in recorded] != [point for point, _ in now]:
            pairs = zip(
                [*recorded, *[("none", None)] * len(now)], [*now, *[("none", None)] * len(recorded)], strict=False
            )
            number, (old, new) = next((i, (a[0], b[0])) for i, (a, b) in enumerate(pairs) if a[0] != b[0])
            raise ResumeMismatchError(
                f"{self.folder.path} holds a sweep of {len(recorded)} other points (recorded → now, of {len(now)}):\n"
                f"  point {number}: {old} → {new}\nput that back to go on with it, or choose another out=DIR"
            )

    def put(self, number: int, code: int | None, problem: str | None = None) -> None:
        """A point has ended, with this exit code; None: its process died. Errors: StorageError."""
        one = self.told[number]
        one.status, one.problem = "died" if code is None else STATUS.get(code, "failed"), problem
        metrics = None
        if code in (0, 1) and one.folder is not None:
            metrics = read_if_there(self.folder.path / one.folder / METRICS)
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
            found.append((one.point, ", ".join([*figures, *failed]) or one.status))
        return found

    def write(self) -> None:
        """Errors: StorageError."""
        points = [asdict(one) for one in self.told]
        files = {SWEEP: {"fengine_sweep": SCHEMA, "points": points}, TABLE: markdown(self.told)}
        self.folder.write_several(files, durable=False)  # all of it is in the points' folders


def _begin(job: Point | BadPoint, number: int, home: Path) -> Told:
    name = "  ".join(job.swept) or f"point {number}"
    if isinstance(job, BadPoint):
        return Told(name, None, "refused", job.message)
    return Told(name, os.path.relpath(job.directory, home))


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


def markdown(told: Sequence[Told]) -> str:
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
