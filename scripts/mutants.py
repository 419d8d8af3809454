"""Mutation tests: small faults planted one at a time into the host column; which of them do the tests see?

    python scripts/mutants.py --count 300 --jobs 2 --json scripts/results/mutants.json
    python scripts/mutants.py --files core/scheduler.py --count 40

First every test file of the lanes runs once and tells which functions it enters. Then each mutant (a comparison, an
operator, a constant, a condition or a statement changed in a copy of the tree) is run against the files that enter its
function, the quickest first, until one fails. A mutant that no test sees is printed with its line: either the line is
not needed, or an oracle is missing. Time-outs count as seen.
"""

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FILES = ("core/*.py", "engine/engine_core.py", "engine/output_processor.py", "speculative/*.py")
LANES = ("tests/unit", "tests/engine")
COMPARE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATE = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add}
# Loaded into pytest by -p: which functions of the package does each test file enter?
TRACER = """
import json, os, sys, threading
from collections import defaultdict
entered, current, times = defaultdict(set), [None], defaultdict(float)
failed = []  # under a profiler: timing and garbage differ
root = os.environ["MUTANTS_PACKAGE"]
def profile(frame, event, _):
    if event == "call" and current[0] and frame.f_code.co_filename.startswith(root):
        entered[current[0]].add(frame.f_code.co_filename[len(root) + 1:] + ":" + str(frame.f_code.co_firstlineno))
def pytest_runtest_protocol(item, nextitem):
    current[0] = os.path.relpath(str(item.path))
    threading.setprofile(profile); sys.setprofile(profile)
def pytest_runtest_logreport(report):
    times[report.nodeid.split("::")[0]] += report.duration
    if report.failed:
        failed.append(report.nodeid)
def pytest_sessionfinish(session):
    sys.setprofile(None)
    with open(os.environ["MUTANTS_MAP"], "w") as out:
        json.dump({"entered": {k: sorted(v) for k, v in entered.items()}, "times": times, "failed": failed}, out)
"""


class Mutant(NamedTuple):
    file: str  # relative to the package
    function: int  # first line of the function around it, decorators included
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
        yield "constant", ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
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
    source, found = path.read_text(), []
    tree = ast.parse(source)
    for function in (n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))):
        first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
        for statement in function.body:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            for node in ast.walk(statement):
                for what, new in mutations(node):
                    found.append((function, first, node, what, new))
    out = []
    for _, first, node, what, new in found:
        changed = Replace(node, new).visit(tree)
        text = ast.unparse(ast.fix_missing_locations(changed))
        Replace(new, node).visit(tree)
        out.append(Mutant(str(path.relative_to(package)), first, getattr(node, "lineno", 0), what, text))
    return out


def pytest(folder: Path, arguments: list[str], timeout: float, environment: dict[str, str]) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"} | environment
    try:
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=timeout).returncode
    except subprocess.TimeoutExpired:
        return 1


def copy_tree(target: Path) -> Path:
    skip = shutil.ignore_patterns(".git", "__pycache__", ".venv", "outputs")
    return Path(shutil.copytree(ROOT, target, ignore=skip))


def survey(folder: Path) -> tuple[dict[str, list[str]], dict[str, float], list[str]]:
    """Test files by the function ("core/scheduler.py:104") that they enter; seconds of each file; tests to leave out,
    which fail under a profiler."""
    (folder / "mutants_tracer.py").write_text(TRACER)
    seen = folder / "mutants_map.json"
    environment = {"MUTANTS_PACKAGE": str(folder / "fengine"), "MUTANTS_MAP": str(seen)}
    pytest(folder, ["-p", "mutants_tracer", *LANES], 3600, environment)
    told, by_function = json.loads(seen.read_text()), defaultdict(list)
    for test, functions in told["entered"].items():
        for function in functions:
            by_function[function].append(test)
    return by_function, told["times"], [f"--deselect={name}" for name in told["failed"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", default=list(FILES), help="patterns in fengine/")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    package = ROOT / "fengine"
    paths = sorted({path for pattern in options.files for path in package.glob(pattern)})
    everything = [mutant for path in paths for mutant in mutants_of(path, package)]
    chosen = random.Random(options.seed).sample(everything, min(options.count, len(everything)))
    with tempfile.TemporaryDirectory() as scratch:
        folders: SimpleQueue[Path] = SimpleQueue()
        for index in range(options.jobs):
            folders.put(copy_tree(Path(scratch) / str(index)))
        first = folders.get()
        by_function, seconds, without = survey(first)
        print(f"left out: {without}", flush=True)
        folders.put(first)

        def judge(mutant: Mutant) -> dict[str, Any]:
            tests = sorted(by_function.get(f"{mutant.file}:{mutant.function}", []), key=lambda t: seconds.get(t, 0.0))
            began, folder, caught = time.perf_counter(), folders.get(), None
            target = folder / "fengine" / mutant.file
            original = target.read_text()
            try:
                target.write_text(mutant.source)
                for test in tests:
                    if pytest(folder, ["-x", test, *without], 60 + 10 * seconds.get(test, 0.0), {}):
                        caught = test
                        break
            finally:
                target.write_text(original)
                folders.put(folder)
            line = (package / mutant.file).read_text().splitlines()[mutant.line - 1].strip()
            told = {"file": mutant.file, "line": mutant.line, "what": mutant.what, "source": line, "caught by": caught}
            print(
                "caught  " if caught else "SURVIVES", f"{mutant.file}:{mutant.line} {mutant.what}: {line}", flush=True
            )
            return told | {"tests": len(tests), "seconds": round(time.perf_counter() - began, 1)}

        with ThreadPoolExecutor(options.jobs) as pool:
            results = list(pool.map(judge, chosen))
    caught = sum(result["caught by"] is not None for result in results)
    print(f"{caught} of {len(results)} mutants caught, of {len(everything)} possible ones")
    if options.json:
        options.json.write_text(
            json.dumps({"seed": options.seed, "caught": caught, "mutants": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
