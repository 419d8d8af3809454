"""`Engine`: SGLang's offline Engine API over one driver. Callable from any thread and any event loop."""

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

from fengine.admission import admit_all, split
from fengine.build import Parts, build
from fengine.calls import AsyncStream, Call, Output, Stream
from fengine.config import EngineConfig
from fengine.errors import EngineClosedError, InvalidRequestError
from fengine.server_args import ServerArgs
from fengine.tokenizer import Tokenizer


class FlushResult(NamedTuple):
    """SGLang's answer to `flush_cache`."""

    success: bool
    message: str


class Engine:
    """`Engine(model_path=..., **ServerArgs fields)` or `Engine(server_args=ServerArgs(...))`.

    Errors at construction: ConfigError, ModelLoadError and their kinds. Use as a context manager, or call `shutdown`.
    """

    def __init__(self, *, server_args: ServerArgs | None = None, **kwargs: Any) -> None:
        if server_args is not None and kwargs:
            raise InvalidRequestError(f"give server_args or single fields, not both (got {', '.join(sorted(kwargs))})")
        args = server_args if server_args is not None else ServerArgs(**kwargs)
        self._start(build(args.to_config()), args)

    @classmethod
    def from_config(cls, config: EngineConfig) -> "Engine":
        """An engine from fengine's own configuration, with timing keys in `meta_info`."""
        return cls.from_parts(build(config))

    @classmethod
    def from_parts(cls, parts: Parts) -> "Engine":
        """An engine over parts that were assembled by hand: other weights, or another model function."""
        engine = cls.__new__(cls)
        engine._start(parts, ServerArgs(model_path=parts.config.model.path, enable_metrics=True))
        return engine

    def _start(self, parts: Parts, args: ServerArgs) -> None:
        self.server_args = args
        self._incremental = args.incremental_streaming_output or args.stream_output
        self._parts = parts
        self.config = parts.config
        self._pid = os.getpid()
        self._next_index = 0  # of the next request: seeds that are not given derive from it
        self._lock = threading.Lock()
        atexit.register(self.shutdown)

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Ends running requests with EngineClosedError, stops the threads and frees the device. Idempotent."""
        if os.getpid() == self._pid:
            self._parts.close()
            atexit.unregister(self.shutdown)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._parts.tokenizer

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and gauges of this moment."""
        return self._parts.stats()

    def flush_cache(self) -> FlushResult:
        """Empties the prefix cache; refused (success False) while requests run."""

        def flush() -> FlushResult:
            scheduler = self._parts.driver.scheduler
            if scheduler.has_work:
                return FlushResult(
                    False, "the cache was not flushed: requests are running; wait for them or abort them"
                )
            if scheduler.cache is not None:
                scheduler.cache.flush()
            return FlushResult(True, "the prefix cache is empty")

        return self._parts.driver.call(flush)

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
        token_ids_logprob: Any = None,
        lora_path: Any = None,
        custom_logit_processor: Any = None,
        require_reasoning: bool = False,
        return_hidden_states: bool = False,
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
        session_params: Any = None,
        priority: int | None = None,
        session_id: str | None = None,
        *,
        cache_salt: str | None = None,
    ) -> Output | list[Output] | Iterator[Output]:
        """Completes one prompt (a dict) or a list of prompts (a list of dicts, in order); `stream=True`: an iterator.

        A chunk of a stream holds everything so far (or, with `incremental_streaming_output`, what is new); in a batch
        it carries its prompt's `index`. Errors are raised here, before anything is queued: InvalidRequestError and its
        kinds, UnsupportedFeatureError, EngineClosedError, EngineDeadError.
        """
        call = self._call(locals(), None)
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
        token_ids_logprob: Any = None,
        lora_path: Any = None,
        custom_logit_processor: Any = None,
        require_reasoning: bool = False,
        return_hidden_states: bool = False,
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
        session_params: Any = None,
        priority: int | None = None,
        session_id: str | None = None,
        *,
        cache_salt: str | None = None,
    ) -> Output | list[Output] | AsyncIterator[Output]:
        """As `generate`; awaits the result, or with `stream=True` an async iterator. Works in any event loop."""
        call = self._call(locals(), asyncio.get_running_loop())
        return AsyncStream(call) if stream else await call.wait_async()

    def _call(self, arguments: dict[str, Any], loop: asyncio.AbstractEventLoop | None) -> Call:
        """Checks the arguments and queues the requests: all of them, or, on an error, none."""
        if os.getpid() != self._pid:
            raise EngineClosedError("this engine belongs to the parent process; create a new Engine after a fork")
        items, single = split(arguments)
        with self._lock:
            first, self._next_index = self._next_index, self._next_index + len(items)
        requests = admit_all(self._parts, items, first)
        return Call(
            self._parts,
            requests,
            items,
            stream=bool(arguments["stream"]),
            single=single,
            incremental=self._incremental,
            metrics=self.server_args.enable_metrics,
            loop=loop,
        )
