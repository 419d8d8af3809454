"""`Watchdog`: an engine's threads, from their start to their ends: whatever ends one, everybody who waits is told."""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from fengine.engine.inbox import Inbox
from fengine.engine.output_processor import OutputProcessor
from fengine.engine.threads import Threads
from fengine.errors import EngineClosedError, EngineDeadError, FengineError

GRACE = 30.0  # seconds that a closing engine waits for its loop: a logit processor may never return
GLANCE = 0.25  # seconds between two looks at the threads


class Watchdog:
    """The loop, the thread that makes text, and the one that watches the two. Modifies: itself, inbox, requests."""

    def __init__(self, system: Threads, inbox: Inbox, requests: OutputProcessor, loop: Callable[[], None]) -> None:
        self.system, self.inbox, self.requests = system, inbox, requests
        self.ended: queue.SimpleQueue[threading.Thread] = system.queue()  # threads that have reached their end
        self.threads = [
            system.thread(target=self._guard, args=(loop,), name="fengine-steps", daemon=True),
            system.thread(target=self._guard, args=(requests.run,), name="fengine-text", daemon=True),
            system.thread(target=self._watch, name="fengine-watch", daemon=True),
        ]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def check(self) -> None:
        """Errors: EngineDeadError if a thread has ended; EngineClosedError."""
        self.inbox.check()
        if not all(thread.is_alive() for thread in self.threads):
            raise EngineDeadError("a thread of the engine has ended")

    def close(self) -> None:
        """Stops the threads; every unfinished request ends with EngineClosedError. Idempotent. When it returns, the
        device's memory is free, unless the loop has not ended within GRACE: then whoever waits is answered all the
        same. One of the threads itself cannot wait: they then end by themselves."""
        self.inbox.close(EngineClosedError("the engine was shut down; create a new Engine"))
        if self.system.current() in self.threads:
            return
        deadline = self.system.now() + GRACE
        for thread in self.threads:
            thread.join(max(deadline - self.system.now(), 0.1))
        self._fail(self._reason())

    def _guard(self, body: Callable[[], None]) -> None:
        """A thread's body; whatever ends it early, the reason is told, and the watching thread wakes."""
        try:
            body()
        except BaseException as error:  # also what another thread has thrown in
            name = "loop" if self.system.current() is self.threads[0] else "text thread"
            dead = EngineDeadError(f"the engine's {name} failed: {type(error).__name__}: {error}")
            dead.__cause__ = error
            self.inbox.close(dead)
        finally:
            self.ended.put(self.system.current())

    def _watch(self) -> None:
        """Answers everybody when a thread has ended for whatever reason: also one that could not tell."""
        loop, text = self.threads[:2]
        while loop.is_alive() and text.is_alive() and not isinstance(self.inbox.end, EngineDeadError):
            with suppress(queue.Empty):
                self.ended.get(timeout=GLANCE).join()
        if text.is_alive():
            loop.join(2 * GLANCE)  # it may wait for ever for words of a rank that is dead
        self.inbox.close(EngineDeadError("the engine's loop failed: its thread has ended"))
        if not loop.is_alive():
            self.requests.end(self._reason())
        self.requests.steps.put(None)
        if not loop.is_alive():
            text.join(GRACE if isinstance(self.inbox.end, EngineClosedError) else 2 * GLANCE)
        self._fail(self._reason())

    def _fail(self, error: FengineError) -> None:
        self.requests.fail(error)
        self.inbox.fail(error)

    def _reason(self) -> FengineError:
        """Why requests that are open now end."""
        end = self.inbox.end
        if isinstance(end, EngineDeadError):
            return end
        return EngineClosedError("the engine was shut down while the request was running")
