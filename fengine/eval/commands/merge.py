"""`fengine merge OUT SHARD ...`: the shards of a run become the run. No torch.

The shards' journals are woven into one journal in the order of the input, and the run is finished from it as any run
is. So the merged folder is that of the unsharded run: the same identity, the same bytes of outputs.jsonl, the same
metrics, and it goes on (failed rows are tried again) with the unsharded command."""

import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from fengine.errors import InputFileError, ResumeMismatchError, StorageError
from fengine.eval.cli.command import DIFFERS, OK, parse
from fengine.eval.cli.recompose import restore
from fengine.eval.cli.view import count, place, say
from fengine.eval.runs import manifest, provenance
from fengine.eval.runs.config import EVAL, parse_shard
from fengine.eval.runs.folder import JOURNAL, MANIFEST, RunFolder, read_object
from fengine.eval.runs.index import NOTHING, RowTable, read_table
from fengine.eval.runs.journal import encode, header, read_at
from fengine.eval.runs.record import METRICS, finish, read_metrics
from fengine.eval.runs.records import read_manifest, runs_of
from fengine.eval.tasks.kinds import open_task

USAGE = """
Usage:  fengine merge OUT SHARD ...

Joins the shards of a run (run.shard=1/4 ... 4/4) in the new folder OUT, whose outputs.jsonl is that of the unsharded
run byte for byte. SHARD is a run's folder, or a sweep's folder whose points are shards. Missing, doubled, foreign and
unfinished shards are refused by name; the shards stay as they are.

Exit codes:  0 all rows good   1 some rows failed   2 usage, or shards that make no run   130 interrupted
"""


class Shard:
    """One finished shard: its manifest, and where its rows are in its journal."""

    def __init__(self, folder: Path) -> None:
        """Errors: StorageError, InputFileError if it is no finished shard; ResumeMismatchError for another version."""
        self.folder, self.manifest = folder, read_manifest(folder)
        self.identity: dict[str, Any] = self.manifest["identity"]
        shard = parse_shard(self.identity["config"].get("run.shard"))
        if shard is None:
            raise InputFileError(f"{folder} is no shard of a run: its run.shard is null")
        self.number, self.count = shard
        self.rows: int = self.identity["input"]["rows"]
        whole = self.identity["input"].get("all_rows")
        if type(whole) is not int or self.rows != len(range(self.number, whole, self.count)):
            raise StorageError(f"{folder / MANIFEST} is damaged: {self.rows} rows are not shard {self.name} of {whole}")
        if (self.manifest.get("result") or {}).get("rows") != self.rows:
            raise InputFileError(f"{folder} (shard {self.name}) has not come to its end; run its command again first")
        self.table = self._read_journal()

    @property
    def name(self) -> str:
        return f"{self.number + 1}/{self.count}"

    def whole(self) -> dict[str, Any]:
        """The identity of the run that this is a shard of. Pure."""
        config = self.identity["config"] | {"run.shard": None}
        rows = {"rows": self.identity["input"]["all_rows"], "sha256": self.identity["input"]["sha256"]}
        return self.identity | {"config": config, "config_sha256": provenance.canonical(config), "input": rows}

    def _read_journal(self) -> RowTable:
        """Errors: StorageError for a journal that is not whole, or not this shard's."""
        path, again = self.folder / JOURNAL, "; run the shard's command again, which saves what can be saved"
        table, damage, headers = read_table(path, self.rows)
        if any(header[-1] != provenance.canonical(self.identity) for header in headers):
            raise StorageError(f"{path} is not the journal of {MANIFEST} beside it")
        if damage:
            raise StorageError(f"{path} is damaged at byte {damage[0].offset:,}{again}")
        if NOTHING in table.known:
            raise StorageError(f"{path} lacks row {table.known.index(NOTHING)}{again}")
        return table


def work(argv: Sequence[str]) -> int:
    """The exit code. Errors: FengineError."""
    places = [Path(word) for word in parse(argv).places]
    if len(places) < 2:
        raise InputFileError("fengine merge takes a new folder and the shards: fengine merge OUT SHARD ...")
    shards = fitting([Shard(folder) for given in places[1:] for folder in runs_of(given)])
    with RunFolder(places[0].absolute()) as folder:
        metrics = merge(folder, shards)
    rows = f"{count(metrics['rows'], 'row')}, {metrics['failed']:,} failed"
    say(f"{place(str(places[0].absolute()))}: {rows}, of {count(len(shards), 'shard')}")
    return DIFFERS if metrics["failed"] else OK


