"""A run's folder: claimed by one writer at a time, its files complete or absent. No torch."""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from fengine.errors import StorageError

LOCK, MANIFEST, JOURNAL, OUTPUTS = "lock", "manifest.json", "journal.log", "outputs.jsonl"
FIRST_FILES = (LOCK, "config.yaml", "overrides.yaml")  # those that a run has before its manifest


def read_object(path: Path) -> dict[str, Any] | None:
    """A file's JSON object; None if there is no such file. Errors: StorageError that names file and place."""
    try:
        if path.exists() and not path.is_file():  # a named pipe would be waited for
            raise StorageError(f"{path} is no file; restore it, or choose another out=DIR")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is damaged: {error}; restore it from a copy, or choose another out=DIR") from error
    if not isinstance(value, dict):
        raise StorageError(f"{path} is damaged: it holds no object; restore it, or choose another out=DIR")
    return value


def encoded(content: bytes | str | dict[str, Any]) -> bytes:
    """What a file of a run's folder holds of it. Pure."""
    if isinstance(content, dict):
        content = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content


class RunFolder:
    """The folder at `path`, made if missing and locked until `close` or the death of the process.

    The lock is the kernel's (flock on the file `lock`), so a file that a killed run left behind locks nothing; its text
    is for the message that tells who holds it. As a context manager it closes at the end.
    """

    record, word = MANIFEST, "run"  # the file by which one knows such a folder

    def __init__(self, path: Path, remedy: str = "another out=DIR") -> None:
        """`remedy`: what to choose in its place. Errors: StorageError if another run has it, it holds other files, or
        it cannot be written."""
        self.path, self._remedy = path, remedy
        self._lock = -1
        try:
            if path.exists() and not path.is_dir():
                raise StorageError(f"{self.word} folder {path} is a file; choose another out=DIR")
            if path.is_dir() and not (path / self.record).exists():
                self._refuse_other_files()
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        except BlockingIOError as error:
            holder = self._holder()
            self.close()
            raise StorageError(f"another run is writing {path} ({holder}); wait for it, or choose out=DIR") from error
        except OSError as error:
            self.close()
            raise error if isinstance(error, StorageError) else self.failed(error) from error
        except BaseException:
            self.close()
            raise

    def _refuse_other_files(self) -> None:
        known = {*FIRST_FILES, *(f".{name}.tmp" for name in (*FIRST_FILES, MANIFEST))}
        others = sorted(p.name for p in self.path.iterdir() if p.name not in known)
        if others:
            raise StorageError(
                f"run folder {self.path} holds {others[0]!r:.80} and no {MANIFEST}: it is not a run's. Choose another "
                "out=DIR"
            )

    def _holder(self) -> str:
        """Who holds the lock, as far as its file tells."""
        words = os.pread(self._lock, 200, 0).decode(errors="replace").split()
        if len(words) != 2 or not words[0].isdigit():
            return "process unknown"
        pid, host = int(words[0]), words[1]
        if host == socket.gethostname() and not os.path.exists(f"/proc/{pid}") and os.path.exists("/proc/self"):
            return f"process {pid} has gone, but one that it started still holds the lock: end that one"
        return f"process {pid} on {host}"

    def read(self, name: str) -> dict[str, Any] | None:
        """A JSON object, or None if there is no such file. Errors: StorageError if it is none."""
        return read_object(self.path / name)

    def write(self, name: str, content: bytes | str | dict[str, Any]) -> None:
        """A whole file, durable, or the one that was there before. Errors: StorageError."""
        self.write_several({name: content})

    def write_several(self, files: Mapping[str, bytes | str | dict[str, Any]], *, durable: bool = True) -> None:
        """Whole files, which get their names one after another; with `durable` they also outlive a power failure.

        Errors: StorageError.
        """
        try:
            for name, content in files.items():
                with (self.path / f".{name}.tmp").open("wb") as file:
                    file.write(encoded(content))
                    file.flush()
                    if durable:
                        os.fsync(file.fileno())
        except OSError as error:
            raise self.failed(error) from error
        self.install(*files, durable=durable)

    def install(self, *names: str, durable: bool = True) -> None:
        """Gives the finished, synced files `.<name>.tmp` their names, durably. Errors: StorageError."""
        try:
            for name in names:
                os.replace(self.path / f".{name}.tmp", self.path / name)
            if durable:
                self.sync()
        except OSError as error:
            raise self.failed(error) from error

    def sync(self) -> None:
        """Makes names of files durable. Errors: OSError."""
        folder = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def failed(self, error: OSError) -> StorageError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "make room, then run the same command again" if full else f"choose {self._remedy}"
        told = StorageError(f"{self.word} folder {self.path} cannot be written: {error.strerror or error}; {remedy}")
        told.errno = error.errno
        return told

    def close(self) -> None:
        """Gives the lock back. Idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
