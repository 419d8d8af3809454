"""One job: rows in, records out, through an engine that is batching all the while.

A record holds only what belongs to its request (no times, no cache hits), so the output file of a run is the same byte
for byte whatever the batch was. A bounded window of rows is in flight, so memory does not grow with the input.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fengine.core.request import derive_seed
from fengine.errors import EngineClosedError, EngineDeadError, FengineError, InputFileError
from fengine.eval.cli.figures import Shown, Summary, count
from fengine.eval.cli.view import STREAMED_ROWS, QuietView
from fengine.eval.runs import builtin
from fengine.eval.runs.config import RunConfig
from fengine.eval.runs.meter import Meter
from fengine.eval.runs.prompts import BadRow, OutputWriter, PromptRow, Row, error_record, read_prompts, result_record

WINDOW = 4  # rows in flight for each row that can run at once: the oldest may be long, and the others wait for it
MAX_COUNTED_BYTES = 256 << 20  # a longer file is not read twice for the sake of a progress bar
TICK_SECONDS = 0.125
OUR_COLUMNS = ("sampling_seed", "prompt_tokens", "output_token_logprobs")
DEFAULT_MAX_NEW_TOKENS = 128


@dataclass(frozen=True)
class Job:
    """What is open before the engine is: the rows (None: built in), their number if known, and the output file."""

    config: RunConfig
    rows: Iterator[Row] | None
    total: int | None
    writer: OutputWriter


@contextmanager
def open_job(config: RunConfig, out: str) -> Iterator[Job]:
    """Opens input and output, so that what is wrong with them is known before a model is loaded.

    After an exception the records written so far stay in `<out>.partial`. Errors: InputFileError, StorageError.
    """
    rows = None if config.prompts is None else read_prompts(config.prompts)
    inputs = config.prompts if isinstance(config.prompts, str) else None
    writer = OutputWriter(out, inputs=inputs)
    try:
        yield Job(config, rows, _count_rows(config.prompts), writer)
    finally:
        writer.close()


def _count_rows(prompts: Any) -> int | None:
    """Lines that hold something, for a file of moderate size."""
    if not isinstance(prompts, str):
        return None if prompts is None else len(prompts)
    path = Path(prompts)
    if path.stat().st_size > MAX_COUNTED_BYTES:
        return None
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


async def run(job: Job, engine: Any, view: QuietView, reused: bool) -> Summary:
    """Sends every row through `engine` and writes every record, in input order. A bad row becomes an error record.

    Cancelled, or stopped by `max_errors`, it writes what has finished, and the file stays `<out>.partial`.
    Errors: EngineDeadError, EngineClosedError, StorageError.
    """
    return await _Run(job, engine, view, reused).run()


def sampling_of(config: RunConfig, index: int) -> dict[str, Any]:
    """The sampling parameters of one row. Pure.

    The default of max_new_tokens is left to the engine, which then fits it to the context; another value is a demand.
    """
    params = config.sampling.as_dict()
    if params["max_new_tokens"] == DEFAULT_MAX_NEW_TOKENS:
        del params["max_new_tokens"]
    if params["sampling_seed"] is None:
        params["sampling_seed"] = derive_seed(config.seed, index)  # as Engine(random_seed=seed) does
    return params


def shown_prompt(row: Row) -> str:
    """What to show of a row's prompt. Pure."""
    if isinstance(row, BadRow):
        return str(row.columns.get("prompt", "(unreadable row)"))
    if row.messages is not None:
        return str(row.messages[-1].get("content", ""))
    return row.prompt if row.prompt is not None else f"{count(len(row.input_ids or []), 'token id')}"


