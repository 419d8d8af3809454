"""What a run has still to do: its rows, surveyed before anything is computed, and what its journal holds of them.
Memory is a few bytes a row: a 64-bit key of its content and the place of its line in the journal. No torch."""

import hashlib
import json
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fengine.core.scalars import told
from fengine.errors import InputFileError, ResumeMismatchError
from fengine.eval.runs.folder import JOURNAL, RunFolder, storage_errors
from fengine.eval.runs.journal import KIND, VERSION, Damage, Entry, encode, header, scan
from fengine.eval.tasks.task import BadRow, Row, Task

NOTHING, FAILED, OK = 0, 1, 2  # what is known of a row
ROW_HEAD = "[%d,%d,%d,%d,%.6f,%.6f,%d,%d]"  # of a line of the journal, as `is_head` has it
COMPACT = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True)
class RowIndex:
    """A run's rows: a key for each (the beginning of the SHA-256 of its content), and the SHA-256 of all of the input,
    also where the run has only a shard of it."""

    keys: array  # of uint64
    sha256: str
    all_rows: int | None = None  # of the input, where the run has a shard of it

    @property
    def rows(self) -> int:
        return len(self.keys)

    def shard(self, shard: tuple[int, int] | None) -> "RowIndex":
        """The rows of one shard, (number from 0, of how many), of these, which are all. Pure."""
        return self if shard is None else RowIndex(self.keys[shard[0] :: shard[1]], self.sha256, self.rows)

    def as_dict(self) -> dict[str, Any]:
        """What an identity says of them. Pure."""
        all_rows = {} if self.all_rows is None else {"all_rows": self.all_rows}
        return {"rows": self.rows, "sha256": self.sha256, **all_rows}


def row_digest(row: Row | BadRow) -> bytes:
    """SHA-256 of a row's content. Pure. Errors: InputFileError for a task's row that is none."""
    content = [row.id, row.data] if isinstance(row, Row) else [row.id, row.line, row.type, row.message]
    if not isinstance(row.id, str):
        raise InputFileError(f"a row's id must be a text, got {told(row.id)}")
    try:
        return hashlib.sha256(COMPACT.encode(content).encode()).digest()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputFileError(f"row {row.id!r:.80}: its data is no JSON: {error}") from error


def row_key(row: Row | BadRow) -> int:
    """64 bits of a row's content. Pure."""
    return int.from_bytes(row_digest(row)[:8], "little")


