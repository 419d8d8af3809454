"""An evaluation on many machines: `fengine eval`'s rows through Ray Data, with an Engine in every actor.

pip install 'fengine[ray]'
python scripts/ray_batch.py --workers 4 --gpus 1 task=jsonl task.data=mine.jsonl model=qwen3-8b out=runs/mine

The words with = are those of `fengine eval`; the folder is a run's folder, and its outputs.jsonl has the bytes of the
single-process run, since a row's bits belong to the row. Ray Data's `map_batches` keeps the order; this process alone
writes, one journaled line for each row as its batch arrives. Killed at any moment, the same command goes on with the
rows that the journal lacks, by their ids; `fengine eval` with the same words may go on with it too, and the other way
around. A run is one kind of machine: an actor on another CPU or GPU than the first is refused, as its bits may differ.

Without --address (or RAY_ADDRESS) a cluster of this machine is started: on the loopback interface, without dashboard.
Model and input paths must be the same on all machines; the rows travel through Ray's object store. Exit codes are those
of `fengine eval`.
"""
# pyright: reportMissingImports=false, reportOptionalMemberAccess=false

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fengine import run
from fengine.errors import FengineError, MissingExtraError
from fengine.eval.cli import view
from fengine.eval.cli.compose import parse, points
from fengine.eval.cli.engines import model_directory, open_engine, report
from fengine.eval.runs import manifest, provenance
from fengine.eval.runs import run as run_file
from fengine.eval.runs.answering import FATAL, Asker, answer_row
from fengine.eval.runs.config import EVAL, EvalConfig, parse_shard
from fengine.eval.runs.folder import JOURNAL, MANIFEST, RunFolder
from fengine.eval.runs.index import OK, index_rows
from fengine.eval.runs.journal import Journal, encode
from fengine.eval.runs.record import error_record, line_of
from fengine.eval.tasks.kinds import open_task
from fengine.eval.tasks.task import BadRow, Row, Task, rows_of
from fengine.eval.tasks.task_config import base_directory

try:
    import ray
    from ray.data import ActorPoolStrategy, DataContext
except ImportError:
    ray = None


class EngineActor:
    """Computes batches of rows with an engine of its own. Made once in every actor of Ray."""

    def __init__(self, config: EvalConfig, base: Path) -> None:
        self.config, self.engine = config, open_engine(config.engine)
        self.task = open_task(config.task, base, run_file.render_of(self.engine, config.chat))
        self.asker = Asker(self.engine)
        found = manifest.in_force(self.engine)
        if provenance.local_directory(config.engine.model.path) is None:
            found["model_files"] = provenance.file_digests(model_directory(config.engine.model))
        self.in_force = json.dumps(found)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The lines of outputs.jsonl of rows: "index", and "row", which is JSON of [id, data]. Errors: the engine's."""
        rows = [Row(*json.loads(row)) for row in batch["row"]]
        done = asyncio.run(self.compute(rows))
        times, lines = zip(*done, strict=True)
        return {
            "index": batch["index"],
            "times": list(times),
            "line": list(lines),
            "in_force": [self.in_force] * len(rows),
        }

    async def compute(self, rows: Sequence[Row]) -> list[tuple[str, bytes]]:
        return await asyncio.gather(*(self.one(row) for row in rows))

    async def one(self, row: Row) -> tuple[str, bytes]:
        """As `fengine eval` computes a row: what fails that is the row's own becomes its record."""
        started, clock, metas = time.time(), time.perf_counter(), []
        try:
            record, line = await answer_row(self.asker, self.config, self.task, row, metas)
        except FATAL:
            raise
        except Exception as error:
            line = line_of(record := error_record(row, error))
        tokens = [sum(meta[key] for meta in metas) for key in ("prompt_tokens", "completion_tokens")]
        head = [int("error" not in record), round(started, 6), round(time.perf_counter() - clock, 6), *tokens]
        return json.dumps(head), line


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1, help="actors, each with an engine")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each actor")
    parser.add_argument("--cpus", type=float, default=1, help="CPUs of each actor")
    parser.add_argument("--batch", type=int, default=64, help="rows that an actor takes at once")
    parser.add_argument("--address", help="of a Ray cluster; default: RAY_ADDRESS, else one of this machine")
    parser.add_argument("words", nargs="+", help="key=value, as for fengine eval")
    args = parser.parse_intermixed_args()
    if args.workers < 1 or args.batch < 1 or args.gpus < 0 or args.cpus < 0:
        parser.error("--workers and --batch must be at least 1, --gpus and --cpus at least 0")
    return args


