"""The JSONL file of a run of prompts: its rows in input order, written while they finish; complete or absent.

A record is the row's own columns and what came of them. It stands in `<path>.partial` as soon as all before it are
there, and the file takes its name at the end, so `path` never holds half a run. No torch.
"""

import fcntl
import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from fengine.errors import StorageError
from fengine.eval.runs.answering import line_of
from fengine.eval.runs.journal import Entry
from fengine.eval.tasks.rows import RESULT_COLUMNS

NOT_FINISHED = {"type": "FengineError", "message": "the run ended before this row had finished"}


class Export:
    """Modified by every method. Errors: StorageError that names the path."""

    def __init__(self, path: str | Path, logprobs: bool = False, text: bool = True, inputs: str | None = None) -> None:
        """Looks at the place, and writes nothing yet. `inputs` is the prompts file, which is never overwritten."""
        self.path, self._logprobs, self._text = Path(os.path.realpath(path)), logprobs, text
        self.written = self.failed = 0
        self._file: BinaryIO | None = None
        if inputs is not None and self.path == Path(os.path.realpath(inputs)):
            raise StorageError(f"output path {path} is the prompts file itself; choose another out=.")
        try:
            kind = stat.S_IFMT(self.path.stat().st_mode) if self.path.exists() else stat.S_IFREG
        except OSError as error:
            raise self._told(error) from error
        if kind not in (stat.S_IFREG, stat.S_IFCHR):
            raise StorageError(f"output path {path} is not a regular file; choose another out=.")
        # a device such as /dev/null is written directly, for a rename would replace it
        self.partial = self.path if kind == stat.S_IFCHR else self.path.with_name(self.path.name + ".partial")

    @property
    def device(self) -> bool:
        return self.partial == self.path

    @property
    def folder(self) -> Path:
        """Where the record of the run is kept that writes this file."""
        return self.path.with_name(self.path.name + ".run")

    def open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.partial.open("ab")
            if not self.device:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._file.truncate(0)
        except BlockingIOError as error:
            raise StorageError(f"another run is writing {self.partial}; wait, or choose another out=.") from error
        except OSError as error:
            raise self._told(error) from error

    def put(self, entry: Entry) -> None:
        """The next row, by its line of the journal."""
        record = json.loads(entry.record.decode("utf-8", "surrogatepass"))
        columns = record.get("data", {})
        if "error" in record:
            self.put_error(columns, record["error"])
            return
        (answer,) = record["answers"]
        found = {"text": answer["text"]} if self._text else {}
        found |= {name: answer[name] for name in ("output_ids", "finish_reason")}
        found |= {"prompt_tokens": entry.head[6], "sampling_seed": answer["sampling_seed"]}
        if self._logprobs:
            found["output_token_logprobs"] = answer["logprobs"]
        self._write({**columns, **found})

    def put_error(self, columns: dict[str, Any], error: dict[str, Any]) -> None:
        """The next row, which failed. Columns that have the name of a result column are left out."""
        self.failed += 1
        self._write({name: value for name, value in columns.items() if name not in RESULT_COLUMNS} | {"error": error})

    def _write(self, record: dict[str, Any]) -> None:
        assert self._file is not None
        try:
            self._file.write(line_of(record) + b"\n")
            self._file.flush()
        except OSError as error:
            raise self._told(error) from error
        self.written += 1

    def finish(self) -> None:
        """Makes the file durable and gives it its name."""
        assert self._file is not None
        try:
            if not self.device:
                os.fsync(self._file.fileno())
                os.replace(self.partial, self.path)
                folder = os.open(self.path.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
            self.close()
        except OSError as error:
            raise self._told(error) from error

    def close(self) -> None:
        """What is written stays in `<path>.partial`. Idempotent; never raises, for each write was flushed."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def _told(self, error: OSError) -> StorageError:
        kept = f"; {self.written} records are kept in {self.partial}" if self.written and not self.device else ""
        return StorageError(
            f"output path {self.path} cannot be written: {error.strerror or error}{kept}. "
            "Free space or choose another out=."
        )
