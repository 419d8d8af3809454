"""What the package imports is what it declares."""

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
IMPORTED_AS = {"hydra-core": "hydra", "PyYAML": "yaml", "Jinja2": "jinja2", "inspect-ai": "inspect_ai", "pillow": "PIL"}
WITH_TORCH = {"triton"}  # torch pins it where it computes on CUDA; without it the CPU computes
TRIED = re.compile(r"importorskip\(\"(\w+)")
UNIMPORTED = {
    "pytest_xdist",
    "pytest_timeout",
    "ruff",
    "pyright",
    "hydra_joblib_launcher",
    "openai",
}  # tools, plugins of pytest and Hydra, a client in a subprocess


def declared(requirements: list[str]) -> set[str]:
    """The names under which requirements are imported; those of the project's own extras are looked up."""
    found: set[str] = set()
    for requirement in requirements:
        name, extras = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", requirement).groups()  # type: ignore[union-attr]
        if name == "fengine":
            for extra in extras.split(","):
                found |= declared(PROJECT["optional-dependencies"][extra])
        else:
            found.add(IMPORTED_AS.get(name, name.replace("-", "_")))
    return found


@cache
def imported(folder: str) -> set[str]:
    """The packages that modules of a folder import, but for Python's own and those beside them."""
    found: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    own = {path.stem for path in [*(ROOT / "scripts").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]}
    return found - set(sys.stdlib_module_names) - own - {"fengine"}


def test_what_is_imported_is_declared_and_the_other_way_round() -> None:
    base, extras = declared(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
    every = base.union(*(declared(names) for names in extras.values()))
    assert imported("fengine") - WITH_TORCH <= every
    assert base <= imported("fengine")
    builds = declared(PYPROJECT["build-system"]["requires"])  # the hook that builds a wheel runs under these
    assert imported("tests") | imported("scripts") <= every | WITH_TORCH | builds
    tried = {name for path in (ROOT / "tests").rglob("*.py") for name in TRIED.findall(path.read_text())}
    assert declared(extras["dev"]) - UNIMPORTED <= imported("tests") | imported("fengine") | tried
