"""The command line of evaluations: `fengine eval task=NAME ...` and `python -m fengine.eval.evaluate ...`.

A run is a value: its folder says what its results depend on, and the same command in the same folder goes on where it
was interrupted and ends with the same bytes. Exit codes: 0 all rows good; 1 rows failed, or the run could not go on
(the engine died, the disk is full, too many errors); 2 usage, configuration, input, or a folder of another run;
130 interrupted; 143 terminated.
"""

import asyncio
import importlib
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from fengine.errors import EngineClosedError, EngineDeadError, StorageError
from fengine.eval.cli import view
from fengine.eval.cli.command import FAILED, INTERRUPTED, OK, TERMINATED, composed
from fengine.eval.cli.compose import jobs
from fengine.eval.cli.engines import EngineCache, model_directory, open_engine, report
from fengine.eval.cli.figures import count, duration, place
from fengine.eval.cli.schema import BadPoint, Point, flat
from fengine.eval.tasks import digests, loop, machine, manifest
from fengine.eval.tasks.config import EVAL, EvalConfig, parse_shard
from fengine.eval.tasks.config import Trace as TraceKind
from fengine.eval.tasks.finish import finish, is_finished, read_metrics
from fengine.eval.tasks.folder import JOURNAL, MANIFEST, RunFolder
from fengine.eval.tasks.journal import Journal
from fengine.eval.tasks.kinds import open_task
from fengine.eval.tasks.points import guarded, how_to_go_on, run_sweep
from fengine.eval.tasks.resume import Survey, Table, reopen, survey
from fengine.eval.tasks.shards import shard_of
from fengine.eval.tasks.sweep import figure
from fengine.eval.tasks.task import Task
from fengine.eval.tasks.task_config import base_directory
from fengine.eval.tasks.trace import Trace

Ended = tuple[int, dict[str, Any] | None]  # exit code of a run, and its metrics.json if it has come to its end


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the words behind `fengine eval` (default: those of this process) and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)

    def work(command: Namespace) -> int:
        found = own_folders(jobs(command, EVAL))
        with EngineCache(open_engine) as engines:
            if len(found) > 1:
                run = partial(run_point, words=words)
                return run_sweep(command, found, engines, run, partial(run_alone, words))
            (point,) = (job for job in found if isinstance(job, Point))
            screen = view.choose(point.config.view)
            code, metrics = run_point(point, engines, screen, words)
            if code != OK and metrics is None:
                screen.note(how_to_go_on(point.directory))
            return code

    return composed(words, EVAL, work)


def own_folders(found: Sequence[Point | BadPoint]) -> list[Point | BadPoint]:
    """The points with `out`, where it is given, as their folders: itself, or a folder in it for each of several. Pure
    but for the working directory."""
    own: list[Point | BadPoint] = []
    for index, point in enumerate(found):
        if isinstance(point, Point) and point.config.out is not None:
            folder = Path(point.config.out).absolute()
            point = replace(point, directory=folder / str(index) if len(found) > 1 else folder)
        own.append(point)
    return own


def run_alone(words: Sequence[str], point: Point) -> int:
    """One point of a sweep in a process of its own, without a live view. Returns its exit code."""
    screen = view.QuietView() if point.config.view is view.View.quiet else view.PlainView()
    with EngineCache(open_engine) as engines:
        return guarded(point, engines, partial(run_point, words=words), screen)[0]


def run_point(
    point: Point, engines: EngineCache, screen: view.QuietView, words: Sequence[str], base: Path | None = None
) -> Ended:
    """One run, from its beginning or from where it was. All that can be refused is refused before a model is loaded.
    `base` is what a relative `task.data` is under; None: as the point's words have it.

    Errors: FengineError, with nothing computed; what the journal holds stays good.
    """
    config: EvalConfig = point.config
    shard = parse_shard(config.run.shard)
    if base is None:
        base = base_directory(dict(point.choices)["task"], list(point.search), list(point.overrides))
    whole = open_task(config.task, base)
    with RunFolder(point.directory) as folder:
        rows = survey(whole).shard(shard)
        record = open_record(folder, point, manifest.identity(config, whole, rows), base)
        table = reopen(folder, rows, digests.canonical(record["identity"]), screen.note, screen.warn)
        if table.left < rows.rows:
            there = rows.rows - table.left
            screen.note(f"{place(str(folder.path))}: {there:,} of {count(rows.rows, 'row')} are there already")
        part = Part(config, folder, record, rows, table)
        if table.left:
            engine = engines.get(config.engine) if engines.holds(config.engine) else load(config, engines, screen)
            part.check_engine(engine)
            whole = open_task(config.task, base, engine.tokenizer.encode_chat)
        task = shard_of(whole, shard)
        try:
            code = part.compute(engine, task, screen, words) if table.left else OK
            return (code, None) if code != OK else part.end(task, screen)
        except (StorageError, EngineDeadError, EngineClosedError) as error:
            engines.close()  # a dead engine is of no use to the next point
            report(error)
            return FAILED, None


