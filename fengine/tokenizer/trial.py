"""Untrusted input is tried in another process: what would take too long or too much there ends that process alone.

    question --a line of JSON--> the child: tries it --a line of JSON--> {"result": …} or {"error": …}

No limit of a library covers every step: 800 patternProperties of 27 kB take a grammar compiler minutes, a split pattern
can take a tokenizer an hour, a chat template of 30 characters fills the memory. The kernel ends the child after so many
seconds of work, or where its memory ends. A child starts with the first question, and after another one has ended. No
torch.
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
from queue import SimpleQueue
from typing import Any, NamedTuple

from fengine.errors import EngineClosedError, FengineError

ROOT = str(Path(__file__).resolve().parents[2])


class Refused(Exception):
    """What was tried failed, or took too much."""


class Limits(NamedTuple):
    """What a child may take for one question: seconds of a core, and bytes of addresses."""

    seconds: float = 2.0
    memory: int = 4 << 30

    @property
    def too_long(self) -> str:
        return f"it is too complex: it takes more time than {self.seconds:g} s of a core"

    @property
    def too_large(self) -> str:
        return f"it is too complex: it takes more memory than {self.memory >> 20} MiB"


LIMITS = Limits()


def answer(attempt: Callable[[Any], Any], limits: Limits) -> None:
    """In the child: answers questions until nobody asks any more. `attempt` raises Refused."""
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory, limits.memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, limits.seconds)  # its signal ends the process, wherever it is
        try:
            reply = json.dumps({"result": attempt(json.loads(line))})
        except Refused as error:
            reply = json.dumps({"error": str(error)})
        except MemoryError:  # what is left of it may be in pieces: another child begins with all
            os.kill(os.getpid(), signal.SIGKILL)
            return
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(reply, flush=True)


class Trial:
    """One child, for one thread at a time. Modifies: itself."""

    def __init__(self, module: str, limits: Limits = LIMITS) -> None:
        """`module` has a function `attempt`, which the child calls with each question."""
        self._limits, self._closed = limits, False
        self._code = (
            f"from fengine.tokenizer.trial import Limits, answer; from {module} import attempt; "
            f"answer(attempt, Limits{tuple(limits)})"
        )
        self._child: subprocess.Popen[str] | None = None

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
            child.wait()

    def _started(self) -> "subprocess.Popen[str]":
        if self._child is None or self._child.poll() is not None:
            paths = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-c", self._code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="ascii",
                    env=os.environ | {"PYTHONPATH": paths, "PYTHONIOENCODING": "ascii"},
                    process_group=0,  # a terminal's Ctrl-C is not for it: it ends when nobody can ask any more
                )  # fmt: skip
            except OSError as error:
                raise FengineError(f"no process can be started to try untrusted input: {error.strerror}") from error
            if self._closed:  # meanwhile
                self._child.kill()
        return self._child

    def _ended(self, code: int) -> Exception:
        if self._closed:
            return EngineClosedError("the engine was shut down; create a new Engine")
        if code >= 0:
            return FengineError(f"the process that tries untrusted input ended with exit code {code}: see its errors")
        return Refused(self._limits.too_long if code == -signal.SIGPROF else self._limits.too_large)


class Trials:
    """Several children, for any number of threads. Thread-safe."""

    def __init__(self, module: str, count: int, limits: Limits = LIMITS) -> None:
        """As `Trial`."""
        self.all = [Trial(module, limits) for _ in range(count)]
        self._idle: SimpleQueue[Trial] = SimpleQueue()
        for trial in self.all:
            self._idle.put(trial)

    def ask(self, question: Any) -> Any:
        """As `Trial.ask`; waits for a child that nobody asks."""
        trial = self._idle.get()
        try:
            return trial.ask(question)
        finally:
            self._idle.put(trial)

    def close(self) -> None:
        """Ends the children."""
        for trial in self.all:
            trial.close()
