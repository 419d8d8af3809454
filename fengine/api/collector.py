"""`OutputCollector`: the requests of one call and their outputs, collected in any thread or event loop."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fengine.api.options import EngineContext
from fengine.api.outputs import Output, output_of
from fengine.api.sessions import Turn
from fengine.api.streams import IndexQueue
from fengine.core.request import Request
from fengine.engine.request_state import RequestOutput, RequestState
from fengine.errors import NumericsError
from fengine.tokenizer.detokenizer import Detokenizer
from fengine.tokenizer.stop_regex import StopRegex, compile_patterns

Result = Callable[[Output, RequestState], Output]


class OutputCollector:
    """The requests of one call and the queue of those that have new output. The text thread puts, the caller reads."""

    def __init__(
        self, context: EngineContext, requests: Sequence[Request], turns: Mapping[str, Turn], *, stream: bool,
        single: bool, loop: asyncio.AbstractEventLoop | None, deltas: bool = False,
        pace: Callable[[], float] | None = None, result: Result = lambda output, state: output,
    ) -> None:  # fmt: skip
        """Queues the requests. `result` makes of a finished one's output what `wait` returns.

        A stream's chunks hold what is new if the engine's settings say so, or `deltas`, with which all but the last are
        `brief`, too. Between the first and the last chunk of a request, none comes before the moment (perf_counter)
        that `pace` gave when the one before was read.

        Errors: EngineClosedError, EngineDeadError, MemoryReleasedError, InvalidRequestError (a rid is in use),
        SessionError (a session was closed or changed meanwhile; nothing of the call goes on).
        """
        self.context, self.stream, self.single, self.loop = context, stream, single, loop
        self.core, self.result = context.parts.core, result
        self.brief = stream and deltas
        self.incremental = (
            self.brief or stream and (context.args.incremental_streaming_output or context.args.stream_output)
        )
        self.ready: Any = IndexQueue() if loop else self.core.system.queue()
        self.post, self.pace = loop and loop.call_soon_threadsafe, pace
        self.not_before = [0.0] * len(requests)
        self.dirty = [False] * len(requests)
        self.sent = [RequestOutput()] * len(requests)
        self.open = set(range(len(requests)))
        self.patterns: dict[tuple[str, ...], tuple[StopRegex, ...]] = {}  # compiled once for all of them
        self.states = [self._state(i, request) for i, request in enumerate(requests)]
        self._submit(turns)

    def _state(self, index: int, request: Request) -> RequestState:
        params, tokenizer, clock = request.params, self.context.parts.tokenizer, self.core.system
        patterns = self.patterns.get(params.stop_regex, ())
        if params.stop_regex and not patterns:
            patterns = self.patterns[params.stop_regex] = compile_patterns(params.stop_regex)
        detokenizer = None if tokenizer is None else Detokenizer(tokenizer, params, patterns=patterns)
        live = self.stream or bool(params.stop) or bool(params.stop_regex)
        return RequestState(
            request, detokenizer, live, self._notifier(index), clock.now, received=clock.wall(), submitted=clock.now()
        )

    def _submit(self, turns: Mapping[str, Turn]) -> None:
        """All requests or none; those of sessions enter their trees."""
        for state in self.states if turns else ():
            if (turn := turns.get(state.request.rid)) is not None:
                turn.state = state
        self.core.submit(self.states)
        try:
            if turns:  # not before: what they replace is aborted
                self.context.sessions.enter(list(turns.values()))
        except BaseException:
            self.abort()
            raise
        if self.context.log is not None:
            self.context.log.received([state.request for state in self.states])

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
        if self.open:
            states = [self.states[i] for i in self.open]
            for state in states:
                state.abandoned = True
            self.core.abort(states)
            self.open = set()

    def read(self, index: int) -> Output | None:
        """What is new of one state, as SGLang's dict; None if nothing is. Errors: the state's own, but in a stream a
        request that failed by itself ends with a chunk that tells so, and its neighbours go on."""
        self.dirty[index] = False
        state = self.states[index]
        if index not in self.open:
            return None
        if state.error is not None and not self._ends_with_chunk(state):
            self.open.discard(index)
            if self.context.log is not None:
                self.context.log.died(state.error)
            raise state.error
        output = state.output  # once: it may be replaced at any moment
        if output.finish is not None:
            self.open.discard(index)
            if self.context.log is not None:
                self.context.log.finished(state.request, output.finish)
        elif output == self.sent[index] or not self._due(index, state):
            return None
        before, self.sent[index] = self.sent[index] if self.incremental else RequestOutput(), output
        if self.pace is not None:
            self.not_before[index] = moment = self.pace()
            if not state.stops_in_text:
                state.quiet_until = moment
        found = output_of(
            state,
            output,
            before,
            brief=self.brief and output.finish is None,
            has_text=self.context.parts.tokenizer is not None,
            metrics=self.context.args.enable_metrics,
        )
        return found | {"index": index} if self.stream and not self.single else found

    def _ends_with_chunk(self, state: RequestState) -> bool:
        if not self.stream or (state.fault is None and not isinstance(state.error, NumericsError)):
            return False
        if state.output.finish is None:
            code, kind = (500, "InternalServerError") if state.fault is None else (400, "BadRequestError")
            reason = {"type": "abort", "message": str(state.error), "status_code": code, "err_type": kind}
            state.output = state.output._replace(finish=reason)
        return True

    # -- results -------------------------------------------------------------------------------------------------------

    def wait(self) -> Output | list[Output]:
        results: list[Any] = [None] * len(self.states)
        try:
            while self.open:
                self._keep(results, self.ready.get())
        finally:
            self.abort()
        return results[0] if self.single else results

    async def wait_async(self) -> Output | list[Output]:
        results: list[Any] = [None] * len(self.states)
        try:
            while self.open:
                self._keep(results, await self.ready.get())
        finally:
            self.abort()
        return results[0] if self.single else results

    def _keep(self, results: list[Any], index: int) -> None:
        output = self.read(index)
        results[index] = None if output is None else self.result(output, self.states[index])
