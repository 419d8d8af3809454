"""From a complete journal to the files of a finished run. No torch.

`outputs.jsonl` is the journal's records in input order: nothing in it tells when, where, or how often interrupted.
Each file is complete or absent; doing this twice gives the same files.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from fengine.eval.runs.folder import JOURNAL, MANIFEST, OUTPUTS, RunFolder, encoded
from fengine.eval.runs.index import RowTable
from fengine.eval.runs.journal import read_at
from fengine.eval.runs.record import bits_of, load
from fengine.eval.tasks.task import Scores, Task

TIMINGS, METRICS = "timings.jsonl", "metrics.json"
TIMING = b'{"row": %d, "session": %d, "started": %.6f, "seconds": %.6f, "prompt_tokens": %d, "completion_tokens": %d}\n'


def is_finished(folder: RunFolder, manifest: dict[str, Any], table: RowTable) -> bool:
    """Whether the files are there already, as the manifest has them. Errors: StorageError."""
    result, path = manifest.get("result"), folder.path / OUTPUTS
    if table.left or not isinstance(result, dict) or not path.is_file() or read_metrics(folder, manifest) is None:
        return False
    with folder.writing():
        if result.get("journal_bytes") != (folder.path / JOURNAL).stat().st_size:
            return False
        with path.open("rb") as file:
            return result.get("outputs_sha256") == hashlib.file_digest(file, "sha256").hexdigest()


def read_metrics(folder: RunFolder, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """metrics.json's content, if it is the very file that the manifest tells. Errors: StorageError."""
    path = folder.path / METRICS
    if not path.is_file():
        return None
    with folder.writing():
        content = path.read_bytes()
    wanted = (manifest.get("result") or {}).get("metrics_sha256")
    return json.loads(content) if hashlib.sha256(content).hexdigest() == wanted else None


def finish(folder: RunFolder, manifest: dict[str, Any], table: RowTable, task: Task) -> dict[str, Any]:
    """Writes outputs, timings and metrics, then the result into the manifest; returns metrics.json's content.

    Every row must be known. Modifies: manifest. Errors: StorageError.
    """
    with folder.writing():
        sums = _write_rows(folder, table)
        with (folder.path / f".{OUTPUTS}.tmp").open("rb", buffering=1 << 20) as file:
            bits = hashlib.sha256()
            figures = task.metrics(_scores(file, bits))
    metrics = {
        "task": task.name,
        "version": task.version,
        "rows": len(table.known),
        "failed": table.failed,
        "metrics": {name: metric.as_dict() for name, metric in figures.items()},
    }
    folder.install(OUTPUTS, TIMINGS)
    ok = len(table.known) - table.failed
    more = {"bits_sha256": bits.hexdigest(), "journal_bytes": (folder.path / JOURNAL).stat().st_size}
    manifest["result"] = {"rows": len(table.known), "ok": ok, "failed": table.failed} | sums | more
    manifest["result"]["metrics_sha256"] = hashlib.sha256(encoded(metrics)).hexdigest()
    folder.write_several({METRICS: metrics, MANIFEST: manifest})
    return metrics


def _write_rows(folder: RunFolder, table: RowTable) -> dict[str, Any]:
    """The temporary files of outputs and timings, synced; digests and totals."""
    digest, seconds, tokens = hashlib.sha256(), 0.0, [0, 0]
    outputs, timings = (folder.path / f".{name}.tmp" for name in (OUTPUTS, TIMINGS))
    journal = folder.path / JOURNAL
    with journal.open("rb", buffering=1 << 20) as source, outputs.open("wb") as out, timings.open("wb") as times:
        for index, offset in enumerate(table.offsets):
            assert table.known[index], f"row {index} is missing"
            entry = read_at(source, offset)
            line = entry.record + b"\n"
            digest.update(line)
            out.write(line)
            times.write(TIMING % (index, *entry.head[3:]))
            seconds += entry.head[5]
            tokens = [tokens[0] + entry.head[6], tokens[1] + entry.head[7]]
        for file in (out, times):
            file.flush()
            os.fsync(file.fileno())
    totals = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "row_seconds": round(seconds, 3)}
    return {"outputs_sha256": digest.hexdigest(), **totals}


def _scores(file: BinaryIO, bits: Any) -> Iterator[Scores]:
    """Of the rows that have not failed, in input order. Modifies: the digest `bits`, by `bits_of` every row."""
    for line in file:
        record = load(line)
        bits.update(bits_of(record))
        if "error" not in record:
            yield record["scores"]
