"""`fengine env`: what a report of a problem needs to know about this machine; what a manifest has. Imports torch."""

import json
import platform
import shutil
from collections.abc import Sequence
from typing import Any

from fengine.errors import FengineError
from fengine.eval.cli import command
from fengine.eval.cli.engines import devices
from fengine.eval.runs import machine, manifest
from fengine.ops.compiler import find_compiler, private_cache_dir

USAGE = """
Usage:  fengine env [--json]

Prints what results and speed depend on: versions, hardware, compiler, caches, environment. It has no names of users, no
keys and no values of other variables, so that it can be sent with a question.
"""
WANTED = ("torch triton numpy tokenizers transformers safetensors huggingface-hub hydra-core llguidance fastapi "
          "uvicorn lm-eval inspect-ai").split()  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Runs `fengine env` with these arguments and returns the exit code."""
    return command.run(USAGE, argv, _work)


def _work(words: Sequence[str]) -> int:
    flags = command.parse(words, flags=["--json"]).flags
    found = facts()
    if "--json" in flags:
        print(json.dumps(found, indent=1), flush=True)
        return command.OK
    for name, value in found.items():
        told = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"{name + ':':<14}{'none' if told in (None, '', []) else told}", flush=True)
    return command.OK


def facts() -> dict[str, Any]:
    """Facts by name, as JSON's values."""
    there, around, seen = machine.packages(), manifest.surroundings(), devices()
    checkout = machine.checkout()
    return {
        "fengine": manifest.versions()["fengine"],
        "commit": checkout and checkout["commit"][:12] + (" and changes" if checkout["dirty"] else ""),
        "code": manifest.code_digest()[:16],
        "python": f"{around['python']} ({platform.python_implementation()})",
        "system": around["system"],
        "cpu": f"{manifest.cpu_name()}, {around['cpus']} cores",
        **seen,
        "compiler": _or_error(lambda: " ".join(map(str, (shutil.which(find_compiler()[0]), *find_compiler()[1:])))),
        "cache": _or_error(lambda: "a private directory" if private_cache_dir().is_dir() else None),
        "packages": {name: there[name][1] for name in WANTED if name in there},
        "environment": around["environment"],
    }


def _or_error(read: Any) -> Any:
    """What it returns, or what is wrong."""
    try:
        return read()
    except FengineError as error:
        return f"{type(error).__name__}: {error}"
