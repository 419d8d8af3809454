"""What a page says of a run as a whole: its state, figures, what it depends on, how to repeat it, verify's word; and
values as a page may hold them: JSON that no HTML parser can misread, short texts, small numbers. No torch."""

import json
import math
import os
import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from fengine.core.json_text import json_object
from fengine.errors import ConfigError, StorageError
from fengine.eval.cli.schema import flattened
from fengine.eval.cli.view import clock, duration, place
from fengine.eval.runs.config import SamplingConfig
from fengine.eval.runs.folder import read_object
from fengine.eval.runs.record import METRICS
from fengine.eval.runs.records import Records
from fengine.eval.tasks.statistics import interval

GROUPS = ("task", "input", "model", "config", "seeds", "versions", "code_sha256")
SESSION = ("started", "ended", "how", "host", "pid")
HIDDEN = ("config.task.name", "config.task.version", "config.seed")  # told elsewhere in the same list
# What would end a script element or a line of JavaScript, or is no text in UTF-8.
_UNSAFE = re.compile("[<>&\u2028\u2029\x7f\ud800-\udfff]")
_PATH = re.compile(r"/[^\s/{}]+/[^\s{}]*")  # an absolute one, as a whole value
_WIDE = re.compile("[\u2028\u2029\ud800-\udfff]")  # of these, the ones of three bytes
EXACT = 2**53  # above it a number of JavaScript is not exact


def overview(records: Records, counts: dict[str, int], score: str | None) -> dict[str, Any]:
    """The run without its rows; `counts` of each kind of them, `score` that says right or wrong."""
    identity, manifest, notes = records.identity, records.manifest, list(records.notes)
    metrics, verify = (object_in(records.folder / name, notes) for name in (METRICS, "verify.json"))
    if metrics is None and records.result:
        notes.append(f"{METRICS} is missing")
    sessions = [{key: cut(told(one[key]), 200) for key in SESSION if one.get(key)} for one in manifest["sessions"]]
    return {
        "name": records.folder.resolve().name,
        "folder": public(str(records.folder.resolve())),
        "task": [cut(told(identity["task"].get(key, "?")), 200) for key in ("name", "version")],
        "model": model_of(identity),
        "brief": brief(records),
        "target": identity["config"].get("task.target") if score else None,
        "group_by": identity["config"].get("task.group_by"),
        "finished": records.finished,
        "rows": records.rows,
        "here": len(records),
        "counts": counts,
        "score": score,
        "totals": {"outputs_sha256": scalar(records.result.get("outputs_sha256"))},
        "metrics": figures(metrics),
        "verify": None if verify is None else {cut(k, 100): plain(v) for k, v in verify.items()},
        "facts": facts(identity, manifest.get("in_force")),
        "sessions": sessions,
        "commands": commands(manifest, records.folder),
        "notes": notes,
    }


def model_of(identity: dict[str, Any]) -> str:
    return cut(public(told(mapping(identity.get("model")).get("path", "?"))), 400)


def brief(records: Records) -> list[list[str]]:
    """[word, text] of what is asked first: the model, how it was sampled, how long it took, how fast that was. Pure."""
    identity, config = records.identity, records.identity["config"]
    in_force = mapping(records.manifest.get("in_force"))
    engine, recommended = mapping(in_force.get("engine")), {}
    with suppress(ConfigError):  # "openai", or nothing is known of it
        recommended = json_object("model.sampling_defaults", engine.get("model.sampling_defaults"))
    device = mapping(in_force.get("hardware")).get("gpu") or engine.get("model.device")
    model = model_of(identity) + (f" on {cut(told(device), 100)}" if device else "")
    found = [["Model", model], ["Sampling", cut(_sampling(config, recommended), 400)]]
    found.append(["Seed", told(config.get("seed", mapping(identity.get("seeds")).get("run_seed", "–")))])
    seconds = [number(one.get("seconds")) for one in records.manifest["sessions"]]
    read, drawn = (number(records.result.get(f"{name}_tokens")) for name in ("prompt", "completion"))
    if read is not None and drawn is not None:
        found.append(["Tokens", f"{read:,} in, {drawn:,} out"])
    total = None if None in seconds else sum(filter(None, seconds))
    if total:
        found.append(["Time", duration(total) if total < 60 else clock(total)])
        if read is not None and drawn is not None:
            found.append(["Speed", f"{read / total:,.0f} tokens/s in, {drawn / total:,.0f} out"])
    return found


def _sampling(config: dict[str, Any], recommended: dict[str, Any]) -> str:
    """The temperature, how many tokens at most, and every parameter that is not its default; the model's
    recommendations hold where the run has a default. Pure."""
    values = {key.removeprefix("sampling."): v for key, v in config.items() if key.startswith("sampling.")}
    plain = SamplingConfig().as_dict()
    values |= {name: value for name, value in recommended.items() if values.get(name) == plain.get(name)}
    heat, most = values.pop("temperature", None), values.pop("max_new_tokens", None)
    changed = [f"{key} {told(value)}" for key, value in values.items() if plain.get(key, ...) != value]
    found = ["greedy" if heat == 0 else f"temperature {told(heat)}", *changed]
    most = config.get("task.max_new_tokens") or most
    return ", ".join([*found, f"at most {most} new tokens"] if isinstance(most, int) else found)


