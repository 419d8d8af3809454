"""One run: from its beginning or from where it was, to the files of its end. No torch before its engine is opened. A
run is a value: its folder says what its results depend on, and the same command in the same folder goes on where it was
interrupted and ends with the same bytes."""

import asyncio
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from fengine.config import EngineConfig
from fengine.core.sampling_params import SamplingParams
from fengine.errors import ConfigError, EngineClosedError, EngineDeadError, FengineError, InputFileError, StorageError
from fengine.eval.cli.command import FAILED, INTERRUPTED, OK, TERMINATED
from fengine.eval.cli.engines import EngineCache, model_directory, refuse_sampling, report
from fengine.eval.cli.schema import Point, nested
from fengine.eval.cli.view import QuietView, count, duration, place
from fengine.eval.runs import manifest, provenance
from fengine.eval.runs.answering import given_sampling
from fengine.eval.runs.config import EvalConfig, RunConfig, TemplateConfig, parse_shard
from fengine.eval.runs.config import Trace as TraceKind
from fengine.eval.runs.folder import JOURNAL, MANIFEST, RunFolder, read_object
from fengine.eval.runs.index import NOTHING, RowIndex, RowTable, index_rows, reopen
from fengine.eval.runs.journal import Entry, Journal, header, read_at
from fengine.eval.runs.loop import ALIKE, Job, Loop
from fengine.eval.runs.loop import INTERRUPTED as CUT_OFF
from fengine.eval.runs.manifest import now
from fengine.eval.runs.output import Export
from fengine.eval.runs.record import finish, is_finished, read_metrics
from fengine.eval.runs.sweep import figure
from fengine.eval.runs.trace import Trace
from fengine.eval.tasks.columns import names_columns
from fengine.eval.tasks.kinds import open_task
from fengine.eval.tasks.task import BadRow, Row, Task
from fengine.eval.tasks.task_config import Format, TaskConfig, base_directory

Ended = tuple[int, dict[str, Any] | None]  # exit code of a run, and its metrics.json if it has come to its end


def run_point(
    point: Point, engines: EngineCache, screen: QuietView, argv: Sequence[str], base: Path | None = None,
    export: Export | None = None,
) -> Ended:  # fmt: skip
    """All that can be refused is refused before a model is loaded. `base` is what a relative `task.data` is under;
    None: as the point's overrides have it. `export`: the output file of a run of prompts. Errors: FengineError, with
    nothing computed; what the journal holds stays good."""
    config: EvalConfig = point.config
    base = base or base_directory(dict(point.choices)["task"], list(point.search), list(point.overrides))
    task = open_task(config.task, base)
    rows = index_rows(task).shard(parse_shard(config.run.shard))
    theirs = export is not None and not export.device and export.path.exists() and export.path.stat().st_size
    if export is not None and theirs and not (point.directory / MANIFEST).exists():
        raise StorageError(f"{export.path} is there already, of another run; choose another out=, or remove it")
    remedy = "another out=DIR" if export is None else "hydra.run.dir=DIR or another out="
    with RunFolder(point.directory, remedy) as folder:
        if not (folder.path / MANIFEST).exists():
            refuse_shadowed(config.task, point.overrides)
            survey(config, base, screen)
            refuse_demands(config, config.task.max_new_tokens, screen)
        one = open_run(folder, point, manifest.identity(config, task, rows), rows, base, screen, export)
        if one.table.left < rows.rows:
            there = rows.rows - one.table.left
            screen.note(f"{place(str(folder.path))}: {there:,} of {count(rows.rows, 'row')} are there already")
        try:
            return one.go(engines, task, base, screen, argv)
        except (StorageError, EngineDeadError, EngineClosedError) as error:
            engines.close()  # a dead engine is of no use to the next point
            screen.note(f"{count(one.there, 'row')} finished before, in {place(str(folder.path))}")
            report(error)
            return FAILED, None


def refuse_shadowed(task: TaskConfig, words: Sequence[str]) -> None:
    """A parameter that is given for the run, and counts for nothing since the task has its own. Errors: ConfigError."""
    given = {word.lstrip("+").partition("=")[0]: word for word in words}
    for name in ("max_new_tokens", "stop"):
        own, word = getattr(task, name), given.get(f"sampling.{name}")
        if own is not None and word is not None and f"task.{name}" not in given:
            told = list(own) if isinstance(own, tuple) else own
            raise ConfigError(f"{word:.200}: the task's own counts, task.{name}={told}; set that")


def survey(config: EvalConfig, base: Path, screen: QuietView) -> None:
    """Looks at the first rows, before a model is loaded. Errors: as `refuse_rows`."""
    chats = list[Any]()
    task = open_task(config.task, base, lambda messages, *_: chats.append(messages) or [0])
    refuse_rows(task, check_request if config.task.format is Format.batch else None)
    if config.task.samples > 1 and config.sampling.temperature == 0:
        screen.warn("task.samples draws the same answer each time at sampling.temperature=0; set that, too")
    if not chats and (config.chat.system is not None or config.chat.template_kwargs is not None):
        key = "chat" if config.task.format is Format.prompts else "task.chat"
        screen.warn(
            f"chat.system and chat.template_kwargs are of chats, and the first row is none: {key}=true makes it one"
        )


