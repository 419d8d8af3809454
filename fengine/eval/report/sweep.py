"""The points of a sweep for a page: what they differ in, their metrics, and paired differences. No torch."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from fengine.errors import FengineError
from fengine.eval.report.facts import cut, figures, number, object_in, public, scalar, told
from fengine.eval.report.rows import RowKinds, row_kinds
from fengine.eval.runs.index import id_key
from fengine.eval.runs.record import METRICS
from fengine.eval.runs.records import Records
from fengine.eval.runs.sweep import PointStatus, over_seeds, without_seed
from fengine.eval.tasks.statistics import CONFIDENT, paired
from fengine.eval.tasks.task import Scores

PAIRS, ROWS = 2_000_000, 1000  # scores that are paired at most beyond those with the first point; rows of the grid
RESAMPLED = "loglikelihood"  # paired by a bootstrap, which costs a thousandfold
NAN = float("nan")


@dataclass
class SweptRun:
    """One run of a sweep: what it has of every row, in numbers; `problem` if it cannot be read."""

    folder: Path
    problem: str | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    finished: bool = False
    rows: int = 0
    notes: list[str] = field(default_factory=list)
    seen: RowKinds = field(default_factory=lambda: RowKinds(bytearray(), array("q"), None))
    keys: array = field(default_factory=lambda: array("Q"))  # of the ids of the rows that have scores
    columns: dict[str, array] = field(default_factory=dict)  # score -> value, nan where a row lacks it

    @property
    def config(self) -> dict[str, Any]:
        return self.identity.get("config", {})


def read_point(folder: Path) -> SweptRun:
    """Memory: 8 bytes for each row and score."""
    point = SweptRun(folder)
    try:
        with Records(folder) as records:
            point.identity, point.manifest, point.rows = records.identity, records.manifest, records.rows
            point.finished, point.notes = records.finished, records.notes
            point.seen = row_kinds(records, lambda record: _add(point, record))
    except FengineError as error:
        point.problem = str(error)
    return point


def _add(point: SweptRun, record: dict[str, Any]) -> None:
    """The scores of one more row. Modifies: point."""
    before = len(point.keys)
    point.keys.append(id_key(record["id"]))
    for name, value in record["scores"].items():
        if not isinstance(value, str):
            column = point.columns.setdefault(name, array("d", [NAN] * before))
            column.append(value)
    for column in point.columns.values():
        if len(column) == before:
            column.append(NAN)


def swept(points: Sequence[SweptRun]) -> list[str]:
    """The keys of the config in which points differ, in its order. Pure."""
    good = [point.config for point in points if point.problem is None]
    keys = list(dict.fromkeys(key for config in good for key in config))
    return [key for key in keys if len({told(config.get(key)) for config in good}) > 1]


def assembled(folder: Path, points: Sequence[SweptRun], names: dict[str, str]) -> dict[str, Any]:
    """`names`: the sweep's own words for points, by folder."""
    keys = swept(points)
    short = [key for key in keys if not key.startswith("task.")]
    tasks = {told(point.identity.get("task")) for point in points if point.problem is None}
    short = ["task.name", *short] if len(tasks) > 1 else short or keys
    shown = [_overview(point, short, names) for point in points]
    return {
        "folder": public(str(folder.resolve())),
        "keys": short,
        "points": shown,
        "folded": _folded([one for one in shown if one["problem"] is None]),
        **_deltas(points),
        "grid": _grid(points),
    }


def _overview(point: SweptRun, keys: Sequence[str], names: dict[str, str]) -> dict[str, Any]:
    values = [[key, scalar(point.config[key]) if key in point.config else None] for key in keys]
    label = "  ".join(f"{_word(key)}={told(value)}" for key, value in values)
    return {
        "name": cut(names.get(point.folder.name) or label or point.folder.name, 200),
        "folder": point.folder.name,
        "task": _task_name(point),
        "input": cut(told((point.identity.get("input") or {}).get("sha256", "")), 100),
        "values": values,
        "problem": point.problem,
        "finished": point.finished,
        "rows": point.rows,
        "counts": point.seen.counts(),
        "metrics": figures(object_in(point.folder / METRICS)) if point.problem is None else [],
        "notes": point.notes,
    }


