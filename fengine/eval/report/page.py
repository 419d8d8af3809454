"""Folders → the data of a page: plain values, in which every text is data; and data → one HTML file that needs nothing
else. No torch; nothing is written.

A content security policy in the page lets it run this one script (by its SHA-256) and fetch nothing at all, whatever
texts the data holds; the script itself never makes markup of them."""

import base64
import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import fengine
from fengine.errors import FengineError, StorageError
from fengine.eval.report import facts, rows, schedule, sweep
from fengine.eval.report.facts import cut, number, plain, public, script_json, size, told
from fengine.eval.runs.compare import RowDifference, compare
from fengine.eval.runs.folder import read_object
from fengine.eval.runs.manifest import now
from fengine.eval.runs.provenance import local_directory
from fengine.eval.runs.records import Records, causes, pairs_of, runs_of, timings

ROWS, SCHEDULE, PAIRS, PIECES, PICTURES = 0.68, 0.22, 0.85, 0.06, 0.1  # parts of a page's bytes
MISSING = 50  # points without a run that are told


def report_data(places: Sequence[Path], *, most_rows: int = 1000, megabytes: float = 5.0) -> dict[str, Any]:
    """The data of a page about a run, about a sweep, or about two runs. Errors: StorageError, ResumeMismatchError."""
    budget = int(megabytes * 1e6)
    found: dict[str, Any] = {"page": 1, "fengine": fengine.__version__, "made": now()}
    if len(places) == 2:
        return found | _two(places[0], places[1], budget)
    runs = runs_of(places[0])
    if runs == [places[0]]:
        return found | _one(runs[0], most_rows, budget)
    return found | _many(places[0], runs)


def _one(folder: Path, most_rows: int, budget: int) -> dict[str, Any]:
    with Records(folder) as records:
        seen = rows.row_kinds(records)
        about = facts.overview(records, seen.counts(), seen.score)
        kept = rows.chosen(seen.kinds, most_rows)
        share = PICTURES if records.identity["config"].get("task.images") else 0.0  # of the rows' bytes
        found = rows.items(records, seen, kept, int(budget * (ROWS - share)))
        ids, in_force = rows.token_ids(found), records.manifest.get("in_force")
        vocab, missing = texts(records.identity, in_force, ids, int(budget * PIECES))
        rows.add_thumbnails(found, records, int(budget * share))
        told = timings(folder) if records.finished else ()  # how long rows took
        places = set(kept)
        told = (one for one in told if type(one.get("row")) is int and one["row"] in places)
        seconds = {one["row"]: number(one.get("seconds")) for one in told}
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
                f"{path} is a sweep; a difference is of two runs: give a point of it, such as {those[0]}"
            )
    with Records(a) as mine, Records(b) as its:
        kinds = [(records, rows.row_kinds(records)) for records in (mine, its)]
        about = [facts.overview(records, seen.counts(), seen.score) for records, seen in kinds]
        found = compared(mine, its, int(budget * PAIRS))
        shown = [one for first in found["firsts"] for one in first["pair"] or ()]
        ids, in_force = rows.token_ids(shown), mine.manifest.get("in_force")
        vocab, missing = texts(mine.identity, in_force, ids, int(budget * PIECES))
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
    with suppress(FengineError, TypeError, KeyError, AttributeError):
        for one in (read_object(folder / "sweep.json") or {}).get("points", []):
            name = cut(str(one["point"]), 200)
            if one.get("folder") in there:
                names[one["folder"]] = name
            else:
                problem = one.get("problem") or one.get("status", "not begun")
                missing.append(f"{name} has no run here: {cut(told(problem), 400)}")
    return names, missing[:MISSING]


MOST = 200  # differing rows that are shown


