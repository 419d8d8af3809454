"""No kernel touches memory that is not its own, nor races with itself: compute-sanitizer over the GPU tests."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

OPS = Path(__file__).resolve().parent.parent / "ops"
SANITIZER = shutil.which("compute-sanitizer")


@pytest.mark.gpu
@pytest.mark.timeout(7200)
@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer comes with CUDA's toolkit")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("tests", sorted(OPS.glob("test_*.py")), ids=lambda path: path.stem)
def test_kernels_keep_to_their_memory(tool: str, tests: Path) -> None:
    command = [str(SANITIZER), "--tool", tool, "--error-exitcode", "9", "--target-processes", "all", sys.executable]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else a block that is freed stays readable
    done = subprocess.run(
        [*command, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "gpu", str(tests)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode in (0, 5), done.stdout[-4000:]  # 5: the file has no test for a GPU
