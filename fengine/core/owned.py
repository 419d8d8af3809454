"""What goes with an object or its process, but not with a fork of that process, which shares its files and children."""

import os
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fengine.errors import StorageError


def finalize(owner: Any, end: Callable[..., Any], *given: Any, **named: Any) -> weakref.finalize:  # type: ignore[type-arg]
    """As `weakref.finalize`: calls `end` once, when the owner is collected, this process exits, or it is called."""
    return weakref.finalize(owner, _here, os.getpid(), end, given, named)


def _here(pid: int, end: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any]) -> None:
    if os.getpid() == pid:
        end(*given, **named)


class Folder:
    """A new folder that only this user can read, from `make` on: before, other processes may be told its name, that
    they remove it should this one be killed. `cleanup` removes it with what it holds; so does the end."""

    def __init__(self, prefix: str = "fengine-", parent: str | None = None) -> None:
        """Errors: StorageError."""
        with _storage():
            self.name = os.path.join(parent or tempfile.gettempdir(), f"{prefix}{uuid.uuid4().hex}")
        self.cleanup = finalize(self, shutil.rmtree, self.name, ignore_errors=True)

    def make(self) -> "Folder":
        """Unless another process has. Returns itself. Errors: StorageError."""
        with _storage():
            os.makedirs(self.name, 0o700, exist_ok=True)
        return self


@contextmanager
def _storage() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"no temporary folder can be made: {error}; make room for one, or set TMPDIR") from error
