"""Simulated threads, locks, queues and clock: one seed decides every interleaving. No real thread, no sleep.

A thread is a greenlet. It may lose its turn wherever it meets another thread: at a lock, a queue, a wait, a start. When
all of them wait, the clock goes on to the first deadline.
"""

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty
from typing import Any, cast

from greenlet import GreenletExit, getcurrent, greenlet

from fengine.engine.threads import Threads

FOREVER = float("inf")
MANY = 1_000_000  # turns: somebody goes round in circles


class Deadlock(Exception):
    """Every thread waits, and none has a deadline."""


class SimulatedThread:
    """As `threading.Thread`. Modifies: itself, its machine."""

    def __init__(
        self, machine: "Machine", target: Callable[..., Any], args: tuple[Any, ...] = (), name: str = "",
        daemon: bool | None = None,
    ) -> None:  # fmt: skip
        self.machine, self.target, self.args, self.name = machine, target, args, name
        self.ended = self.woken = self.waiting = False
        self.deadline = FOREVER
        self.error: BaseException | None = None  # what ended it
        self.thrown: BaseException | None = None  # raised in it as soon as it goes on
        self.joiners: list[SimulatedThread] = []
        self.greenlet: Any = None

    def start(self) -> None:
        self.greenlet = greenlet(self._body, self.machine.hub)
        self.machine.ready.append(self)
        self.machine.pause()

    def join(self, timeout: float | None = None) -> None:
        while not self.ended and self.machine.wait(self.joiners, timeout):
            pass

    def is_alive(self) -> bool:
        return self.greenlet is not None and not self.ended

    def _body(self) -> None:
        try:
            self.target(*self.args)
        except BaseException as error:
            self.error = error
        self.ended = True
        self.machine.wake(self.joiners)


class SimulatedLock:
    """As `threading.RLock`."""

    def __init__(self, machine: "Machine") -> None:
        self.machine, self.count = machine, 0
        self.owner: SimulatedThread | None = None
        self.waiters: list[SimulatedThread] = []

    def __enter__(self) -> bool:
        machine = self.machine
        machine.pause()
        while self.count and self.owner is not machine.running:
            machine.wait(self.waiters, None)
        self.owner = machine.running
        self.count += 1
        return True

    def __exit__(self, *_: object) -> None:
        self.count -= 1
        if not self.count:
            self.owner = None
            self.machine.wake(self.waiters)
            self.machine.pause()


class SimulatedQueue:
    """As `queue.SimpleQueue`."""

    def __init__(self, machine: "Machine") -> None:
        self.machine = machine
        self.items: deque[Any] = deque()
        self.waiters: list[SimulatedThread] = []

    def put(self, item: Any) -> None:
        self.items.append(item)
        if self.waiters:
            self.machine.wake(self.waiters)
        self.machine.pause()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self.machine.pause()
        until = FOREVER if timeout is None else self.machine.clock + timeout
        while not self.items:
            if not block or not self.machine.wait(self.waiters, until - self.machine.clock):
                raise Empty
        return self.items.popleft()

    def empty(self) -> bool:
        return not self.items


class Machine:
    """One processor, whose threads take turns as `rng` decides. Modifies: itself."""

    def __init__(self, rng: random.Random, eager: float) -> None:
        """`eager`: how probable it is that a thread loses its turn where it may."""
        self.random, self.eager = rng.random, eager
        self.clock, self.until = 0.0, FOREVER
        self.hub = getcurrent()
        self.ready: list[SimulatedThread] = []
        self.sleepers: list[SimulatedThread] = []  # with a deadline
        self.soonest = FOREVER  # no sleeper has an earlier one
        self.running: SimulatedThread | None = None
        self.over = False
        self.turns = 0
        self.system = Threads(
            thread=partial(cast(Any, SimulatedThread), self), current=lambda: cast(Any, self.running),
            lock=partial(SimulatedLock, self), queue=partial(cast(Any, SimulatedQueue), self),
            now=lambda: self.clock, wall=lambda: 1e9 + self.clock,
        )  # fmt: skip

    # -- of threads ----------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Another thread may go on here."""
        me = self.running
        if me is None or self.over:
            return
        if self.random() < self.eager and (self.ready or self.sleepers):  # or it would be picked again
            self.ready.append(me)
            self._leave(me)

    def wait(self, waiters: list[SimulatedThread], timeout: float | None) -> bool:
        """Waits until somebody wakes `waiters`. False: the time is up."""
        me = self.running
        if me is None or self.over:
            raise GreenletExit
        if timeout is not None and timeout <= 0:
            return False
        me.woken, me.waiting = False, True
        waiters.append(me)
        if timeout is not None and timeout != FOREVER:
            me.deadline = self.clock + timeout
            self.soonest = min(self.soonest, me.deadline)
            self.sleepers.append(me)
        self._leave(me)
        if not me.woken:
            waiters.remove(me)
        return me.woken

    def sleep(self, seconds: float) -> None:
        self.wait([], seconds)

    def wake(self, waiters: list[SimulatedThread]) -> None:
        for thread in waiters:
            thread.woken = True
            if thread.waiting:  # else its time was up just now
                self._rouse(thread)
        waiters.clear()

    def _rouse(self, thread: SimulatedThread) -> None:
        thread.waiting = False
        if thread.deadline != FOREVER:
            thread.deadline = FOREVER
            self.sleepers.remove(thread)
        self.ready.append(thread)

    def _leave(self, me: SimulatedThread) -> None:
        """Gives the turn away, and returns when it is back."""
        if (other := self._pick()) is not me:
            if other is None:
                self.hub.switch()
            else:
                self.running = other
                other.greenlet.switch()
        if self.over:
            raise GreenletExit
        if me.thrown is not None:
            error, me.thrown = me.thrown, None
            raise error

    def _pick(self) -> SimulatedThread | None:
        """Whose turn it is."""
        self.turns += 1
        if self.sleepers and (not self.ready or self.soonest <= self.clock):
            if not self.ready:
                self.clock = max(self.clock, min(thread.deadline for thread in self.sleepers))
            for thread in [thread for thread in self.sleepers if thread.deadline <= self.clock]:
                self._rouse(thread)
            self.soonest = min((thread.deadline for thread in self.sleepers), default=FOREVER)
        if not self.ready or self.clock > self.until or self.turns > MANY:
            return None
        ready = self.ready
        at = int(self.random() * len(ready))
        ready[at], ready[-1] = ready[-1], ready[at]
        return ready.pop()

    # -- of who owns the machine ---------------------------------------------------------------------------------------

    def run(self, main: Callable[[], None], until: float) -> None:
        """Runs `main` as a thread, to its end. Errors: what it raised; Deadlock, also if it takes longer than `until`
        by the machine's clock."""
        self.until = until
        thread = SimulatedThread(self, main, name="main")
        thread.start()
        try:
            while not thread.ended:
                self.running = self._pick()
                if self.running is None:
                    raise Deadlock(f"at {self.clock:.2f} s, after {self.turns} turns, callers wait")
                self.running.greenlet.switch()
        finally:
            self.running = None
        if thread.error is not None:
            raise thread.error

    def end(self, threads: list[SimulatedThread]) -> None:
        """Ends threads wherever they are."""
        self.over = True
        for thread in threads:
            if thread.is_alive():
                thread.greenlet.throw(GreenletExit)
