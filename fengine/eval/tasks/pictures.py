"""Images of rows: a column of paths or data URLs, which a row's content holds with their hashes. No torch."""

import base64
import hashlib
from pathlib import Path
from typing import Any

from fengine.eval.tasks.task import BadRow, Row


def with_digests(row: Row | BadRow, column: str, base: Path) -> Row | BadRow:
    """The row with the SHA-256 of each image beside it, so that a run knows of images that change. `base` is what
    relative paths are under. A row whose images cannot be read is a bad one."""
    if isinstance(row, BadRow):
        return row
    try:
        found = [
            {"image": item, "sha256": digest_of(item, read_image(item, base))} for item in _items(row.data.get(column))
        ]
    except (OSError, ValueError) as error:
        return BadRow(row.id, 0, f"row {row.id!r}: column {column!r}: {error}")
    return Row(row.id, row.data | {column: found})


def images_of(row: Row, column: str, base: Path) -> tuple[str, ...]:
    """What `image_data` takes, of a row of `with_digests`. Pure."""
    items = [item["image"] for item in row.data[column]]
    return tuple(item if item.startswith("data:") else str(base / item) for item in items)


def _items(value: Any) -> list[str]:
    items = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, str) and item for item in items):
        raise ValueError(f"must be a path or data URL, or a list of them, got {value!r:.80}")
    return items


def read_image(item: str, base: Path) -> bytes:
    """The file of an image. Errors: OSError, ValueError."""
    return base64.b64decode(item.partition(",")[2]) if item.startswith("data:") else (base / item).read_bytes()


def digest_of(item: str, data: bytes) -> str:
    """SHA-256 of a data URL's text, or of a file. Pure."""
    return hashlib.sha256(item.encode() if item.startswith("data:") else data).hexdigest()
