"""Rows of a run through an engine once more, and what came out otherwise. No torch. A row is taken from its record (id,
data), asked as the run asked, and its record compared with the one that is there; or re-scored: its prompt and answer
are read as one prompt, whose logprobs are compared with those of decoding."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from fengine.core.sampling_params import GRAMMARS
from fengine.errors import ContextLengthError
from fengine.eval.commands.layouts import Found
from fengine.eval.runs.answering import FATAL, Asker, Scored, answer_row, sampling_of
from fengine.eval.runs.compare import compare_row
from fengine.eval.runs.config import EvalConfig
from fengine.eval.runs.loop import WINDOW
from fengine.eval.runs.record import Record
from fengine.eval.runs.records import Records
from fengine.eval.tasks.task import DRAWN, Answer, Ask, Row, Task, judging

# Sampling parameters by which logits are edited before a token is drawn, and the values that edit nothing. A prompt's
# logprobs know no edits, so such answers are not re-scored.
EDITS: dict[str, Any] = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
EDITS |= {"min_new_tokens": 0, "logit_bias": {}, "custom_params": {}, **dict.fromkeys(GRAMMARS)}
STOPS = ("stop", "stop_token_ids", "stop_regex", "max_new_tokens", "ignore_eos")


@dataclass(frozen=True)
class Case:
    """What is verified: the records of a run, its config, and the longest input that its engine took."""

    records: Records
    config: EvalConfig
    max_input: int


def replay(case: Case, order: Sequence[int], engine: Any, task: Task, rescore: bool = False) -> Found:
    """The rows of these numbers, in this order, as many at once as the engine takes. Rows that failed in the run are
    left out. Errors: EngineDeadError, EngineClosedError, StorageError."""
    try:
        return asyncio.run(_replay(case, order, engine, task, rescore))
    except ExceptionGroup as group:  # of the first worker that saw the engine die, and perhaps of others
        raise group.exceptions[0] from group


async def _replay(case: Case, order: Sequence[int], engine: Any, task: Task, rescore: bool) -> Found:
    found, asker = Found(), Asker(engine, case.config.top_logprobs, case.max_input, case.config.adapter)
    one, left = _rescored if rescore else _asked, iter(order)

    async def work() -> None:
        for number in left:  # one iterator for all
            record = case.records.record(number)
            if "error" in record:
                continue
            try:
                await one(case, asker, task, number, record, found)
            except FATAL:
                raise
            except Exception as error:  # the engine's word on this row, or a fault of the task's own code with it
                found.failed += 1
                found.error = found.error or f"row {record['id']!r}: {type(error).__name__}: {error}"

    async with asyncio.TaskGroup() as workers:
        for _ in range(min(len(order), WINDOW * engine.config.scheduler.max_running_requests)):
            workers.create_task(work())
    return found


async def _asked(case: Case, asker: Asker, task: Task, number: int, record: Record, found: Found) -> None:
    """Modifies: found."""
    metas: list[dict[str, Any]] = []
    _, line = await answer_row(asker, case.config, task, Row(record["id"], record["data"]), metas)
    found.measure(metas)
    found.add(number, compare_row(record, json.loads(line)), len(record["answers"]))


async def _rescored(case: Case, asker: Asker, task: Task, number: int, record: Record, found: Found) -> None:
    """Compares the logprobs that decoding gave with those of reading. Modifies: found."""
    row = Row(record["id"], record["data"])
    asks, mine, its, count, known = task.asks(row), [], [], 0, 0
    told = [Answer(a["text"], a["output_ids"], a["logprobs"], a["finish_reason"]) for a in record["answers"]]
    asks += judging(task, row, list(map(asker.without_thoughts, asks, told)))
    for sample, (ask, answer) in enumerate(zip(asks, record["answers"], strict=True)):
        sampling = asker.defaults | sampling_of(case.config, ask, row.id, sample)
        part, edited = None, any(sampling.get(name, value) not in (value, None) for name, value in EDITS.items())
        if ask.kind in DRAWN and answer["output_ids"] and not edited:
            with suppress(ContextLengthError):  # of images: ids do not tell what room they take
                part = await _read_again(asker, ask, answer, sampling)
        count += part is not None
        found.left_out += part is None
        ids, logprobs, start = ([], [], 0) if part is None else part
        until = start + len(ids)  # what comes before `start` is taken over, so that places keep their numbers
        known += start
        a_ids, a_logprobs = answer["output_ids"][:until], answer["logprobs"][:until]
        mine.append(answer | {"output_ids": a_ids, "logprobs": a_logprobs})
        its.append(answer | {"output_ids": a_ids[:start] + ids, "logprobs": a_logprobs[:start] + logprobs})
    difference = compare_row(record | {"answers": mine}, record | {"answers": its})
    difference.tokens -= known
    difference.logprobs -= known
    found.add(number, difference, count)


async def _read_again(
    asker: Asker, ask: Ask, answer: Record, sampling: dict[str, Any]
) -> tuple[list[int], list[float], int] | None:
    """(ids, logprobs, the place in the answer from which on they are). None if the context has no room. At temperature
    0 and 1 the logprobs of drawn tokens are those of the plain distribution, which reading gives too. At another one
    the first half of the answer is read behind the prompt, and the rest is drawn again from there."""
    prompt, ids = asker.ids_of(ask.prompt), answer["output_ids"]
    if sampling["temperature"] in (0, 1):
        whole = [*prompt, *ids][: asker.max_input]
        if len(whole) <= len(prompt):
            return None
        output = await asker.read(Scored(whole, len(prompt)), ask)
        scored = output["meta_info"]["input_token_logprobs"][len(prompt) - len(whole) :]  # images take more before
        return [entry[1] for entry in scored], [entry[0] for entry in scored], 0
    half = len(ids) // 2
    if half == 0 or len(prompt) + half > asker.max_input:
        return None
    rest = {name: value for name, value in sampling.items() if name not in STOPS}
    rest |= {"max_new_tokens": len(ids) - half, "ignore_eos": True}
    again, _ = await asker.ask(replace(ask, prompt=[*prompt, *ids[:half]]), rest)
    return again.token_ids, again.logprobs, half
