"""A run's folder for those who only read it: its manifest, and its records by number. No torch.

The records are the lines of `outputs.jsonl`; before a run has ended, or for lines of it that are no records any more,
those of the journal. A line that the journal contradicts is damage. What is damaged or missing stands in `notes`.
Memory is 24 bytes a row; nothing is written."""

import hashlib
import io
import json
from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fengine.errors import ConfigError, StorageError
from fengine.eval.runs.folder import JOURNAL, MANIFEST, OUTPUTS, read_object, storage_errors
from fengine.eval.runs.index import RowTable, id_key, read_table
from fengine.eval.runs.journal import MAX_LINE, read_at
from fengine.eval.runs.manifest import differences, recorded
from fengine.eval.runs.provenance import canonical
from fengine.eval.runs.record import TIMINGS, Record, id_of, record_of

MAX_ROWS = 1 << 32


def runs_of(path: Path) -> list[Path]:
    """The folders of the runs at `path`: itself, that of an output file, or those of a sweep's points in their order.
    Errors: StorageError if it is neither."""
    if (path / MANIFEST).is_file():
        return [path]
    beside = Path(f"{path}.run")  # an output file of prompts has its run there
    if path.is_file() and (beside / MANIFEST).is_file():
        return [beside]
    if not path.is_dir():
        problem = "is a file; give the run's folder" if path.exists() else "does not exist"
        raise StorageError(f"run folder {path} {problem}")
    with _reading(path):
        runs = [child for child in path.iterdir() if (child / MANIFEST).is_file()]
    if not runs:
        raise StorageError(f"{path} is no run's folder: it has no {MANIFEST}, nor has a folder in it")
    return sorted(runs, key=lambda run: (not run.name.isdigit(), int(run.name) if run.name.isdigit() else 0, run.name))


