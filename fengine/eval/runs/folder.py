"""A run's folder: claimed by one writer at a time, its files complete or absent. No torch."""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from fengine.errors import StorageError

LOCK, MANIFEST, JOURNAL, OUTPUTS = "lock", "manifest.json", "journal.log", "outputs.jsonl"
FIRST_FILES = (LOCK, "config.yaml", "overrides.yaml")  # those that a run has before its manifest
FULL = (errno.ENOSPC, errno.EDQUOT)  # what the system says of a disk that is full
Content = bytes | str | dict[str, Any]


@contextmanager
def storage_errors(problem: str, remedy: str = "", if_full: str | None = None) -> Iterator[None]:
    """Inside, an error of the system is a StorageError: the problem, its reason, and what to do; `if_full`: of a disk
    that is."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        told = remedy if if_full is None or error.errno not in FULL else if_full
        raise StorageError.of(f"{problem}: {error.strerror or error}{told}", error) from error


def read_object(path: Path) -> dict[str, Any] | None:
    """A file's JSON object; None if there is no such file. Errors: StorageError that names file and place."""
    if os.path.exists(path) and not os.path.isfile(path):  # a named pipe would be waited for
        raise StorageError(f"{path} is no file; restore it, or choose another out=DIR")
    try:
        with storage_errors(f"{path} cannot be read"), suppress(FileNotFoundError):
            if isinstance(value := json.loads(path.read_bytes()), dict):
                return value
            raise ValueError("it holds no object")
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is damaged: {error}; restore it from a copy, or choose another out=DIR") from error
    return None


def encoded(content: Content) -> bytes:
    """What a file of a run's folder holds of it. Pure."""
    if isinstance(content, dict):
        content = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content


def check_writable(path: Path) -> None:
    """Errors: StorageError if `write_file` could not write there."""
    _refuse_place(path)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        problem = "is a folder" if path.is_dir() else "cannot be written"
        raise StorageError(f"{path} {problem}; choose another place with out=FILE")


@contextmanager
def whole_file(path: Path, partial: Path | None = None) -> Iterator[BinaryIO]:
    """What is written inside becomes the file at `path`, durable; else the one that was there stays. `partial` is the
    file until then; None: one of this process. Errors: OSError."""
    partial = partial or path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):  # of a full disk, which it would keep full
            partial.unlink()
        raise


RECORD = {
    *("manifest.json", "metrics.json", "trace.json", "config.yaml", "overrides.yaml"),
    *("journal.log", "outputs.jsonl", "timings.jsonl", "lock"),
}  # files of a run's folder


def _refuse_place(path: Path) -> None:
    """Errors: StorageError for a device, a pipe, a file of a run's record."""
    if path.exists() and not (path.is_file() or path.is_dir()):  # which is told below
        raise StorageError(f"{path} is no regular file; choose another file")
    if path.name in RECORD and (path.parent / "manifest.json").exists():
        raise StorageError(f"{path} is a file of a run's record; choose another file")


def write_file(path: Path, content: Content) -> None:
    """A whole file anywhere, but not in place of a device, a pipe or a file of a run's record. Errors: StorageError."""
    _refuse_place(path)
    with storage_errors(f"{path} cannot be written", "; choose another file"), whole_file(path) as file:
        file.write(encoded(content))


def sync_names(folder: Path) -> None:
    """Makes the names of a folder's files durable. Errors: OSError."""
    number = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)


class RunFolder(AbstractContextManager["RunFolder"]):
    """The folder at `path`, made if missing and locked until `close` or the death of the process. The lock is the
    kernel's (flock on the file `lock`), so a file that a killed run left behind locks nothing; its text is for the
    message that tells who holds it. As a context manager it closes at the end."""

    record, word = MANIFEST, "run"  # the file by which one knows such a folder

    def __init__(self, path: Path, remedy: str = "another out=DIR") -> None:
        """`remedy`: what to choose in its place. Errors: StorageError if another run has it, it holds other files, or
        it cannot be written."""
        self.path, self._remedy = path, remedy
        self._lock = -1
        try:
            with self.writing():
                self._claim()
        except BaseException:
            self.close()
            raise

    def _claim(self) -> None:
        """Errors: StorageError, OSError."""
        path = self.path
        if path.exists() and not path.is_dir():
            raise StorageError(f"{self.word} folder {path} is a file; choose another out=DIR")
        if path.is_dir() and not (path / self.record).exists():
            others = sorted(p.name for p in path.iterdir() if not self._is_own(p))
            if others:
                problem = f"holds {others[0]!r:.80} and no {self.record}: it is not a {self.word}'s"
                raise StorageError(f"{self.word} folder {path} {problem}. Choose another out=DIR")
        path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = self._holder()
            raise StorageError(f"another run is writing {path} ({holder}); wait for it, or choose out=DIR") from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)

    def _is_own(self, path: Path) -> bool:
        """Whether such a folder may hold this before it has its record."""
        return path.name in {*FIRST_FILES, *(f".{name}.tmp" for name in (*FIRST_FILES, MANIFEST))}

    def _holder(self) -> str:
        """Who holds the lock, as far as its file tells."""
        words = os.pread(self._lock, 200, 0).decode(errors="replace").split()
        if len(words) != 2 or not words[0].isdigit():
            return "process unknown"
        pid, host = int(words[0]), words[1]
        if host == socket.gethostname() and not os.path.exists(f"/proc/{pid}") and os.path.exists("/proc/self"):
            return f"process {pid} has gone, but one that it started still holds the lock: end that one"
        return f"process {pid} on {host}"

    def write(self, name: str, content: Content) -> None:
        """A whole file, durable, or the one that was there before. Errors: StorageError."""
        self.write_several({name: content})

    def write_several(self, files: Mapping[str, Content], *, durable: bool = True) -> None:
        """Whole files, which get their names one after another; with `durable` they also outlive a power failure.
        Errors: StorageError."""
        for name, content in files.items():
            with self.partial(name, durable=durable) as file:
                file.write(encoded(content))
        self.install(*files, durable=durable)

    @contextmanager
    def partial(self, name: str, *, durable: bool = True) -> Iterator[BinaryIO]:
        """What is written inside gets this name by `install`; with `durable` it is synced by then. Errors:
        StorageError."""
        with self.writing(), (self.path / f".{name}.tmp").open("wb", buffering=1 << 20) as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())

    def install(self, *names: str, durable: bool = True) -> None:
        """Gives the finished, synced files `.<name>.tmp` their names, durably. Errors: StorageError."""
        with self.writing():
            for name in names:
                os.replace(self.path / f".{name}.tmp", self.path / name)
            if durable:
                sync_names(self.path)

    def writing(self) -> AbstractContextManager[None]:
        """Inside, an error of the system is a StorageError that names this folder and what to do."""
        problem = f"{self.word} folder {self.path} cannot be written"
        return storage_errors(problem, f"; choose {self._remedy}", "; make room, then run the same command again")

    def close(self) -> None:
        """Gives the lock back. Idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def __exit__(self, *_: object) -> None:
        self.close()
