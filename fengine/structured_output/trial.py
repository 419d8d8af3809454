"""A grammar is compiled in another process first: what would take too long there ends that process, and nothing here.

    text --a line of JSON--> the child: rules, matcher over single bytes --a line of JSON--> the rules, or what is wrong

No limit of a library covers every step: 800 patternProperties of 27 kB take the matcher minutes, and allOf of five
primes has no end. The kernel ends the child after CPU_SECONDS of work, or where its memory ends. What it has compiled
within them is compiled here, without the GIL. A child starts with the first grammar, and after another has ended.
No torch.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from signal import SIGPROF

from fengine.errors import EngineClosedError, FengineError, GrammarError

CPU_SECONDS = 2.0
MEMORY = 4 << 30  # bytes of addresses
ROOT = str(Path(__file__).resolve().parents[2])
CHILD = "from fengine.structured_output.backend import answer; answer()"


class Trial:
    """One child, for one thread at a time. Modifies: itself."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._closed = False

    def rules(self, kind: str, text: str, whitespace: str | None) -> str:
        """The grammar in the matcher's words, which is known to be compiled soon. Errors: GrammarError;
        EngineClosedError; FengineError if no child can run."""
        child = self._started()
        assert child.stdin is not None and child.stdout is not None
        line = ""
        with suppress(OSError):  # it may have ended
            print(json.dumps([kind, text, whitespace]), file=child.stdin, flush=True)
            line = child.stdout.readline()
        if not line.endswith("\n"):
            self._child = None
            raise self._ended(child.wait())
        reply: dict[str, str] = json.loads(line)
        if "error" in reply:
            raise GrammarError(reply["error"])
        return reply["rules"]

    def close(self) -> None:
        """Ends the child. For any thread."""
        self._closed = True
        if (child := self._child) is not None:
            child.kill()

    def _started(self) -> "subprocess.Popen[str]":
        if self._child is None or self._child.poll() is not None:
            paths = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
            self._child = subprocess.Popen(
                [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="ascii",
                env=os.environ | {"PYTHONPATH": paths, "PYTHONIOENCODING": "ascii"},
            )  # fmt: skip
            if self._closed:  # meanwhile
                self._child.kill()
        return self._child

    def _ended(self, code: int) -> FengineError:
        if self._closed:
            return EngineClosedError("the engine was shut down; create a new Engine")
        if code >= 0:
            return FengineError(f"the process that tries grammars could not run, exit code {code}: see its errors")
        more = f"time than {CPU_SECONDS:g} s of a core" if code == -SIGPROF else f"memory than {MEMORY >> 30} GiB"
        return GrammarError(f"it is too complex: to compile it takes more {more}; simplify it")