def compared(a: Records, b: Records, budget: int) -> dict[str, Any]:
    """`compare`'s value, the causes by the manifests, and the first differing rows of both sides. Errors:
    StorageError."""
    found = compare(pairs_of(a, b), MOST)
    wanted = {one.id for one in found.firsts}
    pairs = {}
    for mine, its in pairs_of(a, b) if wanted else ():
        if mine is not None and its is not None and mine["id"] in wanted:
            pairs[mine["id"]] = None  # cut alike, where both fit
            with suppress(*rows.STRANGE):
                pairs[mine["id"]] = rows.fitted([mine, its], 0, budget // len(wanted))
            if len(pairs) == len(wanted):
                break
    told = found.as_dict()
    counts = ("same", "differing_rows", "differing_tokens", "differing_logprobs", "differing_bits")
    return {name: told[name] for name in (*counts, "rows", "only_a", "only_b", "tokens", "logprobs", "rows_with")} | {
        "largest_delta": number(found.largest_delta, 9),
        "metrics": {cut(name, 100): plain(delta) for name, delta in told["metrics"].items()},
        "only_a_ids": [cut(one, 200) for one in found.only_a_ids[:20]],
        "only_b_ids": [cut(one, 200) for one in found.only_b_ids[:20]],
        "histogram": list(map(list, found.bins())),
        "causes": [cut(_shown(line), 600) for line in causes(a, b)[:200]],
        "firsts": [_first(one, pairs.get(one.id)) for one in found.firsts],
    }


def _shown(cause: str) -> str:
    key, mark, values = cause.partition(": ")
    return key + mark + " → ".join(map(public, values.split(" → ")))


def _first(one: RowDifference, pair: list[dict[str, Any]] | None) -> dict[str, Any]:
    """`token`, `logprob`: [answer, place] of the first that differs; `sides`: both runs at whichever comes first."""
    token, logprob = ([d.sample, d.token] if d else None for d in (one.first_token, one.first_logprob))
    both = () if one.first is None else (one.first.a, one.first.b)
    sides = [{"token": s.token, "logprob": number(s.logprob, 12), "bits": s.bits} for s in both]
    found = {"id": cut(one.id, 200), "token": token, "logprob": logprob, "sides": sides or None, "pair": pair}
    return found | {"other": [cut(name, 100) for name in one.other], "largest": number(one.largest[0], 9)}


STYLES = ("page.css", "views.css")
SCRIPTS = "base chart heat row rows summary schedule pages session compare sweep main".split()
HERE = Path(__file__).parent


def page(data: dict[str, Any]) -> bytes:
    """Pure but for the files of this folder."""
    script = '"use strict";\n(() => {\n' + "\n".join(_file(f"js/{name}.js") for name in SCRIPTS) + "\n})();\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    filled, style = _file("page.html"), "".join(map(_file, STYLES))
    for name, text in {"hash": digest, "style": style, "script": script, "data": script_json(data)}.items():
        before, mark, after = filled.partition(f"@@{name}@@")
        assert mark, name
        filled = before + text + after
    return filled.encode()


def _file(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


# -- token ids as texts, by the run's tokenizer, if its files are still here and still the same ------------------------


FILE = "tokenizer.json"


def texts(
    identity: dict[str, Any], in_force: Any, ids: Iterable[int], budget: int
) -> tuple[dict[str, str], str | None]:
    """Id (as a text) → what it adds to the text, of the first ids, in all of about `budget` bytes; and if there are
    none, why not."""
    from fengine.tokenizer.tokenizer import Tokenizer
    from fengine.worker.hub import resolve_local

    config, model, ids_told = identity["config"], identity.get("model") or {}, "so that tokens are shown by their ids"
    own = config.get("model.tokenizer_path")
    path, revision = str(own or config.get("model.path") or ""), None if own else config.get("model.revision")
    files = model.get("tokenizer_files") or model.get("files") or (in_force or {}).get("model_files")
    recorded = files.get(FILE, ...) if isinstance(files, dict) else ...
    directory = local_directory(path) or resolve_local(path, revision, config.get("model.download_dir"))
    if directory is None:
        return {}, f"the tokenizer of {public(path)!r} is not on this machine, {ids_told}"
    try:
        if recorded is not ... and recorded != hashlib.sha256((directory / FILE).read_bytes()).hexdigest():
            return {}, f"{public(str(directory / FILE))} has changed since the run, {ids_told}"
        tokenizer = Tokenizer.from_directory(directory)
    except (OSError, FengineError) as error:
        return {}, f"the tokenizer of {public(path)!r} cannot be read, {ids_told}: {error}"
    return _pieces(tokenizer.decoding.data, ids, budget), None


def _pieces(data: Callable[[int], bytes], ids: Iterable[int], budget: int) -> dict[str, str]:
    """Of the first ids, in all of about `budget` bytes. Pure."""
    found: dict[str, str] = {}
    for i in ids:
        if type(i) is int and 0 <= i < 2**32:
            found[str(i)] = piece = shown(data(i))
            budget -= size(piece) + len(str(i)) + 4
            if budget < 0:
                break
    return found


def shown(piece: bytes) -> str:
    """A piece as a text; bytes that are no whole character in UTF-8 as ‹E2 96›. Pure."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return f"‹{piece.hex(' ').upper()}›"
