"""Untrusted input is tried in another process first: what would take too long there ends that process, not this one.

    question --a line of JSON--> the child: tries it --a line of JSON--> {"result": …} or {"error": …}

No limit of a library covers every step: 800 patternProperties of 27 kB take a grammar compiler minutes, and a split
pattern can take a tokenizer an hour. The kernel ends the child after CPU_SECONDS of work, or where its memory ends.
A child starts with the first question, and after another one has ended. No torch.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fengine.errors import EngineClosedError, FengineError

CPU_SECONDS = 2.0
MEMORY = 4 << 30  # bytes of addresses
ROOT = str(Path(__file__).resolve().parents[2])
TOO_LONG = f"it is too complex: it takes more time than {CPU_SECONDS:g} s of a core"
TOO_LARGE = f"it is too complex: it takes more memory than {MEMORY >> 30} GiB"


class Refused(Exception):
    """What was tried failed, or took too much."""


def answer(attempt: Callable[[Any], Any]) -> None:
    """In the child: answers questions until nobody asks any more. `attempt` raises Refused."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # its signal ends the process, wherever it is
        try:
            reply = {"result": attempt(question)}
        except Refused as error:
            reply = {"error": str(error)}
        except MemoryError:
            reply = {"error": TOO_LARGE}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), flush=True)


class Trial:
    """One child, for one thread at a time. Modifies: itself."""

    def __init__(self, code: str) -> None:
        """`code` is Python that calls `answer`."""
        self._code = code
        self._child: subprocess.Popen[str] | None = None
        self._closed = False

    def ask(self, question: Any) -> Any:
        """What the child's attempt gave. Errors: Refused; EngineClosedError; FengineError if no child can run."""
        child = self._started()
        if child.stdin is None or child.stdout is None:
            raise FengineError("the process that tries untrusted input has no pipes")
        line = ""
        with suppress(OSError):  # it may have ended
            print(json.dumps(question), file=child.stdin, flush=True)
            line = child.stdout.readline()
        if not line.endswith("\n"):
            self._child = None
            raise self._ended(child.wait())
        reply = json.loads(line)
        if "error" in reply:
            raise Refused(reply["error"])
        return reply["result"]

    def close(self) -> None:
        """Ends the child. For any thread."""
        self._closed = True
        if (child := self._child) is not None:
            child.kill()

    def _started(self) -> "subprocess.Popen[str]":
        if self._child is None or self._child.poll() is not None:
            paths = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
            self._child = subprocess.Popen(
                [sys.executable, "-c", self._code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="ascii",
                env=os.environ | {"PYTHONPATH": paths, "PYTHONIOENCODING": "ascii"},
            )  # fmt: skip
            if self._closed:  # meanwhile
                self._child.kill()
        return self._child

    def _ended(self, code: int) -> Exception:
        if self._closed:
            return EngineClosedError("the engine was shut down; create a new Engine")
        if code >= 0:
            return FengineError(f"the process that tries untrusted input ended with exit code {code}: see its errors")
        return Refused(TOO_LONG if code == -signal.SIGPROF else TOO_LARGE)
