"""One `generate` call: its arguments checked into tickets, and its results collected, in any thread or event loop."""

import asyncio
import queue
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fengine.build import Parts
from fengine.driver import Ticket
from fengine.errors import (
    CapacityError,
    ContextLengthError,
    FengineError,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from fengine.request import Request, SamplingParams, derive_seed, exact_int
from fengine.text.detokenizer import Detokenizer

Output = dict[str, Any]

# Arguments of SGLang's generate that are not built, with the values that mean "off".
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "image_data": (None,),
    "audio_data": (None,),
    "video_data": (None,),
    "mm_hashes": (None,),
    "mm_content_hashes": (None,),
    "logprob_start_len": (None, -1),
    "top_logprobs_num": (None, 0),
    "token_ids_logprob": (None, []),
    "lora_path": (None,),
    "custom_logit_processor": (None,),
    "require_reasoning": (False, None),
    "return_hidden_states": (False, None),
    "return_routed_experts": (False, None),
    "bootstrap_host": (None,),
    "bootstrap_port": (None,),
    "bootstrap_room": (None,),
    "routed_dp_rank": (None, 0),
    "disagg_prefill_dp_rank": (None, 0),
    "data_parallel_rank": (None, 0),
    "kv_hints": (None,),
    "session_params": (None,),
    "session_id": (None,),
    "priority": (None,),
    "cache_salt": (None,),
}


def check_ids(ids: Any, vocab_size: int) -> list[int]:
    """Token ids as a list of int, each within the width of the logits. Errors: InvalidRequestError."""
    if hasattr(ids, "tolist"):
        try:
            ids = ids.tolist()
        except RuntimeError as error:  # a tensor of torch that is sparse, or holds no data
            raise InvalidRequestError(f"input_ids must be readable as a list of token ids: {error}") from error
    if not isinstance(ids, (list, tuple)):
        raise InvalidRequestError(f"input_ids must be a list of token ids, got {type(ids).__name__}.")
    if not ids:
        raise InvalidRequestError("input_ids cannot be empty.")
    if set(map(type, ids)) != {int}:
        exact = [exact_int(value) for value in ids]
        if None in exact:
            i = exact.index(None)
            kind = type(ids[i]).__name__
            raise InvalidRequestError(f"input_ids[{i}] must be an integer, got {ids[i]!r:.80} ({kind}).")
        ids = exact
    if min(ids) < 0 or max(ids) >= vocab_size:
        i, bad = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        raise InvalidRequestError(f"input_ids[{i}] is {bad}; token ids must be in [0, {vocab_size - 1}].")
    return list(ids)


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a call, before it is checked."""

    prompt: Any
    input_ids: Any
    sampling: Any
    rid: str
    return_logprob: bool


def _refuse(arguments: dict[str, Any]) -> None:
    bad = [
        f"{name}={arguments[name]!r}"
        for name, off in NOT_BUILT.items()
        if not any(arguments[name] is o or (type(arguments[name]) is type(o) and arguments[name] == o) for o in off)
    ]
    if bad:
        raise UnsupportedFeatureError(f"not built: {', '.join(bad)}. Leave these arguments out.")


def _is_batch_of_ids(ids: Any) -> bool:
    if hasattr(ids, "ndim"):
        return ids.ndim == 2
    return (
        isinstance(ids, (list, tuple))
        and bool(ids)
        and (isinstance(ids[0], (list, tuple)) or hasattr(ids[0], "tolist"))
    )


def split(arguments: dict[str, Any]) -> tuple[list[Item], bool]:
    """The prompts of a call and whether it was a single one. Errors: InvalidRequestError, UnsupportedFeatureError."""
    _refuse(arguments)
    prompt, ids = arguments["prompt"], arguments["input_ids"]
    if prompt is None and ids is None:
        raise InvalidRequestError("Either text, input_ids or input_embeds should be provided.")
    if prompt is not None and ids is not None:
        raise InvalidRequestError("prompt and input_ids cannot both be given: they would be two prompts.")
    if prompt is not None and not isinstance(prompt, (str, list, tuple)):
        fix = " Decode it first." if isinstance(prompt, bytes) else ""
        raise InvalidRequestError(f"prompt must be a string or a list of strings, got {type(prompt).__name__}.{fix}")
    single = isinstance(prompt, str) if prompt is not None else not _is_batch_of_ids(ids)
    given: Any = ids if prompt is None else prompt
    values = [given] if single else list(given)
    count = len(values)
    sampling = _spread("sampling_params", arguments["sampling_params"], count, single)
    logprob = _spread("return_logprob", arguments["return_logprob"], count, single)
    rids = _rids(arguments["rid"], count, single)
    for flag in logprob:
        if not isinstance(flag, bool):
            raise InvalidRequestError(f"return_logprob must be True or False, got {flag!r}.")
    text = prompt is not None
    return [
        Item(v if text else None, None if text else v, s, r, lp)
        for v, s, r, lp in zip(values, sampling, rids, logprob, strict=True)
    ], single


def _spread(name: str, value: Any, count: int, single: bool) -> list[Any]:
    """One value for all prompts, or a list with one for each."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(f"{name} has {len(value)} entries for {count} prompt{'s' * (count != 1)}.")
    return value


