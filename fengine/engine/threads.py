"""`Threads`: where an engine's threads, locks, queues and clock come from. A simulation brings others."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any


@dataclass(frozen=True, slots=True)
class Threads:
    """Those of the machine, unless others are given."""

    thread: Callable[..., threading.Thread] = threading.Thread
    current: Callable[[], threading.Thread] = threading.current_thread
    lock: Callable[[], AbstractContextManager[Any]] = threading.RLock  # reentrant
    queue: Callable[[], SimpleQueue[Any]] = SimpleQueue
    now: Callable[[], float] = time.perf_counter  # seconds, never back
    wall: Callable[[], float] = time.time  # seconds since the epoch


REAL = Threads()
