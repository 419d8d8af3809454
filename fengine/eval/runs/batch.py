"""Rows that are requests to a server: answered by the same readers, and written in OpenAI's batch format. No torch."""

import hashlib
from collections.abc import Callable
from typing import Any

from fengine.eval.runs.answering import FATAL, Watcher
from fengine.eval.runs.journal import Entry
from fengine.eval.runs.manifest import row_seed
from fengine.eval.runs.output import Export
from fengine.eval.runs.record import Record, line_of, load
from fengine.eval.tasks.task import Row
from fengine.server.errors import ApiError


async def answer_request(
    respond: Callable[..., Any], seed: int, row: Row, metas: list[dict[str, Any]], watcher: Watcher | None = None
) -> tuple[Record, bytes]:
    """The row's record with the server's response, and its line. The seed derives from `seed` and the row's id.

    Modifies: metas, to the `meta_info` of every output. Errors: those of an engine that has failed.
    """
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


class BatchExport(Export):
    """OpenAI's batch output: a line {id, custom_id, response, error} for each request, in the order of the input."""

    def put(self, entry: Entry) -> None:
        record = load(entry.record)
        if "error" in record:
            self.put_error({"custom_id": record["id"]}, record["error"])
            return
        self._write(_line(record["id"], record["response"], None))

    def put_error(self, columns: dict[str, Any], error: dict[str, Any]) -> None:
        self.failed += 1
        told = {"code": (error.get("error") or {}).get("code") or error["type"], "message": error["message"]}
        status, body = error.get("status_code"), {"error": error.get("error")}
        self._write(_line(columns.get("custom_id"), status and {"status_code": status, "body": body}, told))


def _line(custom_id: Any, response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    """A request's id is of its custom_id. Pure."""
    name = hashlib.sha256(str(custom_id).encode("utf-8", "surrogatepass")).hexdigest()[:24]
    told = response and {"status_code": response["status_code"], "request_id": f"req_{name}", **response}
    return {"id": f"batch_req_{name}", "custom_id": custom_id, "response": told, "error": error}
