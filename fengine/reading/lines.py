"""Lines of `outputs.jsonl` and records of journals: what is one, and whose. Pure; no torch."""

import hashlib
import json
from pathlib import Path
from typing import Any

from fengine.errors import StorageError

_ID, _decode = b'{"id": ', json.JSONDecoder().raw_decode


def parsed(line: bytes, folder: Path) -> dict[str, Any]:
    """A line's record. Errors: StorageError if it is none."""
    record = record_of(line)
    if record is None:
        raise StorageError(f"{folder} holds a line that is no record: {line[:60]!r}")
    return record


def record_of(line: bytes) -> dict[str, Any] | None:
    """None for what is no record: another shape, or logprobs that are no numbers. Pure."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("id"), str):
        return None
    if "error" in record:
        return record if isinstance(record["error"], dict) else None
    answers, scores = record.get("answers"), record.get("scores")
    if not isinstance(answers, list) or not isinstance(scores, dict):
        return None
    if not {*map(type, scores.values())} <= {float, int, bool, str}:
        return None
    return record if all(map(_is_answer, answers)) else None


def _is_answer(value: Any) -> bool:
    """Pure."""
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        return False
    ids, logprobs = value.get("output_ids"), value.get("logprobs")
    if not isinstance(ids, list) or not isinstance(logprobs, list):
        return False
    if not {*map(type, ids)} <= {int} or not {*map(type, logprobs)} <= {float, int}:
        return False
    return all(type(value) is float or abs(value) < 2**53 for value in logprobs)


def id_of(line: bytes) -> str:
    """The id of a line that begins as records do; of another one, if there is any. Pure."""
    if line.startswith(_ID):
        try:
            value, _ = _decode(line[len(_ID) : len(_ID) + 8192].decode("utf-8", "ignore"))
            return value if isinstance(value, str) else ""
        except ValueError:
            pass
    record = record_of(line)
    return "" if record is None else record["id"]


def id_key(row_id: str) -> int:
    return int.from_bytes(hashlib.sha256(row_id.encode("utf-8", "surrogatepass")).digest()[:8], "little")
