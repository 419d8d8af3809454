"""Rows in the order of the input: shown as soon as all before them are there, and written to the file of a run of
prompts once they all are. A record there is the row's own columns and what came of them; until then the rows are in the
run's journal, where the same command goes on. Rows of a batch are requests to a server: answered by the same readers,
and written in OpenAI's batch format. No torch."""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

from fengine.errors import StorageError
from fengine.eval.cli.view import QuietView, Shown, count
from fengine.eval.runs.answering import FATAL, Watcher
from fengine.eval.runs.folder import storage_errors, sync_names, whole_file
from fengine.eval.runs.index import OK, RowTable
from fengine.eval.runs.journal import Entry, read_at
from fengine.eval.runs.manifest import row_seed
from fengine.eval.runs.record import Record, line_of, load
from fengine.eval.tasks.sources import RESULT_COLUMNS
from fengine.eval.tasks.task import Row
from fengine.server.errors import ApiError

OTHERS = (".csv", ".tsv", ".json", ".parquet", ".xlsx", ".gz", ".zst")  # files of other kinds


class Export:
    """The file of a run of prompts. Errors: StorageError that names the path."""

    def __init__(self, path: str | Path, logprobs: bool = False, text: bool = True, inputs: str | None = None) -> None:
        """Looks at the place, and writes nothing yet. `inputs` is the prompts file, which is never overwritten."""
        if "\0" in str(path):
            raise StorageError(f"output path {str(path)!r:.200} is no name of a file; choose another out=.")
        self.path, self._logprobs, self._text = Path(os.path.realpath(path)), logprobs, text
        self.folder = Path(f"{self.path}.run")  # of the run that writes this file
        if inputs is not None and self.path == Path(os.path.realpath(inputs)):
            raise StorageError(f"output path {path} is the prompts file itself; choose another out=.")
        if self.path.name == "-" or self.path.suffix.lower() in OTHERS:
            problem = "a file is written, one JSON object a line"
            raise StorageError(f"output path {path}: {problem}; name it out=FILE.jsonl")
        with self._writing():
            kind = stat.S_IFMT(self.path.stat().st_mode) if self.path.exists() else stat.S_IFREG
            self.device = kind == stat.S_IFCHR  # such as /dev/null: written directly, for a rename would replace it
            if self.device:
                with self.path.open("wb", buffering=0) as file:
                    file.write(b"")  # which /dev/full refuses
        if kind not in (stat.S_IFREG, stat.S_IFCHR):
            raise StorageError(f"output path {path} is not a regular file; choose another out=.")

    def write(self, entries: Iterable[Entry]) -> None:
        """All rows, by their lines of the journal: a whole file, durable, or the one that was there before."""
        with self._writing():
            partial = self.path.with_name(f".{self.path.name}.tmp")  # one name: what a killed run left is written over
            with self.path.open("wb") if self.device else whole_file(self.path, partial) as file:
                for entry in entries:
                    file.write(line_of(self.row(entry)) + b"\n")
            if not self.device:
                sync_names(self.path.parent)

    def row(self, entry: Entry) -> Record:
        """Of one that failed, columns that have the name of a result column are left out."""
        record = load(entry.record)
        columns = record.get("data", {})
        if "error" in record:
            kept = {name: value for name, value in columns.items() if name not in RESULT_COLUMNS}
            return kept | {"error": record["error"]}
        (answer,) = record["answers"]
        found = {"text": answer["text"]} if self._text else {}
        found |= {name: answer[name] for name in ("output_ids", "finish_reason")}
        found |= {"prompt_tokens": entry.head[6], "sampling_seed": answer["sampling_seed"]}
        if self._logprobs:
            found["output_token_logprobs"] = answer["logprobs"]
        return {**columns, **found}

    def _writing(self) -> AbstractContextManager[None]:
        """Inside, an error of the system is a StorageError that names the path."""
        return storage_errors(f"output path {self.path} cannot be written", ". Free space or choose another out=.")


class BatchExport(Export):
    """OpenAI's batch output: a line {id, custom_id, response, error} for each request, in the order of the input."""

    def row(self, entry: Entry) -> Record:
        """A request's id is of its custom_id."""
        record = load(entry.record)
        name = hashlib.sha256(record["id"].encode("utf-8", "surrogatepass")).hexdigest()[:24]
        response, error = record.get("response"), record.get("error")
        if error is not None:
            inner, status = error.get("error"), error.get("status_code")
            response = status and {"status_code": status, "body": {"error": inner}}
            error = {"code": (inner or {}).get("code") or error["type"], "message": error["message"]}
        told = response and {"status_code": response["status_code"], "request_id": f"req_{name}", **response}
        return {"id": f"batch_req_{name}", "custom_id": record["id"], "response": told, "error": error}


