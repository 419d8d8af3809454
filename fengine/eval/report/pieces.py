"""Token ids as texts, by the run's tokenizer, if its files are still here and still the same.

Tokenizer and hub client are imported where they are used: no command line is to wait for them that needs none.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fengine.errors import FengineError
from fengine.eval.report.plain import mapping, size
from fengine.eval.runs.digests import local_directory

FILE = "tokenizer.json"


def texts(
    identity: dict[str, Any], in_force: Any, ids: Iterable[int], budget: int
) -> tuple[dict[str, str], str | None]:
    """Id (as a text) → what it adds to the text, of the first ids, in all of about `budget` bytes; and if there are
    none, why not."""
    from fengine.tokenizer.tokenizer import Tokenizer

    config, model = mapping(identity.get("config")), mapping(identity.get("model"))
    path = str(config.get("model.tokenizer_path") or config.get("model.path") or "")
    files = model.get("tokenizer_files") or model.get("files")
    if files is None and isinstance(in_force, dict):
        files = in_force.get("model_files")
    directory = _directory(path, config.get("model.revision"))
    if directory is None:
        return {}, f"the tokenizer of {path!r} is not on this machine, so that tokens are shown by their ids"
    try:
        if isinstance(files, dict) and FILE in files and files[FILE] != _sha256(directory / FILE):
            return {}, f"{directory / FILE} has changed since the run, so that tokens are shown by their ids"
        tokenizer = Tokenizer.from_directory(directory)
    except (OSError, FengineError) as error:
        return {}, f"the tokenizer of {path!r} cannot be read, so that tokens are shown by their ids: {error}"
    table = tokenizer.decoding.tables[False]
    found: dict[str, str] = {}
    for i in ids:
        if type(i) is int and 0 <= i < 2**32:
            found[str(i)] = piece = shown(table[i])
            budget -= size(piece) + len(str(i)) + 4
            if budget < 0:
                break
    return found, None


def shown(piece: bytes | str | int | None) -> str:
    """A piece as a text; bytes that are no whole character in UTF-8 as ‹E2 96›. Pure."""
    if isinstance(piece, int):
        piece = bytes([piece])
    if isinstance(piece, bytes):
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return f"‹{piece.hex(' ').upper()}›"
    return piece or ""


def _directory(path: str, revision: Any) -> Path | None:
    if (found := local_directory(path)) is not None:
        return found
    from fengine.worker.hub import HUB_ID, resolve_local

    return resolve_local(path, revision) if HUB_ID.fullmatch(path) else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
