"""What of a call's output is read piece by piece: streams, and the queue that an event loop reads."""

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from fengine.api.outputs import Output
from fengine.errors import InvalidRequestError


class Collector(Protocol):
    """What streams need of an `OutputCollector`."""

    core: Any
    ready: Any
    open: set[int]
    loop: asyncio.AbstractEventLoop | None

    def read(self, index: int) -> Output | None: ...

    def abort(self) -> None: ...


class IndexQueue:
    """Indices of requests that have new output, for one reader at a time in the event loop's thread: `asyncio.Queue` at
    a part of its cost. `wake` is called after each `put`. Modifies: itself."""

    def __init__(self) -> None:
        self._items: deque[int] = deque()
        self.wake: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: int) -> None:
        self._items.append(item)
        if self.wake is not None:
            self.wake()

    def pop(self) -> int:
        return self._items.popleft()

    async def get(self) -> int:
        if not self._items:
            came = asyncio.get_running_loop().create_future()
            self.wake = lambda: None if came.done() else came.set_result(None)
            try:
                await came
            finally:
                self.wake = None
        return self._items.popleft()


class Stream:
    """Iterator over a call's chunks. Dropping, closing or failing it aborts what still runs. Several threads may read
    it; each chunk goes to one of them."""

    def __init__(self, collector: Collector, owner: object) -> None:
        self._collector, self._owner = collector, owner  # the owner's engine lives as long as its streams
        self._reading = collector.core.system.lock()  # or a second reader would wait for news behind the last

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Output:
        collector = self._collector
        with self._reading:
            try:
                while collector.open:
                    output = collector.read(collector.ready.get())
                    if output is not None:
                        return output
            except BaseException:
                collector.abort()
                raise
        raise StopIteration

    def close(self) -> None:
        self._collector.abort()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # then modules have lost their names, and the engine's threads are gone
            self._collector.abort()


class AsyncStream:
    """Async iterator over a call's chunks, in the event loop that made the call; the same promises as `Stream`."""

    def __init__(self, collector: Collector, owner: object) -> None:
        self._collector, self._owner = collector, owner  # the owner's engine lives as long as its streams
        self._reading = asyncio.Lock()

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> Output:
        collector = self._collector
        if asyncio.get_running_loop() is not collector.loop:
            collector.abort()
            raise InvalidRequestError("this stream belongs to another event loop; read it in the one that made it.")
        async with self._reading:
            try:
                while collector.open:
                    output = collector.read(await collector.ready.get())
                    if output is not None:
                        return output
            except BaseException:
                collector.abort()
                raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._collector.abort()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():
            self._collector.abort()
