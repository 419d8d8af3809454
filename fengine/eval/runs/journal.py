"""The journal of a run: one line for each finished row, only ever appended, readable after any crash. No torch.

    <crc32, 8 hex> <length, 8 hex> <head: JSON list> TAB <record: JSON> NEWLINE

Length and CRC-32 are of the bytes between the second blank and the newline; JSON holds neither a raw tab nor a raw
newline. The record is the row's line of `outputs.jsonl`, byte for byte; the head is what must not be in there (times).
A line without its newline at the end of the file is a torn tail: the crash came while it was written. Any other line
that is not what its length and checksum say is damage, which costs that line and no other. No line is longer than
MAX_LINE, so that whatever the file holds, no more than that of it is in memory; of a longer one each piece is damage.

Lines that are appended together are one `write` without a buffer, so that the death of the process loses nothing that
was appended; one that was torn off costs the lines that it lacks.
`fsync` follows when `sync_seconds` have passed or `sync_rows` lines have come since the last one: that much a power
failure can cost, and the rows are computed again. A failed write or fsync ends the writer: it is not tried again."""

import errno
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from fengine.errors import StorageError
from fengine.eval.runs.folder import storage_errors

PREFIX = 18  # bytes before the head
KIND, VERSION = "fengine-journal", 1
MAX_LINE = 256 << 20  # bytes, with the newline
_HEAD = json.JSONEncoder(separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Entry:
    """One good line at byte `offset` of the file."""

    offset: int
    head: list[Any]
    record: bytes


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes offset .. offset + length of the file that are no line. `torn`: the file ends in the middle of a line."""

    offset: int
    length: int
    torn: bool = False


def encode(head: list[Any], record: bytes) -> bytes:
    return framed(_HEAD.encode(head), record)


def framed(head: str, record: bytes) -> bytes:
    """One line, of a head that is JSON already. Pure."""
    body = b"%b\t%b" % (head.encode(), record)
    return b"%08x %08x %b\n" % (zlib.crc32(body), len(body), body)


def header(identity: str) -> bytes:
    """The first line: whose journal this is. Pure."""
    return encode([KIND, VERSION, identity], b"{}")


def scan(path: Path) -> Iterator[Entry | Damage]:
    """Every line in order, one in memory at a time. Errors: StorageError if the file cannot be read."""
    if path.exists() and not path.is_file():  # a named pipe would be waited for
        raise StorageError(f"journal {path} is no file; restore it, or choose another out=DIR")
    with storage_errors(f"journal {path} cannot be read"), path.open("rb", buffering=1 << 20) as file:
        offset = 0
        while line := file.readline(MAX_LINE):
            yield from _split(line, offset)
            offset += len(line)


def read_at(file: BinaryIO, offset: int) -> Entry:
    """The good line at `offset`. Errors: StorageError if it is good no more."""
    file.seek(offset)
    found = _entry(file.readline(MAX_LINE), offset)
    if found is None:
        raise StorageError(f"journal {file.name} changed at byte {offset} while it was read; run the command again")
    return found


def _entry(line: bytes, offset: int) -> Entry | None:
    """The line that `line` begins with, if it is good; more may follow it. Pure."""
    try:
        length = int(line[9:17], 16)
    except ValueError:
        return None
    body = line[PREFIX : PREFIX + length]
    if len(body) != length or line[:PREFIX] != b"%08x %08x " % (zlib.crc32(body), length):
        return None
    head, tab, record = body.partition(b"\t")
    if not tab:
        return None
    try:
        found = json.loads(head)
    except (ValueError, RecursionError):
        return None
    return Entry(offset, found, record) if isinstance(found, list) and len(found) > 2 else None


def _split(line: bytes, offset: int) -> Iterator[Entry | Damage]:
    """What one line of the file holds: an entry; more than one where the newline between them is damaged. Pure."""
    while line:
        entry = _entry(line, offset)
        if entry is None:
            yield Damage(offset, len(line), torn=not line.endswith(b"\n"))
            return
        end = PREFIX + int(line[9:17], 16)
        if len(line) == end:  # all but the newline
            yield Damage(offset, len(line), torn=True)
            return
        yield entry
        if line[end] != 10:
            yield Damage(offset + end, 1)
        line, offset = line[end + 1 :], offset + end + 1


class Journal(AbstractContextManager["Journal"]):
    """Appends to a journal. Modified by every method; `fsync` and `write` are the system's, and can be replaced."""

    def __init__(
        self, path: Path, *, sync_seconds: float = 1.0, sync_rows: int = 1000,
        write: Callable[[int, bytes], int] | None = None, fsync: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """Opens the file at its end; it holds whole lines only. Errors: StorageError."""
        self.path, self.sync_seconds, self.sync_rows = path, sync_seconds, sync_rows
        self._write, self._fsync = write or os.write, fsync or os.fsync
        self._unsynced = 0
        self._synced_at = time.monotonic()
        self._failed: StorageError | None = None
        with storage_errors(f"journal {path} cannot be opened"):
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self.size = os.lseek(self._file, 0, os.SEEK_END)

    def extend(self, lines: Sequence[bytes]) -> list[int]:
        """Writes lines of `encode` by one `write`, and returns their offsets. Errors: StorageError, and then those that
        are whole in the file are kept, of the others nothing."""
        if self._failed is not None:
            raise self._failed
        ends = list(accumulate(map(len, lines), initial=self.size))
        left = b"".join(lines)
        try:
            while left:
                count = self._write(self._file, left)  # less than asked for where the disk fills up
                if count < 1:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                left = left[count:]
        except OSError as error:
            self._cut(max(end for end in ends if end <= ends[-1] - len(left)))
            raise self._fail(error) from error
        self.size = ends[-1]
        self._unsynced += len(lines)
        if self._unsynced >= self.sync_rows:
            self.sync()
        else:
            self.sync_if_due()
        return ends[:-1]

    def sync_if_due(self) -> None:
        """`sync` if the last one is `sync_seconds` ago. Call it now and then. Errors: StorageError."""
        if self._unsynced and time.monotonic() - self._synced_at >= self.sync_seconds:
            self.sync()

    def sync(self) -> None:
        """Makes everything appended durable. Errors: StorageError."""
        if self._failed is not None:
            raise self._failed
        if self._unsynced:
            try:
                self._fsync(self._file)
            except OSError as error:
                raise self._fail(error) from error
            self._unsynced = 0
        self._synced_at = time.monotonic()

    def close(self) -> None:
        """Syncs, unless it has failed before, and closes. Idempotent. Errors: StorageError."""
        if self._file < 0:
            return
        try:
            if self._failed is None:
                self.sync()
        finally:
            file, self._file = self._file, -1
            os.close(file)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cut(self, size: int) -> None:
        """Takes a part of a line back. Where that fails too it stays as a torn tail, which the next run cuts off."""
        with suppress(OSError):
            os.ftruncate(self._file, size)

    def _fail(self, error: OSError) -> StorageError:
        self._failed = StorageError.of(
            f"journal {self.path} cannot be written: {error.strerror or error}. What it holds is good: make "
            "room, then run the same command again",
            error,
        )
        return self._failed
