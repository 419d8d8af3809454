"""One of the other ranks of an engine: loads its part, then computes its part of every step that rank 0 tells of.

Each line of JSON on the socket is one value. The process ends with the socket, wherever it waits: so with rank 0.
"""

import json
import os
import queue
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import numpy as np

from fengine.config import EngineConfig
from fengine.core.plain import Handles, from_plain
from fengine.core.scheduler_output import SchedulerOutput
from fengine.engine.stepper import Runner
from fengine.models.kv_state import KVState
from fengine.worker.input_batch import InputBatch
from fengine.worker.process_group import checksum
from fengine.worker.step import Result

BEAT = 1.0  # seconds between two signs of life
NOTHING = Handles({}, lambda kind, text: None, lambda name, number: cast(Any, None))


def lines(sock: socket.socket) -> Iterator[bytes]:
    """What comes, line by line, until the other side closes. Errors: OSError, also of a time limit."""
    rest = b""
    while data := sock.recv(1 << 16):
        *whole, rest = (rest + data).split(b"\n")
        yield from whole


class Follower:
    """One of the other ranks: loads its part, then computes its part of every step that it is told of."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.lock = sock, threading.Lock()
        self.told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for body in (self._listen, self._beat):
            threading.Thread(target=body, daemon=True).start()

    def say(self, **told: Any) -> None:
        with self.lock:
            self.sock.sendall(json.dumps(told).encode() + b"\n")

    def _listen(self) -> None:
        """Rank 0's words; with the last one the process ends, wherever it waits."""
        with suppress(OSError):
            for line in lines(self.sock):
                self.told.put(json.loads(line))
        os._exit(0)

    def _beat(self) -> None:
        with suppress(OSError):
            while True:
                self.say(alive=True)
                time.sleep(BEAT)

    def start(self) -> tuple[EngineConfig, tuple[str, int, int], str]:
        """What the rank is to be: its config; its group's name, itself, their number; the file by which the ranks find
        one another."""
        told = self.told.get()
        return from_plain(EngineConfig, told["config"], NOTHING), told["group"], told["store"]

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Inside, what fails is told to rank 0."""
        try:
            yield
        except Exception as error:
            self.say(error=f"{type(error).__name__}: {error}"[:2000])

    def loaded(self) -> None:
        """Waits until every rank is."""
        self.say(loaded=True)
        self.told.get()

    def run(self, runner: Runner, input_batch: InputBatch, kv: KVState) -> None:
        """Steps, until the process ends."""
        pending: tuple[int, int, Result] | None = None  # the step whose result is not read yet
        while True:
            output = from_plain(SchedulerOutput, self.told.get(), NOTHING)
            step = input_batch.stage(output)
            step.stages, step.top, step.hidden_H = (), None, None  # rank 0's alone
            kv, result = runner.launch(kv, step)
            if pending is not None:
                self._land(*pending)
            pending = output.step, checksum(step), result
            if self.told.empty():
                self._land(*pending)
                pending = None

    def _land(self, number: int, digest: int, result: Result) -> None:
        self.say(step=number, sum=zlib.crc32(np.array(result().tokens, np.int32).tobytes(), digest))
