"""What a run's journal, manifest and resume cost, and whether kills leave a trace: `fengine eval` on the CPU model.

python scripts/bench_eval.py kill --trials 50        SIGKILL at random moments, also while going on; 500 rows
python scripts/bench_eval.py cost                    share of the wall time at 10,000 rows; memory at 10,000 and 2,000
python scripts/bench_eval.py resume                  a finished journal of 100,000 rows
python scripts/bench_eval.py sweep                   12 sampling points: the command's time over that of their decoding
"""

import hashlib
import importlib
import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import measure

from fengine import run

ROOT = Path(__file__).resolve().parent.parent
MAIN = "import sys; from fengine.run import main; sys.exit(main(sys.argv[1:]))"
TASK = ["task=jsonl", "task.match=exact", "task.target=answer", "view=quiet", "compile=none", "model.device=cpu"]


def rows(path: Path, count: int) -> None:
    """Additions to be continued, each with an id."""
    with path.open("w") as file:
        for i in range(count):
            a, b = i % 97, i % 89
            file.write(
                json.dumps({"id": f"row-{i}", "prompt": f"Question: What is {a} + {b}?\nAnswer:", "answer": str(a + b)})
            )
            file.write("\n")


def command(folder: Path, *words: str, code: str = MAIN) -> list[str]:
    given = [f"task.data={folder / 'rows.jsonl'}", f"out={folder / 'run'}", *words]
    return [sys.executable, "-c", code, "eval", *TASK, *given]


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# -- kills -------------------------------------------------------------------------------------------------------------


def child(folder: Path, *words: str) -> int:
    """A process that works on the run in `folder`: a fork, so that it need not import torch again. Returns its pid."""
    pid = os.fork()
    if pid == 0:
        os.environ["OMP_NUM_THREADS"] = "1"
        os._exit(run.main(command(folder, *words)[3:]))
    return pid


def code_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill(trials: int, count: int, processes: int, minutes: float) -> dict[str, Any]:
    """Every trial is killed at a random moment, three of four again while going on; then it is let to its end. So many
    `processes` run trials side by side; behind `minutes` none begins."""
    importlib.import_module("fengine.api.engine")
    words = ["sampling.temperature=0.8", "sampling.max_new_tokens=24"]
    with tempfile.TemporaryDirectory() as top:
        whole = Path(top) / "whole"
        whole.mkdir()
        rows(whole / "rows.jsonl", count)
        started = time.perf_counter()
        assert code_of(child(whole, *words)) == 0
        seconds, wanted = time.perf_counter() - started, sha(whole / "run" / "outputs.jsonl")
        done = []
        fork = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(processes, fork) as pool:
            going = [pool.submit(trial, Path(top), i, words, count, seconds, wanted) for i in range(trials)]
            for number, one in enumerate(going):
                if time.perf_counter() - started >= 60 * minutes:
                    _ = [other.cancel() for other in going[number:]]
                if not one.cancelled():
                    done.append(one.result())
                    print(number, done[-1], flush=True)
    return {
        "rows": count,
        "trials": len(done),
        "kills": sum(d["killed"] for d in done),
        "byte_identical": sum(d["same"] for d in done),
        "codes": sorted({d["code"] for d in done}),
        "journal_lines_at_kills": " ".join(str(lines) for d in done for lines in d["lines"]),
        "uninterrupted_seconds": seconds,
    }


def trial(top: Path, number: int, words: list[str], count: int, seconds: float, wanted: str) -> dict[str, Any]:
    folder, pick = top / f"trial-{number}", random.Random(number)
    killed, kept, journal = 0, [], folder / "run" / "journal.log"
    folder.mkdir()
    rows(folder / "rows.jsonl", count)
    for _ in range(pick.choice([1, 2, 2, 2])):
        at_row, target, after = pick.random() < 0.5, pick.uniform(0, count + 1), pick.uniform(0, seconds)
        begun, pid = time.perf_counter(), child(folder, *words)
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if (lines(journal) >= target) if at_row else (time.perf_counter() - begun >= after):
                os.kill(pid, signal.SIGKILL)
                killed += code_of(pid) == -signal.SIGKILL
                break
            time.sleep(0.002)
        kept.append(lines(journal))
    code = code_of(child(folder, *words))
    return {
        "killed": killed,
        "lines": kept,
        "code": code,
        "same": code == 0 and sha(folder / "run" / "outputs.jsonl") == wanted,
    }


def lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


# -- cost --------------------------------------------------------------------------------------------------------------

TIMED = """
import sys, time, json, resource
from fengine.eval.runs import run as run_file
from fengine.eval.runs import answering, folder, journal, loop, trace
journals = int(sys.argv.pop(1))
spent, waited = {}, {}  # CPU seconds of the thread; wall, in which other threads (the engine's steps) go on
inner = [[0.0, 0.0]]  # what timed calls inside a timed call took: each second counts once
def timed(key, owner, *names):
    for name in names:
        setattr(owner, name, wrapped(key, getattr(owner, name)))
def wrapped(key, call):
    def one(*a, **k):
        inner.append([0.0, 0.0])
        t, w = time.thread_time(), time.perf_counter()
        try: return call(*a, **k)
        finally:
            took, within = (time.thread_time() - t, time.perf_counter() - w), inner.pop()
            for kept, total, less in ((spent, took[0], within[0]), (waited, took[1], within[1])):
                kept[key] = kept.get(key, 0.0) + total - less
            inner[-1] = [x + y for x, y in zip(inner[-1], took)]
    return one
keep, others = loop.Loop.keep, []
def keep_often(self, done):
    own = self.job.journal
    if not others:
        others.extend(journal.Journal(own.path.with_name(f"journal-{i}")) for i in range(1, journals))
    for self.job.journal in others: keep(self, done)
    self.job.journal = own
    return keep(self, done)
loop.Loop.keep = keep_often if journals > 1 else keep
timed("journal", journal.Journal, "__init__", "sync_if_due", "sync", "close")
timed("journal", loop.Loop, "keep"); timed("journal", run_file, "reopen")
timed("manifest", run_file.manifest, "identity", "session", "in_force"); timed("manifest", run_file, "open_record")
timed("manifest", run_file.Run, "check_engine"); timed("manifest", folder.RunFolder, "write_several")
timed("records as JSON", answering, "line_of"); timed("records as JSON", loop, "line_of")
timed("survey", run_file, "index_rows"); timed("finish", run_file, "finish")
timed("trace", trace.Trace, "row", "gauges")
from fengine.run import main
started = time.perf_counter()
code = main(sys.argv[1:])
wall = time.perf_counter() - started
rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"wall": wall, "spent": spent, "wall_in_calls": waited, "peak_rss_mib": rss}))
sys.exit(code)
"""


# The text of a record is that of its line in outputs.jsonl, which a run without a journal would have to make as well.
SHARES = {
    "journal and manifest": ["journal", "manifest"],
    "with records as JSON": ["journal", "manifest", "records as JSON"],
    "with survey, finish, trace": ["journal", "manifest", "records as JSON", "survey", "finish", "trace"],
}


JOURNALS = 11  # in the runs that show by their wall time what ten of them cost