async def answer_request(
    respond: Callable[..., Any], seed: int, row: Row, metas: list[dict[str, Any]], watcher: Watcher | None = None
) -> tuple[Record, bytes]:
    """A batch row's record with the server's response, and its line. The seed derives from `seed` and the row's id.
    Modifies: metas, to the `meta_info` of every output. Errors: those of an engine that has failed."""
    record: Record = {"id": row.id, "data": row.data}
    try:
        body, outputs = await respond(row.data, row_seed(seed, row.id, 0))
        metas += [{"completion_tokens": 0, "cached_tokens": 0} | output["meta_info"] for output in outputs]
        record |= {"answers": [], "scores": {}, "response": {"status_code": 200, "body": body}}
    except ApiError as error:
        if isinstance(error.__cause__, FATAL):
            raise error.__cause__ from error
        record["error"] = {"type": "ApiError", "message": error.message, "status_code": error.status} | error.body()
    return record, line_of(record)


class InOrder(AbstractContextManager["InOrder"]):
    """The rows in the order of the input, as far as all before them are there: the first `show` of this process are
    shown, and of failures as many. They are read back from the journal, so that a row that takes long makes nothing
    wait in memory."""

    def __init__(self, rows: RowTable, journal: Path, show: int, view: QuietView, exported: bool = False) -> None:
        """`exported`: a file will have the rest."""
        self.table, self.exported, self.show, self.view = rows, exported, show, view
        self.there = bytearray(known == OK for known in rows.known)  # 1: before this process, 2: by it
        self.next = self.shown = self.failures = 0
        self.file: BinaryIO = journal.open("rb")

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def put(self, index: int) -> None:
        self.there[index] = 2

    def advance(self) -> None:
        """Errors: StorageError."""
        while self.next < len(self.there) and self.there[self.next]:
            if self.there[self.next] == 2:
                self._pass_on(self.next)
            self.next += 1

    def _pass_on(self, index: int) -> None:
        failed, show = self.table.known[index] != OK, self.show
        self.failures += failed
        due = self.failures <= max(show, 1) if failed else self.shown < show
        if due:
            self.view.row(shown(read_at(self.file, self.table.offsets[index])))
        if not failed:
            self.shown += due
            if self.exported and not due and self.shown == show and show:
                self.shown += 1
                self.view.note(f"... further rows are only written to the file (show={show})")


def shown(entry: Entry) -> Shown:
    record, number = load(entry.record), entry.head[0] + 1
    prompt = prompt_of(record.get("data") or {})
    if "error" in record:
        error = record["error"]
        return Shown(number, prompt or f"row {record['id']}", error=f"{error['type']}: {error['message']}")
    if not record["answers"]:
        return Shown(number, f"row {record['id']}", _response_text(record))
    first = record["answers"][0]
    if isinstance(first["prompt"], str):
        prompt = first["prompt"]
    if not prompt and first["prompt"]:
        prompt = count(len(first["prompt"]), "token id")
    note = ", ".join(f"{name} {value}" for name, value in record["scores"].items())
    tokens = f"{entry.head[6]:,} → {count(entry.head[7], 'token')}, {first['finish_reason']['type']}"
    ids = str(first["output_ids"]) if len(first["output_ids"]) > 1 else ""  # of a run without a tokenizer
    return Shown(number, prompt, first["text"] or ids, note or tokens)


def _response_text(record: dict[str, Any]) -> str:
    """What to show of a server's response: its first choice's text, else the response cut short. Pure."""
    body = record.get("response", {}).get("body") or {}
    choice = (body.get("choices") or [{}])[0]
    text = choice.get("text") or (choice.get("message") or {}).get("content")
    return text if isinstance(text, str) else json.dumps(body, ensure_ascii=False)[:200]


def prompt_of(data: dict[str, Any]) -> str:
    """What to show of a row's own prompt. Pure."""
    messages = data.get("messages")
    if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        content = messages[-1].get("content", "")
        parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
        return " ".join(str(part.get("text") or part.get("type")) for part in parts) or str(content)
    return str(data.get("prompt") or data.get("question") or "")
