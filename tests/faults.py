"""Calls of the system on files below a folder, counted, one of them failing: of `os`, and of files of Python."""

import builtins
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class Faults:
    """While installed, the calls on files in `folder` are numbered; number `fails` raises, as on a full disk."""

    def __init__(self, folder: Path, fails: int = -1, short: bool = False) -> None:
        """`short`: a write that would fail writes its first byte instead, as the system may."""
        self.folder, self.fails, self.short = str(folder), fails, short
        self.calls: list[str] = []
        self.files: dict[int, str] = {}

    def count(self, name: str, path: str) -> bool:
        """Numbers a call. Whether it is short. Errors: OSError for the one that fails."""
        if not path.startswith(self.folder):
            return False
        self.calls.append(f"{name} {path.removeprefix(self.folder) or '.'}")
        if len(self.calls) - 1 != self.fails:
            return False
        if self.short and name == "write":
            return True
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def undurable(self) -> list[str]:
        """Files that got a name, or were left, with something written that a power failure takes: not synced since."""
        written, found = dict[str, None](), []
        for name, path in (call.split(" ", 1) for call in self.calls):
            if name in ("write", "pwrite", "truncate", "ftruncate"):
                written[path] = None
            elif name == "fsync":
                written.pop(path, None)
            elif name in ("replace", "rename") and path in written:
                found.append(path)
                del written[path]
        return found + list(written)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        by_path = ("replace", "rename", "truncate", "link", "unlink", "mkdir")
        for name in by_path:
            patch.setattr(os, name, self._by_path(name, getattr(os, name)))
        for name in ("fsync", "ftruncate", "pwrite", "write"):
            patch.setattr(os, name, self._by_file(name, getattr(os, name)))
        patch.setattr(os, "open", self._open(os.open))
        patch.setattr(io, "open", self._file(io.open))
        patch.setattr(builtins, "open", io.open)

    def _by_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *more: Any, **options: Any) -> Any:
            if isinstance(path, int):
                self.count(name, self.files.get(path, ""))
            else:
                self.count(name, os.fspath(path))
            return real(path, *more, **options)

        return call

    def _by_file(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: int, *more: Any) -> Any:
            if self.count(name, self.files.get(file, "")) and name == "write":
                return real(file, more[0][:1])
            return real(file, *more)

        return call

    def _open(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, *more: Any, **options: Any) -> int:
            self.count("open", os.fspath(path))
            file = real(path, *more, **options)
            self.files[file] = os.fspath(path)
            return file

        return call

    def _file(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Python's `open`: files that write go through a raw file whose calls are counted."""
        faults = self

        class Raw(io.FileIO):
            def write(self, data: Any, /) -> int:
                short = faults.count("write", os.fspath(self.name))
                return super().write(bytes(data)[:1] if short else data)

            def truncate(self, size: int | None = None, /) -> int:
                faults.count("truncate", os.fspath(self.name))
                return super().truncate(size)

        def call(path: Any, mode: str = "r", buffering: int = -1, *more: Any, **options: Any) -> Any:
            if isinstance(path, int) or not os.fspath(path).startswith(self.folder) or "b" not in mode or mode == "rb":
                return real(path, mode, buffering, *more, **options)
            self.count("open", os.fspath(path))
            raw = Raw(os.fspath(path), mode.replace("b", ""))
            self.files[raw.fileno()] = os.fspath(path)
            return io.BufferedRandom(raw) if "+" in mode else raw if buffering == 0 else io.BufferedWriter(raw)

        return call
