"""How large the house is, and what one request walks through: `python scripts/structure.py [--trace] [--json FILE]`.

Lines and files of `fengine/` by package, the arrows between packages (and those that run up), the longest chain of
packages, functions by length and cyclomatic complexity (counted as radon does); with --trace the files and types that
one `generate()` with a penalty uses on the CPU.
"""

import argparse
import ast
import json
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent / "fengine"
ORDER = (
    "errors config ops models core worker engine tokenizer structured_output lora speculative multimodal "
    "api server eval run"
).split()
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert, ast.IfExp, ast.comprehension)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def room(path: Path) -> str:
    """The package or root module that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def complexity(function: Function) -> int:
    """Cyclomatic complexity, without that of functions inside."""
    total, stack = 1, list(ast.iter_child_nodes(function))
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        total += isinstance(node, BRANCHES) + isinstance(node, ast.match_case)
        if isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        if isinstance(node, ast.comprehension):
            total += len(node.ifs)
        stack += ast.iter_child_nodes(node)
    return total


def is_kernel(function: Function) -> bool:
    """Whether Triton or Gluon compiles it."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def imported(tree: ast.AST) -> set[str]:
    """The rooms that a file imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fengine":
            parts = (node.module or "").split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("fengine.")}
    return found


def longest_chain(edges: dict[str, set[str]]) -> list[str]:
    memo: dict[str, list[str]] = {}

    def chain(name: str) -> list[str]:
        if name not in memo:
            memo[name] = [name]  # a circle ends here
            memo[name] = [name, *max((chain(next_) for next_ in sorted(edges[name])), key=len, default=[])]
        return memo[name]

    return max((chain(name) for name in sorted(edges)), key=len)


def figures() -> dict[str, Any]:
    files = {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
    lines, count, edges = Counter[str](), Counter[str](), defaultdict[str, set[str]](set)
    for path, tree in files.items():
        lines[room(path)] += len(path.read_text().splitlines())
        count[room(path)] += 1
        if path.name != "__main__.py":  # what `python -m` runs, and nobody imports
            edges[room(path)] |= imported(tree) - {room(path)}
    rooms = {name for name in lines if not name.startswith("__")}
    arrows = {name: edges[name] & rooms for name in rooms}
    upward = [
        f"{own} -> {other}"
        for own in sorted(arrows)
        for other in sorted(arrows[own])
        if own in ORDER and other in ORDER and ORDER.index(other) > ORDER.index(own)
    ]
    every = [(path, f) for path, tree in files.items() for f in functions(tree)]
    size = {(path, f.lineno): (f.end_lineno or 0) - f.lineno + 1 for path, f in every}
    long = [(size[path, f.lineno], name_of(path, f)) for path, f in every if not is_kernel(f)]
    complex_ = sorted(((complexity(f), name_of(path, f)) for path, f in every if not is_kernel(f)), reverse=True)
    big = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in files}
    return {
        "lines": sum(lines.values()),
        "files": len(files),
        "by room": {name: [lines[name], count[name]] for name in sorted(lines, key=lambda n: -lines[n])},
        "rooms": len(rooms),
        "longest chain of rooms": longest_chain(arrows),
        "arrows that run up": upward,
        "functions over 40 lines": sorted((entry for entry in long if entry[0] > 40), reverse=True),
        "functions of complexity over 15": [entry for entry in complex_ if entry[0] > 15],
        "files over 300 lines": {name: size for name, size in big.items() if size > 300},
    }


def name_of(path: Path, function: Function) -> str:
    return f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"


class Trace:
    """Files and types of fengine that run, in all threads. Modifies: itself."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.types: dict[str, None] = {}

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(str(ROOT)):
            self.files.add(code.co_filename)
        made: Any = None
        if code.co_name == "__init__" and "self" in frame.f_locals:
            made = type(frame.f_locals["self"])
        elif "_cls" in frame.f_locals and isinstance(frame.f_locals["_cls"], type):  # a named tuple
            made = frame.f_locals["_cls"]
        if made is not None and made.__module__.startswith("fengine."):
            self.types[f"{made.__module__}.{made.__qualname__}"] = None


def traced() -> dict[str, Any]:
    """What one `generate()` with a penalty runs through: a first call warms up, the second is traced."""
    from fengine import Engine

    trace, asked = Trace(), {"max_new_tokens": 4, "frequency_penalty": 0.5, "sampling_seed": 1}
    threading.setprofile(trace)  # threads that begin from here on
    with Engine(model_path="box", device="cpu") as engine:
        engine.generate("Once upon a time", asked)
        trace.files.clear()
        trace.types.clear()
        sys.setprofile(trace)
        engine.generate("Once upon a time", asked)
        sys.setprofile(None)
        threading.setprofile(None)
        files, types = sorted(trace.files), list(trace.types)  # what ends the engine is no part of the call
    sizes = {str(Path(name).relative_to(ROOT)): len(Path(name).read_text().splitlines()) for name in files}
    return {
        "traced files": len(sizes),
        "traced lines": sum(sizes.values()),
        "traced": dict(sorted(sizes.items())),
        "types": types,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = figures() | (traced() if options.trace else {})
    text = json.dumps(found, indent=1)
    if options.json:
        options.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
