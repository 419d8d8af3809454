"""`Command`: what is asked of the loop, by name; `Inbox`: commands on their way to it, in order, and their answers.

    add          requests           queue them; attached: their states
    abort        rids               end them (None: all) in whatever state; attached: the states that are meant
    pause        mode               schedule no step: "abort" ends all, "retract" sends what runs back to the queue
    resume                          schedule steps again
    flush_cache                     empty the prefix cache, unless requests run, or wait and the loop is not paused;
                                    answers whether it was emptied
    get_stats                     * counters, and what is refused
    ping                          * answers as soon as the loop can
    watch_steps, unwatch_steps key  tell of every step from here on; attached: who is called with each `StepRecord`
    label_weights  version          the label of the weights that steps run with
    update_weights names, version   write tensors; attached: the checked changes, their origin; see `WeightUpdates`
    read_weights   tensor, rows   * a tensor, or None for a name that the model has not
    release_memory, resume_memory tags, everything                          see `Memory`
    start_profile, stop_profile                                             see `Profile`

Those with * are also executed inside of a step, for a logit processor that asks."""

import os
import queue
from collections.abc import Callable
from typing import Any

from fengine.engine.threads import Threads
from fengine.errors import EngineClosedError, EngineDeadError, FengineError

IN_STEP = ("get_stats", "ping", "read_weights")
PATIENCE = 0.5  # seconds between two looks whether the loop still lives
FORKED = "this engine belongs to the parent process, and a fork has none of its threads: use it there, or spawn"

Reply = queue.SimpleQueue[tuple[Any, BaseException | None]]


# A command: its name; arguments, which are values that a log or another process can receive; what is none is attached:
# tensors, a callback, the states of requests; where its answer goes, or None: nobody waits for one.
Command = tuple[str, dict[str, Any], Any, Reply | None]


class Inbox:
    """Thread-safe. Modifies: itself."""

    def __init__(self, system: Threads) -> None:
        self.system = system
        # Orders submissions against the end. Reentrant: the garbage collector may drop a stream at any moment, also in
        # a thread that holds this lock, and a dropped stream aborts its requests.
        self.lock = system.lock()
        self.end: EngineClosedError | EngineDeadError | None = None  # why no command is taken any more
        self._items: queue.SimpleQueue[Command | None] = system.queue()
        self._waiting: dict[int, Reply] = {}
        self._pid = os.getpid()

    @property
    def here(self) -> bool:
        """Whether this is the process of the threads, not a forked child."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Errors: EngineClosedError in a forked child."""
        if not self.here:
            raise EngineClosedError(FORKED)

    def check(self) -> None:
        """Errors: EngineClosedError, EngineDeadError if no command is taken any more, or in a forked child."""
        self.check_process()
        if self.end is not None:
            raise type(self.end)(str(self.end)) from self.end.__cause__

    def put(self, name: str, arguments: dict[str, Any], attached: Any = None, reply: Reply | None = None) -> None:
        """Errors: as `check`."""
        self.check_process()  # before the lock, which another thread of the parent may have held
        with self.lock:
            self.check()
            self._items.put((name, arguments, attached, reply))

    def call(self, name: str, arguments: dict[str, Any], attached: Any, alive: Callable[[], bool]) -> Any:
        """The loop's answer. `alive`: whether one may still come. Errors: as `check`, and what the handler raises."""
        reply: Reply = self.system.queue()
        self._waiting[id(reply)] = reply
        try:
            self.put(name, arguments, attached, reply)
            while True:
                try:
                    value, error = reply.get(timeout=PATIENCE)
                except queue.Empty:
                    if not alive():
                        self.check()
                        raise EngineClosedError("the engine was shut down during the call") from None
                    continue
                if error is not None:
                    raise error
                return value
        finally:
            del self._waiting[id(reply)]

    def get(self, block: bool) -> Command | None:
        """The next one; None if there is none, or it was rung."""
        try:
            return self._items.get(block)
        except queue.Empty:
            return None

    def ring(self) -> None:
        """Wakes the loop."""
        self._items.put(None)

    def close(self, end: EngineClosedError | EngineDeadError) -> bool:
        """Takes no command from here on, and wakes the loop. False: it was closed before."""
        with self.lock:
            first = self.end is None
            if first:
                self.end = end
        self.ring()
        return first

    def fail(self, error: FengineError) -> None:
        """Answers everybody who still waits."""
        for reply in list(self._waiting.values()):
            reply.put((None, error))