def start(args: argparse.Namespace) -> None:
    address = args.address or os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address, log_to_driver=False)
        return
    slots = max(
        os.cpu_count() or 1, int(args.workers * args.cpus) + 4
    )  # logical: Ray Data wants some for its own tasks
    ray.init(num_cpus=slots, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")


def batches(args: argparse.Namespace, config: EvalConfig, base: Path, rows: list[dict[str, Any]]) -> Iterator[Any]:
    """What the actors make of `rows`, in their order."""
    context = DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    given = ray.data.from_items(rows, override_num_blocks=max(1, -(-len(rows) // args.batch)))
    computed = given.map_batches(
        EngineActor,
        fn_constructor_args=(config, base),
        batch_size=args.batch,
        compute=ActorPoolStrategy(size=args.workers),
        num_gpus=args.gpus or None,
        num_cpus=args.cpus,
    )
    return iter(computed.iter_batches(batch_size=None, prefetch_batches=1))


def work(args: argparse.Namespace) -> int:
    """The run from its beginning, or from where it was. Errors: FengineError; those of Ray."""
    if ray is None:
        raise MissingExtraError.of("scripts/ray_batch.py", "ray", "ray")
    (point,) = points(parse(args.words, EVAL), EVAL)
    config: EvalConfig = point.config
    folder = Path(config.out).absolute() if config.out else point.directory
    screen, shard = view.choose(config.view), parse_shard(config.run.shard)
    base = base_directory(dict(point.choices)["task"], list(point.search), list(point.overrides))
    task = open_task(config.task, base)
    with RunFolder(folder) as opened:
        rows = index_rows(task).shard(shard)
        part = run_file.open_run(opened, point, manifest.identity(config, task, rows), rows, base, screen)
        record, table = part.record, part.table
        if table.left:
            screen.note(f"{rows.rows - table.left:,} of {rows.rows:,} rows are there; a folder to go on with: {folder}")
            record["sessions"].append(manifest.session(["ray_batch", *args.words], run_file.now()))
            record["result"] = None
            opened.write(MANIFEST, record)
            compute(args, part, task, base)
            record["sessions"][-1] |= {"ended": run_file.now(), "how": "all rows", "workers": args.workers}
            opened.write(MANIFEST, record)
        return part.end(task, screen, [], 0.0)[0]


def compute(args: argparse.Namespace, part: run_file.Run, task: Task, base: Path) -> None:
    """Computes what the table lacks. Modifies: the table, the journal, and what the manifest says of the machine."""
    with Journal(part.folder.path / JOURNAL) as journal:
        left = []
        for index, row in enumerate(rows_of(task, parse_shard(part.config.run.shard))):
            if part.table.known[index] == OK:
                continue
            if isinstance(row, BadRow):
                head = json.dumps([0, round(time.time(), 6), 0.0, 0, 0])
                put(journal, part, index, head, line_of(error_record(row)))
            else:
                left.append({"index": index, "row": json.dumps([row.id, row.data])})
        if not left:
            return
        start(args)
        for batch in batches(args, part.config, base, left):
            for index, head, line, force in zip(
                *(batch[key] for key in ("index", "times", "line", "in_force")), strict=True
            ):
                check(part, json.loads(force))
                put(journal, part, int(index), str(head), bytes(line))


def put(journal: Journal, part: run_file.Run, index: int, head: str, line: bytes) -> None:
    (ok, *times), session = json.loads(head), len(part.record["sessions"])
    (offset,) = journal.extend([encode([index, ok, part.rows.keys[index], session, *times], line)])
    part.table.put(index, bool(ok), offset)


def check(part: run_file.Run, found: dict[str, Any]) -> None:
    """All actors compute on the same. Errors: ResumeMismatchError."""
    if part.record["in_force"] != found:
        part.take_in_force(found)
        part.folder.write(MANIFEST, part.record)


def main() -> int:
    args = arguments()
    try:
        return work(args)
    except KeyboardInterrupt:
        print("ray_batch: interrupted; run the same command to go on", file=sys.stderr)
        return run.INTERRUPTED
    except FengineError as error:
        report(error)
        return run.USAGE
    finally:
        if ray is not None and ray.is_initialized():
            ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
