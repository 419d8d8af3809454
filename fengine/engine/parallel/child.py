"""Processes of one engine: `Child` is another one as the first sees it, `Link` the first as the other sees it. They
talk by lines of JSON over a socket of their own. Each value that a child says is a dict; it gives a sign of life every
second. It ends with its socket, wherever it waits: so with the first process."""

import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fengine
from fengine.core.plain import Handles
from fengine.core.request import Adapter
from fengine.ops.peers import RankGoneError

MAIN = "fengine.api.rank"  # the module that a child runs
FIRST = 120.0  # seconds until a child gives its first sign of life, while its process starts
SILENCE = 8.0  # seconds without a sign of life after which a child is taken for dead
ENDING = 3.0  # seconds that a child may take to end
BEAT = 1.0  # seconds between two signs of life


NOTHING = Handles({}, lambda kind, text: None, lambda name, number: Adapter(name, number, None))  # empty handles


_open: "weakref.WeakSet[Child]" = weakref.WeakSet()


def _forget() -> None:
    """In a fork of the first process, which has its sockets, too: it has nothing to say, and nobody waits for its
    end."""
    for each in list(_open):
        if each.sock.fileno() >= 0:
            os.close(each.sock.detach())


os.register_at_fork(after_in_child=_forget)


class Child:
    """Thread-safe. `hear` and `ended` are called in a thread of their own; `ended` at most once, with the reason."""

    def __init__(
        self, start: Any, threads: int, hear: Callable[[dict[str, Any]], None], ended: Callable[[str], None],
        files: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Starts the process, whose first line is `start`, with so many threads for the CPU's kernels, and with these
        open files under their numbers."""
        self._hear, self._ended, self._closing = hear, ended, False
        self._sending = threading.Lock()
        self.sock, theirs = socket.socketpair()
        root = str(Path(fengine.__file__).parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(max(threads, 1))}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", MAIN, str(theirs.fileno())], env=env,
            pass_fds=[theirs.fileno(), *(file for file in files if file >= 0)],
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        _open.add(self)
        self.sock.settimeout(FIRST)
        self.send(start)
        threading.Thread(target=self._listen, name=f"fengine-child-{self.process.pid}", daemon=True).start()

    def send(self, value: Any) -> None:
        """Who is gone hears nothing: `ended` tells why."""
        line = json.dumps(value).encode() + b"\n"
        with suppress(OSError), self._sending:
            self.sock.sendall(line)

    def _listen(self) -> None:
        try:
            for line in self.sock.makefile("rb"):
                self.sock.settimeout(SILENCE)
                self._hear(json.loads(line))
            end = "closed its socket"
        except (OSError, ValueError) as error:
            end = f"gave no sign of life for {SILENCE:.0f} s" if isinstance(error, TimeoutError) else f"failed: {error}"
        if self._closing:
            return
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(1.0)
            end = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        self.close()  # one that had only stopped would wake up to a closed socket, and remove what others read
        self._ended(end)

    def kill(self) -> None:
        """At once, and nobody is told."""
        self._closing = True
        self.process.kill()

    def close(self) -> None:
        """Ends it, and waits for that. Idempotent."""
        self.kill()
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        with suppress(subprocess.TimeoutExpired):  # a driver that does not let go of it
            self.process.wait(ENDING)


class Link:
    """What a child hears and says."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.lock = sock, threading.Lock()
        self.folder: str | None = None  # goes with the first process, should that not come to remove it
        self.told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for body in (self._listen, self._beat):
            threading.Thread(target=body, daemon=True).start()

    def say(self, **told: Any) -> None:
        line = json.dumps(told).encode() + b"\n"
        with self.lock:
            self.sock.sendall(line)

    def _listen(self) -> None:
        with suppress(OSError, ValueError):  # the last line may be half of one
            for line in self.sock.makefile("rb"):
                told = json.loads(line)
                if self.folder is None:  # the first line, behind which may come the end
                    self.folder = str(told["folder"])
                    os.makedirs(self.folder, 0o700, exist_ok=True)
                self.told.put(told)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(0)

    def _beat(self) -> None:
        with suppress(OSError):
            while True:
                self.say(alive=True)
                time.sleep(BEAT)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Inside, what fails is told to the first process; but for the end of another one, which it sees itself."""
        try:
            yield
        except RankGoneError:
            threading.Event().wait()  # for the end
        except Exception as error:
            self.say(error=f"{type(error).__name__}: {error}"[:2000])
