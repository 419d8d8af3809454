"""Mutation tests: small faults planted one at a time into core, loop and journal; which of them do the tests see?

    python scripts/mutants.py --count 300 --jobs 2 --json scripts/results/mutants.json
    python scripts/mutants.py --files core/scheduler.py --count 40
    python scripts/mutants.py --only simulation --count 100     # what the simulated schedules see alone

A process that has imported the libraries forks one child for each mutant: a comparison, an operator, a constant, a
condition or a statement of one file changed as it is imported, nothing on disk. The child runs the test files of the
module's row of TESTS, the quickest first, up to the first failure. A mutant that no test sees is printed with its line:
either the line is not needed, or an oracle is missing, or `reason` in the JSON file tells why neither is; reasons stay
when the file is written again. What runs too long counts as seen.
"""

import argparse
import ast
import copy
import importlib
import importlib.abc
import importlib.util
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from measure import environment

ROOT = Path(__file__).resolve().parent.parent
HOST = ("engine/test_simulation", "unit/test_scheduler")
LOOP = ("engine/test_simulation", "engine/test_sessions", "engine/test_state", "engine/test_ends",
        "engine/test_lifecycle", "engine/test_api_streams", "engine/test_memory", "engine/test_weights")  # fmt: skip
TESTS: dict[str, tuple[str, ...]] = {  # test files by pattern of what they are the oracle of
    "core/kv_pages.py": ("unit/test_pages", *HOST),
    "core/prefix_cache.py": ("unit/test_prefix_cache", *HOST),
    "core/lora_slots.py": ("unit/test_adapter_slots", *HOST),
    "core/waiting_queue.py": HOST,
    "core/running.py": (*HOST, "engine/test_speculation", "engine/test_encode"),
    "core/batch.py": (*HOST, "engine/test_speculation"),
    "core/scheduler.py": (*HOST, "engine/test_speculation", "engine/test_encode", "engine/test_api_options"),
    "core/request.py": ("unit/test_request", *HOST, "engine/test_plain", "engine/test_extended", "engine/test_encode",
                        "engine/test_api_results"),
    "core/scheduler_output.py": (*HOST, "engine/test_extended", "engine/test_plain"),
    "core/speculation.py": ("engine/test_simulation", "unit/test_scheduler", "engine/test_speculation"),
    "core/step_trace.py": ("unit/test_steps", "engine/test_simulation", "eval/test_trace"),
    "engine/engine_core.py": LOOP,
    "engine/inbox.py": LOOP,
    "engine/output_processor.py": (*LOOP, "engine/test_text_engine"),
    "engine/request_state.py": (*LOOP, "engine/test_extended", "engine/test_encode", "engine/test_api_results"),
    "engine/stepper.py": (*LOOP, "engine/test_extended"),
    "api/sessions.py": ("engine/test_sessions", "engine/test_simulation"),
    "speculative/ngram.py": ("engine/test_speculation", "unit/test_scheduler"),
    "speculative/pace.py": ("unit/test_pace", "engine/test_draft"),
    "speculative/draft.py": ("engine/test_draft", "engine/test_eagle", "engine/test_drafts_with_all"),
    "speculative/chain.py": ("engine/test_draft", "engine/test_eagle", "engine/test_drafts_with_all"),
    "speculative/proposers.py": ("engine/test_draft", "engine/test_eagle", "engine/test_drafts_beside"),
    "eval/runs/journal.py": ("eval/test_journal", "eval/test_rerun", "eval/test_run"),
}  # fmt: skip
SIMULATION = ("slow/test_simulation_many",)
SLOW = "not (any_schedule or many_schedules or tight_pools)"  # what simulated schedules see as well, and sooner
COMPARE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATE = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add}
LONGEST = 180  # seconds of processor time that the tests of one mutant may take


class Mutant(NamedTuple):
    file: str  # relative to the package
    line: int
    what: str
    source: str  # of the whole file


def mutations(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What a node may become."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARE:
        new = copy.deepcopy(node)
        new.ops = [COMPARE[type(node.ops[0])]()]
        yield "comparison", new
    elif isinstance(node, ast.BoolOp):
        new = copy.deepcopy(node)
        new.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and/or", new
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not removed", node.operand
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPERATE:
        new = copy.deepcopy(node)
        new.op = OPERATE[type(node.op)]()
        yield "operator", new
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        yield "constant", ast.Constant(not node.value if isinstance(node.value, bool) else int(str(node.value)) + 1)
    elif isinstance(node, (ast.If, ast.While)):
        new = copy.deepcopy(node)
        new.test = ast.Constant(False)
        yield "condition never holds", new
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) or isinstance(node, ast.AugAssign):
        yield "statement removed", ast.Pass()


class Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return ast.copy_location(self.new, node) if node is self.old else self.generic_visit(node)


