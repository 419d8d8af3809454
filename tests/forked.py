"""Programs in processes of their own, which need not each import torch: forks of one process that has, and no more."""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
FORKS = """
import json, os, sys
import checksum  # and with it the engine
for line in sys.stdin:
    code, cwd, *paths = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, path in enumerate(paths, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(cwd)
        exec(code, {"__name__": "__main__"})
        sys.exit()  # the interpreter ends as one that was started for this
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@cache
def forks() -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        process_group=0,
    )  # fmt: skip
    atexit.register(process.communicate)
    return process


def run(code: str, cwd: Path = TESTS.parent) -> "subprocess.CompletedProcess[str]":
    """What `python -c code` would give, and write; it finds fengine and the modules of tests."""
    process = forks()
    assert process.stdin is not None and process.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("stdout", "stderr")]
        try:
            process.stdin.write(json.dumps([code, str(cwd), *map(str, paths)]) + "\n")
            process.stdin.flush()
            status = int(process.stdout.readline())
        except BaseException:  # of the test's end, too: the next would be told of this fork
            os.killpg(process.pid, signal.SIGKILL)
            forks.cache_clear()
            raise
        return subprocess.CompletedProcess(code, status, *(path.read_text() for path in paths))
