"""Prompt files in, result files out. One bad line becomes an error record; the others go on. No torch.

Input: an inline list of prompts, a `.txt` with one prompt a line, or a `.jsonl` whose objects hold one of "prompt",
"messages", "input_ids" and any other columns, which are kept. Output: JSONL in input order, deterministic.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from fengine.errors import FengineError, InputFileError
from fengine.eval.runs.output_file import OutputWriter, encode_record

__all__ = [
    "BadRow",
    "OutputWriter",
    "PromptRow",
    "Row",
    "encode_record",
    "error_record",
    "read_prompts",
    "result_record",
]

KEYS = ("prompt", "messages", "input_ids")
RESULT_COLUMNS = ("text", "output_ids", "finish_reason", "error")  # names that results take in a record
MAX_LINE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One usable row: exactly one of prompt, messages, input_ids is not None. `columns` is the input row untouched."""

    index: int
    columns: dict[str, Any]
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    input_ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class BadRow:
    """One row that cannot be used, and why; the message names the line."""

    index: int
    message: str
    type: str = InputFileError.__name__
    columns: dict[str, Any] = field(default_factory=dict)


Row = PromptRow | BadRow


def read_prompts(spec: str | Path | Sequence[Any], *, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Row]:
    """Rows in order, numbered from 0; blank lines are skipped. Holds one line in memory at a time.

    Errors, before the first row: InputFileError for a missing, unreadable or empty file, another suffix, an empty list.
    """
    if not isinstance(spec, (str, Path)):
        if not isinstance(spec, Sequence) or isinstance(spec, (bytes, bytearray)):
            raise InputFileError(f"prompts must be a list, or a .txt or .jsonl path, got {type(spec).__name__}.")
        if not spec:
            raise InputFileError("prompts is an empty list; give at least one prompt.")
        return (_inline_row(i, item) for i, item in enumerate(spec))
    path = Path(spec)
    parse = {".txt": _text_row, ".jsonl": _json_row}.get(path.suffix.lower())
    if parse is None:
        raise InputFileError(
            f"prompts={str(spec)!r:.200} ends in neither .txt (one prompt a line) nor .jsonl (one object a line); "
            "write an inline prompt as a list: prompts=['…']."
        )
    try:
        file = path.open("rb") if path.is_file() else None
    except OSError as error:
        raise InputFileError(f"prompts file {path} cannot be read: {error.strerror or error}.") from error
    if file is None:
        problem = "is not a file" if path.exists() else "does not exist"
        raise InputFileError(f"prompts file {path} {problem}; check the path (relative to {Path.cwd()}).")
    rows = _rows(file, path, parse, max_line_bytes)
    first = next(rows, None)
    if first is None:
        raise InputFileError(f"prompts file {path} is empty; write one prompt a line into it.")
    return itertools.chain([first], rows)


def _rows(file: BinaryIO, path: Path, parse: Callable[[int, str], Row], max_line_bytes: int) -> Iterator[Row]:
    """Reads and parses line by line; closes `file`."""
    with file:
        index = 0
        for number, line in enumerate(_lines(file, path, max_line_bytes), 1):
            where = f"{path.name} line {number}"
            if line is None:
                yield BadRow(index, f"{where} is longer than {max_line_bytes} bytes; split it or shorten it.")
            elif not line.strip():
                continue
            else:
                try:
                    row = parse(index, line.decode())
                except UnicodeDecodeError as error:
                    row = BadRow(index, f"invalid UTF-8 at byte {error.start}; save the file as UTF-8.")
                yield (
                    row
                    if isinstance(row, PromptRow)
                    else BadRow(index, f"{where}: {row.message}", row.type, row.columns)
                )
            index += 1


def _lines(file: BinaryIO, path: Path, max_line_bytes: int) -> Iterator[bytes | None]:
    """Lines without BOM and line end; None for one that is too long. Errors: InputFileError if reading fails."""
    first = True
    while True:
        try:
            line = file.readline(max_line_bytes + 3)  # room for a line end, and to see that there is more
            too_long = len(line.rstrip(b"\r\n")) > max_line_bytes
            rest = line
            while too_long and rest and not rest.endswith(b"\n"):
                rest = file.readline(1 << 20)
        except OSError as error:
            raise InputFileError(f"prompts file {path} cannot be read: {error.strerror or error}.") from error
        if not line:
            return
        if too_long:
            yield None
        else:
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            yield line.removeprefix(b"\xef\xbb\xbf") if first else line
        first = False


def _inline_row(index: int, item: Any) -> Row:
    if isinstance(item, str):
        return PromptRow(index, {"prompt": item}, prompt=item)
    return BadRow(index, f"prompts[{index}] must be a string, got {type(item).__name__}.")


def _text_row(index: int, line: str) -> Row:
    return PromptRow(index, {"prompt": line}, prompt=line)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {text:.20} is too large")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"key {key!r:.80} occurs twice")
        value[key] = item
    return value


# What JSON's standard says and Python's default does not: no NaN, no infinity, no key twice.
STRICT_JSON = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)


def _json_row(index: int, line: str) -> Row:
    try:
        row = STRICT_JSON.decode(line)
    except (ValueError, RecursionError) as error:
        return BadRow(index, f"not valid JSON: {error}")
    if not isinstance(row, dict):
        return BadRow(index, f"must be a JSON object, got {type(row).__name__}.")
    taken = [name for name in RESULT_COLUMNS if name in row]
    given = [name for name in KEYS if row.get(name) is not None]
    problem = None
    if taken:
        problem = f"column {taken[0]!r} is a name that results use; rename it."
    elif not given:
        problem = "holds none of prompt, messages, input_ids; give exactly one."
    elif len(given) > 1:
        problem = f"holds {' and '.join(given)}; give exactly one."
    else:
        problem = _wrong_type(given[0], row[given[0]])
    if problem is not None:
        return BadRow(index, problem, columns=row)
    return PromptRow(index, row, **{given[0]: row[given[0]]})


def _wrong_type(name: str, value: Any) -> str | None:
    """What is wrong with the value of one of KEYS, or None. Pure."""
    if name == "prompt":
        return None if isinstance(value, str) else f"prompt must be a string, got {type(value).__name__}."
    if not isinstance(value, list) or not value:
        return f"{name} must be a non-empty list, got {value!r:.80}."
    if name == "messages":
        bad = next((i for i, m in enumerate(value) if not isinstance(m, dict)), None)
        return None if bad is None else f'messages[{bad}] must be an object with "role" and "content".'
    bad = next((i for i, t in enumerate(value) if isinstance(t, bool) or not isinstance(t, int) or t < 0), None)
    return None if bad is None else f"input_ids[{bad}] must be a token id, an integer >= 0, got {value[bad]!r:.40}."


# -- records ----------------------------------------------------------------------------------------------------------


def result_record(row: PromptRow, result: dict[str, Any]) -> dict[str, Any]:
    """The input columns, then the result's ("text", "finish_reason", …). Pure."""
    return {**row.columns, **result}


def error_record(row: Row, error: FengineError | None = None) -> dict[str, Any]:
    """The input columns and {"error": {"type", "message"}}; `error` is None for a BadRow, which tells itself. Pure.

    Columns that have the name of a result column are left out.
    """
    if error is None:
        assert isinstance(row, BadRow)
        told = {"type": row.type, "message": row.message}
    else:
        told = {"type": type(error).__name__, "message": str(error)}
    return {**{name: value for name, value in row.columns.items() if name not in RESULT_COLUMNS}, "error": told}
