"""`Generation`: the calls of `Engine` that complete prompts, and those that steer them while they run."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from fengine.api.admission import admit_all
from fengine.api.arguments import split
from fengine.api.calls import AsyncStream, Call, Stream
from fengine.api.options import Door, bring_back, grammars_in
from fengine.api.results import Output
from fengine.core.scalars import told
from fengine.errors import EngineClosedError, InvalidRequestError
from fengine.tokenizer.chat import RESERVED
from fengine.tokenizer.tokenizer import Tokenizer

PAUSE_MODES = ("abort", "retract", "in_place")
Chat = Sequence[dict[str, Any]]


class Generation:
    """SGLang's signatures. Callable from any thread and any event loop."""

    _door: Door
    _pid: int
    _next_index: int  # of the next prompt: seeds that are not given derive from it
    _lock: threading.Lock

    # -- generate ------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        image_data: Any = None,
        audio_data: Any = None,
        video_data: Any = None,
        mm_hashes: Any = None,
        mm_content_hashes: Any = None,
        return_logprob: bool | list[bool] = False,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        token_ids_logprob: list[int] | list[list[int]] | None = None,
        lora_path: str | list[str | None] | None = None,
        custom_logit_processor: Any = None,
        require_reasoning: bool = False,
        return_hidden_states: bool | str | list[bool | str] = False,
        return_routed_experts: bool = False,
        routed_experts_start_len: int = 0,
        stream: bool = False,
        bootstrap_host: Any = None,
        bootstrap_port: Any = None,
        bootstrap_room: Any = None,
        routed_dp_rank: int | None = None,
        disagg_prefill_dp_rank: int | None = None,
        kv_hints: Any = None,
        data_parallel_rank: int | None = None,
        external_trace_header: Any = None,
        rid: str | list[str] | None = None,
        session_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        priority: int | list[int] | None = None,
        session_id: str | None = None,
        *,
        cache_salt: str | list[str] | None = None,
    ) -> Output | list[Output] | Iterator[Output]:
        """Completes one prompt (a dict) or a list of prompts (a list of dicts, in order); `stream=True`: an iterator.

        With sampling_params n > 1 every prompt has n results, one behind the other. A scalar argument holds for all
        prompts, a list has one entry for each. A chunk of a stream holds everything so far (or, with
        `incremental_streaming_output`, what is new); where there are several results it carries its `index`. Logprob
        options have an effect only with `return_logprob`; hidden states are `FloatList`s. `custom_logit_processor` is a
        callable (logits, [params]) -> logits of this process, or its registered name. Errors are raised here, before
        anything is queued: InvalidRequestError and its kinds, UnsupportedFeatureError, EngineClosedError,
        EngineDeadError. A request that fails by itself (non-finite logits, its processor) raises its error here, or in
        a stream ends with a chunk whose finish reason is an abort that tells it.
        """
        call = self.begin(locals(), None)
        return Stream(call) if stream else call.wait_sync()

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        image_data: Any = None,
        audio_data: Any = None,
        video_data: Any = None,
        mm_hashes: Any = None,
        mm_content_hashes: Any = None,
        return_logprob: bool | list[bool] = False,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        token_ids_logprob: list[int] | list[list[int]] | None = None,
        lora_path: str | list[str | None] | None = None,
        custom_logit_processor: Any = None,
        require_reasoning: bool = False,
        return_hidden_states: bool | str | list[bool | str] = False,
        return_routed_experts: bool = False,
        routed_experts_start_len: int = 0,
        stream: bool = False,
        bootstrap_host: Any = None,
        bootstrap_port: Any = None,
        bootstrap_room: Any = None,
        routed_dp_rank: int | None = None,
        disagg_prefill_dp_rank: int | None = None,
        kv_hints: Any = None,
        data_parallel_rank: int | None = None,
        external_trace_header: Any = None,
        rid: str | list[str] | None = None,
        session_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        priority: int | list[int] | None = None,
        session_id: str | None = None,
        *,
        cache_salt: str | list[str] | None = None,
    ) -> Output | list[Output] | AsyncIterator[Output]:
        """As `generate`; awaits the result, or with `stream=True` an async iterator. Works in any event loop."""
        arguments = locals()
        if grammars := grammars_in(self._door, sampling_params):  # compiled while this event loop goes on
            await asyncio.to_thread(self._door.grammars.prepare, grammars)
        await bring_back(self._door.parts, lora_path)
        call = self.begin(arguments, asyncio.get_running_loop())
        return AsyncStream(call) if stream else await call.wait_async()

    def begin(self, arguments: Mapping[str, Any], loop: asyncio.AbstractEventLoop | None, **how: Any) -> Call:
        """Checks the arguments of a `generate` and queues its requests: all of them, or, on an error, none.

        For other doors: the caller reads the `Call`, in `loop`, and aborts it. `how`: further arguments of `Call`.
        """
        if os.getpid() != self._pid:
            raise EngineClosedError("this engine belongs to the parent process; create a new Engine after a fork")
        door = self._door
        if threading.current_thread() in door.parts.driver.threads:
            raise InvalidRequestError("a logit processor cannot ask its engine for text: the engine waits for it.")
        if not door.parts.spec.generates:
            raise InvalidRequestError("this is an embedding model or classifier, which generates no text; use encode.")
        items, single = split(arguments, door.preferred)
        with self._lock:
            first, self._next_index = self._next_index, self._next_index + len(items)
        return Call(door, admit_all(door, items, first), stream=arguments["stream"], single=single, loop=loop, **how)

    # -- chats ---------------------------------------------------------------------------------------------------------

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
        stream: bool = False,
        **more: Any,
    ) -> Output | list[Output] | Iterator[Output]:
        """`generate` for a chat, or a list of chats, rendered by the model's template (`chat_template_kwargs` are its
        variables). Special-token text in a message stays text. `more` are further arguments of `generate`.

        Errors: as `generate`; ChatTemplateError, UnknownParameterError (a variable with a meaning of its own).
        """
        ids = self.chat_ids(messages, tools, add_generation_prompt, chat_template_kwargs)
        return self.generate(input_ids=ids, sampling_params=sampling_params, stream=stream, **_further(more))

    async def async_chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
        stream: bool = False,
        **more: Any,
    ) -> Output | list[Output] | AsyncIterator[Output]:
        """As `chat`, in any event loop."""
        ids = self.chat_ids(messages, tools, add_generation_prompt, chat_template_kwargs)
        return await self.async_generate(
            input_ids=ids, sampling_params=sampling_params, stream=stream, **_further(more)
        )

    def apply_chat_template(
        self,
        messages: Chat,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tokenize: bool = False,
        **chat_template_kwargs: Any,
    ) -> str | list[int]:
        """A chat as the text that the model sees, or with `tokenize` as its ids. Errors: as `chat`."""
        values = self._template_values(tools, chat_template_kwargs)
        render = self._text_of().encode_chat if tokenize else self._text_of().apply_chat_template
        return render(messages, add_generation_prompt=add_generation_prompt, **values)

    def chat_ids(self, messages: Any, tools: Any, add_generation_prompt: bool, values: Any) -> Any:
        """The ids of a chat, or of each of several. `values`: variables of the template. Errors: as `chat`."""
        tokenizer, values = self._text_of(), self._template_values(tools, values)

        def ids(chat: Any) -> list[int]:
            return tokenizer.encode_chat(chat, add_generation_prompt=add_generation_prompt, **values)

        several = isinstance(messages, (list, tuple)) and bool(messages) and isinstance(messages[0], (list, tuple))
        return [ids(chat) for chat in messages] if several else ids(messages)

    def _template_values(self, tools: Any, values: Any) -> dict[str, Any]:
        if values is not None and not (isinstance(values, dict) and all(isinstance(name, str) for name in values)):
            raise InvalidRequestError(f"chat_template_kwargs must be a dict of values by name, got {told(values)}.")
        if reserved := RESERVED.intersection(values or ()):
            raise InvalidRequestError(f"chat_template_kwargs cannot set {', '.join(sorted(reserved))}.")
        given = {} if tools is None else {"tools": tools}
        return {**(self._door.args.default_chat_template_kwargs or {}), **given, **(values or {})}

    def _text_of(self) -> Tokenizer:
        if self._door.parts.tokenizer is None:
            raise InvalidRequestError("chats need the tokenizer; start without skip_tokenizer_init, or pass input_ids.")
        return self._door.parts.tokenizer

    # -- steering ------------------------------------------------------------------------------------------------------

    def register_logit_processor(self, name: str, processor: Callable[..., Any]) -> None:
        """Lets requests name `processor` as their custom_logit_processor. The name may be given anew."""
        if not isinstance(name, str) or not name or isinstance(processor, type) or not callable(processor):
            raise InvalidRequestError(f"needed are a name and a callable, got {name!r:.80} and {processor!r:.80}.")
        self._door.processors[name] = processor

    def abort(self, rid: str | None = None, abort_all: bool = False) -> None:
        """Ends the request with exactly this rid, or all; their calls return what there is, finish type "abort".

        A rid that is unknown, or has finished, is left alone. Returns at once. Errors: InvalidRequestError.
        """
        if not abort_all and not isinstance(rid, str):
            raise InvalidRequestError(f"abort needs a rid (a string) or abort_all=True, got rid={rid!r:.80}.")
        self._door.parts.driver.abort_rids(None if abort_all else {str(rid)})

    def pause_generation(self, mode: str = "abort") -> None:
        """No step is planned until `continue_generation`; requests that come meanwhile wait.

        "abort" first ends all requests as `abort` does. "in_place" leaves them as they are, with their KV. "retract"
        sends them back to the queue: they give their pages back, so that `flush_cache` works, and are computed again.
        Returns when it holds. Errors: InvalidRequestError (mode), EngineClosedError, EngineDeadError.
        """
        if mode not in PAUSE_MODES:
            raise InvalidRequestError(f"Invalid mode: {mode!r:.80}. Expected one of {list(PAUSE_MODES)}.")
        self._door.parts.driver.pause(mode)

    def continue_generation(self) -> None:
        """Steps are planned again. Errors: EngineClosedError, EngineDeadError."""
        self._door.parts.driver.resume()


def _further(more: dict[str, Any]) -> dict[str, Any]:
    """Errors: InvalidRequestError for arguments that would give a second prompt."""
    for name in ("prompt", "input_ids"):
        if more.get(name) is not None:
            raise InvalidRequestError(f"chat takes its prompt from messages; leave {name} out.")
    return {name: value for name, value in more.items() if name not in ("prompt", "input_ids")}
