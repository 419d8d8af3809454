"""Python's processes that need not each import torch: forks of one that has imported the engine, and no more."""

import atexit
import ctypes
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
FORKS = """
import fcntl, json, os, runpy, socket, sys
import checksum, fengine.api.rank  # and with them the engine
ours = socket.socket(fileno=0)
while True:
    asked, files, *_ = socket.recv_fds(ours, 1 << 20, 64)
    if not asked:
        break
    if os.fork():
        os.wait()
        ours.send(b"it has another parent")
        for file in files:
            os.close(file)
        continue
    if child := os.fork():
        ours.send(str(child).encode())
        os._exit(0)  # now the tests' process is the parent of its child
    (option, code, *words), cwd, environment, numbers, session = json.loads(asked)
    ours.detach()
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, 500) for file in files]  # a number of one may be that of another here
    for file in files:
        os.close(file)
    for file, number in zip(high, numbers):
        os.dup2(file, number)
        os.close(file)
    if session:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [option, *words]
    if option == "-m":
        runpy.run_module(code, run_name="__main__", alter_sys=True)
    else:
        exec(code, {"__name__": "__main__"})
    sys.exit()  # the interpreter ends as one that was started for this
"""
FOUND = {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}", "OMP_NUM_THREADS": "1"}
ADOPTS = 36  # of prctl: the parent of those below whose own has ended
STARTED = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


@cache
def forks() -> socket.socket:
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=theirs.fileno(), env=os.environ | FOUND, process_group=0
    )
    theirs.close()
    atexit.register(lambda: (ours.close(), process.wait()))
    return ours


class Fork(subprocess.Popen[Any]):
    """As `Popen` of this Python with `-c code` or `-m module`; it finds fengine and the modules of tests, and its CPU
    kernels have one thread. Where no process adopts another's (Linux does), it is started as any other."""

    asking = threading.Lock()

    def _execute_child(self: Any, words: Any, *how: Any) -> None:
        given = STARTED.bind(self, words, *how).arguments
        environment, files = dict(given["env"] or os.environ), given["pass_fds"]
        if sys.platform != "linux":
            given["env"] = environment | FOUND
            super()._execute_child(*list(given.values())[1:])  # type: ignore[misc]
            return
        pipes = [given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        streams = [own if own >= 0 else number for number, own in enumerate((pipes[0], pipes[3], pipes[5]))]
        words, cwd = [word for word in words[1:] if word != "-P"], str(given["cwd"] or os.getcwd())
        asked = [words, cwd, environment, [0, 1, 2, *files], given["start_new_session"]]
        with self.asking:
            ours, prctl = forks(), ctypes.CDLL(None).prctl
            prctl(ADOPTS, 1)
            socket.send_fds(ours, [json.dumps(asked).encode()], [*streams, *files])
            self.pid = int(ours.recv(99))
            ours.recv(99)
            prctl(ADOPTS, 0)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def run(code: str, cwd: Path = TESTS.parent) -> "subprocess.CompletedProcess[str]":
    """What `python -c code` would give, and write."""
    words, pipe, null = [sys.executable, "-c", code], subprocess.PIPE, subprocess.DEVNULL
    with Fork(words, stdin=null, stdout=pipe, stderr=pipe, text=True, cwd=cwd) as process:
        try:
            out, err = process.communicate()
        except BaseException:  # of the test's end, too
            process.kill()
            raise
        return subprocess.CompletedProcess(code, process.returncode, out, err)
