"""Rows in the order of the input, while they finish in any: shown, and written to the output file. No torch."""

import json
from pathlib import Path
from typing import Any, BinaryIO

from fengine.eval.cli.view import QuietView, Shown, count
from fengine.eval.runs.export import NOT_FINISHED, Export
from fengine.eval.runs.index import OK, RowTable
from fengine.eval.runs.journal import Entry, read_at
from fengine.eval.tasks.task import BadRow, Row


class InOrder:
    """The rows in the order of the input, as far as all before them are there: shown, and exported.

    They are read back from the journal, so that a row that takes long makes nothing wait in memory.
    """

    def __init__(self, rows: RowTable, journal: Path, export: Export | None, show: int, view: QuietView) -> None:
        self.table, self.export, self.show, self.view = rows, export, show, view
        self.there = bytearray(known == OK for known in rows.known)  # 1: before this process, 2: by it
        self.next = self.shown = self.failures = 0
        self.fed = -1  # the last row that was begun
        self.file: BinaryIO = journal.open("rb")

    def close(self) -> None:
        self.file.close()

    def put(self, index: int) -> None:
        self.there[index] = 2

    def advance(self) -> None:
        """Errors: StorageError."""
        while self.next < len(self.there) and self.there[self.next]:
            self.pass_on(self.next)
            self.next += 1

    def pass_on(self, index: int) -> None:
        export, show = self.export, self.show
        failed = self.table.known[index] != OK
        self.failures += failed
        due = self.failures <= max(show, 1) if failed else self.shown < show
        due = due and self.there[index] == 2
        if export is None and not due:
            return
        entry = read_at(self.file, self.table.offsets[index])
        if export is not None:
            export.put(entry)
        if due:
            self.view.row(shown(entry))
        if not failed and self.there[index] == 2:
            self.shown += due
            if export is not None and not due and self.shown == show and show:
                self.shown += 1
                self.view.note(f"... further rows are only written to the file (show={show})")

    def end(self, open_rows: dict[int, Row | BadRow]) -> None:
        """The rows behind one that has not finished, which gets an error in the export. Errors: StorageError."""
        if self.export is None:
            return
        last = max((i for i in range(self.next, self.fed + 1) if self.there[i]), default=-1)
        for index in range(self.next, last + 1):
            if self.there[index]:
                self.pass_on(index)
            else:
                row = open_rows[index]
                self.export.put_error(row.data if isinstance(row, Row) else {}, NOT_FINISHED)


def shown(entry: Entry) -> Shown:
    record, number = json.loads(entry.record.decode("utf-8", "surrogatepass")), entry.head[0] + 1
    prompt = prompt_of(record.get("data") or {})
    if "error" in record:
        error = record["error"]
        return Shown(number, prompt or f"row {record['id']}", error=f"{error['type']}: {error['message']}")
    if not record["answers"]:
        return Shown(number, f"row {record['id']}")
    first = record["answers"][0]
    if isinstance(first["prompt"], str):
        prompt = first["prompt"]
    prompt = prompt or count(len(first["prompt"]), "token id")
    note = ", ".join(f"{name} {value}" for name, value in record["scores"].items())
    tokens = f"{entry.head[6]:,} → {count(entry.head[7], 'token')}, {first['finish_reason']['type']}"
    ids = str(first["output_ids"]) if len(first["output_ids"]) > 1 else ""  # of a run without a tokenizer
    return Shown(number, prompt, first["text"] or ids, note or tokens)


def prompt_of(data: dict[str, Any]) -> str:
    """What to show of a row's own prompt. Pure."""
    messages = data.get("messages")
    if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        return str(messages[-1].get("content", ""))
    return str(data.get("prompt") or "")
