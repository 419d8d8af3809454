"""Imports point one way, the host column never imports torch, and nothing forbidden stands in the package."""

import ast
import functools
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "fengine"
FILES = sorted(p for p in ROOT.rglob("*.py"))

# Packages in order: each may import those before it, and itself.
ORDER = list[str](
    (
        "errors compat config utils test ops models core worker engine tokenizer structured_output lora speculative "
        "multimodal api server eval run __main__"
    ).split()
)


@pytest.fixture(autouse=True, scope="module")
def no_garbage() -> Iterator[None]:
    """Half a million nodes stay: to look for garbage among them takes twice as long as to make them."""
    gc.disable()
    yield
    gc.enable()


def module_name(path: Path) -> str:
    return ".".join(part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Parsed once for all tests."""
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


@functools.cache
def imports_of(path: Path) -> list[tuple[str, ast.stmt]]:
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides where it points"
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fengine":
            base = node.module.removeprefix("fengine").lstrip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}".lstrip(".")
                target = ROOT / Path(*full.split("."))
                is_module = target.with_suffix(".py").exists() or target.is_dir()
                found.append((full if is_module else base, node))
        elif isinstance(node, ast.Import):
            found += [(a.name.removeprefix("fengine."), node) for a in node.names if a.name.startswith("fengine.")]
    return [(name, node) for name, node in found if name]


def test_packages_import_one_way() -> None:
    wrong = []
    for path in FILES:
        own = "__main__" if path.stem == "__main__" else module_name(path).partition(".")[0]  # nobody imports it
        for name, node in imports_of(path) if own else ():
            if ORDER.index(name.partition(".")[0]) > ORDER.index(own):
                wrong.append(f"{path}:{node.lineno}: {own} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles() -> None:
    edges = {module_name(p): {n for n, _ in imports_of(p)} for p in FILES}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module not in done:
            for name in edges.get(module, ()):
                visit(name, (*trail, module))
            done.add(module)

    for module in edges:
        visit(module, ())


def test_no_forbidden_words() -> None:
    for path in FILES:
        check_words(path, path.read_text())


def check_words(path: Path, source: str) -> None:
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"eval", "exec"}, f"{path}:{node.lineno}"
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {a.name.split(".")[0] for a in node.names} | {(getattr(node, "module", None) or "").split(".")[0]}
            assert not names & {"pickle", "dill", "cloudpickle", "marshal"}, f"{path}:{node.lineno}"
            assert "TYPE_CHECKING" not in {a.name for a in node.names}, f"{path}:{node.lineno}"
    assert "torch.load(" not in source and "hydra.utils.instantiate" not in source


# The engine, on the command line: `--help` needs no torch; optional libraries.
LAZY = {
    "eval.cli.engines",
    "eval.tasks.columns",
    "eval.report.page",
    "structured_output.backend",
    "tokenizer.pipeline",
    "multimodal.images",
    "eval.commands.lm_eval",
    "eval.harness.inspect_registry",
    "eval.commands.serve",
}


def test_no_imports_inside_functions() -> None:
    imports = (ast.Import, ast.ImportFrom)
    for path in FILES:
        if not any(isinstance(node, imports) and node.col_offset for node in nodes_of(path)):
            continue  # all stand at the left edge
        for node in nodes_of(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inner = [n for n in ast.walk(node) if isinstance(n, imports)]
                assert not inner or module_name(path) in LAZY, f"{path}:{inner[0].lineno}"


def test_host_column_needs_no_torch() -> None:
    modules = "fengine.core.scheduler, fengine.core.prefix_cache, fengine.structured_output.backend"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
