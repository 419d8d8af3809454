"""Mutation tests: small faults planted one at a time into core, loop and journal; which of them do the tests see?

    python scripts/mutants.py --seed 3 --count 60 --json scripts/results/mutants.json
    python scripts/mutants.py --files core/scheduler.py --count 40
    python scripts/mutants.py --again --json scripts/results/mutants.json    # what survived, as the tests are now
    python scripts/mutants.py --planted faults.json         # faults by hand: a list of {name, file, old, new}

A child is forked for each mutant. There the code of one function is replaced in memory (a comparison, an operator, a
constant, a condition or a statement changed); then simulated schedules are run, and after them the tests BESIDE its
file, up to the first failure. What runs too long counts as seen. Without a mutant those tests must pass.

The JSON file keeps all samples, and with its line each mutant that no test saw: either the line is not needed, or an
oracle is missing, or `reason` tells why neither is. One that is `equivalent` by its reason changes nothing that anybody
could ask for; it counts neither as caught nor as a survivor, nor does one whose line has gone since. What is raised or
asserted is not mutated, nor left out where it is an InvariantError, nor is `strict=True`: only a fault meets those. A
planted fault whose `old` text is not found once is left out by name.
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
import time
from collections import defaultdict
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
    "engine/stepper.py", "engine/readout.py", "api/sessions.py", "api/streams.py",
    "speculative/ngram.py", "speculative/pace.py", "speculative/draft.py", "speculative/chain.py",
    "speculative/proposers.py", "speculative/memo.py", "eval/runs/journal.py",
)  # fmt: skip
QUEUE = ("unit/test_scheduler.py", "unit/test_prefix_cache.py", "unit/test_pages.py", "unit/test_window_pages.py",
         "unit/test_adapter_slots.py", "unit/test_image_rows.py", "unit/test_request.py")  # fmt: skip
OPTIONS = ("unit/test_request.py", "engine/test_server_args.py", "engine/test_api_options.py")
DRAFTS = ("unit/test_pace.py", "engine/test_drafts_with_all.py", "engine/test_draft.py", "engine/test_drafts_beside.py",
          "engine/test_speculation.py")  # fmt: skip
BESIDE = {  # by how the name of a file begins: the first that fits
    "core/sampling_params": OPTIONS, "core/parameter_kinds": OPTIONS, "core/scalars": OPTIONS,
    "core/plain": ("engine/test_plain.py",), "core/recording": ("engine/test_recording.py",),
    "core/step_trace": ("unit/test_steps.py", "engine/test_speculation.py", "eval/test_trace.py"),
    "core/speculation": ("engine/test_speculation.py", "unit/test_scheduler.py"),
    "core/simulated_device": ("engine/test_recording.py", "engine/test_simulation.py"), "core": QUEUE,
    "api/sessions": ("engine/test_sessions.py",), "api/streams": ("engine/test_api_streams.py",),
    "eval/runs/folder": ("eval/test_eval.py", "eval/test_faults.py"),
    "eval": ("eval/test_journal.py", "eval/test_rerun.py"),
    "engine/readout": ("engine/test_encode.py", "engine/test_extended.py", "engine/test_api_results.py",
                       "engine/test_speculation.py"),
    "engine": ("engine/test_ends.py", "engine/test_engine.py", "engine/test_lifecycle.py"),
    "speculative": DRAFTS,
    "worker": ("engine/test_engine.py", "engine/test_lora.py", "engine/test_extended.py", "engine/test_speculation.py",
               "engine/test_drafts_with_all.py"),
}  # fmt: skip
ALONE = ("eval", "core/recording", "core/sampling", "core/parameter", "core/plain", "core/scalars")
COMPARE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATE = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add}
HANGS = 150  # seconds of processor time of the schedules of one mutant, or of its tests; it may wait, too
CAUGHT = {1: "by tests", 2: "by schedules"}  # by the status of a child; another one: it hangs, or ends the process


class Mutant(NamedTuple):
    """`code` of the whole file."""

    file: str  # relative to the package
    line: int
    what: str
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
    return Mutant(str(path.relative_to(PACKAGE)), node.lineno, what, code)


def by_hand(faults: list[dict[str, str]]) -> Iterator[Mutant]:
    """Faults that are told as text; one that no longer fits is left out."""
    for fault in faults:
        path = PACKAGE / fault["file"]
        source = path.read_text() if path.exists() else ""
        if source.count(fault["old"]) != 1:
            print(f"left out, its text is not found once: {fault['name']}", flush=True)
            continue
        text = source.replace(fault["old"], fault["new"])
        blocks = SequenceMatcher(None, source.splitlines(), text.splitlines(), False).get_opcodes()
        line = next(a + 1 for tag, a, *_ in blocks if tag != "equal")
        yield Mutant(fault["file"], line, fault["name"], compile(text, str(path), "exec"))


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


def beside(file: str) -> tuple[str, ...]:
    return next(tests for start, tests in BESIDE.items() if file.startswith(start))


def limit() -> None:
    """What runs too long from here on ends this process."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + HANGS, resource.RLIM_INFINITY))
    signal.alarm(5 * HANGS)


def judge(file: str, mutant: Mutant | None, living: dict[tuple[str, str], list[FunctionType]], schedules: int) -> int:
    """In a child: one of CAUGHT, or 0 if nothing fails with this mutant of a file, or with none."""
    if mutant is not None:
        plant(mutant, living)
    limit()
    if not file.startswith(ALONE):
        from simulated_plan import plan_of  # type: ignore[import-not-found]
        from simulated_run import violation  # type: ignore[import-not-found]

        if any(violation(plan_of(seed)) for seed in range(schedules)):
            return 2
    tests = beside(file)
    plugins = ["no:cacheprovider", "no:timeout", "no:xdist", "no:warnings"]
    limit()
    return int(pytest.main(["-qx", *(f"-p{name}" for name in plugins), *(f"tests/{name}" for name in tests)]) != 0)


