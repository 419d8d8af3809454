"""One `generate` call under way: its tickets, and their results collected in any thread or event loop."""

import asyncio
import queue
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from fengine.admission import Item
from fengine.build import Parts
from fengine.request import Request
from fengine.text.detokenizer import Detokenizer
from fengine.tickets import Ticket

Output = dict[str, Any]


class Call:
    """The tickets of one call and the mail that tells about them. `put` is called by the text thread."""

    def __init__(self, parts: Parts, requests: Sequence[Request], items: Sequence[Item], stream: bool, single: bool,
                 incremental: bool, metrics: bool, loop: asyncio.AbstractEventLoop | None) -> None:  # fmt: skip
        self.parts, self.items, self.stream, self.single = parts, items, stream, single
        self.incremental, self.metrics, self.loop = incremental, metrics, loop
        self.mail: Any = asyncio.Queue() if loop else queue.SimpleQueue()
        self.dirty = [False] * len(requests)
        self.sent = [("", 0)] * len(requests)
        self.open = set(range(len(requests)))
        self.tickets = [self._ticket(i, request) for i, request in enumerate(requests)]
        parts.driver.submit(self.tickets)

    def _ticket(self, index: int, request: Request) -> Ticket:
        tokenizer = self.parts.tokenizer
        detokenizer = None if tokenizer is None else Detokenizer(tokenizer, request.params)
        return Ticket(request, detokenizer, self.stream or bool(request.params.stop), self._notifier(index))

    def _notifier(self, index: int) -> Callable[[Ticket], None]:
        def notify(ticket: Ticket) -> None:
            if self.loop is not None and self.loop.is_closed():  # nobody will read
                self.parts.driver.abort([ticket])
                return
            if self.dirty[index] or not (self.stream or ticket.done):
                return  # the reader will see this news with that which it has not read yet
            self.dirty[index] = True
            if self.loop is None:
                self.mail.put(index)
                return
            with suppress(RuntimeError):  # it was closed just now; the next news ends the request
                self.loop.call_soon_threadsafe(self.mail.put_nowait, index)

        return notify

    def abort(self) -> None:
        """Ends what is still open; called when the caller goes away. Idempotent."""
        if self.open:
            self.parts.driver.abort([self.tickets[i] for i in self.open])
            self.open = set()

    def read(self, index: int) -> Output | None:
        """What is new of one ticket, as SGLang's dict; None if nothing is. Errors: the ticket's own."""
        self.dirty[index] = False
        ticket = self.tickets[index]
        if index not in self.open:
            return None
        done = ticket.done  # read before `seen`: what is seen after it is complete
        if ticket.error is not None:
            self.open.discard(index)
            raise ticket.error
        if done:
            self.open.discard(index)
        elif ticket.seen == self.sent[index]:
            return None
        output = self._output(index, ticket, done)
        if self.stream and not self.single:
            output["index"] = index
        return output

    def _output(self, index: int, ticket: Ticket, done: bool) -> Output:
        request, (text, count) = ticket.request, ticket.seen
        text_from, from_ = (
            (len(self.sent[index][0]), self.sent[index][1]) if self.incremental and self.stream else (0, 0)
        )
        self.sent[index] = ticket.seen
        start = request.prompt_len
        ids = request.token_ids[start + from_ : start + count]
        finish = ticket.finish.as_dict() if done and ticket.finish is not None else None
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": finish,
            "prompt_tokens": request.prompt_len,
            "completion_tokens": count,
            "reasoning_tokens": 0,
            "cached_tokens": request.num_cached,
            "cached_tokens_details": None,
            "weight_version": "default",
            "num_retractions": request.num_preempted,
        }
        if self.items[index].return_logprob:
            logprobs = request.logprobs[from_:count]
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [(lp, token, None) for lp, token in zip(logprobs, ids, strict=True)]
            meta["output_token_logprobs_length"] = len(ids)
        if done and ticket.finished is not None:
            meta["e2e_latency"] = ticket.finished - ticket.submitted
            if self.metrics and ticket.first_token is not None:
                meta["first_token_latency"] = ticket.first_token - ticket.submitted
        output: Output = {"text": text[text_from:]} if self.parts.tokenizer is not None else {}
        return output | {"output_ids": ids, "meta_info": meta}

    # -- results -------------------------------------------------------------------------------------------------------

    def wait_sync(self) -> Output | list[Output]:
        results: list[Any] = [None] * len(self.tickets)
        try:
            while self.open:
                index = self.mail.get()
                results[index] = self.read(index)
        finally:
            self.abort()
        return results[0] if self.single else results

    async def wait_async(self) -> Output | list[Output]:
        results: list[Any] = [None] * len(self.tickets)
        try:
            while self.open:
                index = await self.mail.get()
                results[index] = self.read(index)
        finally:
            self.abort()
        return results[0] if self.single else results


class Stream:
    """Iterator over a call's chunks. Dropping, closing or failing it aborts what still runs."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Output:
        call = self._call
        try:
            while call.open:
                output = call.read(call.mail.get())
                if output is not None:
                    return output
        except BaseException:
            call.abort()
            raise
        raise StopIteration

    def close(self) -> None:
        self._call.abort()

    __del__ = close


class AsyncStream:
    """Async iterator over a call's chunks; the same promises as `Stream`."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> Output:
        call = self._call
        try:
            while call.open:
                output = call.read(await call.mail.get())
                if output is not None:
                    return output
        except BaseException:
            call.abort()
            raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._call.abort()

    def __del__(self) -> None:
        self._call.abort()
