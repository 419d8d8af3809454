"""The record of a row, a line of `outputs.jsonl`: made, written, read; and the files of a finished run. No torch.

A record holds only what belongs to the row's requests: nothing in it depends on time, order or batch. `outputs.jsonl`
is the journal's records in input order: nothing in it tells when, where, or how often interrupted. Each file is
complete or absent; finishing twice gives the same files."""

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from fengine.core.json_text import LAST_COUNTS
from fengine.eval.runs.folder import JOURNAL, MANIFEST, OUTPUTS, RunFolder, encoded, storage_errors
from fengine.eval.runs.index import RowTable
from fengine.eval.runs.journal import read_at
from fengine.eval.tasks.task import DRAWN, Answer, Ask, BadRow, Metric, Row, Scores, Task

TIMINGS, METRICS = "timings.jsonl", "metrics.json"
TIMING = b'{"row": %d, "session": %d, "started": %.6f, "seconds": %.6f, "prompt_tokens": %d, "completion_tokens": %d}\n'
Record = dict[str, Any]
LARGEST = 1e100  # of a logprob or a score: sums and squares of them stay finite; no run has a larger one
_PLAIN, _ESCAPED = json.JSONEncoder(ensure_ascii=False, allow_nan=False), json.JSONEncoder(allow_nan=False)
_ID = b'{"id": '


def error_record(row: Row | BadRow, error: BaseException | None = None) -> Record:
    """The record of a row that failed; `error` is None for a BadRow, which tells itself. Pure."""
    if isinstance(row, BadRow):
        return {"id": row.id, "error": {"type": row.type, "message": row.message}}
    return {"id": row.id, "data": row.data, "error": {"type": type(error).__name__, "message": str(error)}}


def row_record(row: Row, asks: list[Ask], answers: list[Answer], seeds: list[int], scores: Any) -> Record:
    """The record of a row that was scored. Pure. Errors: TypeError for scores that no record holds."""
    if not _are_scores(scores):
        raise TypeError(f"scores must be a dict of texts, booleans and numbers below {LARGEST:g}, got {scores!r:.200}")
    recorded = []
    for ask, answer, seed in zip(asks, answers, seeds, strict=True):
        one: dict[str, Any] = {"prompt": ask.prompt, "text": answer.text, "output_ids": answer.token_ids}
        one |= {"logprobs": answer.logprobs, "finish_reason": answer.finish}
        if answer.top_logprobs is not None:
            one["top_logprobs"] = answer.top_logprobs
        one |= {} if answer.pixels is None else {"pixels_sha256": answer.pixels}
        one |= {"sampling_seed": seed} if ask.kind in DRAWN else {}
        recorded.append(one | ({} if ask.kind == "generate" else {"kind": ask.kind}))
    return {"id": row.id, "data": row.data, "answers": recorded, "scores": scores}


def line_of(record: Record) -> bytes:
    """A record as files have it: JSON, keys in their order, in UTF-8; escaped where a text holds lone surrogates. Pure.
    Errors: ValueError, TypeError for what is no JSON."""
    try:
        return _PLAIN.encode(record).encode()
    except UnicodeEncodeError:
        return _ESCAPED.encode(record).encode()


def load(line: bytes) -> Record:
    """The record of a line that fengine has written. Pure. Errors: ValueError."""
    return json.loads(line.decode("utf-8", "surrogatepass"))


def bits_of(record: Record) -> bytes:
    """What an engine computed for a row, without what was asked or how it was scored: the id, and the tokens and
    logprobs of each answer as 64-bit integers and floats, big-endian, behind their number; no answers for an error.
    The SHA-256 of all rows is `bits_sha256` in the manifest. Pure."""
    parts = [record["id"].encode("utf-8", "surrogatepass") + b"\0"]
    for answer in record.get("answers", ()):
        ids, logprobs = answer["output_ids"], answer["logprobs"]
        parts.append(struct.pack(f">qq{len(ids)}q{len(logprobs)}d", len(ids), len(logprobs), *ids, *logprobs))
    return b"".join(parts)


# -- reading what anybody may have written -----------------------------------------------------------------------------


def record_of(line: bytes) -> Record | None:
    """None for what is no record: another shape, or logprobs that are no numbers. Pure."""
    try:
        record = LAST_COUNTS.decode(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("id"), str):
        return None
    if "error" in record:
        return record if isinstance(record["error"], dict) else None
    answers = record.get("answers")
    good = isinstance(answers, list) and _are_scores(record.get("scores")) and all(map(_is_answer, answers))
    return record if good else None


def _are_scores(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_number(one) or isinstance(one, (bool, str)) for one in value.values())


