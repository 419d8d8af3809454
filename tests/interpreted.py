"""Triton's interpreter, in processes of its own: tests once more, and ranks that exchange."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fengine.ops.registration import tl, triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ENVIRONMENT = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
starts_interpreter = pytest.mark.skipif(
    INTERPRETED or not hasattr(triton, "__version__"), reason="runs in the process that it starts, and needs Triton"
)

if INTERPRETED:
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set[str]()

    def patch_once(fn: Any) -> Any:
        """Triton replaces its whole language again at each call of a function in a kernel: a third of the time."""
        if triton.language.core.is_builtin(tl.load):  # a launch, after which it is put back
            patched.clear()
        if fn.__module__ not in patched:
            patched.add(fn.__module__)
            return patch(fn)

    interpreter._patch_lang = patch_once
    # It computes whether each sum and product of integers overflows, and tells that in its debug mode alone.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def run_interpreted(files: list[Path]) -> None:
    """The tests of Triton's kernels in these files: those with `triton` in their names or their file's."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu", "-k", "triton"]
    where = Path(__file__).parents[1]
    done = subprocess.run(
        [*command, *map(str, files)], capture_output=True, text=True, env=ENVIRONMENT, cwd=where, timeout=900
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


def run_ranks(script: str, paths: list[Path], size: int) -> None:
    """A script as so many ranks, each with files of this size that all of them map; rank 0 says "ends" at its end."""
    for path in paths:
        path.write_bytes(bytes(size))
    ranks = [
        subprocess.Popen([sys.executable, "-c", script, str(rank), str(len(paths)), *map(str, paths)], env=ENVIRONMENT,
                         text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(len(paths))
    ]  # fmt: skip
    try:
        told = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(rank.returncode for rank in ranks), "\n".join(told)
    assert told[0].endswith("ends\n")
