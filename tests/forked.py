"""Python's processes that need not each import torch: forks of one that has imported the engine, and no more."""

import atexit
import ctypes
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
ADOPTS = 36  # of prctl: the parent of those below whose own has ended


@cache
def forks() -> socket.socket:
    environment = os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}", "OMP_NUM_THREADS": "1"}
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    process = subprocess.Popen([sys.executable, "-c", FORKS], stdin=theirs.fileno(), env=environment, process_group=0)
    theirs.close()
    atexit.register(lambda: (ours.close(), process.wait()))
    return ours


class Fork(subprocess.Popen[Any]):
    """As `Popen` of this Python with `-c code` or `-m module`; it finds fengine and the modules of tests, and its CPU
    kernels have one thread."""

    asking = threading.Lock()

    def _execute_child(self: Any, words: Any, *how: Any) -> None:
        files, cwd, environment = how[3:6]
        pipes, session = how[9:15], how[20]
        streams = [own if own >= 0 else number for number, own in enumerate((pipes[0], pipes[3], pipes[5]))]
        words = [word for word in words[1:] if word != "-P"]
        asked = [words, str(cwd or os.getcwd()), dict(environment or os.environ), [0, 1, 2, *files], session]
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
