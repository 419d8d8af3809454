"""Files of a model's directory, which may be anything: a pipe, a link to nothing, larger than memory. No torch."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from fengine.errors import CorruptCheckpointError, ModelLoadError

MAX_JSON_BYTES = 16 << 20


def read_file(path: Path, most: int = MAX_JSON_BYTES) -> bytes:
    """All of a regular file. Errors: ModelLoadError; CorruptCheckpointError if it has more bytes than `most`."""
    with open_regular(path) as file:
        data = read_from(file, path, most + 1)
    if len(data) > most:
        raise CorruptCheckpointError(f"{path} has more than {most} bytes; no more are read.")
    return data


def open_regular(path: Path) -> BinaryIO:
    """A file that can be opened without waiting, unbuffered. Errors: ModelLoadError for anything else."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ModelLoadError(f"{path} is not a regular file; a checkpoint has regular files or links to them.")
        return open(path, "rb", buffering=0)
    except FileNotFoundError:
        dangling = f" (a link to {os.readlink(path)}, which does not exist)" if path.is_symlink() else ""
        raise ModelLoadError(f"{path} is missing{dangling}; download the checkpoint again.") from None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}; check its permissions.") from None


def read_from(file: BinaryIO, path: Path, most: int) -> bytes:
    """Up to `most` bytes. Modifies: the position in `file`."""
    data = b""
    try:
        size = max(os.fstat(file.fileno()).st_size, 4096)  # a read takes memory for all that it may bring
        while len(data) < most and (more := file.read(min(most - len(data), size))):
            data += more
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}.") from None
    if data.startswith(b"version "):
        raise ModelLoadError(f"{path} is a pointer of Git LFS, not the file itself: run git lfs pull there.")
    return data