def cost(count: int, runs: int) -> dict[str, Any]:
    """Parts of the wall time of a run: by the CPU seconds of the calls, by their seconds on the clock (in which other
    threads compute), and of the journal by how much longer a run takes that writes JOURNALS of them."""
    once, often = [], []
    for _ in range(runs):
        once.append(timed_run(count, 1))
        often.append(timed_run(count, JOURNALS))
    shares = {
        f"{name}, {kind}": measure.summary([sum(one[kind][key] for key in keys) / one["wall"] for one in once])
        for name, keys in SHARES.items()
        for kind in ("spent", "wall_in_calls")
    }
    longer = [
        (many["wall"] - one["wall"]) / (JOURNALS - 1) / one["wall"] for one, many in zip(once, often, strict=True)
    ]
    shares["journal, by the wall of runs that write more of them"] = measure.summary(longer)
    rss = {n: one["peak_rss_mib"] for n, one in ((count // 5, timed_run(count // 5, 1)), (count, once[0]))}
    return {"rows": count, "shares": shares, "peak_rss_mib": rss, "runs": once, f"runs with {JOURNALS} journals": often}


def timed_run(count: int, journals: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as top:
        rows(Path(top) / "rows.jsonl", count)
        argv = command(Path(top), "sampling.max_new_tokens=16", code=TIMED)
        argv.insert(3, str(journals))
        done = subprocess.run(argv, env=measure.of_this_checkout(OMP_NUM_THREADS="1"), check=True, capture_output=True)
    return json.loads(done.stdout.splitlines()[-1])


# -- resume ------------------------------------------------------------------------------------------------------------

FAKED = """
import sys, time
sys.path.insert(0, sys.argv.pop(1))
from eval_fakes import FakeEngine
from fengine.eval.cli import engines as engines_file
from fengine.eval.runs import run as run_file
engines_file.open_engine = FakeEngine
from fengine.run import main
sys.exit(main(sys.argv[1:]))
"""


def cpu_seconds() -> float:
    """Of the processes that were waited for: what a busy machine does not stretch as it does the wall's."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def finished(count: int) -> dict[str, Any]:
    """A run of a fake engine; then the same command: as it is, and with only the journal left to finish from."""
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top)
        rows(folder / "rows.jsonl", count)
        words = command(folder, "trace=off", code=FAKED)
        words[3:3] = [str(ROOT / "tests")]
        figures: dict[str, Any] = {"rows": count}
        for name in ("first", "finished", "journal only"):
            if name == "journal only":
                (folder / "run" / "outputs.jsonl").unlink()
            started, before = time.perf_counter(), cpu_seconds()
            subprocess.run(words, env=measure.of_this_checkout(OMP_NUM_THREADS="1"), check=True)
            figures[f"{name}, seconds"] = time.perf_counter() - started
            figures[f"{name}, CPU seconds"] = cpu_seconds() - before
        figures["journal_mib"] = (folder / "run" / "journal.log").stat().st_size / 2**20
    return figures


# -- sweep -------------------------------------------------------------------------------------------------------------

SWEPT = """
import sys, time, json
from fengine.eval.cli import engines as engines_file
from fengine.eval.runs import run as run_file
spent = {"points": [], "load": []}  # seconds in which rows were computed; and in which the engine was opened
def timed(owner, name, key):
    call = getattr(owner, name)
    def one(*a, **k):
        began = time.perf_counter()
        try: return call(*a, **k)
        finally: spent[key].append(time.perf_counter() - began)
    setattr(owner, name, one)
timed(engines_file, "open_engine", "load"); timed(run_file.asyncio, "run", "points")
from fengine.run import main
began = time.perf_counter()
code = main(sys.argv[1:])
print(json.dumps({"seconds": time.perf_counter() - began, **spent}))
sys.exit(code)
"""


def sweep(runs: int, task: str) -> dict[str, Any]:
    """One load; then every point's rows. `ratio`: all seconds of the command but those of opening the engine, over
    those of decoding. Importing Python modules precedes both."""
    words = [f"task={task}", "sampling.temperature=0,0.5,0.7,1", "seed=1,2,3", "view=quiet", "model.device=cpu"]
    found = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as top:
            argv = [sys.executable, "-c", SWEPT, "eval", "-m", *words, f"out={top}/sweep"]
            done = subprocess.run(
                argv, env=measure.of_this_checkout(OMP_NUM_THREADS="1"), check=True, capture_output=True
            )
        told = json.loads(done.stdout.splitlines()[-1])
        assert len(told["points"]) == 12 and len(told["load"]) == 1
        found.append(told | {"ratio": (told["seconds"] - told["load"][0]) / sum(told["points"])})
    return {"words": words, "ratio": measure.summary([one["ratio"] for one in found]), "runs": found}


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("what", choices=["kill", "cost", "resume", "sweep"])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--processes", type=int, default=1, help="of `kill`")
    parser.add_argument("--minutes", type=float, default=60.0, help="of `kill`")
    args = parser.parse_args()
    if args.what == "kill":
        figures = kill(args.trials, args.rows or 500, args.processes, args.minutes)
    elif args.what == "cost":
        figures = cost(args.rows or 10_000, args.runs)
    elif args.what == "sweep":
        figures = {task: sweep(args.runs, task) for task in ("addition", "json_filling")}
    else:
        figures = finished(args.rows or 100_000)
    measure.save(f"bench_eval_{args.what}", figures, args.out)


if __name__ == "__main__":
    main()