def mutants_of(path: Path, package: Path) -> list[Mutant]:
    """Of the statements in functions; not of what is raised: messages are tested by a few words."""
    source, found = path.read_text(), []
    tree = ast.parse(source)
    told = {id(node) for raised in ast.walk(tree) if isinstance(raised, ast.Raise) for node in ast.walk(raised)}
    for function in (n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))):
        for statement in function.body:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            found += [(n, *m) for n in ast.walk(statement) if id(n) not in told for m in mutations(n)]
    out = []
    for node, what, new in found:
        changed = Replace(node, new).visit(tree)
        text = ast.unparse(ast.fix_missing_locations(changed))
        Replace(new, node).visit(tree)
        out.append(Mutant(str(path.relative_to(package)), getattr(node, "lineno", 0), what, text))
    return out


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Imports one module of the package from other source."""

    def __init__(self, mutant: Mutant) -> None:
        self.path = str(ROOT / "fengine" / mutant.file)
        self.name = "fengine." + mutant.file.removesuffix(".py").replace("/", ".")
        self.source = mutant.source

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        return (
            importlib.util.spec_from_file_location(fullname, self.path, loader=self) if fullname == self.name else None
        )

    def get_filename(self, fullname: str) -> str:
        return self.path

    def get_data(self, path: Any) -> bytes:
        return self.source.encode() if str(path) == self.path else Path(path).read_bytes()


def import_libraries() -> None:
    """All that the package and the tests import, but for the package: a child need not."""
    probe = "import pytest, hypothesis, greenlet, fengine.api.engine, fengine.eval.runs.run, sys; print(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.split():
        if not name.startswith(("fengine", "__")):
            with suppress(Exception):
                importlib.import_module(name)


def judge(mutant: Mutant | None, tests: tuple[str, ...]) -> int:
    """In a child: the exit status of the tests with this mutant, None: with none."""
    import pytest

    devnull = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(devnull, stream)
    resource.setrlimit(resource.RLIMIT_CPU, (LONGEST, LONGEST))
    signal.alarm(6 * LONGEST)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    if mutant is not None:
        sys.meta_path.insert(0, Mutated(mutant))
    files = [f"tests/{name}.py" for name in tests]
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-k", SLOW, *files]))


def fork(mutant: Mutant | None, tests: tuple[str, ...]) -> int:
    """The process that judges."""
    if (pid := os.fork()) == 0:
        status = 9
        try:
            os.setpgid(0, 0)
            status = judge(mutant, tests)
        finally:
            os._exit(status)
    return pid


def wait() -> tuple[int, bool, float]:
    """(process, whether a test failed or could not end, its seconds) of a child that has ended."""
    pid, status, usage = os.wait4(-1, 0)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it started
    return pid, os.waitstatus_to_exitcode(status) != 0, usage.ru_utime + usage.ru_stime


def unsound(files: list[str], jobs: int) -> list[str]:
    """Those test files that fail without a mutant."""
    going: dict[int, str] = {}
    wrong: list[str] = []
    for name in [*files, ""]:
        while going and (len(going) == jobs or not name):
            pid, failed, _ = wait()
            wrong += [going.pop(pid)] if failed else [going.pop(pid)][1:]
        if name:
            going[fork(None, (name,))] = name
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", default=list(TESTS), help="patterns in fengine/")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["simulation"], help="see with these tests alone")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no more are begun after so long")
    parser.add_argument("--trust", action="store_true", help="the tests pass without a mutant; not tried first")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    package, until = ROOT / "fengine", time.monotonic() + 60 * options.minutes
    rows = {path: tests for name, tests in TESTS.items() for path in package.glob(name)}
    paths = sorted({path for pattern in options.files for path in package.glob(pattern)} & rows.keys())
    everything = [mutant for path in paths for mutant in mutants_of(path, package)]
    chosen = random.Random(options.seed).sample(everything, min(options.count, len(everything)))
    import_libraries()
    files = {name for path in paths for name in (SIMULATION if options.only else rows[path])}
    failing = [] if options.trust else unsound(sorted(files), options.jobs)
    print(f"left out, for they fail without a mutant: {failing}", flush=True)
    results, going = Results(options.json, package, len(everything), options.seed), {}
    for mutant in chosen:
        if time.monotonic() > until:
            break
        if len(going) == options.jobs:
            results.take(going, *wait())
        tests = SIMULATION if options.only else rows[package / mutant.file]
        going[fork(mutant, tuple(name for name in tests if name not in failing))] = mutant
    while going:
        results.take(going, *wait())
    print(f"{results.caught} of {len(results.found)} mutants caught, of {len(everything)} possible ones")


class Results:
    """What became of each mutant; written after each."""

    def __init__(self, path: Path | None, package: Path, possible: int, seed: int) -> None:
        self.path, self.package, self.possible, self.seed = path, package, possible, seed
        self.found: list[dict[str, Any]] = []
        before = json.loads(path.read_text())["survivors"] if path is not None and path.exists() else []
        self.reasons = {(m["file"], m["what"], m["source"]): m["reason"] for m in before}

    @property
    def caught(self) -> int:
        return sum(one["caught"] for one in self.found)

    def take(self, going: dict[int, Mutant], pid: int, caught: bool, seconds: float) -> None:
        mutant = going.pop(pid)
        line = (self.package / mutant.file).read_text().splitlines()[mutant.line - 1].strip()
        print("caught  " if caught else "SURVIVES", f"{mutant.file}:{mutant.line} {mutant.what}: {line}", flush=True)
        self.found.append({"file": mutant.file, "line": mutant.line, "what": mutant.what, "source": line,
                           "caught": caught, "seconds": round(seconds, 1)})  # fmt: skip
        if self.path is not None:
            self.path.write_text(json.dumps(self._summary(), indent=1) + "\n")

    def _summary(self) -> dict[str, Any]:
        files = sorted({one["file"] for one in self.found})
        by_file = {name: [one["caught"] for one in self.found if one["file"] == name] for name in files}
        survivors = [{key: one[key] for key in ("file", "line", "what", "source")} for one in self.found
                     if not one["caught"]]  # fmt: skip
        for one in survivors:
            one["reason"] = self.reasons.get((one["file"], one["what"], one["source"]), "")
        return {
            "environment": environment(),
            "seed": self.seed, "possible": self.possible, "mutants": len(self.found), "caught": self.caught,
            "cpu_seconds": round(sum(one["seconds"] for one in self.found)),
            "by_file": {name: f"{sum(seen)} of {len(seen)}" for name, seen in by_file.items()},
            "survivors": survivors,
        }  # fmt: skip


if __name__ == "__main__":
    main()
