"""No kernel touches memory that is not its own, nor races with itself: compute-sanitizer over the GPU tests."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

OPS = Path(__file__).resolve().parent.parent / "ops"
SANITIZER = shutil.which("compute-sanitizer")
WATCH = ("--target-processes", "application-only", "--launch-timeout", "0", "--error-exitcode", "9")


@pytest.mark.gpu
@pytest.mark.timeout(7200)
@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer comes with CUDA's toolkit")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("tests", [p for p in sorted(OPS.glob("test_*.py")) if "mark.gpu" in p.read_text()],
                         ids=lambda path: path.stem)  # fmt: skip
def test_kernels_keep_to_their_memory(tool: str, tests: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [str(SANITIZER), "--tool", tool, *WATCH, sys.executable, "-m", "pytest", "-q", "-p", "sanitized",
         "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=0", "-m", "gpu", str(tests)],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode in (0, 5), done.stdout[-6000:]  # 5: the file has no test for a GPU
    assert "SUMMARY: 0 " in done.stdout + done.stderr
