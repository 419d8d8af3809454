"""Folders → the data of a page: plain values, in which every text is data. No torch; nothing is written."""

import io
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fengine
from fengine.errors import FengineError, StorageError
from fengine.eval.records.records import Records, runs_of
from fengine.eval.report import comparison, facts, pieces, rows, schedule, sweep
from fengine.eval.report.plain import cut, number, told
from fengine.eval.runs.finish import TIMINGS
from fengine.eval.runs.folder import read_object

ROWS, SCHEDULE, PAIRS, PIECES = 0.68, 0.22, 0.85, 0.06  # parts of a page's bytes
MISSING = 50  # points without a run that are told


def report_data(places: Sequence[Path], *, most_rows: int = 1000, megabytes: float = 5.0) -> dict[str, Any]:
    """The data of a page about a run, about a sweep, or about two runs. Errors: StorageError, ResumeMismatchError."""
    budget = int(megabytes * 1e6)
    found: dict[str, Any] = {"page": 1, "fengine": fengine.__version__, "made": _now()}
    if len(places) == 2:
        return found | _two(places[0], places[1], budget)
    runs = runs_of(places[0])
    if runs == [places[0]]:
        return found | _one(runs[0], most_rows, budget)
    return found | _many(places[0], runs)


def _one(folder: Path, most_rows: int, budget: int) -> dict[str, Any]:
    with Records(folder) as records:
        seen = rows.row_kinds(records)
        about = facts.overview(records, seen)
        kept = rows.chosen(seen.kinds, most_rows)
        found = rows.items(records, seen, kept, int(budget * ROWS))
        ids, in_force = rows.token_ids(found), records.manifest.get("in_force")
        vocab, missing = pieces.texts(records.identity, in_force, ids, int(budget * PIECES))
        seconds = _seconds(folder / TIMINGS, set(kept)) if records.finished else {}
        for one in found:
            one |= {"sec": seconds[one["n"]]} if one["n"] in seconds else {}
        about["rows_here"] = {"items": found, "why": rows.why(seen.kinds, kept), "tokens": missing, "vocab": vocab}
        about["rows_here"]["recorded"] = any("top" in answer for one in found for answer in one.get("a", ()))
    sessions, notes = schedule.timeline(folder / "trace.json", int(budget * SCHEDULE))
    about["schedule"] = {"sessions": sessions, "notes": notes}
    return {"kind": "run", "title": f"{about['task'][0]} · {about['name']}", "run": about}


def _two(a: Path, b: Path, budget: int) -> dict[str, Any]:
    runs = [runs_of(path) for path in (a, b)]
    for path, those in zip((a, b), runs, strict=True):
        if those != [path]:
            raise StorageError(
                f"{path} is a sweep; a difference is of two runs: give one of its points, such as {those[0]}"
            )
    with Records(a) as mine, Records(b) as its:
        about = [facts.overview(records, rows.row_kinds(records)) for records in (mine, its)]
        found = comparison.compared(mine, its, int(budget * PAIRS))
        shown = [one for first in found["firsts"] for one in first["pair"] or ()]
        ids, in_force = rows.token_ids(shown), mine.manifest.get("in_force")
        vocab, missing = pieces.texts(mine.identity, in_force, ids, int(budget * PIECES))
    title = f"{about[0]['name']} ↔ {about[1]['name']}"
    return {"kind": "diff", "title": title, "runs": about, "diff": found, "vocab": vocab, "tokens": missing}


def _many(folder: Path, runs: Sequence[Path]) -> dict[str, Any]:
    points = [sweep.read_point(run) for run in runs]
    names, missing = _names(folder, {run.name for run in runs})
    found = sweep.assembled(folder, points, names)
    found["missing"] = missing
    return {"kind": "sweep", "title": f"sweep · {folder.resolve().name}", "sweep": found}


def _names(folder: Path, there: set[str]) -> tuple[dict[str, str], list[str]]:
    """The folder's own words for its points by their folders, where its sweep.json tells them; and a line for each
    point that has no run here: refused, failed before it began, or not come to."""
    names, missing = {}, []
    try:
        for one in (read_object(folder / "sweep.json") or {}).get("points", []):
            name = cut(str(one["point"]), 200)
            if one.get("folder") in there:
                names[one["folder"]] = name
            else:
                problem = one.get("problem")
                missing.append(f"{name} has no run here: {cut(told(problem or one.get('status', 'not begun')), 400)}")
    except (FengineError, TypeError, KeyError, AttributeError):
        return names, missing[:MISSING]
    return names, missing[:MISSING]


def _seconds(path: Path, wanted: set[int]) -> dict[int, float | None]:
    """How long rows took, as far as the file tells."""
    found: dict[int, float | None] = {}
    try:
        with path.open("rb") if path.is_file() else io.BytesIO() as lines:
            for line in lines:
                line_of = json.loads(line)
                if line_of["row"] in wanted:
                    found[line_of["row"]] = number(line_of["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return found
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
