"""No kernel touches memory that is not its own, nor races with itself: compute-sanitizer over the GPU tests.

Races are sought in Triton's kernels. In those of warp groups the tool does not know how the compiler hands work over,
and reports that; libraries' kernels are not ours.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
OPS = TESTS / "ops"
GROUPED = [
    name
    for path in (TESTS.parent / "fengine/ops").glob("*.py")
    for name in re.findall(r"def (\w+_kernel)\((?:(?!\ndef )[\s\S])*?gl\.warp_specialize\(", path.read_text())
]
SANITIZER = shutil.which("compute-sanitizer")
WATCH = ("--target-processes", "application-only", "--launch-timeout", "0", "--error-exitcode", "9")
TOOLS = {
    "memcheck": (),
    "racecheck": ("--kernel-name", "regex=^[a-z]", "--kernel-name-exclude", f"regex=^({'|'.join(GROUPED)})$"),
}


@pytest.mark.gpu
@pytest.mark.timeout(7200)
@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer comes with CUDA's toolkit")
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("tests", [p for p in sorted(OPS.glob("test_*.py")) if "mark.gpu" in p.read_text()],
                         ids=lambda path: path.stem)  # fmt: skip
def test_kernels_keep_to_their_memory(tool: str, tests: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [str(SANITIZER), "--tool", tool, *TOOLS[tool], *WATCH, sys.executable, "-m", "pytest", "-q", "-p", "sanitized",
         "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=0", "-m", "gpu", str(tests)],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode in (0, 5), done.stdout[-6000:]  # 5: the file has no test for a GPU
    assert "SUMMARY: 0 " in done.stdout + done.stderr
