"""Untrusted input is tried in another process: what would take too long or too much there ends that process alone.

    question --a line of JSON--> the child: tries it --a line of JSON--> {"result": …} or {"error": …}

Bytes may stand behind either line, which ends with their number.

No limit of a library covers every step: 800 patternProperties of 27 kB take a grammar compiler minutes, a split pattern
can take a tokenizer an hour, a chat template of 30 characters fills the memory. The kernel ends the child after so many
seconds of work, or where its memory ends. A child starts with the first question, and after another one has ended. No
torch."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import LifoQueue
from typing import Any, NamedTuple

from fengine.core.owned import finalize
from fengine.errors import EngineClosedError, FengineError

ROOT = str(Path(__file__).resolve().parents[2])


class Refused(Exception):
    """What was tried failed, or took too much."""


class Limits(NamedTuple):
    """What a child may take for one question: seconds of a core, and bytes of addresses."""

    seconds: float = 2.0
    memory: int = 4 << 30


LIMITS = Limits()


def answer(attempt: Callable[..., Any], limits: Limits) -> None:
    """In the child: answers questions until nobody asks any more. `attempt` raises Refused. One that takes bytes, too,
    gives (result, bytes)."""
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory, limits.memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    for line in source:
        question, size = json.loads(line)
        data, more = None if size is None else source.read(size), b""
        signal.setitimer(signal.ITIMER_PROF, limits.seconds)  # its signal ends the process, wherever it is
        try:
            result, more = (attempt(question), more) if data is None else attempt(question, data)
            reply = json.dumps([{"result": result}, len(more)])
        except Refused as error:
            reply = json.dumps([{"error": str(error)}, 0])
        except MemoryError:  # what is left of it may be in pieces: another child begins with all
            os.kill(os.getpid(), signal.SIGKILL)
            return
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.writelines((reply.encode(), b"\n", more))
        sink.flush()


class Trials:
    """Several children, each for one question at a time. Thread-safe."""

    def __init__(self, module: str, count: int = 1, limits: Limits = LIMITS) -> None:
        """`module` has a function `attempt`, which a child calls with each question."""
        self._limits, self._closed = limits, False
        self._code = (
            f"from fengine.tokenizer.trial import Limits, answer; from {module} import attempt; "
            f"answer(attempt, Limits{tuple(limits)})"
        )
        self.children: list[subprocess.Popen[bytes] | None] = [None] * count
        self._idle: LifoQueue[int] = LifoQueue()  # one that has started comes first
        for i in range(count):
            self._idle.put(i)

    def ask(self, question: Any, data: bytes | None = None) -> Any:
        """What a child's attempt gave; waits for one that nobody asks. Errors: Refused; EngineClosedError; FengineError
        if no child can run."""
        head, reply, size, more = json.dumps([question, None if data is None else len(data)]), {}, 0, b""
        i = self._idle.get()
        try:
            child = self._started(i)
            assert child.stdin is not None and child.stdout is not None
            with suppress(OSError, ValueError):  # it may have ended
                child.stdin.writelines((head.encode(), b"\n", data or b""))
                child.stdin.flush()
                reply, size = json.loads(child.stdout.readline())
                more = child.stdout.read(size)
            if not reply or len(more) < size:
                with suppress(OSError):  # one that goes on, having said something else, ends by it
                    child.stdin.close()
                raise self._ended(child.wait())
        except BaseException:  # of one who was interrupted, too: the next to ask would take the answer for their own
            child, self.children[i] = self.children[i], None
            if child is not None:
                _end(child)
            raise
        finally:
            self._idle.put(i)
        if "error" in reply:
            raise Refused(reply["error"])
        return reply["result"] if data is None else (reply["result"], more)

    def close(self) -> None:
        """Ends the children. For any thread."""
        self._closed = True
        for child in filter(None, self.children):
            _end(child)

    def _started(self, i: int) -> "subprocess.Popen[bytes]":
        child = self.children[i]
        if child is None or child.poll() is not None:
            paths = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
            try:
                child = self.children[i] = subprocess.Popen(
                    [sys.executable, "-P", "-c", self._code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    env=os.environ | {"PYTHONPATH": paths},
                    process_group=0,  # a terminal's Ctrl-C is not for it: it ends when nobody can ask any more
                )  # fmt: skip
            except OSError as error:
                raise FengineError(f"no process can be started to try untrusted input: {error.strerror}") from error
            if self._closed:  # meanwhile
                child.kill()
        return child

    def _ended(self, code: int) -> Exception:
        if self._closed:
            return EngineClosedError("the engine was shut down; create a new Engine")
        if code >= 0:
            return FengineError(f"the process that tries untrusted input ended with exit code {code}: see its errors")
        if code not in (-signal.SIGPROF, -signal.SIGKILL):
            return Refused(f"it ends the process that reads it ({signal.Signals(-code).name})")
        seconds, memory = self._limits
        late = code == -signal.SIGPROF
        taken = f"time than {seconds:g} s of a core" if late else f"memory than {memory >> 20} MiB"
        return Refused(f"it is too complex: it takes more {taken}")


def _end(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        with suppress(OSError, ValueError):  # half a question is left in it, or somebody reads it
            assert pipe is not None
            pipe.close()


_shared: dict[tuple[str, int, Limits, int], Trials] = {}


def shared(module: str, count: int, limits: Limits = LIMITS) -> Trials:
    """The children of a whole process, which end with it: starting one takes a tenth of a second. A fork has its own.
    Pure but for them."""
    key = module, count, limits, os.getpid()
    if key not in _shared:
        new = Trials(module, count, limits)  # starts none yet
        if _shared.setdefault(key, new) is new:  # of those who ask at once, one's
            finalize(new, new.close)
    return _shared[key]