def load(config: EvalConfig, engines: EngineCache, screen: view.QuietView) -> Any:
    """A new engine, with a word about the time it takes."""
    with screen.opening(f"loading {config.engine.model.path}"):
        engine = engines.get(config.engine)
    took = duration(engine.stats()["start_seconds"])
    screen.note(f"{config.engine.model.path} is ready on {engine.config.model.device} after {took}")
    return engine


def open_record(folder: RunFolder, point: Point, what: dict[str, Any], base: Path) -> dict[str, Any]:
    """The run's manifest: new, or the one that is there. Errors: ResumeMismatchError, StorageError."""
    record = folder.read(MANIFEST)
    if record is not None:
        known, allow = manifest.recorded(record, folder.path), point.config.resume.allow_code_change
        manifest.refuse_differences(known, what, folder.path, allow_code_change=allow)
        return record
    record = manifest.record(what, manifest.origin(point, base))
    config = yaml.safe_dump(nested(point.config), sort_keys=False, allow_unicode=True)
    words = yaml.safe_dump(list(point.overrides), allow_unicode=True)
    folder.write_several({"config.yaml": config, "overrides.yaml": words, MANIFEST: record})
    return record


@dataclass
class Part:
    """One process's part of a run."""

    config: EvalConfig
    folder: RunFolder
    record: dict[str, Any]  # the manifest
    rows: Survey
    table: Table

    def check_engine(self, engine: Any) -> None:
        """Writes what the open engine adds to the manifest, or compares it. Errors: ResumeMismatchError."""
        model = self.config.engine.model
        found = manifest.in_force(engine.config, int(engine.get_server_info()["max_req_input_len"]))
        if digests.local_directory(model.path) is None:
            found["model_files"] = digests.file_digests(model_directory(model))
        known = self.record["in_force"]
        if known is not None:
            manifest.refuse_differences({"in_force": known}, {"in_force": found}, self.folder.path)
        self.record["in_force"] = found

    def compute(self, engine: Any, task: Task, screen: view.QuietView, words: Sequence[str]) -> int:
        """Computes what the table lacks. 0: all rows are there, some perhaps failed. Errors: as `loop.run`."""
        sessions, config, begun = self.record["sessions"], self.config, time.perf_counter()
        sessions.append(manifest.session(words, now()))
        self.record["result"] = None
        self.folder.write(MANIFEST, self.record)
        path = None if config.trace is TraceKind.off else self.folder.path / "trace.json"
        sync = {"sync_seconds": config.journal.sync_seconds, "sync_rows": config.journal.sync_rows}
        steps = config.trace is TraceKind.steps
        with Journal(self.folder.path / JOURNAL, **sync) as journal, Trace(path, len(sessions), steps=steps) as trace:
            job = loop.Job(config, task, self.rows, self.table, journal, trace, len(sessions))
            with engine.steps_told(trace.step) if steps else nullcontext():
                outcome = asyncio.run(loop.run(job, engine, screen))
        sessions[-1] |= {"ended": now(), "seconds": round(time.perf_counter() - begun, 3)}
        sessions[-1] |= {"how": outcome.ended or "all rows", "engine": engine.stats()}
        sessions[-1]["proofs"] = machine.proved(engine.config.model.device)
        if not outcome.ended:
            return OK  # the manifest is written with the result
        self.folder.write(MANIFEST, self.record)
        there = len(self.table.known) - self.table.known.count(0)
        screen.note(f"{outcome.ended}; {there:,} of {count(self.rows.rows, 'row')} are journaled")
        return (TERMINATED if outcome.terminated else INTERRUPTED) if outcome.ended == loop.INTERRUPTED else FAILED

    def end(self, task: Task, screen: view.QuietView) -> Ended:
        """Writes the files of a finished run, unless they are there, and shows its figures. Errors: StorageError."""
        if not is_finished(self.folder, self.record, self.table):
            finish(self.folder, self.record, self.table, task)
        metrics = read_metrics(self.folder, self.record)
        assert metrics is not None
        failed = f", {metrics['failed']:,} failed" if metrics["failed"] else ""
        rows = ("rows", f"{metrics['rows']:,}{failed}")
        screen.figures([rows, *told(metrics), ("folder", place(str(self.folder.path)))])
        return (FAILED if metrics["failed"] else OK), metrics


def told(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, value ± standard error) of every metric. Pure."""
    return [(name, figure(metric)) for name, metric in metrics["metrics"].items()]


def nested(config: EvalConfig) -> dict[str, Any]:
    """A config as plain nested mappings. Pure."""
    whole: dict[str, Any] = {}
    for key, value in flat(config).items():
        *sections, last = key.split(".")
        inner = whole
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return whole


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


if __name__ == "__main__":  # by its name, since the processes of a launcher look its functions up there
    sys.exit(importlib.import_module("fengine.eval.evaluate").main())
