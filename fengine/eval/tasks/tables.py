"""Rows from parquet files and Hugging Face datasets: the one file that imports the optional `pyarrow` and `datasets`.

No torch. Values become what JSON would hold, so that a row reads alike from any source.
"""

import base64
import datetime
import decimal
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fengine.errors import InputFileError, MissingExtraError

BATCH_ROWS = 256


def read_parquet(path: Path) -> Iterator[dict[str, Any] | str]:
    """One dict a row, or what is wrong with it; BATCH_ROWS are decoded at a time.

    Errors, at once: MissingExtraError without pyarrow, InputFileError for what is no parquet file.
    """
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

    Errors, at once: MissingExtraError without datasets, InputFileError for what cannot be opened.
    """
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
    """The columns as JSON values, or which one is none. Pure."""
    row = {}
    for name, value in columns.items():
        try:
            row[str(name)] = _plain(value)
        except TypeError as error:
            return f"column {name!r} holds {error}, which is no JSON value; leave it out of the data"
    return row


def _plain(value: Any) -> Any:
    """A JSON value: dates in ISO format, bytes in base64, decimals as text, null for nan and infinity. Pure.

    Errors: TypeError that names the type of anything else.
    """
    return json.loads(json.dumps(value, default=_encoded), parse_constant=lambda _: None)


def _encoded(value: Any) -> str:
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, decimal.Decimal):
        return str(value)
    raise TypeError(type(value).__name__)