class _Run:
    """The state of one job while it runs."""

    def __init__(self, job: Job, engine: Any, view: QuietView, reused: bool) -> None:
        self.job, self.config, self.engine, self.view, self.reused = job, job.config, engine, view, reused
        self.rows = job.rows if job.rows is not None else iter(builtin.rows(_can_chat(engine)))
        self.total = job.total if job.rows is not None else len(builtin.rows(_can_chat(engine)))
        self.meter = Meter(engine.stats)
        self.flight: deque[tuple[Row, asyncio.Task[dict[str, Any]]]] = deque()
        self.growing: dict[int, Shown] = {}
        at_once = engine.config.scheduler.max_running_requests
        self.window = WINDOW * at_once
        # Streaming has its price, so that only as many rows are streamed as the view shows of those that run.
        self.stride = max(1, min(at_once, self.total or at_once) // STREAMED_ROWS)

    async def run(self) -> Summary:
        ended = "interrupted"
        with self.view.job():
            ticker = asyncio.create_task(self.tick())
            try:
                ended = "" if await self.feed() else f"stopped by max_errors={self.config.max_errors}"
            except asyncio.CancelledError:  # Ctrl-C: the summary tells
                pass
            finally:
                ticker.cancel()
                for _, task in self.flight:
                    task.cancel()
                await asyncio.gather(ticker, *(task for _, task in self.flight), return_exceptions=True)
            if ended:
                self.salvage()
            else:
                self.job.writer.finish()
        return self.meter.summary(reused=self.reused, ended=ended, out=self.job.writer.path)

    async def feed(self) -> bool:
        """Keeps the window full and finishes its oldest row first. False if `max_errors` ended the job."""
        for row in self.rows:
            self.flight.append((row, asyncio.create_task(self.generate(row))))
            while len(self.flight) >= self.window or self.flight and self.flight[0][1].done():
                if not await self.finish_oldest():
                    return False
        while self.flight:
            if not await self.finish_oldest():
                return False
        return True

    async def finish_oldest(self) -> bool:
        """Waits for the oldest row, writes and shows it. False when the job has failed too often."""
        row, task = self.flight[0]
        await asyncio.wait([task])
        self.flight.popleft()
        self.finish(row, task)
        limit = self.config.max_errors
        return limit is None or self.meter.failed <= limit

    def finish(self, row: Row, task: asyncio.Task[dict[str, Any]]) -> None:
        """Writes one record and counts it. Errors: those that end the job."""
        error = task.exception()
        if error is None:
            self._finish_ok(row, task.result())
        elif isinstance(error, FengineError) and _is_rows_own(error):
            self._finish_bad(row, error)
        else:
            raise error

    def _finish_ok(self, row: Row, output: dict[str, Any]) -> None:
        assert isinstance(row, PromptRow)
        meta, meter = output["meta_info"], self.meter
        record = {name: output[name] for name in ("text", "output_ids") if name in output}
        record["finish_reason"] = meta["finish_reason"]
        record["prompt_tokens"] = meta["prompt_tokens"]
        record["sampling_seed"] = sampling_of(self.config, row.index)["sampling_seed"]
        if self.config.return_logprob:
            record["output_token_logprobs"] = [entry[0] for entry in meta["output_token_logprobs"]]
        self.job.writer.write(row.index, result_record(row, record))
        if meter.rows < self.config.show:
            why = meta["finish_reason"]["type"]
            note = f"{meta['prompt_tokens']:,} → {count(meta['completion_tokens'], 'token')}, {why}"
            text = output.get("text", str(output["output_ids"]))
            self.view.row(Shown(row.index + 1, shown_prompt(row), text, note))
        elif meter.rows == self.config.show:
            self.view.note(f"... further rows are only written to the file (show={self.config.show})")
        meter.count(meta)

    def _finish_bad(self, row: Row, error: FengineError) -> None:
        self.job.writer.write(row.index, error_record(row) if isinstance(row, BadRow) else error_record(row, error))
        self.meter.count_failure()
        if self.meter.failed <= max(self.config.show, 1):
            self.view.row(Shown(row.index + 1, shown_prompt(row), error=f"{type(error).__name__}: {error}"))

    def salvage(self) -> None:
        """Writes what had finished when the job ended early. Rows in between get an error record, to keep the order."""
        done = [not t.cancelled() and (t.exception() is None or _is_rows_own(t.exception())) for _, t in self.flight]
        last = max((i for i, ok in enumerate(done) if ok), default=-1)
        for (row, task), ok in list(zip(self.flight, done, strict=True))[: last + 1]:
            if ok:
                self.finish(row, task)
            else:
                self._finish_bad(row, FengineError("the run ended before this row had finished"))

    # -- one row -------------------------------------------------------------------------------------------------------

    async def generate(self, row: Row) -> dict[str, Any]:
        """The engine's output for one row. Errors: FengineError."""
        if isinstance(row, BadRow):
            raise InputFileError(row.message)
        taken = [name for name in OUR_COLUMNS if name in row.columns]
        if taken:
            raise InputFileError(f"column {taken[0]!r} is a name that results use; rename it.")
        call = {
            "sampling_params": sampling_of(self.config, row.index),
            "return_logprob": self.config.return_logprob,
            "lora_path": self.config.adapter,
            **self.prompt_of(row),
        }
        if self.view.streams and row.index % self.stride == 0:
            return await self.stream(row, call)
        return await self.engine.async_generate(**call)

    async def stream(self, row: PromptRow, call: dict[str, Any]) -> dict[str, Any]:
        """As `async_generate`, with the text on view while it grows."""
        prompt, output = shown_prompt(row), {}
        try:
            async for output in await self.engine.async_generate(**call, stream=True):
                self.growing[row.index] = Shown(row.index + 1, prompt, output.get("text", str(output["output_ids"])))
        finally:
            self.growing.pop(row.index, None)
        return output

    def prompt_of(self, row: PromptRow) -> dict[str, Any]:
        """`prompt` or `input_ids`; a chat goes through the model's template. Errors: InvalidRequestError, its kinds."""
        if row.input_ids is not None:
            return {"input_ids": row.input_ids}
        messages = row.messages
        if messages is None and not self.config.chat:
            return {"prompt": row.prompt}
        if messages is None:
            messages = [{"role": "user", "content": row.prompt}]
        if self.engine.tokenizer is None:
            raise InputFileError("messages need a tokenizer; set model.skip_tokenizer_init=false or give input_ids.")
        return {"input_ids": self.engine.tokenizer.encode_chat(messages)}

    async def tick(self) -> None:
        """Shows the progress until cancelled."""
        while True:
            done = sum(task.done() for _, task in self.flight)
            self.view.progress(self.meter.progress(done, self.total, tuple(self.growing.values())))
            await asyncio.sleep(TICK_SECONDS)


def _is_rows_own(error: BaseException | None) -> bool:
    """An error of one row, rather than of the engine, the output file, or this program."""
    return isinstance(error, FengineError) and not isinstance(error, (EngineDeadError, EngineClosedError))


def _can_chat(engine: Any) -> bool:
    return engine.tokenizer is not None and bool(engine.tokenizer.chat_templates)
