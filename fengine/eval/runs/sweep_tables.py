"""The points of a sweep as tables: for the eye, and for other programs; those that differ in their seed only as one."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fengine.eval.cli.view import count
from fengine.eval.tasks.statistics import mean


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


def figure(metric: dict[str, Any] | None) -> str:
    """value ± standard error. Pure."""
    if metric is None or metric["value"] is None:
        return "–"
    error = "" if metric["stderr"] is None else f" ± {metric['stderr']:.4f}"
    return f"{metric['value']:.4f}{error}"


def without_seed(point: str) -> str:
    """A point's name without the word that gives its seed. Pure."""
    return "  ".join(word for word in point.split("  ") if not word.startswith("seed="))


def over_seeds(points: Sequence[PointStatus]) -> list[PointStatus]:
    """Points that differ in their seed only as one: the means of their metrics with the standard errors over seeds.
    None where no two of them do. Pure."""
    groups: dict[str, list[PointStatus]] = {}
    for one in points:
        groups.setdefault(without_seed(one.point), []).append(one)
    if len(groups) == len(points):
        return []
    return [_mean_of(name, group) for name, group in groups.items()]


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


def _metric_names(points: Sequence[PointStatus]) -> list[str]:
    return list(dict.fromkeys(name for one in points for name in one.metrics or {}))


def _table(points: Sequence[PointStatus]) -> str:
    names = _metric_names(points)
    lines = [["point", "status", "rows", "failed", *names, "folder"]]
    for one in points:
        counts = ["" if value is None else f"{value:,}" for value in (one.rows, one.failed)]
        figures = [figure(one.metrics.get(name)) if one.metrics else "" for name in names]
        lines.append([one.point, one.status, *counts, *figures, one.folder or ""])
    cells = [[" ".join(cell.replace("|", "\\|").split()) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return "".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |\n"
        for line in cells
    )


def as_csv(points: Sequence[PointStatus]) -> str:
    """A line for each point: what was swept, each key a column, and every metric's value and standard error. Pure."""
    text, lines = io.StringIO(), []
    for one in points:
        pairs = [word.lstrip("+").partition("=") for word in one.point.split("  ")]
        line: dict[str, Any] = {key: value for key, sign, value in pairs if sign}
        line |= {"folder": one.folder, "status": one.status, "rows": one.rows, "failed": one.failed}
        for name, metric in (one.metrics or {}).items():
            line |= {name: metric["value"], f"{name} stderr": metric["stderr"]}
        lines.append(line)
    writer = csv.DictWriter(text, list(dict.fromkeys(key for line in lines for key in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()
