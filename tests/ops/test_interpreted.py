"""The tests of Triton's kernels once more, in Triton's interpreter: it must be chosen before Triton is imported.

A process takes seconds to start. So there are two: one for the slowest file, and one for all others.
"""

from pathlib import Path

import pytest
from interpreted import run_interpreted, starts_interpreter

HERE = Path(__file__).parent
FILES = [path for path in sorted(HERE.glob("test_*.py")) if "interpreted import INTERPRETED\n" in path.read_text()]
SLOWEST = HERE / "test_ops_triton.py"


@starts_interpreter
@pytest.mark.parametrize("files", [[SLOWEST], [path for path in FILES if path != SLOWEST]], ids=["ops", "others"])
def test_kernels_in_the_interpreter(files: list[Path]) -> None:
    assert files and {*files} <= {*FILES}
    run_interpreted(files)