def timings(folder: Path) -> Iterator[dict[str, Any]]:
    """The objects of timings.jsonl, as far as it can be read; none without the file."""
    path = folder / TIMINGS
    with suppress(OSError, ValueError), path.open("rb") if path.is_file() else io.BytesIO() as lines:
        yield from (one for one in map(json.loads, lines) if isinstance(one, dict))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Errors: StorageError; ResumeMismatchError if it is of another version of fengine; ConfigError if of a batch."""
    manifest = read_object(folder / MANIFEST)
    if manifest is None:
        raise StorageError(f"{folder / MANIFEST} does not exist")
    identity = recorded(manifest, folder)
    rows = identity["input"].get("rows")
    if canonical(identity["config"]) != identity.get("config_sha256"):
        raise StorageError(f"{folder / MANIFEST} is damaged: its config is not that of its config_sha256")
    if type(rows) is not int or not 0 <= rows <= MAX_ROWS:
        raise StorageError(f"{folder / MANIFEST} is damaged: input.rows is {rows!r:.40}")
    if identity["config"].get("task.format") == "batch":
        raise ConfigError(f"{folder} is of a batch, whose responses are in its OUT.jsonl; there is no more to read")
    return manifest


class Records(AbstractContextManager["Records"]):
    """The records of one run, in input order. As a context manager it closes its files. `rows` is how many the run has
    to have, `len` how many are there; `keys` are 64 bits of the SHA-256 of their ids. `vouched`: outputs.jsonl is the
    very file that the manifest tells. `damaged`: a file holds what no run has written."""

    def __init__(self, folder: Path) -> None:
        """Errors: StorageError if it is no run's folder or has no records; ResumeMismatchError."""
        self.folder, self.manifest = folder, read_manifest(folder)
        self.identity: dict[str, Any] = self.manifest["identity"]
        self.result: dict[str, Any] = self.manifest.get("result") or {}
        self.rows: int = self.identity["input"]["rows"]
        self.notes: list[str] = []
        self.vouched = self.damaged = False
        self.keys, self._places = array("Q"), array("q")  # an offset in outputs.jsonl, or ~offset in the journal
        self._files: dict[str, BinaryIO] = {}
        try:
            with _reading(folder):
                for name in (OUTPUTS, JOURNAL):
                    if (folder / name).is_file():
                        self._files[name] = (folder / name).open("rb", buffering=1 << 20)
                self._find_records()
        except BaseException:
            self.close()
            raise

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return bool(self.result) and len(self) == self.rows

    def __len__(self) -> int:
        return len(self._places)

    def line(self, number: int) -> bytes:
        """The record of row `number` among those that are there, without its newline. Errors: StorageError."""
        with _reading(self.folder):
            return self._line_at(self._places[number])

    def record(self, number: int) -> Record:
        """Errors: StorageError if the file has changed."""
        return self._parsed(self.line(number))

    def _parsed(self, line: bytes) -> Record:
        record = record_of(line)
        if record is None:
            raise StorageError(f"{self.folder} holds a line that is no record: {line[:60]!r}")
        return record

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find_records(self) -> None:
        wanted = self.result.get("outputs_sha256")
        table, good = self._read_journal(), {}
        if OUTPUTS in self._files:
            digest, contradicted = self._index_outputs(table)
            if digest == wanted:
                self.vouched = True
                self._note_contradicted(contradicted)
                return
            if wanted:
                self._note_damage(f"{OUTPUTS} is not the file that {MANIFEST} tells of: it has another SHA-256")
            good = self._good_lines()
        elif wanted:
            self.notes.append(f"{OUTPUTS} is missing")
        if not wanted:
            self.notes.append("the run has not come to its end")
        self._join(table, good)
        if len(self) < self.rows:
            self.notes.append(f"{len(self):,} of {self.rows:,} rows are there")

    def _read_journal(self) -> RowTable:
        """What the journal knows of every row."""
        if JOURNAL not in self._files:
            return RowTable(self.rows)
        table, damage, headers = read_table(self.folder / JOURNAL, self.rows)
        if any(header[-1] != canonical(self.identity) for header in headers):
            self._note_damage(f"{JOURNAL} and {MANIFEST} are not of the same run, or one was changed")
        if count := sum(not one.torn for one in damage):
            self._note_damage(f"{JOURNAL} is damaged in {count:,} place{'s' if count > 1 else ''}")
        return table

    def _index_outputs(self, table: RowTable) -> tuple[str, list[int]]:
        """Takes every line of outputs.jsonl for a record. The file's SHA-256; the rows that the journal contradicts."""
        digest, offset, contradicted = hashlib.sha256(), 0, []
        journaled = self.result.get("journal_bytes", 0)  # behind it there are later rows
        journal = self._files.get(JOURNAL, io.BytesIO())
        for number, line in enumerate(_lines(self._files[OUTPUTS])):
            digest.update(line)
            self._put(id_key(id_of(line)), offset)
            if number < self.rows and table.known[number] and table.offsets[number] < journaled:
                journal.seek(table.offsets[number])  # a good line there, as was seen: it ends with a tab and the record
                if not journal.readline(MAX_LINE).endswith(b"\t" + line):
                    contradicted.append(number + 1)
            offset += len(line)
        return digest.hexdigest(), contradicted

    def _good_lines(self) -> dict[int, int]:
        """Key -> offset of the lines of outputs.jsonl that are records; the first of each id."""
        self.keys, self._places = array("Q"), array("q")
        good, offset, bad = {}, 0, []
        self._files[OUTPUTS].seek(0)
        for number, line in enumerate(_lines(self._files[OUTPUTS]), 1):
            record = record_of(line)
            key = None if record is None else id_key(record["id"])
            if key is None or key in good:
                bad.append(f"{number:,} (byte {offset:,})")
            else:
                good[key] = offset
            offset += len(line)
        if bad:
            self._note_damage(f"{OUTPUTS} is damaged in line {_some(bad)}")
        return good

    def _join(self, table: RowTable, good: dict[int, int]) -> None:
        """Rows in input order as far as the journal tells; a record of outputs.jsonl goes before the journal's."""
        saved, contradicted = 0, []
        for index in range(self.rows):
            if not table.known[index]:
                continue
            line = self._line_at(~table.offsets[index])
            if record_of(line) is None:
                self._note_damage(f"{JOURNAL} holds no record at byte {table.offsets[index]:,}")
                continue
            key = id_key(id_of(line))
            mine = good.pop(key, None)
            saved += mine is None
            if mine is not None and self._line_at(mine) != line:
                contradicted.append(index + 1)
            self._put(key, ~table.offsets[index] if mine is None else mine)
        for key, offset in good.items():
            self._put(key, offset)
        if not len(self) and self.rows:
            raise StorageError(f"{self.folder} holds no record: neither {OUTPUTS} nor {JOURNAL} has a good line")
        if saved and OUTPUTS in self._files:
            self.notes.append(f"{saved:,} rows are read from {JOURNAL} instead")
        self._note_contradicted(contradicted)

    def _line_at(self, place: int) -> bytes:
        """Errors: OSError, StorageError."""
        if place < 0:
            return read_at(self._files[JOURNAL], ~place).record
        self._files[OUTPUTS].seek(place)
        return self._files[OUTPUTS].readline(MAX_LINE).removesuffix(b"\n")

    def _put(self, key: int, place: int) -> None:
        self.keys.append(key)
        self._places.append(place)

    def _note_damage(self, note: str) -> None:
        self.damaged = True
        self.notes.append(note)

    def _note_contradicted(self, rows: list[int]) -> None:
        if rows:
            which = _some([f"{number:,}" for number in rows])
            self._note_damage(f"{OUTPUTS} and {JOURNAL} hold different records of row {which}")


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Its lines; one that is too long comes in pieces."""
    return iter(partial(file.readline, MAX_LINE), b"")


def _some(items: list[str]) -> str:
    return ", ".join(items[:5]) + (f" and {len(items) - 5:,} more" if len(items) > 5 else "")


def _reading(folder: Path) -> AbstractContextManager[None]:
    """Inside, an error of the system is a StorageError that names the folder."""
    return storage_errors(f"run folder {folder} cannot be read")


def pairs_of(a: Records, b: Records) -> Iterator[tuple[Record | None, Record | None]]:
    """Records of the same id in the order of `a`, None where a run has none; what only `b` has comes last."""
    if a.keys == b.keys:
        for number in range(len(a)):
            mine, its = a.line(number), b.line(number)
            record = a._parsed(mine)
            yield record, (record if mine == its else b._parsed(its))
        return
    keys, left = np.array(b.keys, np.uint64), bytearray(b"\1" * len(b))
    order = np.argsort(keys, kind="stable")
    places = np.searchsorted(keys, np.array(a.keys, np.uint64), sorter=order)
    for number, place in enumerate(places.tolist()):
        other = int(order[place]) if place < len(b) and b.keys[order[place]] == a.keys[number] else None
        if other is not None:
            left[other] = 0
        yield a.record(number), None if other is None else b.record(other)
    for number, there in enumerate(left):
        if there:
            yield None, b.record(number)


def causes(a: Records, b: Records) -> list[str]:
    """Lines "key: in A → in B" of what results depend on: config, input, versions, code, weights, hardware. Pure."""
    lines = differences(a.identity, b.identity)
    lines += differences(a.manifest.get("in_force"), b.manifest.get("in_force"), "in_force")
    return list(dict.fromkeys(lines))