def id_key(text: str) -> int:
    """64 bits of the SHA-256 of a row's id. Pure."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "little")


def index_rows(task: Task) -> RowIndex:
    """Reads all rows once. Errors: InputFileError that names ids that occur twice; whatever reading them raises."""
    keys, ids, whole = array("Q"), array("Q"), hashlib.sha256()
    for row in task.rows():
        digest = row_digest(row)
        whole.update(digest)
        keys.append(int.from_bytes(digest[:8], "little"))
        ids.append(id_key(row.id))
    of_ids = np.array(ids, np.uint64)
    order = np.argsort(of_ids, kind="stable")
    again = np.flatnonzero(of_ids[order][1:] == of_ids[order][:-1])
    if len(again):
        places = {int(order[i + 1]): int(order[i]) for i in again[:10]}
        names = [(number, row.id) for number, row in enumerate(task.rows()) if number in places]
        lines = [f"\n  {name!r:.80}: rows {places[number] + 1:,} and {number + 1:,}" for number, name in names]
        more = f"\n  and {len(again) - 10:,} more" if len(again) > 10 else ""
        raise InputFileError(
            f"task {task.name} has ids that occur twice; every row needs its own:{''.join(lines)}{more}"
        )
    return RowIndex(keys, whole.hexdigest())


class RowTable:
    """For each row: what is known, and where its line is in the journal. Modified by `put`."""

    def __init__(self, rows: int) -> None:
        self.known = bytearray(rows)
        self.offsets = array("q", bytes(8 * rows))

    def put(self, index: int, ok: bool, offset: int) -> None:
        """A line of the journal. A good one stays, whatever comes later; of failures the last one counts."""
        if self.known[index] != OK:
            self.known[index] = OK if ok else FAILED
            self.offsets[index] = offset

    @property
    def left(self) -> int:
        """Rows to be computed: new ones, and those that failed."""
        return len(self.known) - self.known.count(OK)

    @property
    def failed(self) -> int:
        return self.known.count(FAILED)


def is_head(head: list[Any], rows: int) -> bool:
    """Whether it is that of one of `rows` rows: index, ok, key, session, started, seconds, tokens in and out. Pure."""
    if len(head) != 8 or not {*map(type, head)} <= {int, float} or not all(-(1 << 63) <= x < 1 << 64 for x in head):
        return False
    return type(head[0]) is int and 0 <= head[0] < rows


def read_table(path: Path, rows: int, keys: array | None = None) -> tuple[RowTable, list[Damage], list[list[Any]]]:
    """A journal's rows; what of it is damaged; and the heads of the lines that tell whose it is. A good line that is of
    none of `rows` rows, or with `keys` of another one, is damage. Errors: StorageError."""
    table, damage, headers = RowTable(rows), [], []
    for entry in scan(path):
        if isinstance(entry, Damage):
            _add(damage, entry)
        elif entry.head[0] == KIND:
            headers.append(entry.head)
        elif _is_row(entry, rows, keys):
            table.put(entry.head[0], bool(entry.head[1]), entry.offset)
        else:
            _add(damage, Damage(entry.offset, len(encode(entry.head, entry.record))))
    return table, damage, headers


def _is_row(entry: Entry, rows: int, keys: array | None) -> bool:
    return is_head(entry.head, rows) and (keys is None or keys[entry.head[0]] == entry.head[2])


def _add(damage: list[Damage], new: Damage) -> None:
    """Damage behind damage is one place, so that there are no more of them than good lines. Modifies: damage."""
    if damage and damage[-1].offset + damage[-1].length == new.offset:
        before = damage.pop()
        new = Damage(before.offset, before.length + new.length, before.torn and new.torn)
    damage.append(new)


def reopen(
    folder: RunFolder, rows: RowIndex, identity: str, note: Callable[[str], None], warn: Callable[[str], None]
) -> RowTable:
    """What the journal holds, once it holds nothing but good lines; a new one if there is none. A torn tail is cut off.
    Of a damaged journal a copy is kept, the good lines are saved, and `warn` is told what was lost. Errors:
    ResumeMismatchError if it is another run's; StorageError."""
    path = folder.path / JOURNAL
    if not path.exists() or path.is_file() and path.stat().st_size == 0:
        folder.write(JOURNAL, header(identity))
        return RowTable(rows.rows)
    table, damage, headers = read_table(path, rows.rows, rows.keys)
    if any(head[1:] != [VERSION, identity] for head in headers):
        raise ResumeMismatchError(f"{path} is the journal of another run; choose another out=DIR")
    if any(not one.torn for one in damage):
        kept = _salvage(folder, path, rows, identity)
        places = ", ".join(f"{d.offset:,}-{d.offset + d.length - 1:,}" for d in damage[:5] if not d.torn)
        warn(
            f"{path.name} is damaged at byte {places}{' and more' if len(damage) > 5 else ''}: what its checksums "
            f"vouch for is kept, the rest is computed again; the damaged file is {kept}"
        )
        return read_table(path, rows.rows, rows.keys)[0]
    if damage:
        with storage_errors(f"journal {path} cannot be written"):
            os.truncate(path, damage[0].offset)
        note(f"{path.name} ended in the middle of a row, which is computed again")
        if damage[0].offset == 0:  # not even the first line was whole
            folder.write(JOURNAL, header(identity))
    return table


def _salvage(folder: RunFolder, path: Path, rows: RowIndex, identity: str) -> str:
    """Keeps a copy of a damaged journal and puts one of its good lines in its place. Returns the copy's name."""
    number = 1
    while (copy := path.with_name(f"journal.damaged-{number}")).exists():
        number += 1
    with folder.writing():
        os.link(path, copy)
    with folder.partial(JOURNAL) as file:
        file.write(header(identity))
        for entry in scan(path):
            if isinstance(entry, Entry) and _is_row(entry, rows.rows, rows.keys):
                file.write(encode(entry.head, entry.record))
    folder.install(JOURNAL)
    return copy.name
