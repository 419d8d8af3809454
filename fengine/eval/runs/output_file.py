"""`OutputWriter`: a JSONL file in input order, complete or absent.

Records are written to `<path>.partial` as soon as all before them are there, and the file takes its name at the end, so
`path` never holds half a run.
"""

import fcntl
import json
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Any

from fengine.errors import StorageError

_PLAIN = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_ESCAPED = json.JSONEncoder(allow_nan=False)


def encode_record(record: dict[str, Any]) -> bytes:
    """One line of JSON, keys in their order, in UTF-8; escaped where the text holds lone surrogates. Pure."""
    try:
        return _PLAIN.encode(record).encode() + b"\n"
    except UnicodeEncodeError:
        return _ESCAPED.encode(record).encode() + b"\n"


class OutputWriter:
    """Takes records by index, in any order, each once, and writes them in order of index from 0.

    Records that come early wait in memory (`waiting` tells how many). As a context manager it finishes at the end of
    the block; after an exception it leaves `<path>.partial` behind.
    """

    def __init__(self, path: str | Path, *, inputs: str | Path | None = None) -> None:
        """Opens the file, so that nothing is lost later. `inputs` is the prompts file, which is never overwritten.

        Errors: StorageError if the path cannot be written, is the input, or another run is writing it.
        """
        self.path = Path(os.path.realpath(path))
        if inputs is not None and self.path == Path(os.path.realpath(inputs)):
            raise StorageError(f"output path {path} is the prompts file itself; choose another out=.")
        self._pending: dict[int, bytes] = {}
        self._next = 0
        try:
            kind = stat.S_IFMT(self.path.stat().st_mode) if self.path.exists() else stat.S_IFREG
            if kind not in (stat.S_IFREG, stat.S_IFCHR):
                raise StorageError(f"output path {path} is not a regular file; choose another out=.")
            # a device such as /dev/null is written directly, for a rename would replace it
            self._partial = None if kind == stat.S_IFCHR else self.path.with_name(self.path.name + ".partial")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = (self._partial or self.path).open("ab")
            if self._partial is not None:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._file.truncate(0)
        except BlockingIOError as error:
            raise StorageError(f"another run is writing {self._partial}; wait, or choose another out=.") from error
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise self._failed(error) from error

    @property
    def waiting(self) -> int:
        """Records that wait for an earlier one."""
        return len(self._pending)

    @property
    def written(self) -> int:
        """Records in the file."""
        return self._next

    def write(self, index: int, record: dict[str, Any]) -> None:
        """Errors: StorageError (disk full, file gone); ValueError for a record that is no JSON (NaN, an object)."""
        assert index >= self._next and index not in self._pending, f"record {index} came twice"
        self._pending[index] = encode_record(record)
        try:
            while (line := self._pending.get(self._next)) is not None:
                self._file.write(line)
                del self._pending[self._next]
                self._next += 1
            self._file.flush()
        except OSError as error:
            raise self._failed(error) from error

    def finish(self) -> None:
        """Makes the file durable and gives it its name. Every record before the last must have come."""
        assert not self._pending, f"record {self._next} is missing, {len(self._pending)} wait behind it"
        try:
            if self._partial is not None:
                self._file.flush()
                os.fsync(self._file.fileno())
                os.replace(self._partial, self.path)
                folder = os.open(self.path.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
            self._file.close()
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Gives up: what is written stays in `<path>.partial`. Never raises."""
        try:
            self._file.close()
        except OSError:
            return

    def __enter__(self) -> "OutputWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.close()

    def _failed(self, error: OSError) -> StorageError:
        kept = f"; {self._next} records are kept in {self._partial}" if self._next and self._partial else ""
        return StorageError(
            f"output path {self.path} cannot be written: {error.strerror or error}{kept}. "
            "Free space or choose another out=."
        )