def _folded(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Points that differ in their seed only as one, as a page has points; none where no two do. Pure."""
    told_of = []
    for one in points:
        metrics = {metric["name"]: metric for metric in one["metrics"]}
        status = "ok" if one["finished"] else "not at its end"
        told_of.append(PointStatus(one["name"], None, status, None, one["rows"], one["counts"]["failed"], metrics))
    firsts, folded = {without_seed(one["name"]): one for one in reversed(points)}, []
    beyond = {metric["name"] for one in points for metric in one["metrics"] if not _within(metric)}
    for one in over_seeds(told_of):
        first, shown = firsts[one.point.rpartition("  ")[0]], figures({"metrics": one.metrics})
        values = [pair for pair in first["values"] if pair[0] != "seed"]
        found = {"name": one.point, "folder": "", "problem": None, "task": first["task"], "values": values}
        found |= {"finished": one.status == "ok", "rows": one.rows, "counts": {"failed": one.failed}}
        folded.append(found | {"metrics": [_over_seeds(metric, metric["name"] not in beyond) for metric in shown]})
    return folded


def _within(metric: dict[str, Any]) -> bool:
    """Whether its interval lies between 0 and 1. Pure."""
    low, high = metric.get("low"), metric.get("high")
    return low is not None and high is not None and 0 <= low and high <= 1


def _over_seeds(metric: dict[str, Any], share: bool) -> dict[str, Any]:
    """A mean over seeds, whose interval is its standard error's: seeds are no trials that succeed or fail. That of a
    share ends at 0 and 1. Pure."""
    value, error = metric["value"], metric["stderr"]
    if value is None or error is None:
        return metric
    low, high = value - CONFIDENT * error, value + CONFIDENT * error
    low, high = (max(low, 0.0), min(high, 1.0)) if share else (low, high)
    return metric | {"low": number(low, 12), "high": number(high, 12)}


def _task_name(point: SweptRun) -> str:
    return cut(told((point.identity.get("task") or {}).get("name", "?")), 200)


def _word(key: str) -> str:
    """A key as short as it can be read. Pure."""
    return "task" if key == "task.name" else key.rpartition(".")[2]


def _deltas(points: Sequence[SweptRun]) -> dict[str, Any]:
    """`deltas`: [a, b, score, value, stderr, low, high, n, up, down] of b - a over the rows that both have. Every
    pair of points of one input, where they are not too many; then each with the first of its input."""
    kin = _kin(points)
    complete = sum(len(points[a].keys) * (1000 if RESAMPLED in points[a].columns else 1) for a, _ in kin) <= PAIRS
    firsts = {a for a, _ in kin} - {b for _, b in kin}  # of each input
    found = []
    for a, b in kin if complete else (pair for pair in kin if pair[0] in firsts):
        for name, delta in paired(_both(points[a], points[b])).items():
            values = [number(value, 9) for value in (delta.value, delta.stderr, delta.low, delta.high)]
            found.append([a, b, cut(name, 100), *values, delta.n, delta.up, delta.down])
    return {"deltas": found, "complete": complete}


def _kin(points: Sequence[SweptRun]) -> list[tuple[int, int]]:
    """The places of two points that have the same input. Pure."""
    good = [i for i, point in enumerate(points) if point.problem is None and len(point.keys)]
    return [(a, b) for a, b in combinations(good, 2) if _input(points[a]) == _input(points[b])]


def _input(point: SweptRun) -> tuple[str, str, str]:
    """The digest of an input is that of all its rows, of which a shard has others than another. Pure."""
    return told(point.identity.get("task")), told(point.identity.get("input")), told(point.config.get("run.shard"))


def _both(a: SweptRun, b: SweptRun) -> Iterator[tuple[Scores, Scores]]:
    others = {key: place for place, key in enumerate(b.keys)}
    names = [name for name in a.columns if name in b.columns]
    for place_a, key in enumerate(a.keys):
        if (place_b := others.get(key)) is not None:
            mine = {name: a.columns[name][place_a] for name in names}
            its = {name: b.columns[name][place_b] for name in names}
            there = [name for name in names if mine[name] == mine[name] and its[name] == its[name]]
            yield {name: mine[name] for name in there}, {name: its[name] for name in there}


def _grid(points: Sequence[SweptRun]) -> list[dict[str, Any]]:
    """For each input that several points have: their rows' kinds as digits, a text a point, if all have all rows."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for i, point in enumerate(points):
        if point.problem is None and point.finished and 0 < len(point.seen.kinds):
            found.setdefault(_input(point), []).append(i)
    grids = []
    for places in found.values():
        first = points[places[0]]
        if len(places) > 1:
            digits = ["".join(map(str, points[i].seen.kinds[:ROWS])) for i in places]
            shown = {"points": places, "kinds": digits, "rows": len(first.seen.kinds), "task": _task_name(first)}
            grids.append(shown)
    return grids