def public(text: str) -> str:
    """A text; but an absolute path as one that tells nothing of its machine: relative if it lies below the working
    directory, else its name."""
    if not _PATH.fullmatch(text):
        return text
    here = place(text)
    return here if here != "." and not here.startswith("/") else f"…/{os.path.basename(text.rstrip('/'))}"


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
            pairs = [pair for pair in flat(identity[group]) if f"{group}.{pair[0]}" not in HIDDEN]
            found.append([group, [[key or group, value] for key, value in pairs]])
    if in_force is not None:
        values = flat({k: v for k, v in in_force.items() if k != "engine"})
        mine, engine = identity["config"], mapping(in_force.get("engine"))
        found.append(["in force", [*values, *([k, cut(told(v), 400)] for k, v in engine.items() if mine.get(k) != v)]])
    return found


def flat(value: Any) -> list[list[str]]:
    """[key, text] of every leaf. Pure."""
    leaves = flattened(value) if isinstance(value, dict) else [("", value)]
    return [[cut(key, 200), cut(public(told(leaf)), 400)] for key, leaf in leaves]


def commands(manifest: dict[str, Any], folder: Path) -> list[list[str]]:
    """[what for, command]. Pure."""
    found, here, config = [], public(str(folder.resolve())), manifest["identity"]["config"]
    if config.get("task.data") is None and config.get("task.prompts") is None:  # which the commands cannot have
        return [["the task is an object of Python; the same call goes on", "fengine.evaluate(task, engine, out)"]]
    lies = ", typed where the run's folder lies" if here.startswith("…") else ""  # an elided name cannot be typed
    where = shlex.quote(folder.resolve().name if lies else here)
    sessions = [one for one in manifest["sessions"] if isinstance(one.get("argv"), list)]
    if sessions:
        argv = sessions[0]["argv"]
        program = "fengine " if config.get("task.format") == "prompts" or argv[:1] == ["rerun"] else "fengine eval "
        found.append(["the command of the run", program + shlex.join(map(_word, argv))])
    found.append([f"the same run again, into a new folder{lies}", f"fengine rerun {where}"])
    found.append([f"under other schedules: are the bits the same{lies}?", f"fengine verify {where}"])
    return [[what, cut(command, 4000)] for what, command in found]


def _word(word: Any) -> str:
    key, mark, value = str(word).partition("=")
    return key + mark + public(value) if mark else public(key)


def object_in(path: Path, notes: list[str] | None = None) -> dict[str, Any] | None:
    """A file's object; None if there is no such file, or if it is damaged, which is noted. Modifies: notes."""
    try:
        return read_object(path)
    except StorageError as error:
        if notes is not None:
            notes.append(str(error))
        return None


def script_json(value: Any) -> str:
    """JSON for a `<script type="application/json">`, which encodes to UTF-8 whatever texts it holds. Pure. Errors:
    ValueError for NaN and infinities."""
    return _UNSAFE.sub(lambda match: f"\\u{ord(match.group()):04x}", _json(value))


def size(value: Any) -> int:
    """Bytes of `script_json`, which it does not make. Pure."""
    text = _json(value)
    raw = text.encode("utf-8", "surrogatepass")
    return len(raw) + 5 * sum(map(raw.count, (b"<", b">", b"&", b"\x7f"))) + 3 * len(_WIDE.findall(text))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def cut(text: str, most: int | None) -> str:
    """At most `most` characters, with a word about the rest. Pure."""
    if most is None or len(text) <= most:
        return text
    return f"{text[:most]} … ({len(text) - most:,} more characters)"


def number(value: Any, digits: int = 4) -> float | None:
    """Rounded; None for what is no finite number. Pure."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        return None
    found = round(value, digits)
    return int(found) if abs(found) < EXACT and found == int(found) else found


def told(value: Any) -> str:
    """Any JSON value as a text for readers. Pure."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def scalar(value: Any) -> float | int | bool | str | None:
    """A score as it is, where JavaScript can hold it, else as a text. Pure."""
    if isinstance(value, (bool, str)) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if isinstance(value, int) and abs(value) < EXACT else told(value)


def mapping(value: Any) -> dict[str, Any]:
    """The value, if it is an object; else an empty one. Pure."""
    return value if isinstance(value, dict) else {}


def plain(value: Any, deep: int = 6) -> Any:
    """A JSON value of a file that anybody may have written, with bounds. Pure."""
    if isinstance(value, dict) and deep:
        return {cut(str(k), 100): plain(v, deep - 1) for k, v in list(value.items())[:200]}
    if isinstance(value, list) and deep:
        return [plain(v, deep - 1) for v in value[:200]]
    found = value if isinstance(value, (dict, list)) else scalar(value)
    return found if isinstance(found, (bool, int, float)) or found is None else cut(told(found), 1000)