# -- results -----------------------------------------------------------------------------------------------------------


class Results:
    """What became of each mutant; written after each. Modifies: itself, the JSON file."""

    def __init__(self, options: argparse.Namespace, possible: int) -> None:
        self.path, self.again = options.json, options.again
        known = json.loads(self.path.read_text()) if self.path and self.path.exists() else {}
        self.samples: list[dict[str, Any]] = known.get("samples", [])
        self.survivors: list[dict[str, Any]] = known.get("survivors", [])
        self.sample = {"seed": options.seed, "possible": possible, "mutants": 0, "caught": 0, "cpu_seconds": 0.0,
                       "environment": environment()}  # fmt: skip
        if options.again:
            for one in self.survivors:
                one["now"] = "equivalent" if one["reason"].startswith("equivalent") else "gone"  # until it is judged
        else:
            self.samples.append(self.sample)

    def take(self, mutant: Mutant, status: int, seconds: float) -> None:
        line = line_of(mutant.file, mutant.line)
        verdict = CAUGHT.get(status, "hangs") if status else "SURVIVES"
        print(f"{verdict:12} {seconds:5.1f} s {mutant.file}:{mutant.line} {mutant.what}: {line}", flush=True)
        if self.again:
            for one in self.survivors:
                if key_of(one) == (mutant.file, mutant.what, line) and one["now"] not in ("equivalent", "survives"):
                    one |= {"now": "caught" if status else "survives", "line": mutant.line}
        else:
            self.sample["mutants"] += 1
            self.sample["caught"] += status != 0
            self.sample["cpu_seconds"] = round(self.sample["cpu_seconds"] + seconds, 1)
            if not status:
                self.survivors.append({"file": mutant.file, "line": mutant.line, "what": mutant.what, "source": line,
                                       "seed": self.sample["seed"], "now": "survives", "reason": ""})  # fmt: skip
        if self.path is not None:
            self.path.write_text(json.dumps(self.told(), indent=1) + "\n")

    def told(self) -> dict[str, Any]:
        judged = sum(sample["mutants"] for sample in self.samples)
        now = {name: sum(one["now"] == name for one in self.survivors)
               for name in ("caught", "equivalent", "gone", "survives")}  # fmt: skip
        count = judged - now["equivalent"] - now["gone"]
        caught = count - now["survives"]
        told = {
            "judged": judged,
            "caught": caught,
            "of_these_later": now["caught"],
            "equivalent": now["equivalent"],
            "gone": now["gone"],
            "survive": now["survives"],
            "percent_caught": round(100 * caught / (count or 1), 1),
        }
        return told | {"samples": self.samples, "survivors": self.survivors}


def line_of(file: str, line: int) -> str:
    return (PACKAGE / file).read_text().splitlines()[line - 1].strip()


def key_of(one: dict[str, Any]) -> tuple[str, str, str]:
    return one["file"], one["what"], one["source"]


def chosen(options: argparse.Namespace) -> tuple[list[Mutant], int]:
    """The mutants to judge, and how many there could be."""
    if options.planted:
        found = list(by_hand(json.loads(options.planted.read_text())))
        return found, len(found)
    paths = sorted({path for pattern in options.files for path in PACKAGE.glob(pattern)})
    everything = [(path, *found) for path in paths for found in mutants_of(path)]
    if not options.again:
        sample = random.Random(options.seed).sample(everything, min(options.count, len(everything)))
        return [planted(*one) for one in sample], len(everything)
    known = json.loads(options.json.read_text())["survivors"]
    keys = {key_of(one) for one in known if not one["reason"].startswith("equivalent")}
    places = [(str(path.relative_to(PACKAGE)), node, what) for path, _, node, what, _ in everything]
    again = [(file, what, line_of(file, node.lineno)) in keys for file, node, what in places]  # type: ignore[attr-defined]
    return [planted(*one) for one, wanted in zip(everything, again, strict=True) if wanted], len(everything)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", default=FILES, help="patterns in fengine/")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--schedules", type=int, default=1000, help="simulated ones; 0: tests alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no more are begun after so long")
    parser.add_argument("--again", action="store_true", help="those of the JSON file that survived")
    parser.add_argument("--planted", type=Path, help="faults by hand, in place of those that are made")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    mutants, possible = chosen(options)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    importlib.import_module("simulated_run")
    for path in sorted({path for pattern in FILES for path in PACKAGE.glob(pattern)}):
        importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    living = defaultdict[tuple[str, str], list[FunctionType]](list)
    for found in gc.get_objects():
        if type(found) is FunctionType and found.__code__.co_filename.startswith(str(PACKAGE)):
            living[found.__code__.co_filename, found.__code__.co_qualname].append(found)
    results, going, until = Results(options, possible), dict[int, Mutant](), time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
        os.chdir(ROOT)
        for file in {beside(mutant.file): mutant.file for mutant in mutants}.values():
            fork(lambda file=file: judge(file, None, living, 0))
            if wait()[1]:
                sys.exit(f"{', '.join(beside(file))}: some of these fail without a mutant")
        for mutant in (*mutants, None):
            while going and (mutant is None or len(going) == options.jobs):
                pid, status, seconds = wait()
                results.take(going.pop(pid), status, seconds)
            if mutant is not None and time.monotonic() < until:
                going[fork(lambda mutant=mutant: judge(mutant.file, mutant, living, options.schedules))] = mutant
    told = results.told()
    print(*(f"{name} {value}" for name, value in told.items() if type(value) in (int, float)), sep=", ")


if __name__ == "__main__":
    main()