def refuse_demands(config: RunConfig | EvalConfig, own: int | None, screen: QuietView) -> None:
    """What the model cannot do of `sampling`, told before it is loaded; `own`: a task's max_new_tokens. Errors: as
    `refuse_sampling`."""
    given = given_sampling(config)
    params, tokens = SamplingParams.of(given), own if own is not None else given.get("max_new_tokens")
    if params.grammar_key is not None or tokens is not None:
        is_here = provenance.local_directory(config.engine.model.path) is not None  # else it is downloaded
        with nullcontext() if is_here else screen.opening(f"reading {config.engine.model.path}"):
            refuse_sampling(config.engine, params, tokens)


def check_request(row: Row) -> None:
    """That a row of a batch may be a request; the rest is the server's to read. Errors: InputFileError."""
    if not isinstance(row.data.get("url"), str):
        raise InputFileError(f"row {row.id}: no request of OpenAI's batch format, which has custom_id, url and body")


def refuse_rows(task: Task, check: Callable[[Row], Any] | None = None) -> None:
    """Tells before a model is loaded that no row, or for one reason none of the first ALIKE, can be asked. `check`
    None: by the task. Errors: InputFileError."""
    errors = []
    for row in islice(task.rows(), ALIKE):
        try:
            if isinstance(row, BadRow):
                raise InputFileError(row.message)
            (check or task.asks)(row)
            return
        except FengineError as error:
            errors.append(str(error))
    if errors and (len(errors) < ALIKE or len({error.partition(": ")[2] for error in errors}) == 1):
        more = f"; none of {'the first' if len(errors) == ALIKE else 'its'} {count(len(errors), 'row')} can be used"
        raise InputFileError(errors[0] if len(errors) == 1 else errors[0].rstrip(".") + more)


def load(config: EngineConfig, engines: EngineCache, screen: QuietView) -> Any:
    """The engine; a new one with a word about the time it takes."""
    if engines.holds(config):
        return engines.get(config)
    with screen.opening(f"loading {config.model.path}"):
        engine = engines.get(config)
    took = duration(engine.stats()["start_seconds"])
    screen.note(f"{config.model.path} is ready on {engine.config.model.device} after {took}")
    return engine


def render_of(engine: Any, chat: TemplateConfig) -> Any:
    """Messages to ids, by the chat template of an engine's model; None without a tokenizer. Pure."""
    tokenizer, head = engine.tokenizer, [{"role": "system", "content": chat.system}] if chat.system is not None else []

    def render(messages: list[dict[str, Any]], with_system: bool = True) -> list[int]:
        own = not with_system or messages[0].get("role") in ("system", "developer")
        return tokenizer.encode_chat(messages if own else [*head, *messages], **chat.values)

    return None if tokenizer is None else render


def open_record(folder: RunFolder, point: Point, what: dict[str, Any], base: Path) -> dict[str, Any]:
    """The run's manifest: new, or the one that is there. Errors: ResumeMismatchError, StorageError."""
    record, journal = read_object(folder.path / MANIFEST), folder.path / JOURNAL
    if record is not None:
        known, allow = manifest.recorded(record, folder.path), point.config.resume.allow_code_change
        size = journal.stat().st_size if journal.exists() else 0
        if record["sessions"] or record["result"] or size > len(header(provenance.canonical(known))):
            known = manifest.completed(known, "config", manifest.settings(EvalConfig()))
            manifest.refuse_differences(known, what, folder.path, allow_code_change=allow)
            return record
        with folder.writing():  # its model was never loaded, perhaps for want of another config
            journal.unlink(missing_ok=True)
    record = manifest.record(what, manifest.origin(point, base))
    config = yaml.safe_dump(nested(point.config), sort_keys=False, allow_unicode=True)
    words = yaml.safe_dump(list(point.overrides), allow_unicode=True)
    folder.write_several({"config.yaml": config, "overrides.yaml": words, MANIFEST: record})
    return record