def _is_answer(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        return False
    ids, logprobs = value.get("output_ids"), value.get("logprobs")
    if not isinstance(ids, list) or not isinstance(logprobs, list):
        return False
    return {*map(type, ids)} <= {int} and all(map(_is_number, logprobs))


def _is_number(value: Any) -> bool:
    return abs(value) < LARGEST if isinstance(value, float) else type(value) is int and abs(value) < 2**53


def id_of(line: bytes) -> str:
    """The id of a line that begins as records do; of another one, if there is any. Pure."""
    if line.startswith(_ID):
        try:
            value, _ = LAST_COUNTS.raw_decode(line[len(_ID) : len(_ID) + 8192].decode("utf-8", "ignore"))
            return value if isinstance(value, str) else ""
        except ValueError:
            pass
    record = record_of(line)
    return "" if record is None else record["id"]


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many ids, or characters, both begin with. Pure."""
    if one == other:
        return len(one)
    return next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))


# -- the files of the end ---------------------------------------------------------------------------------------------


def is_finished(folder: RunFolder, manifest: dict[str, Any], table: RowTable) -> bool:
    """Whether the files are there already, as the manifest has them. Errors: StorageError."""
    result, path = manifest.get("result"), folder.path / OUTPUTS
    if table.left or not isinstance(result, dict) or not path.is_file() or read_metrics(folder, manifest) is None:
        return False
    with storage_errors(f"{path} and the journal beside it cannot be read"):
        if result.get("journal_bytes") != (folder.path / JOURNAL).stat().st_size:
            return False
        with path.open("rb") as file:
            return result.get("outputs_sha256") == hashlib.file_digest(file, "sha256").hexdigest()


def read_metrics(folder: RunFolder, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """metrics.json's content, if it is the very file that the manifest tells. Errors: StorageError."""
    path = folder.path / METRICS
    if not path.is_file():
        return None
    with storage_errors(f"{path} cannot be read"):
        content = path.read_bytes()
    wanted = (manifest.get("result") or {}).get("metrics_sha256")
    return json.loads(content) if hashlib.sha256(content).hexdigest() == wanted else None


def finish(folder: RunFolder, manifest: dict[str, Any], table: RowTable, task: Task) -> dict[str, Any]:
    """Writes outputs, timings and metrics, then the result into the manifest; returns metrics.json's content. Every row
    must be known. Modifies: manifest. Errors: StorageError."""
    with folder.writing():
        sums = _write_rows(folder, table)
        with (folder.path / f".{OUTPUTS}.tmp").open("rb", buffering=1 << 20) as file:
            bits = hashlib.sha256()
            figures = task.metrics(_scores(file, bits))
    ok = len(table.known) - table.failed
    bare = {name: Metric(value, math.nan, ok) for name, value in figures.items() if isinstance(value, int | float)}
    metrics = {
        "task": task.name,
        "version": task.version,
        "rows": len(table.known),
        "failed": table.failed,
        "metrics": {name: metric.as_dict() for name, metric in (figures | bare).items()},
    }
    folder.install(OUTPUTS, TIMINGS)
    more = {"bits_sha256": bits.hexdigest(), "journal_bytes": (folder.path / JOURNAL).stat().st_size}
    manifest["result"] = {"rows": len(table.known), "ok": ok, "failed": table.failed} | sums | more
    manifest["result"]["metrics_sha256"] = hashlib.sha256(encoded(metrics)).hexdigest()
    folder.write_several({METRICS: metrics, MANIFEST: manifest})
    return metrics


def _write_rows(folder: RunFolder, table: RowTable) -> dict[str, Any]:
    """The temporary files of outputs and timings, synced; digests and totals."""
    digest, seconds, tokens = hashlib.sha256(), 0.0, [0, 0]
    with (
        (folder.path / JOURNAL).open("rb", buffering=1 << 20) as source,
        folder.partial(OUTPUTS) as out,
        folder.partial(TIMINGS) as times,
    ):
        for index, offset in enumerate(table.offsets):
            assert table.known[index], f"row {index} is missing"
            entry = read_at(source, offset)
            line = entry.record + b"\n"
            digest.update(line)
            out.write(line)
            times.write(TIMING % (index, *entry.head[3:]))
            seconds += entry.head[5]
            tokens = [tokens[0] + entry.head[6], tokens[1] + entry.head[7]]
    totals = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "row_seconds": round(seconds, 3)}
    return {"outputs_sha256": digest.hexdigest(), **totals}


def _scores(file: BinaryIO, bits: Any) -> Iterator[Scores]:
    """Of the rows that have not failed, in input order. Modifies: the digest `bits`, by `bits_of` every row."""
    for line in file:
        record = load(line)
        bits.update(bits_of(record))
        if "error" not in record:
            yield record["scores"]
