"""A row's columns: read from parquet files and Hugging Face datasets, filled into templates; images. No torch. The one
file that imports the optional `pyarrow` and `datasets`. Values become what JSON would hold, so that a row reads alike
from any source."""

import base64
import datetime
import decimal
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fengine.api.chat_images import without_images
from fengine.core.sampling_params import PARAMETERS
from fengine.errors import InputFileError, MissingExtraError
from fengine.eval.tasks.task import BadRow, Row, Scores

BATCH_ROWS = 256  # of a parquet file that are decoded at a time
# Columns that can only be meant as sampling parameters, and their names there.
BARE = {name: name for name, row in PARAMETERS.items() if name not in ("n", "regex", "ebnf", "custom_params")}
BARE |= {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")


def grouped(scores: Scores) -> Scores:
    """Scores under their own names, and under those of the row's group. Pure."""
    numbers: Scores = {name: value for name, value in scores.items() if not isinstance(value, str)}
    return numbers | {f"{name} [{scores.get('group')}]": value for name, value in numbers.items()}


def refuse_bare(row: Row) -> None:
    """A row that is a request: what it asks for outside `sampling` would be ignored. Errors: InputFileError."""
    bare = [name for name in BARE if row.data.get(name) is not None]
    if row.data.get("sampling_params") is not None:
        raise problem(row, "'sampling_params' is not read as a column; its name here is sampling")
    if bare:
        name, value = BARE[bare[0]], json.dumps(row.data[bare[0]])
        raise problem(row, f'{bare[0]!r} is not read as a column; write "sampling": {{"{name}": {value:.80}}}')


def problem(row: Row, what: str) -> InputFileError:
    return InputFileError(f"row {row.id!r}: {what}")


def column(name: str, row: Row) -> Any:
    """The value of a column; `a.b` reaches into an object, `a.0` into a list, where there is no column of that very
    name. Pure. Errors: InputFileError if there is none, or if it is null."""
    value: Any = row.data
    for part in [name] if name in row.data else name.split("."):
        if isinstance(value, list):
            value = {str(place): item for place, item in enumerate(value)}
        value = value.get(part) if isinstance(value, dict) else None
    if value is None:
        known = ", ".join(map(repr, list(row.data)[:12]))
        raise problem(row, f"has no column {name!r}; it has {known or 'none'}")
    return value


def names_columns(template: str) -> bool:
    """Whether rows can have different prompts by it. Pure."""
    return any(match[1] is not None for match in _FIELD.finditer(template))


def filled(template: str, row: Row) -> str:
    """`template` with {column} replaced by texts and numbers; {{ and }} are braces. Pure. Errors: InputFileError."""

    def put(match: re.Match[str]) -> str:
        if match.group() in ("{{", "}}"):
            return match.group()[0]
        value = column(match.group(1), row)
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise problem(row, f"task.prompt takes texts and numbers; {match.group(1)!r} is {type(value).__name__}")
        return str(value)

    return _FIELD.sub(put, template)


def with_digests(row: Row | BadRow, column: str, base: Path) -> Row | BadRow:
    """The row with the SHA-256 of each image beside it, so that a run knows of images that change. `base` is what
    relative paths are under. A row whose images cannot be read is a bad one."""
    if isinstance(row, BadRow):
        return row
    data = row.data
    try:
        messages, inside = without_images(data.get("messages"))
        if inside and data.get(column) is not None:
            raise ValueError("the messages have images, too; give them in one place")
        data = data | {"messages": messages, column: inside} if inside else data
        if data.get(column) is None:
            return row
        found = [{"image": item, "sha256": digest_of(item, read_image(item, base))} for item in _items(data[column])]
    except (OSError, ValueError) as error:
        return BadRow(row.id, 0, f"row {row.id!r}: column {column!r}: {error}")
    return Row(row.id, data | {column: found})


def images_of(row: Row, column: str, base: Path) -> tuple[str, ...]:
    """What `image_data` takes, of a row of `with_digests`. Pure."""
    items = [item["image"] for item in row.data.get(column) or ()]
    return tuple(item if item.startswith("data:") else str(base / item) for item in items)


def _items(value: Any) -> list[str]:
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str) and item for item in items):
        raise ValueError(f"must be a path or data URL, or a list of them, got {value!r:.80}")
    return items


def read_image(item: str, base: Path) -> bytes:
    """The file of an image. Errors: OSError, ValueError."""
    return base64.b64decode(item.partition(",")[2]) if item.startswith("data:") else (base / item).read_bytes()


def digest_of(item: str, data: bytes) -> str:
    """SHA-256 of a data URL's text, or of a file. Pure."""
    return hashlib.sha256(item.encode() if item.startswith("data:") else data).hexdigest()


def read_parquet(path: Path) -> Iterator[dict[str, Any] | str]:
    """One dict a row, or what is wrong with it. Errors, at once: MissingExtraError without pyarrow, InputFileError for
    what is no parquet file."""
    try:
        from pyarrow import ArrowException, parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingExtraError.of("task.format=parquet", "pyarrow", "data") from None
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ArrowException) as error:
        raise InputFileError(f"task.data={path} cannot be read as parquet: {error}") from error

    def rows() -> Iterator[dict[str, Any] | str]:
        with file:
            try:
                for batch in file.iter_batches(BATCH_ROWS):
                    yield from map(_row, batch.to_pylist())
            except (OSError, ArrowException) as error:
                raise InputFileError(f"task.data={path} is damaged: {error}") from error

    return rows()


def read_dataset(name: str, subset: str | None, split: str) -> Iterator[dict[str, Any] | str]:
    """One dict a row, or what is wrong with it; streamed from a directory or the hub. A dataset's code is never run.
    Errors, at once: MissingExtraError without datasets, InputFileError for what cannot be opened."""
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingExtraError.of("task.format=hf", "datasets", "data") from None
    what = f"task.data={name} (subset {subset!r}, split {split!r})"
    try:
        found = datasets.load_dataset(name, subset, split=split, streaming=True)
    except Exception as error:  # whatever the network, the hub or the files say
        raise InputFileError(f"{what} cannot be opened: {error}") from error

    def rows() -> Iterator[dict[str, Any] | str]:
        try:
            yield from map(_row, found)
        except Exception as error:  # likewise
            raise InputFileError(f"{what} cannot be read on: {error}") from error

    return rows()


def _row(columns: dict[str, Any]) -> dict[str, Any] | str:
    """The columns as JSON values, null for nan and infinity, or which one is none. Pure."""
    row = {}
    for name, value in columns.items():
        try:
            row[str(name)] = json.loads(json.dumps(value, default=_encoded), parse_constant=lambda _: None)
        except TypeError as error:
            return f"column {name!r} holds {error}, which is no JSON value; leave it out of the data"
    return row


def _encoded(value: Any) -> str:
    """Dates in ISO format, bytes in base64, decimals as text. Pure. Errors: TypeError that names any other type."""
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, decimal.Decimal):
        return str(value)
    raise TypeError(type(value).__name__)
