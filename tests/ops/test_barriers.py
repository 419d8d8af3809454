"""Kernels for Hopper keep to what shared memory asks of barriers."""

import ast
from pathlib import Path

OPS = Path(__file__).resolve().parents[2] / "fengine/ops"
MAKERS = {"barriers", "barrier_ring"}


def unused(tree: ast.AST) -> list[str]:
    """Names that barriers are given and that nothing reads, in each function of a file."""
    found = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
            read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                    made = isinstance(node.value.func, ast.Name) and node.value.func.id in MAKERS
                    bound = {
                        name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)
                    }
                    found += [f"{function.name}: {name}" for name in bound - read if made]
    return found


def test_every_barrier_is_used():
    """The compiler gives the memory of one that is not to other values, and a GPU that interrupts the kernel for
    another process writes the barrier over them: rows of several chunks were not merged, and their counters stood."""
    files = sorted(OPS.glob("*.py"))
    assert [f"{path.name}: {what}" for path in files for what in unused(ast.parse(path.read_text()))] == []
    assert unused(ast.parse("def f():\n    a, _ = barriers(1, 2, 3)\n    return a")) == ["f: _"]
