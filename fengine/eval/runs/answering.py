"""One row asked and scored, and the record that is kept of it. No torch.

A record holds only what belongs to the row's requests: nothing in it depends on time, order or batch.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from fengine.core.request import derive_seed
from fengine.errors import EngineClosedError, EngineDeadError, InputFileError, StorageError
from fengine.eval.runs.asking import Asker
from fengine.eval.runs.config import EvalConfig
from fengine.eval.runs.journal import MAX_LINE
from fengine.eval.runs.manifest import row_seed
from fengine.eval.tasks.task import Answer, Ask, BadRow, Row, Task
from fengine.eval.tasks.task_config import Format

DEFAULT_MAX_NEW_TOKENS = 128
_PLAIN, _ESCAPED = json.JSONEncoder(ensure_ascii=False, allow_nan=False), json.JSONEncoder(allow_nan=False)
MAX_RECORD = MAX_LINE - 1024  # bytes; beside it there is the head
FATAL = (EngineDeadError, EngineClosedError, StorageError)  # not a row's own


def sampling_of(config: EvalConfig, ask: Ask, row_id: str, sample: int) -> dict[str, Any]:
    """The sampling parameters of one ask: the run's, the ask's over them, and the seed. Pure.

    The default of max_new_tokens is left to the engine, which then fits it to the context; another value is a demand.
    """
    params = config.sampling.as_dict()
    if params["max_new_tokens"] == DEFAULT_MAX_NEW_TOKENS:
        del params["max_new_tokens"]
    params |= ask.sampling
    if params.get("sampling_seed") is None:
        plain = config.task.format is Format.prompts  # as Engine(random_seed=seed) does
        own = derive_seed(config.seed, int(row_id)) if plain else row_seed(config.seed, row_id, sample)
        params["sampling_seed"] = own
    return params


def error_record(row: Row | BadRow, error: BaseException | None = None) -> dict[str, Any]:
    """The line of a row that failed; `error` is None for a BadRow, which tells itself. Pure."""
    if isinstance(row, BadRow):
        return {"id": row.id, "error": {"type": row.type, "message": row.message}}
    return {"id": row.id, "data": row.data, "error": {"type": type(error).__name__, "message": str(error)}}


def line_of(record: dict[str, Any]) -> bytes:
    """A record as files have it: JSON, keys in their order, in UTF-8; escaped where a text holds lone surrogates.

    Pure. Errors: ValueError, TypeError for what is no JSON.
    """
    try:
        return _PLAIN.encode(record).encode()
    except UnicodeEncodeError:
        return _ESCAPED.encode(record).encode()


def row_record(row: Row, asks: list[Ask], answers: list[Answer], seeds: list[int], scores: Any) -> dict[str, Any]:
    """The line of a row that was scored: nothing in it depends on time or batch. Pure."""
    told = []
    for ask, answer, seed in zip(asks, answers, seeds, strict=True):
        one: dict[str, Any] = {"prompt": ask.prompt, "text": answer.text, "output_ids": answer.token_ids}
        one |= {"logprobs": answer.logprobs, "finish_reason": answer.finish}
        if answer.top_logprobs is not None:
            one["top_logprobs"] = answer.top_logprobs
        told.append(one | ({"sampling_seed": seed} if ask.kind == "generate" else {"kind": ask.kind}))
    return {"id": row.id, "data": row.data, "answers": told, "scores": scores}


async def answer_row(
    asker: Asker,
    config: EvalConfig,
    task: Task,
    row: Row,
    metas: list[dict[str, Any]],
    seen: Callable[[str], None] | None = None,
) -> tuple[dict[str, Any], bytes]:
    """The row's record, asked and scored, and its line; `seen` gets the first answer's text while it grows.

    Modifies: metas, to the `meta_info` of every call. Errors: those of the engine, and whatever the task makes of it.
    """
    asks = task.asks(row)
    params = [sampling_of(config, ask, row.id, i) for i, ask in enumerate(asks)]
    watched = [seen, *[None] * len(asks)][: len(asks)]
    results = await asyncio.gather(*map(asker.ask, asks, params, watched))
    metas += [meta for _, several in results for meta in several]
    answers = [answer for answer, _ in results]
    record = row_record(row, asks, answers, [p["sampling_seed"] for p in params], task.score(row, answers))
    line = line_of(record)  # a score that is no JSON is the row's failure
    if len(line) > MAX_RECORD:
        raise InputFileError(
            f"the row's record would have {len(line):,} bytes, at most {MAX_RECORD:,} are kept; ask for less"
        )
    return record, line
