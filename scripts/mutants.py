"""Mutation tests: small faults planted one at a time into core, loop and journal; which of them do the tests see?

    python scripts/mutants.py --count 300 --json scripts/results/mutants.json
    python scripts/mutants.py --files core/scheduler.py --count 40
    python scripts/mutants.py --planted faults.json         # faults by hand: a list of {name, file, old, new}

One process collects the tests of LANES. A child runs them all under a tracer, and tells of each how long it takes and
which lines it runs. Then one child is forked for each mutant: the code of one function is replaced in memory (a
comparison, an operator, a constant, a condition or a statement changed), and the tests that run its lines are run, the
quickest first, simulated schedules before, up to the first failure. What runs too long counts as seen.

A mutant that no test sees is printed with its line: either the line is not needed, or an oracle is missing, or `reason`
in the JSON file tells why neither is; reasons stay when the file is written again. What is raised or asserted is not
mutated, nor left out where it is an InvariantError, nor is `strict=True`: only a fault meets those. A planted fault
whose `old` text is not found once is left out by name.
"""

import argparse
import ast
import copy
import gc
import importlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from difflib import SequenceMatcher
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest
from measure import environment

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fengine"
FILES = (
    "core/*.py", "engine/engine_core.py", "engine/inbox.py", "engine/output_processor.py", "engine/request_state.py",
    "engine/stepper.py", "engine/readout.py", "engine/steering.py", "api/sessions.py", "api/streams.py",
    "speculative/ngram.py", "speculative/pace.py", "speculative/draft.py", "speculative/chain.py",
    "speculative/proposers.py", "eval/runs/journal.py",
)  # fmt: skip
LANES = (
    "unit/test_adapter_slots.py", "unit/test_image_rows.py", "unit/test_p*.py", "unit/test_request.py",
    "unit/test_scheduler.py", "unit/test_steps.py", "unit/test_window_pages.py", "engine", "eval/test_journal.py",
    "eval/test_rerun.py", "eval/test_run.py", "eval/test_trace.py", "slow/test_simulation_many.py",
)  # fmt: skip
COMPARE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATE = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add}
BUDGET = 10.0  # seconds that the tests of one mutant take in all, without it; the longest are left out
OFTEN = 64  # calls of a function in one test, beyond which its lines are seldom looked at
HANGS = 6  # seconds of processor time, beyond ten times what a test takes without a mutant


class Mutant(NamedTuple):
    """`lines` of the source as it is that tests must run to see it; `code` of the whole file."""

    file: str  # relative to the package
    line: int
    what: str
    lines: frozenset[int]
    code: CodeType


# -- mutants -----------------------------------------------------------------------------------------------------------


