"""Outputs that are read piece by piece, or in an event loop: `OutputCollector`, and the streams over it."""

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fengine.api.context import EngineContext
from fengine.api.outputs import Output, Result, abandon, output_of, result_of, submit
from fengine.api.sessions import Turn
from fengine.core.request import Request
from fengine.engine.request_state import RequestOutput, RequestState
from fengine.errors import InvalidRequestError, NumericsError, TimedOutError


class IndexQueue:
    """Indices of requests that have new output, for one reader at a time in the event loop's thread: `asyncio.Queue` at
    a part of its cost. Modifies: itself."""

    def __init__(self) -> None:
        self._items: deque[int] = deque()
        self._came: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: int) -> None:
        self._items.append(item)
        if self._came is not None and not self._came.done():
            self._came.set_result(None)

    def pop(self) -> int:
        return self._items.popleft()

    async def get(self) -> int:
        if not self._items:
            self._came = asyncio.get_running_loop().create_future()
            await self._came
        return self._items.popleft()


class OutputCollector:
    """The requests of one call and the queue of those that have new output. The text thread puts, the caller reads."""

    def __init__(
        self, context: EngineContext, requests: Sequence[Request], turns: Mapping[str, Turn], single: bool,
        result: Result = lambda output, state: output, *, stream: bool, loop: asyncio.AbstractEventLoop | None,
        deltas: bool = False, pace: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        """Queues the requests. `result` makes of a finished one's output what `wait` returns.

        A stream's chunks hold what is new if the engine's settings say so, or `deltas`, with which all but the last are
        `brief`, too. Between the first and the last chunk of a request, none comes before the moment (perf_counter)
        that `pace` gave when the one before was read. Errors: as `submit`."""
        self.context, self.stream, self.single, self.loop = context, stream, single, loop
        self.core, self.result, args = context.parts.core, result, context.args
        self.brief = stream and deltas
        self.incremental = self.brief or stream and (args.incremental_streaming_output or args.stream_output)
        self.ready: Any = IndexQueue() if loop else self.core.system.queue()
        self.post, self.pace = loop and loop.call_soon_threadsafe, pace
        self.not_before = [0.0] * len(requests)
        self.dirty = [False] * len(requests)
        self.sent = [RequestOutput()] * len(requests)
        self.open = set(range(len(requests)))
        self.states = submit(context, requests, turns, [*map(self._notifier, self.open)], stream)

    def _notifier(self, index: int) -> Callable[[RequestState], None]:
        def notify(state: RequestState) -> None:
            if self.loop is not None and self.loop.is_closed():  # nobody will read
                self.core.abort([state])
                return
            if self.dirty[index] or not (state.done or self.stream and self._due(index, state)):
                return  # the reader will see this news with that which it has not read yet
            self.dirty[index] = True
            if self.post is None:
                self.ready.put(index)
                return
            with suppress(RuntimeError):  # it was closed just now; the next news ends the request
                self.post(self.ready.put, index)

        return notify

    def _due(self, index: int, state: RequestState) -> bool:
        """Whether a stream's next chunk has enough new tokens: the first comes at once, then every k; and whether it is
        time for it."""
        every = state.request.params.stream_interval or self.context.args.stream_interval
        had = self.sent[index].num_tokens
        if had and self.pace is not None and self.core.system.now() < self.not_before[index]:
            return False  # the next news, or the last, brings these tokens along
        return had == 0 or every == 1 or state.output.num_tokens - had >= every

    def abort(self) -> None:
        """Ends what is still open; called when the caller goes away. Idempotent."""
        states, self.open = [self.states[i] for i in self.open], set()
        abandon(self.core, states)

    def leave(self) -> None:
        """In the event loop: aborts, and wakes who waits for news, of which there will be none."""
        self.abort()
        self.ready.put(0)

    def read(self, index: int) -> Output | None:
        """What is new of one state, as SGLang's dict; None if nothing is. Errors: the state's own. In a stream one
        that failed by itself ends with a chunk that tells so instead, and its neighbours go on."""
        self.dirty[index] = False
        state, log = self.states[index], self.context.log
        if index not in self.open:
            return None
        if not self.stream or (state.error is not None and not self._ends_with_chunk(state)):
            self.open.discard(index)
            return result_of(self.context, state)
        output = state.output  # once: it may be replaced at any moment
        if output.finish is not None:
            self.open.discard(index)
            if log is not None:
                log.finished(state.request, output.finish)
        elif output == self.sent[index] or not self._due(index, state):
            return None
        before, self.sent[index] = self.sent[index] if self.incremental else RequestOutput(), output
        if self.pace is not None:
            self.not_before[index] = moment = self.pace()
            if not state.stops_in_text:
                state.quiet_until = moment
        found = output_of(self.context, state, output, before, self.brief and output.finish is None)
        return found if self.single else found | {"index": index}

    def _ends_with_chunk(self, state: RequestState) -> bool:
        if state.fault is None and not isinstance(state.error, NumericsError):
            return False
        if state.output.finish is None:
            ours = isinstance(state.error, NumericsError)
            code, kind = (500, "InternalServerError") if ours else (400, "BadRequestError")
            code, kind = (503, "ServiceUnavailable") if isinstance(state.fault, TimedOutError) else (code, kind)
            reason = {"type": "abort", "message": str(state.error), "status_code": code, "err_type": kind}
            state.output = state.output._replace(finish=reason)
        return True

    def wait(self) -> Output | list[Output]:
        """All results of a call that is no stream. Errors: those of requests."""
        results: list[Any] = [None] * len(self.states)
        try:
            while self.open:
                self._finish(self.ready.get(), results)
        finally:
            self.abort()
        return results[0] if self.single else results

    async def wait_async(self) -> Output | list[Output]:
        """As `wait`, in the event loop of the call."""
        results: list[Any] = [None] * len(self.states)
        try:
            while self.open:
                self._finish(await self.ready.get(), results)
        finally:
            self.abort()
        return results[0] if self.single else results

    def _finish(self, index: int, results: list[Any]) -> None:
        """Modifies: results."""
        output = self.read(index)
        results[index] = output and self.result(output, self.states[index])


class _Chunks:
    """What reads a call's chunks. Dropping, closing or failing it aborts what still runs."""

    def __init__(self, collector: OutputCollector, owner: object) -> None:
        self._collector, self._owner = collector, owner  # the owner's engine lives as long as its streams
        # Of readers, or a second one would wait for news behind the last.
        self._reading: Any = collector.core.system.lock() if collector.loop is None else asyncio.Lock()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # then modules have lost their names, and the engine's threads are gone
            self._collector.abort()


class Stream(_Chunks):
    """Iterator over a call's chunks. Several threads may read it; each chunk goes to one of them."""

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Output:
        collector = self._collector
        collector.core.check_process()
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


class AsyncStream(_Chunks):
    """Async iterator over a call's chunks, in the event loop that made the call; the same promises as `Stream`."""

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
