"""What a page says of a run as a whole: its state, figures, what it depends on, how to repeat it, verify's word.
No torch."""

import shlex
from pathlib import Path
from typing import Any

from fengine.errors import StorageError
from fengine.eval.cli.view import place
from fengine.eval.report.plain import cut, mapping, number, plain, scalar, told
from fengine.eval.report.rows import RowKinds
from fengine.eval.runs.folder import read_object
from fengine.eval.runs.record import METRICS
from fengine.eval.runs.records import Records
from fengine.eval.tasks.statistics import interval

GROUPS = ("task", "input", "model", "config", "seeds", "versions", "code_sha256")
HIDDEN = ("config.task.name", "config.task.version", "config.seed")  # told elsewhere in the same list


def overview(records: Records, seen: RowKinds) -> dict[str, Any]:
    """The run without its rows."""
    identity, manifest = records.identity, records.manifest
    result, notes = manifest.get("result"), list(records.notes)
    metrics, verify = (_object(records.folder / name, notes) for name in (METRICS, "verify.json"))
    if metrics is None and isinstance(result, dict):
        notes.append(f"{METRICS} is missing")
    kept, task, model = mapping(result), mapping(identity.get("task")), mapping(identity.get("model"))
    return {
        "name": records.folder.resolve().name,
        "folder": place(str(records.folder.resolve())),
        "task": [cut(told(task.get(key, "?")), 200) for key in ("name", "version")],
        "model": cut(told(model.get("path", "?")), 400),
        "finished": records.finished,
        "rows": records.rows,
        "here": len(records),
        "counts": seen.counts(),
        "score": seen.score,
        "totals": {
            k: scalar(kept.get(k)) for k in ("prompt_tokens", "completion_tokens", "row_seconds", "outputs_sha256")
        },
        "metrics": figures(metrics),
        "verify": None if verify is None else {cut(k, 100): plain(v) for k, v in verify.items()},
        "facts": facts(identity, manifest.get("in_force")),
        "sessions": [_session(one) for one in _sessions(manifest)],
        "commands": commands(manifest, records.folder),
        "notes": notes,
    }


def figures(metrics: dict[str, Any] | None) -> list[dict[str, Any]]:
    """name, value, stderr, and 95 % from low to high, of every metric that is a number. Pure."""
    found = []
    for name, metric in mapping(mapping(metrics).get("metrics")).items():
        metric = mapping(metric)
        value, error = (number(metric.get(key), 12) for key in ("value", "stderr"))
        one = {"name": cut(name, 100), "value": value, "stderr": error, "n": number(metric.get("n"))}
        if value is not None and error is not None:
            low, high = interval(value, error, one["n"] if isinstance(one["n"], int) else 0)
            one |= {"low": number(low, 12), "high": number(high, 12)}
        found.append(one)
    return found


def facts(identity: dict[str, Any], in_force: Any) -> list[list[Any]]:
    """[group, [[key, value], ...]] of all that the bits of outputs.jsonl depend on. Pure."""
    found: list[list[Any]] = []
    for group in [*GROUPS, *(key for key in identity if key not in (*GROUPS, "config_sha256"))]:
        if group in identity:
            pairs = [pair for pair in flat(identity[group], "") if f"{group}.{pair[0]}" not in HIDDEN]
            found.append([group, [[key or group, value] for key, value in pairs]])
    if isinstance(in_force, dict):
        values = flat({k: v for k, v in in_force.items() if k != "engine"}, "")
        mine, engine = mapping(identity.get("config")), in_force.get("engine")
        auto = (
            [[k, cut(told(v), 400)] for k, v in engine.items() if mine.get(k) != v] if isinstance(engine, dict) else []
        )
        found.append(["in force", [*values, *auto]])
    return found


def flat(value: Any, prefix: str) -> list[list[str]]:
    """[key, text] of every leaf. Pure."""
    if isinstance(value, dict):
        return [pair for k, v in value.items() for pair in flat(v, f"{prefix}.{k}" if prefix else str(k))]
    return [[cut(prefix, 200), cut(told(value), 400)]]


def commands(manifest: dict[str, Any], folder: Path) -> list[list[str]]:
    """[what for, command]. Pure."""
    found, where = [], shlex.quote(str(folder.resolve()))
    sessions = [one for one in _sessions(manifest) if isinstance(one.get("argv"), list)]
    if sessions:
        plain = mapping(mapping(manifest.get("identity")).get("config")).get("task.format") == "prompts"
        program = "fengine " if plain else "fengine eval "
        found.append(["the command of the run", program + shlex.join(map(str, sessions[0]["argv"]))])
    found.append(["the same run again, into a new folder", f"fengine rerun {where}"])
    found.append(["under other schedules: are the bits the same?", f"fengine verify {where}"])
    return [[what, cut(command, 4000)] for what, command in found]


def _sessions(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    found = manifest.get("sessions")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _session(one: dict[str, Any]) -> dict[str, Any]:
    wanted = ("started", "ended", "how", "host", "pid")
    return {key: cut(told(one[key]), 200) for key in wanted if one.get(key) is not None}


def _object(path: Path, notes: list[str]) -> dict[str, Any] | None:
    """None if there is no such file, or if it is damaged, which is noted."""
    try:
        return read_object(path)
    except StorageError as error:
        notes.append(str(error))
        return None
