"""Lines of `outputs.jsonl` and records of journals: what is one, and whose. Pure; no torch."""

import hashlib
import json
from pathlib import Path
from typing import Any

from fengine.errors import StorageError

_ID = b'{"id": '
LARGEST = 1e100  # of a logprob or a score: sums and squares of them stay finite; no run has a larger one


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse)


def parsed(line: bytes, folder: Path) -> dict[str, Any]:
    """A line's record. Errors: StorageError if it is none."""
    record = record_of(line)
    if record is None:
        raise StorageError(f"{folder} holds a line that is no record: {line[:60]!r}")
    return record


def record_of(line: bytes) -> dict[str, Any] | None:
    """None for what is no record: another shape, or logprobs that are no numbers. Pure."""
    try:
        record = _JSON.decode(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("id"), str):
        return None
    if "error" in record:
        return record if isinstance(record["error"], dict) else None
    answers, scores = record.get("answers"), record.get("scores")
    if not isinstance(answers, list) or not isinstance(scores, dict):
        return None
    if not all(_is_number(value) or isinstance(value, (bool, str)) for value in scores.values()):
        return None
    return record if all(map(_is_answer, answers)) else None


def _is_answer(value: Any) -> bool:
    """Pure."""
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        return False
    ids, logprobs = value.get("output_ids"), value.get("logprobs")
    if not isinstance(ids, list) or not isinstance(logprobs, list):
        return False
    return {*map(type, ids)} <= {int} and all(map(_is_number, logprobs))


def _is_number(value: Any) -> bool:
    return abs(value) < LARGEST if type(value) is float else type(value) is int and abs(value) < 2**53


def id_of(line: bytes) -> str:
    """The id of a line that begins as records do; of another one, if there is any. Pure."""
    if line.startswith(_ID):
        try:
            value, _ = _JSON.raw_decode(line[len(_ID) : len(_ID) + 8192].decode("utf-8", "ignore"))
            return value if isinstance(value, str) else ""
        except ValueError:
            pass
    record = record_of(line)
    return "" if record is None else record["id"]


def id_key(row_id: str) -> int:
    return int.from_bytes(hashlib.sha256(row_id.encode("utf-8", "surrogatepass")).digest()[:8], "little")