@dataclass
class Run:
    """One process's part of a run."""

    config: EvalConfig
    folder: RunFolder
    record: dict[str, Any]  # the manifest
    rows: RowIndex
    table: RowTable
    export: Export | None = None

    def go(self, engines: EngineCache, task: Task, base: Path, screen: QuietView, argv: Sequence[str]) -> Ended:
        """Errors: StorageError, EngineDeadError, EngineClosedError; ResumeMismatchError."""
        if not self.table.left:
            return self.end(task, screen, [], 0.0)
        reused = engines.holds(self.config.engine)
        engine = load(self.config.engine, engines, screen)
        self.check_engine(engine)
        task = open_task(self.config.task, base, render_of(engine, self.config.chat))
        return self.compute(engine, task, screen, argv, reused)

    def check_engine(self, engine: Any) -> None:
        """Takes what the open engine adds to the manifest, or compares it. Errors: ResumeMismatchError."""
        model = self.config.engine.model
        found = manifest.in_force(engine, self.config.adapter)
        if provenance.local_directory(model.path) is None:
            found["model_files"] = provenance.file_digests(model_directory(model))
        self.take_in_force(found)

    def take_in_force(self, found: dict[str, Any]) -> None:
        """As `check_engine`, of what an engine in another process has found. Modifies: the record."""
        known = self.record["in_force"]
        if known is not None:
            known = manifest.completed(known, "engine", found["engine"])
            manifest.refuse_differences({"in_force": known}, {"in_force": found}, self.folder.path)
        self.record["in_force"] = found

    def compute(self, engine: Any, task: Task, screen: QuietView, argv: Sequence[str], reused: bool = False) -> Ended:
        """Computes what the table lacks, and writes the files of the end once all rows are there. Errors: as
        `Loop.run`."""
        sessions, config, begun = self.record["sessions"], self.config, time.perf_counter()
        if config.task.prompt and config.task.images is None and not names_columns(config.task.prompt):
            screen.warn("every row has the same prompt: task.prompt names no column, as {question} would")
        sessions.append(manifest.session(argv, now()))
        self.record["result"] = None
        self.folder.write(MANIFEST, self.record)
        path = None if config.trace is TraceKind.off else self.folder.path / "trace.json"
        sync, steps = asdict(config.journal), config.trace is TraceKind.steps
        with Journal(self.folder.path / JOURNAL, **sync) as journal, Trace(path, len(sessions), steps=steps) as trace:
            job = Job(config, task, self.rows, self.table, journal, trace, len(sessions), self.export is not None)
            with engine.steps_told(trace.step) if steps else nullcontext():
                loop = Loop(job, engine, screen)
                _complete(loop.run)
        seconds, figures = loop.meter.seconds, loop.meter.lines(reused)
        if trace.problem is not None:
            screen.warn(trace.problem)
        sessions[-1] |= {"ended": now(), "seconds": round(time.perf_counter() - begun, 3), "engine": engine.stats()}
        sessions[-1] |= {"how": loop.ended or "all rows", "proofs": provenance.proved(engine.config.model.device)}
        if not loop.ended:  # the manifest is written with the result
            return self.end(task, screen, figures, seconds)
        self.folder.write(MANIFEST, self.record)
        screen.note(f"{loop.ended}; {self.there:,} of {count(self.rows.rows, 'row')} are journaled")
        if self.export is not None:
            told = f"{loop.ended}: {_told(self.there, self.table.failed)} in {duration(seconds)}"
            screen.figures([("rows", told), *figures, ("folder", place(str(self.folder.path)))])
        return (FAILED if loop.ended != CUT_OFF else TERMINATED if loop.terminated else INTERRUPTED), None

    def end(self, task: Task, screen: QuietView, figures: Sequence[tuple[str, str]], seconds: float) -> Ended:
        """Writes the files of a finished run, unless they are there, and shows its figures. Errors: StorageError."""
        if not is_finished(self.folder, self.record, self.table):
            finish(self.folder, self.record, self.table, task)
        metrics = read_metrics(self.folder, self.record)
        assert metrics is not None
        out = [("folder", folder := place(str(self.folder.path)))]
        if not (self.record.get("origin") or {}).get("swept"):
            out.append(("report", f"fengine report {shlex.quote(folder)}"))
        if self.export is not None:
            self.export.write(self._entries())
            out = [("output", place(str(self.export.path)))]
        took = f" in {duration(seconds)}" if seconds else ""
        found = [(name, figure(metric)) for name, metric in metrics["metrics"].items()]
        screen.figures([("rows", _told(metrics["rows"], metrics["failed"]) + took), *found, *figures, *out])
        asked = self.config.task.format in (Format.prompts, Format.batch)  # and nothing else
        if not (found or asked or metrics["failed"] == metrics["rows"]):
            screen.note("nothing was scored: add for example task.match=exact task.target=answer")
        return (FAILED if metrics["failed"] else OK), metrics

    @property
    def there(self) -> int:
        """Rows that are journaled, good or failed."""
        return len(self.table.known) - self.table.known.count(NOTHING)

    def _entries(self) -> Iterator[Entry]:
        """Errors: StorageError."""
        with (self.folder.path / JOURNAL).open("rb") as file:
            for offset in self.table.offsets:
                yield read_at(file, offset)


def open_run(
    folder: RunFolder, point: Point, what: dict[str, Any], rows: RowIndex, base: Path, screen: QuietView,
    export: Export | None = None,
) -> Run:  # fmt: skip
    """The run in a folder, new or as it was left; `what` is its identity. Errors: ResumeMismatchError, StorageError."""
    record = open_record(folder, point, what, base)
    table = reopen(folder, rows, provenance.canonical(record["identity"]), screen.note, screen.warn)
    return Run(point.config, folder, record, rows, table, export)


def _complete(work: Callable[[], Any]) -> Any:
    """The result of a coroutine, also where a loop is running already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work()).result()


def _told(rows: int, failed: int) -> str:
    return count(rows, "row") + (f", {failed:,} failed" if failed else "")