def _rids(rid: Any, count: int, single: bool) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str):
        return [rid] if single else [f"{rid}_{i}" for i in range(count)]
    rids = _spread("rid", rid, count, single) if isinstance(rid, list) else []
    if not isinstance(rid, list) or any(not isinstance(r, str) for r in rids):
        raise InvalidRequestError(f"rid must be a string or a list of strings, got {rid!r}.")
    twice = sorted({r for r in rids if rids.count(r) > 1}) if len(set(rids)) != len(rids) else []
    if twice:
        raise InvalidRequestError(f"Duplicate request IDs detected within the request: {twice}")
    return rids


def admit(parts: Parts, item: Item, index: int) -> Request:
    """A checked request. Errors: InvalidRequestError and its kinds, naming value, limit and remedy."""
    spec, tokenizer, context = parts.spec, parts.tokenizer, parts.context_length
    params = SamplingParams.of(item.sampling, spec.vocab_size)
    if item.input_ids is not None:
        ids = check_ids(item.input_ids, spec.vocab_size)
    elif tokenizer is None:
        raise InvalidRequestError(
            "The engine initialized with skip_tokenizer_init=True cannot accept text prompts; give input_ids."
        )
    else:
        ids = tokenizer.encode(item.prompt)
        if not ids:
            raise InvalidRequestError("the prompt is empty and this model has no bos token to start from.")
        check_ids(ids, spec.vocab_size)
    if params.stop and tokenizer is None:
        raise InvalidRequestError("stop is unavailable when skip_tokenizer_init=True: there is no text to search.")
    count = len(ids)
    if count >= context:
        raise ContextLengthError(
            f"The input ({count} tokens) is longer than the model's context length ({context} tokens), of which one is "
            "needed for the answer; shorten the prompt or raise context_length."
        )
    room = context - count
    wanted = room if params.max_new_tokens is None else params.max_new_tokens
    explicit = isinstance(item.sampling, SamplingParams) or "max_new_tokens" in (item.sampling or {})
    if wanted > room and explicit:
        raise ContextLengthError(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a "
            f"total of {count + wanted} tokens: {count} of the input and {wanted} for the completion. "
            "Lower max_new_tokens."
        )
    if count >= parts.pool_tokens:
        raise CapacityError(
            f"Input length ({count} tokens) exceeds the maximum allowed length ({parts.pool_tokens - 1} tokens). "
            "Use a shorter input or raise max_total_tokens."
        )
    stop_ids = frozenset() if params.ignore_eos else parts.eos_ids | frozenset(params.stop_token_ids)
    seed = params.sampling_seed
    return Request(
        rid=item.rid,
        prompt_len=count,
        token_ids=ids,
        params=params,
        seed=derive_seed(parts.config.random_seed, index) if seed is None else seed,
        max_new_tokens=min(wanted, room, parts.pool_tokens - count),
        stop_ids=stop_ids,
    )


def admit_all(parts: Parts, items: list[Item], first_index: int) -> list[Request]:
    """Checks every prompt before any is queued and reports all that fail, with their index."""
    requests, errors = [], []
    for i, item in enumerate(items):
        try:
            requests.append(admit(parts, item, first_index + i))
        except FengineError as error:
            errors.append((i, error))
    if errors:
        if len(items) == 1:
            raise errors[0][1]
        kinds = {type(error) for _, error in errors}
        kind = kinds.pop() if len(kinds) == 1 else InvalidRequestError
        shown = [f"prompt {i}: {error}" for i, error in errors[:20]] + ["..."] * (len(errors) > 20)
        raise kind("\n".join(shown))
    return requests


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