def fitting(shards: Sequence[Shard]) -> list[Shard]:
    """The shards in their order, if they are all of one run and each is there once. Pure. Errors: ResumeMismatchError
    that names what differs; InputFileError that names what is missing or there twice."""
    first, places = shards[0], {}
    for shard in shards:
        if shard.count != first.count:
            problem = f"{shard.folder} is shard {shard.name}, {first.folder} is {first.name}: not of one run"
            raise InputFileError(problem)
        if (other := places.setdefault(shard.number, shard)) is not shard:
            raise InputFileError(f"shard {shard.name} is there twice: {other.folder} and {shard.folder}")
        lines = manifest.differences(first.whole(), shard.whole())
        forces = [one.manifest["in_force"] for one in (first, shard)]
        if all(forces):  # a shard without rows has opened no engine
            lines += manifest.differences({"in_force": forces[0]}, {"in_force": forces[1]})
        if lines:
            listed = manifest.listed(lines)
            raise ResumeMismatchError(f"{shard.folder} is not of the same run as {first.folder}:\n{listed}")
    missing = [f"{number + 1}/{first.count}" for number in range(first.count) if number not in places]
    if missing:
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        raise InputFileError(f"shard {', '.join(missing[:10])}{more} is missing")
    return [places[number] for number in range(first.count)]


def merge(folder: RunFolder, shards: Sequence[Shard]) -> dict[str, Any]:
    """Writes the run of `shards` (those of `fitting`) into `folder`; returns metrics.json's content. Where the same
    merge was interrupted, it goes on; where it has been done, nothing is. Errors: ResumeMismatchError, StorageError."""
    identity, record = shards[0].whole(), read_object(folder.path / MANIFEST)
    parts = [
        {"shard": s.name, "folder": str(s.folder), "outputs_sha256": s.manifest["result"]["outputs_sha256"]}
        for s in shards
    ]
    if record is None:
        record = _begin(folder, shards, identity) | {"merged": parts}
        folder.write(MANIFEST, record)
    elif record.get("merged") != parts or record.get("identity") != identity:
        raise ResumeMismatchError(f"{folder.path} holds another run; choose another folder to merge into")
    elif record.get("result") is not None:  # merged before; rows that failed may have been computed since
        if (metrics := read_metrics(folder, record)) is None:
            remedy = "the unsharded command with its folder as out=DIR writes it again"
            raise StorageError(f"{folder.path / METRICS} is damaged or missing; {remedy}")
        return metrics
    table = _weave(folder, shards, provenance.canonical(identity))
    task = open_task(restore(identity["config"], (), EVAL).task, Path())
    return finish(folder, record, table, task)


def _begin(folder: RunFolder, shards: Sequence[Shard], identity: dict[str, Any]) -> dict[str, Any]:
    """The manifest of the whole, with config.yaml and overrides.yaml as the unsharded run has them. Errors:
    StorageError."""
    origin = (shards[0].manifest.get("origin") or {}) | {"run_id": uuid.uuid4().hex, "swept": []}
    origin["overrides"] = _unsharded(origin.get("overrides"))
    record = manifest.record(identity, origin)
    record["in_force"] = next((s.manifest["in_force"] for s in shards if s.manifest["in_force"]), None)
    record["sessions"] = [session | {"shard": s.name} for s in shards for session in s.manifest["sessions"]]
    first = shards[0].folder
    try:
        config = yaml.safe_load((first / "config.yaml").read_bytes())
        words = _unsharded(yaml.safe_load((first / "overrides.yaml").read_bytes()))
        config["run"]["shard"], config["out"] = None, str(folder.path)
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{first}/config.yaml or overrides.yaml cannot be read: {error}") from error
    folder.write("config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    folder.write("overrides.yaml", yaml.safe_dump(words, allow_unicode=True))
    return record


def _weave(folder: RunFolder, shards: Sequence[Shard], identity: str) -> RowTable:
    """The shards' journals as one, in the order of the input. Errors: StorageError."""
    table, before = RowTable(sum(shard.rows for shard in shards)), [0]
    for shard in shards:  # sessions are numbered through
        before.append(before[-1] + len(shard.manifest["sessions"]))
    with folder.partial(JOURNAL) as out, ExitStack() as files:
        sources = [files.enter_context((s.folder / JOURNAL).open("rb")) for s in shards]
        size = out.write(header(identity))
        for index in range(len(table.known)):
            row, number = divmod(index, len(shards))
            entry = read_at(sources[number], shards[number].table.offsets[row])
            ok, key, session, *rest = entry.head[1:]
            table.put(index, bool(ok), size)
            size += out.write(encode([index, ok, key, session + before[number], *rest], entry.record))
    folder.install(JOURNAL)
    return table


def _unsharded(words: Any) -> list[str]:
    """The words of a command without those that make it one of a shard; none if they are no list. Pure."""
    ours = ("run.shard=", "out=", "hydra/launcher", "hydra.launcher")
    return [str(word) for word in words if not str(word).startswith(ours)] if isinstance(words, list) else []
