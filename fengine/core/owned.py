"""What goes with an object or its process, but not with a fork of that process, which shares its files and children."""

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fengine.errors import StorageError


def finalize(owner: Any, end: Callable[..., Any], *given: Any, **named: Any) -> weakref.finalize:  # type: ignore[type-arg]
    """As `weakref.finalize`: calls `end` once, when the owner is collected, this process exits, or it is called."""
    return weakref.finalize(owner, _here, os.getpid(), end, given, named)


def _here(pid: int, end: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any]) -> None:
    if os.getpid() == pid:
        end(*given, **named)


class Folder:
    """A new folder that only this user can read. `cleanup` removes it with what it holds; so does the end."""

    def __init__(self, prefix: str = "fengine-", parent: str | None = None) -> None:
        """Errors: StorageError."""
        try:
            self.name = tempfile.mkdtemp(prefix=prefix, dir=parent)
        except OSError as error:
            raise StorageError(f"no temporary folder can be made: {error}; make room for one, or set TMPDIR") from error
        self.cleanup = finalize(self, shutil.rmtree, self.name, ignore_errors=True)