def mutations(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What a node may become. What is left out stays as dead code, so that closures have the variables they had."""
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
    elif isinstance(node, (ast.If, ast.While)) and "InvariantError" not in ast.unparse(node.body[0]):
        new = copy.copy(node)
        new.test = ast.BoolOp(ast.And(), [ast.Constant(False), node.test])
        yield "condition never holds", new
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) or isinstance(node, ast.AugAssign):
        yield "statement removed", ast.If(ast.Constant(False), [node], [])


class Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return ast.copy_location(self.new, node) if node is self.old else self.generic_visit(node)


def mutants_of(path: Path) -> Iterator[tuple[ast.Module, ast.AST, str, ast.AST]]:
    """(module, node, what, new node) of the statements in functions, not of what is raised."""
    tree = ast.parse(path.read_text())
    guards = (node for node in ast.walk(tree) if isinstance(node, (ast.Raise, ast.Assert)))
    told = {id(node) for guard in guards for node in ast.walk(guard)}
    told |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "strict"}
    for function in (n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))):
        for statement in function.body:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            for node in ast.walk(statement):
                if id(node) not in told:
                    yield from ((tree, node, *mutation) for mutation in mutations(node))


def planted(path: Path, tree: ast.Module, node: Any, what: str, new: ast.AST) -> Mutant:
    """The mutant, compiled."""
    changed = Replace(node, new).visit(tree)
    code = compile(ast.fix_missing_locations(changed), str(path), "exec")
    Replace(new, node).visit(tree)
    last: Any = node.test.end_lineno if isinstance(node, (ast.If, ast.While)) else node.end_lineno
    return Mutant(str(path.relative_to(PACKAGE)), node.lineno, what, frozenset(range(node.lineno, last + 1)), code)


def by_hand(faults: list[dict[str, str]]) -> Iterator[Mutant]:
    """Faults that are told as text; one that no longer fits is left out."""
    for fault in faults:
        path = PACKAGE / fault["file"]
        source = path.read_text() if path.exists() else ""
        if source.count(fault["old"]) != 1:
            print(f"left out, its text is not found once: {fault['name']}", flush=True)
            continue
        text = source.replace(fault["old"], fault["new"])
        blocks = SequenceMatcher(None, before := source.splitlines(), text.splitlines(), False).get_opcodes()
        changed = [range(a + 1, max(b, a + 1) + 1) for tag, a, b, _, _ in blocks if tag != "equal"]
        lines = {line for block in changed for line in block if line <= len(before)}
        yield Mutant(fault["file"], min(lines), fault["name"], frozenset(lines), compile(text, str(path), "exec"))


def functions_of(code: CodeType) -> Iterator[CodeType]:
    """Functions of a module and of its classes."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            if "<locals>" not in inner.co_qualname:
                yield from functions_of(inner)


def plant(mutant: Mutant, living: dict[tuple[str, str], list[FunctionType]]) -> None:
    """Gives the functions of the module the mutant's code."""
    path, nth = str(PACKAGE / mutant.file), defaultdict[str, int](int)
    for code in functions_of(mutant.code):
        known = living.get((path, code.co_qualname), [])
        starts = sorted({function.__code__.co_firstlineno for function in known})
        at = nth[code.co_qualname]  # a property has more than one of the same name
        nth[code.co_qualname] += 1
        for function in known:
            if at < len(starts) and function.__code__.co_firstlineno == starts[at]:
                function.__code__ = code


# -- children ----------------------------------------------------------------------------------------------------------


def fork(body: Callable[[], int]) -> int:
    """A process that does this, and whatever it prints is lost."""
    if (pid := os.fork()) == 0:
        status = 9
        try:
            os.setpgid(0, 0)
            devnull = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(devnull, stream)
            status = body()
        finally:
            os._exit(status)
    return pid


def wait() -> tuple[int, int, float]:
    """(process, status, its seconds) of a child that has ended."""
    pid, status, usage = os.wait4(-1, 0)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it started
    return pid, os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime


class Lines:
    """Which lines of some files run, in any thread. Modifies: itself."""

    def __init__(self, paths: set[str]) -> None:
        self.paths = paths
        self.found: dict[CodeType, set[int]] = {}
        self.most: dict[CodeType, int] = {}
        self.calls = Counter[CodeType]()

    def take(self) -> dict[str, list[int]]:
        """Those since the last time."""
        found, self.found, by_file = self.found, {}, defaultdict[str, set[int]](set)
        self.calls.clear()
        for code, lines in found.items():
            by_file[os.path.relpath(code.co_filename, PACKAGE)] |= lines
        return {file: sorted(lines) for file, lines in by_file.items()}

    def trace(self, frame: Any, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in self.paths:
            return None
        self.calls[code] = count = self.calls[code] + 1
        if count > OFTEN and count & (count - 1):  # a look now and then
            return None
        if (most := self.most.get(code)) is None:
            most = self.most[code] = len({line for _, _, line in code.co_lines() if line is not None})
        lines = self.found.setdefault(code, set())
        lines.add(frame.f_lineno)
        return None if len(lines) == most else self._line

    def _line(self, frame: Any, event: str, _: Any) -> Any:
        self.found.setdefault(frame.f_code, set()).add(frame.f_lineno)
        return self._line


class Judge:
    """Plugin of pytest: instead of running the tests once it runs them for each mutant."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.failed = options, False
        self.tests: dict[str, Any] = {}  # by id: seconds and lines

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or report.failed

    def passes(self, item: pytest.Item, after: pytest.Item | None) -> bool:
        self.failed = False
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        return not self.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        options, paths = self.options, {path for pattern in self.options.files for path in PACKAGE.glob(pattern)}
        for path in sorted(paths):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        if options.planted:
            chosen = list(by_hand(json.loads(options.planted.read_text())))
            paths, possible = {PACKAGE / mutant.file for mutant in chosen}, len(chosen)
        else:
            everything = [(path, *found) for path in sorted(paths) for found in mutants_of(path)]
            sample = random.Random(options.seed).sample(everything, min(options.count, len(everything)))
            chosen, possible = [planted(*one) for one in sample], len(everything)
        self.items = {item.nodeid: item for item in session.items}
        self.tests = self._traced(paths)
        print(f"{len(self.tests)} tests, {len(chosen)} mutants", flush=True)
        results, going, until = Results(options, possible), {}, time.monotonic() + 60 * options.minutes
        self.living = defaultdict[tuple[str, str], list[FunctionType]](list)
        for found in gc.get_objects():
            if type(found) is FunctionType and found.__code__.co_filename.startswith(str(PACKAGE)):
                self.living[found.__code__.co_filename, found.__code__.co_qualname].append(found)
        for mutant in chosen:
            if time.monotonic() > until:
                break
            if len(going) == options.jobs:
                results.take(going, *wait())
            going[fork(lambda mutant=mutant: self._judge(mutant))] = mutant
        while going:
            results.take(going, *wait())
        print(f"{results.caught} of {len(results.found)} mutants caught, of {possible} possible ones")
        return True

    def _traced(self, paths: set[Path]) -> dict[str, Any]:
        """Each test that passes: its seconds, and its lines by file. One that hangs under the tracer is left out."""
        path = self.options.map or Path(tempfile.mkdtemp()) / "map.jsonl"
        items = list(self.items.values())
        while (done := len(path.read_text().splitlines()) if path.exists() else 0) < len(items):
            fork(lambda done=done: self._trace({str(path) for path in paths}, items[done:], path))
            if wait()[1]:
                with path.open("a") as file:
                    print("null", file=file)
        told = map(json.loads, path.read_text().splitlines())
        return {test["name"]: test for test in told if test is not None and test["name"] in self.items}

    def _trace(self, paths: set[str], items: list[pytest.Item], map_file: Path) -> int:
        """In a child: writes what each test runs. An exception thrown into a thread may hit its tracer, and be lost:
        what waits for it ends the child."""
        lines = Lines(paths)
        with map_file.open("a", buffering=1) as file:
            for item, after in zip(items, [*items[1:], None], strict=True):
                began = time.process_time()
                signal.alarm(60)
                threading.settrace(lines.trace)
                sys.settrace(lines.trace)
                passed = self.passes(item, after)
                sys.settrace(None)
                told = {"name": item.nodeid, "seconds": time.process_time() - began, "lines": lines.take()}
                print(json.dumps(told if passed else None), file=file)
        return 0

    def _judge(self, mutant: Mutant) -> int:
        """In a child: 1 if a test fails with this mutant, 2 if none runs its lines, 0 if all pass."""
        plant(mutant, self.living)
        seeing = [
            name for name, test in self.tests.items() if not mutant.lines.isdisjoint(test["lines"].get(mutant.file, ()))
        ]
        seeing.sort(key=lambda name: ("engine/test_simulation" not in name, self.tests[name]["seconds"]))
        spent, chosen = 0.0, []
        for name in seeing:
            spent += self.tests[name]["seconds"]
            if spent < BUDGET:
                chosen.append(name)
        for name, after in zip(chosen, [*chosen[1:], None], strict=True):
            limit = 10 * self.tests[name]["seconds"] + HANGS
            used = time.process_time()
            resource.setrlimit(resource.RLIMIT_CPU, (int(used + limit) + 1, resource.RLIM_INFINITY))
            signal.alarm(int(5 * limit))  # it may wait, too
            if not self.passes(self.items[name], self.items.get(after or "")):
                return 1
        return 0 if chosen else 2


class Results:
    """What became of each mutant; written after each."""

    def __init__(self, options: argparse.Namespace, possible: int) -> None:
        self.path, self.possible, self.seed = options.json, possible, options.seed
        self.found: list[dict[str, Any]] = []
        before = json.loads(self.path.read_text())["survivors"] if self.path and self.path.exists() else []
        self.reasons = {(m["file"], m["what"], m["source"]): m["reason"] for m in before}

    @property
    def caught(self) -> int:
        return sum(one["caught"] for one in self.found)

    def take(self, going: dict[int, Mutant], pid: int, status: int, seconds: float) -> None:
        mutant = going.pop(pid)
        line = (PACKAGE / mutant.file).read_text().splitlines()[mutant.line - 1].strip()
        verdict = {0: "SURVIVES", 2: "NOT RUN "}.get(status, "caught  ")
        print(f"{verdict} {seconds:5.1f} s {mutant.file}:{mutant.line} {mutant.what}: {line}", flush=True)
        self.found.append({"file": mutant.file, "line": mutant.line, "what": mutant.what, "source": line,
                           "caught": status not in (0, 2), "seconds": seconds})  # fmt: skip
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", default=FILES, help="patterns in fengine/")
    parser.add_argument("--tests", nargs="+", default=LANES, help="in tests/")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no more are begun after so long")
    parser.add_argument("--planted", type=Path, help="faults by hand, in place of those that are made")
    parser.add_argument("--map", type=Path, help="which test runs which lines: written, or read if it is there")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
        os.chdir(ROOT)
        sys.path.insert(0, str(ROOT))
        given = [str(path) for name in options.tests for path in sorted(Path("tests").glob(name))]
        plugins = ["no:cacheprovider", "no:timeout", "no:xdist", "no:warnings"]
        pytest.main([*(f"-p{name}" for name in plugins), "-qs", *given], plugins=[Judge(options)])


if __name__ == "__main__":
    main()
