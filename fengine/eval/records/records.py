"""A run's folder for those who only read it: its manifest, and its records by number. No torch.

The records are the lines of `outputs.jsonl`; before a run has ended, or for lines of it that are no records any more,
those of the journal. What was damaged or is missing is told in `notes`. Memory is 25 bytes a row; nothing is written.
"""

import hashlib
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from fengine.errors import StorageError
from fengine.eval.records.lines import id_key, id_of, parsed, record_of
from fengine.eval.runs.digests import canonical
from fengine.eval.runs.folder import JOURNAL, MANIFEST, OUTPUTS, read_object
from fengine.eval.runs.index import NOTHING, RowTable, is_head
from fengine.eval.runs.journal import KIND, MAX_LINE, Damage, read_at, scan
from fengine.eval.runs.manifest import differences, recorded

OF_OUTPUTS, OF_JOURNAL = 0, 1
MAX_ROWS = 1 << 32


def runs_of(path: Path) -> list[Path]:
    """The folders of the runs at `path`: itself, that of an output file, or those of a sweep's points in their order.

    Errors: StorageError if it is neither.
    """
    if (path / MANIFEST).is_file():
        return [path]
    beside = path.with_name(f"{path.name}.run")  # an output file of prompts has its run there
    if path.is_file() and (beside / MANIFEST).is_file():
        return [beside]
    if not path.is_dir():
        what = "is a file; give the run's folder" if path.exists() else "does not exist"
        raise StorageError(f"run folder {path} {what}")
    try:
        found = [child for child in path.iterdir() if (child / MANIFEST).is_file()]
    except OSError as error:
        raise StorageError(f"run folder {path} cannot be read: {error.strerror or error}") from error
    if not found:
        raise StorageError(f"{path} is no run's folder: it has no {MANIFEST}, nor has a folder in it")
    return sorted(
        found, key=lambda child: (not child.name.isdigit(), int(child.name) if child.name.isdigit() else 0, child.name)
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """Errors: StorageError; ResumeMismatchError if it is of another version of fengine."""
    manifest = read_object(folder / MANIFEST)
    if manifest is None:
        raise StorageError(f"{folder / MANIFEST} does not exist")
    identity = recorded(manifest, folder)
    config = identity.get("config")
    if not isinstance(config, dict) or canonical(config) != identity.get("config_sha256"):
        raise StorageError(f"{folder / MANIFEST} is damaged: its config is not that of its config_sha256")
    if not isinstance(identity.get("model"), dict | None):
        raise StorageError(f"{folder / MANIFEST} is damaged: model is {identity['model']!r:.40}, no object")
    given = identity.get("input")
    rows = given.get("rows") if isinstance(given, dict) else None
    if type(rows) is not int or not 0 <= rows <= MAX_ROWS:
        raise StorageError(f"{folder / MANIFEST} is damaged: input.rows is {rows!r:.40}")
    return manifest


class Records:
    """The records of one run, in input order. As a context manager it closes its files.

    `rows` is how many the run has to have, `len` how many are there; `keys` are 64 bits of the SHA-256 of their ids.
    `vouched`: outputs.jsonl is the very file that the manifest tells. `damaged`: a file holds what no run has written.
    """

    def __init__(self, folder: Path) -> None:
        """Errors: StorageError if it is no run's folder or has no records; ResumeMismatchError."""
        self.folder, self.manifest = folder, read_manifest(folder)
        self.identity: dict[str, Any] = self.manifest["identity"]
        self.rows: int = self.identity["input"]["rows"]
        self.notes: list[str] = []
        self.vouched = self.damaged = False
        self.keys, self._offsets, self._sources = array("Q"), array("q"), bytearray()
        self._files: list[BinaryIO | None] = [None, None]
        try:
            self._open()
        except OSError as error:
            self.close()
            raise error if isinstance(error, StorageError) else _unreadable(folder, error) from error

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return isinstance(self.manifest.get("result"), dict) and len(self) == self.rows

    def __len__(self) -> int:
        return len(self._offsets)

    def line(self, number: int) -> bytes:
        """The record of row `number` among those that are there, without its newline. Errors: StorageError."""
        file, offset = self._files[self._sources[number]], self._offsets[number]
        assert file is not None
        try:
            if self._sources[number] == OF_JOURNAL:
                return read_at(file, offset).record
            file.seek(offset)
            return file.readline(MAX_LINE).removesuffix(b"\n")
        except OSError as error:
            raise error if isinstance(error, StorageError) else _unreadable(self.folder, error) from error

    def record(self, number: int) -> dict[str, Any]:
        """Errors: StorageError if the file has changed."""
        return parsed(self.line(number), self.folder)

    def close(self) -> None:
        """Idempotent."""
        for file in self._files:
            if file is not None:
                file.close()

    def __enter__(self) -> "Records":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- finding the lines ---------------------------------------------------------------------------------------------

    def _open(self) -> None:
        outputs, result = self.folder / OUTPUTS, self.manifest.get("result")
        wanted = result.get("outputs_sha256") if isinstance(result, dict) else None
        if outputs.is_file():
            self._files[OF_OUTPUTS] = file = outputs.open("rb", buffering=1 << 20)
            if self._index(file) == wanted:
                self.vouched = True
                return
            if wanted:
                self.damaged = True
                self.notes.append(f"{OUTPUTS} is not the file that {MANIFEST} tells of: it has another SHA-256")
            good = self._good_lines(file)
        else:
            good = {}
            if wanted:
                self.notes.append(f"{OUTPUTS} is missing")
        if not wanted:
            self.notes.append("the run has not come to its end")
        self._from_both(good)
        if len(self) < self.rows:
            self.notes.append(f"{len(self):,} of {self.rows:,} rows are there")

    def _index(self, file: BinaryIO) -> str:
        """Takes every line for a record; returns the file's SHA-256."""
        digest, offset = hashlib.sha256(), 0
        for line in _lines(file):
            digest.update(line)
            self._put(id_key(id_of(line)), offset, OF_OUTPUTS)
            offset += len(line)
        return digest.hexdigest()

    def _good_lines(self, file: BinaryIO) -> dict[int, int]:
        """Key -> offset of the lines that are records; the first of each id."""
        self.keys, self._offsets, self._sources = array("Q"), array("q"), bytearray()
        good, offset, bad = {}, 0, []
        file.seek(0)
        for number, line in enumerate(_lines(file), 1):
            record = record_of(line)
            key = None if record is None else id_key(record["id"])
            if key is None or key in good:
                bad.append(f"{number:,} (byte {offset:,})")
            else:
                good[key] = offset
            offset += len(line)
        if bad:
            more = f" and {len(bad) - 5:,} more" if len(bad) > 5 else ""
            self.notes.append(f"{OUTPUTS} is damaged in line {', '.join(bad[:5])}{more}")
        return good

    def _from_both(self, good: dict[int, int]) -> None:
        """Rows in input order as far as the journal tells; a record of outputs.jsonl goes before the journal's."""
        path, saved = self.folder / JOURNAL, 0
        if path.is_file():
            table = self._journal(path)
            self._files[OF_JOURNAL] = file = path.open("rb", buffering=1 << 20)
            for index, offset in enumerate(table.offsets):
                if table.known[index] == NOTHING:
                    continue
                key = id_key(id_of(read_at(file, offset).record))
                mine = good.pop(key, None)
                saved += mine is None
                self._put(key, offset if mine is None else mine, OF_JOURNAL if mine is None else OF_OUTPUTS)
        for key, offset in good.items():
            self._put(key, offset, OF_OUTPUTS)
        if not len(self) and self.rows:
            raise StorageError(f"{self.folder} holds no record: neither {OUTPUTS} nor {JOURNAL} has a good line")
        if saved and self._files[OF_OUTPUTS] is not None:
            self.notes.append(f"{saved:,} rows are read from {JOURNAL} instead")

    def _journal(self, path: Path) -> RowTable:
        table, damage = RowTable(self.rows), 0
        for found in scan(path):
            if isinstance(found, Damage):
                damage += not found.torn
            elif found.head[0] == KIND:
                if found.head[-1] != canonical(self.identity):
                    self.damaged = True
                    self.notes.append(f"{JOURNAL} and {MANIFEST} are not of the same run, or one was changed")
            elif is_head(found.head, self.rows) and record_of(found.record):
                table.put(found.head[0], bool(found.head[1]), found.offset)
            else:
                damage += 1
        self.damaged |= damage > 0
        if damage:
            self.notes.append(f"{JOURNAL} is damaged in {damage:,} place{'s' if damage > 1 else ''}")
        return table

    def _put(self, key: int, offset: int, source: int) -> None:
        self.keys.append(key)
        self._offsets.append(offset)
        self._sources.append(source)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Its lines; one that is too long comes in pieces."""
    return iter(partial(file.readline, MAX_LINE), b"")


def _unreadable(folder: Path, error: OSError) -> StorageError:
    return StorageError(f"run folder {folder} cannot be read: {error.strerror or error}")


# -- two runs ----------------------------------------------------------------------------------------------------------


def pairs_of(a: Records, b: Records) -> Iterator[tuple[dict[str, Any] | None, dict[str, Any] | None]]:
    """Records of the same id in the order of `a`, None where a run has none; what only `b` has comes last."""
    if a.keys == b.keys:
        for number in range(len(a)):
            mine, its = a.line(number), b.line(number)
            record = parsed(mine, a.folder)
            yield record, (record if mine == its else parsed(its, b.folder))
        return
    keys = np.frombuffer(b.keys, np.uint64) if len(b) else np.zeros(0, np.uint64)
    order, left = np.argsort(keys, kind="stable"), bytearray(b"\1" * len(b))
    ordered = keys[order]
    for number, key in enumerate(a.keys):
        place = int(np.searchsorted(ordered, np.uint64(key)))
        other = int(order[place]) if place < len(order) and ordered[place] == key else None
        if other is not None:
            left[other] = 0
        yield a.record(number), None if other is None else b.record(other)
    for number, there in enumerate(left):
        if there:
            yield None, b.record(number)


def causes(a: Records, b: Records) -> list[str]:
    """Lines "key: in A → in B" of what results depend on: config, input, versions, code, weights, hardware. Pure."""
    found = differences(a.identity, b.identity)
    found += differences(a.manifest.get("in_force"), b.manifest.get("in_force"), "in_force")
    return list(dict.fromkeys(found))
