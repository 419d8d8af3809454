"""`Engine`: SGLang's offline Engine API over one engine core. Callable from any thread and any event loop."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, Unpack, cast, overload

from fengine.api import admin, call_options, info, weights
from fengine.api import chat as chats
from fengine.api import encode as embeddings
from fengine.api import score as scoring
from fengine.api.arguments import checked_calls, described_by, record_of, takes
from fengine.api.context import EngineContext
from fengine.api.features import FEATURES
from fengine.api.generate_input import GenerateReqInput
from fengine.api.input_processor import process_input
from fengine.api.io_struct import EncodeReqInput
from fengine.api.request_log import RequestLog
from fengine.api.server_args import ServerArgs
from fengine.api.sessions import Sessions, Turn
from fengine.api.streams import AsyncStream, OutputCollector, Stream
from fengine.api.tokenizer_manager import TokenizerManager
from fengine.api.types import CallOptions, GenerateOutput, SamplingParamsDict
from fengine.config import EngineConfig
from fengine.core.owned import finalize
from fengine.core.request import Request, SamplingParams
from fengine.engine.build import build, memory_told
from fengine.engine.parts import Parts
from fengine.errors import ConfigError, InvalidRequestError, UnsupportedFeatureError
from fengine.structured_output.backend import Grammars
from fengine.tokenizer.detokenizer import token_texts
from fengine.tokenizer.tokenizer import Tokenizer
from fengine.worker.device import refuse_forked
from fengine.worker.generation_config import read_sampling_defaults

Values = SamplingParamsDict | Mapping[str, Any]
Sampling = Values | SamplingParams | Sequence[Values] | None
Prompts = str | list[str] | None
Ids = Sequence[int]


@contextmanager
def _built(config: EngineConfig, **template: str | None) -> Iterator[Parts]:
    """Parts that end where what is inside fails; `template`: of chats, as `with_chat_template`. Errors: as `build`."""
    refuse_forked()
    make = FEATURES.tokenizer  # before weights are read, so that a template is refused before
    parts = build(config, replace(FEATURES, tokenizer=lambda *a, **k: make(*a, **k).with_chat_template(**template)))
    try:
        yield parts
    except BaseException:
        parts.close()
        raise


@checked_calls
class Engine:
    """`Engine(model_path=..., **ServerArgs fields)` or `Engine(server_args=ServerArgs(...))`.

    Use as a context manager, or call `shutdown`; an engine that is dropped ends by itself.
    Errors at construction: ConfigError, ModelLoadError and their kinds. Everywhere: InvalidRequestError and its kinds,
    UnsupportedFeatureError, EngineClosedError, EngineDeadError."""

    @overload
    def __init__(self, *, server_args: ServerArgs) -> None: ...
    @overload
    @takes(ServerArgs)
    def __init__(self, *given: Any, **settings: Any) -> None: ...
    def __init__(self, *given: Any, server_args: ServerArgs | None = None, **settings: Any) -> None:
        if server_args is not None and (given or settings):
            raise InvalidRequestError(f"give server_args or single fields, not both (got {', '.join(settings)})")
        args = server_args if server_args is not None else ServerArgs(*given, **settings)
        if not isinstance(args, ServerArgs):
            got = type(args).__name__
            raise ConfigError(f"server_args must be a ServerArgs, got {got}; a dict: Engine(**settings)")
        with _built(args.to_config(), source=args.chat_template, name=args.hf_chat_template_name) as parts:
            self._start(parts, args, owned=True)

    @classmethod
    def from_config(cls, config: EngineConfig) -> "Engine":
        """An engine from fengine's own configuration, with timing keys in `meta_info` and every per-call option on."""
        with _built(config) as parts:
            return cls.from_parts(parts, owned=True)

    @classmethod
    def from_parts(cls, parts: Parts, args: ServerArgs | None = None, *, owned: bool = False) -> "Engine":
        """An engine over parts that were assembled by hand: other weights, or another model function.

        Parts that are not `owned` may serve other engines, and end with `shutdown` only."""
        engine = cls.__new__(cls)
        every_option_on = ServerArgs(
            parts.config.model.path, enable_metrics=True, enable_return_hidden_states=True,
            enable_custom_logit_processor=True, enable_priority_scheduling=True,
        )  # fmt: skip
        engine._start(parts, args or every_option_on, owned=owned)
        return engine

    @memory_told()
    def _start(self, parts: Parts, args: ServerArgs, *, owned: bool) -> None:
        grammars = Grammars(lambda: token_texts(parts.tokenizer, parts.spec.vocab_size), args.whitespace)
        preferred = args.preferred()
        if parts.config.model.sampling_defaults == "model":
            found = read_sampling_defaults(parts.model_dir)
            told = replace(parts.config.model, sampling_defaults=json.dumps(found, sort_keys=True))
            parts.config, preferred = replace(parts.config, model=told), found | preferred
        self._parts, self.server_args, self.config = parts, args, parts.config
        sessions, logs = Sessions(parts.core.abort, parts.core.system), args.log_requests or args.crash_dump_folder
        log = RequestLog(args, parts.tokenizer) if logs else None
        self._context = EngineContext(parts, args, sessions, grammars, log, preferred)
        parts.memory.keep_weights(args.enable_weights_cpu_backup)
        if parts.config.parallel.dp_size > 1:  # grammars are compiled where they are used
            parts.core.call("use_whitespace", whitespace=args.whitespace and list(args.whitespace))
        parts.core.call("label_weights", version=args.weight_version)
        self.tokenizer_manager = TokenizerManager(self)
        holder = self if owned else grammars  # `grammars` lives as long as its own finalizer: until shutdown or the end
        self._finalizer = finalize(holder, lambda: (parts.close(), grammars.close()))

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        model = self.config.model
        return f"Engine({str(model.path)!r}, {model.device}, KV cache of {self._parts.pool_tokens:,} tokens)"

    def __reduce__(self) -> Any:
        raise UnsupportedFeatureError("an Engine cannot be pickled or copied, for it owns threads; make another.")

    def shutdown(self) -> None:
        """Ends running requests with EngineClosedError, stops the threads and frees the device. Idempotent."""
        self._finalizer()

    @property
    def tokenizer(self) -> Tokenizer:
        """None with skip_tokenizer_init, which type checkers are spared."""
        return cast(Tokenizer, self._parts.tokenizer)

    # fmt: off
    @overload
    def generate(self, prompt: str | None = None, sampling_params: Sampling = None, input_ids: Ids | None = None, *,
                 stream: Literal[False] = False, **options: Unpack[CallOptions]) -> GenerateOutput: ...
    @overload
    def generate(self, prompt: list[str] | None = None, sampling_params: Sampling = None,
                 input_ids: Sequence[Ids] | None = None, *,
                 stream: Literal[False] = False, **options: Unpack[CallOptions]) -> list[GenerateOutput]: ...
    @overload
    def generate(self, prompt: Prompts = None, sampling_params: Sampling = None, input_ids: Any = None, *,
                 stream: Literal[True], **options: Unpack[CallOptions]) -> Iterator[GenerateOutput]: ...
    # fmt: on
    @described_by(GenerateReqInput)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Completes one prompt (a dict) or a list of prompts (a list of dicts, in order); `stream=True`: an iterator.

        With sampling_params n > 1 every prompt has n results, one after the other. A scalar argument holds for all
        prompts, a list has one entry for each. A chunk of a stream holds everything so far (or, with
        `incremental_streaming_output`, what is new); where there are several results it carries its `index`. Logprob
        options have an effect only with `return_logprob`; hidden states are `FloatList`s. `custom_logit_processor` is a
        callable (logits [1, V], [params]) -> logits of this process, or its registered name. Errors are raised here,
        before anything is queued. A request that fails by itself (non-finite logits, its processor) raises its error
        here. In a stream it ends with a chunk whose finish reason is an abort with the message."""
        collector = self.submit(record_of(GenerateReqInput, args, kwargs))
        return Stream(collector, self) if collector.stream else collector.wait()

    # fmt: off
    @overload
    async def async_generate(self, prompt: str | None = None, sampling_params: Sampling = None,
                             input_ids: Ids | None = None, *, stream: Literal[False] = False,
                             **options: Unpack[CallOptions]) -> GenerateOutput: ...
    @overload
    async def async_generate(self, prompt: list[str] | None = None, sampling_params: Sampling = None,
                             input_ids: Sequence[Ids] | None = None, *, stream: Literal[False] = False,
                             **options: Unpack[CallOptions]) -> list[GenerateOutput]: ...
    @overload
    async def async_generate(self, prompt: Prompts = None, sampling_params: Sampling = None,
                             input_ids: Any = None, *, stream: Literal[True],
                             **options: Unpack[CallOptions]) -> AsyncIterator[GenerateOutput]: ...
    # fmt: on
    @described_by(GenerateReqInput)
    async def async_generate(self, *args: Any, **kwargs: Any) -> Any:
        """As `generate`; awaits the result, or with `stream=True` an async iterator. Works in any event loop."""
        return await self._answered(record_of(GenerateReqInput, args, kwargs))

    async def _answered(self, req: GenerateReqInput | EncodeReqInput) -> Any:
        """What `async_generate` or `async_encode` gives of a call. The event loop goes on while grammars are compiled,
        and images and adapters that have left CPU memory are read."""
        if isinstance(req, GenerateReqInput) and (
            sources := call_options.grammars_in(self._context, req.sampling_params)
        ):
            await asyncio.to_thread(self._context.grammars.prepare, sources)
        if (images := self._parts.images) is not None and req.image_data is not None:
            req.image_data = await asyncio.to_thread(images.read_all, req.image_data)
        if (adapters := self._parts.adapters) is not None:
            for name in adapters.given_up(req.lora_path):
                await asyncio.to_thread(adapters.resolve, name)
        collector = self.submit(req, asyncio.get_running_loop())
        return AsyncStream(collector, self) if collector.stream else await collector.wait_async()

    def submit(
        self, req: GenerateReqInput | EncodeReqInput, loop: asyncio.AbstractEventLoop | None = None,
        hidden: bool = False, **how: Any,
    ) -> OutputCollector:  # fmt: skip
        """Checks a call and queues its requests: all of them or, on an error, none.

        For servers: the caller reads the collector, in `loop`, and aborts it. `hidden`: as of `encode_requests`; `how`:
        arguments of OutputCollector."""
        if isinstance(req, EncodeReqInput):
            found = embeddings.encode_requests(self, req, hidden)
            return OutputCollector(self._context, *found, stream=False, loop=loop)
        return OutputCollector(self._context, *self._requests(req), stream=req.stream, loop=loop, **how)

    def _requests(self, req: GenerateReqInput) -> tuple[list[Request], dict[str, Turn], bool]:
        if not self._parts.spec.generates:
            raise InvalidRequestError("this is an embedding model or classifier, which generates no text; use encode.")
        if (images := self._parts.images) is not None and req.image_data is not None:
            req.image_data = images.read_all(req.image_data, refuse=False)
        return process_input(self._context, req)

    # -- what else it can do: functions of other files are methods -----------------------------------------------------

    chat = chats.chat
    async_chat = chats.async_chat
    apply_chat_template = chats.apply_chat_template
    chat_ids = chats.chat_ids
    encode = embeddings.encode
    async_encode = embeddings.async_encode
    rerank = scoring.rerank
    score = scoring.score
    async_score = scoring.async_score
    update_weights_from_disk = weights.update_weights_from_disk
    update_weights_from_tensor = weights.update_weights_from_tensor
    update_weights_from_distributed = weights.update_weights_from_distributed
    update_weights_from_ipc = weights.update_weights_from_ipc
    init_weights_update_group = weights.init_weights_update_group
    destroy_weights_update_group = weights.destroy_weights_update_group
    begin_weight_update = weights.begin_weight_update
    end_weight_update = weights.end_weight_update
    get_weights_by_name = weights.get_weights_by_name
    release_memory_occupation = weights.release_memory_occupation
    resume_memory_occupation = weights.resume_memory_occupation
    load_lora_adapter = weights.load_lora_adapter
    load_lora_adapter_from_tensors = weights.load_lora_adapter_from_tensors
    unload_lora_adapter = weights.unload_lora_adapter
    async_load_lora_adapter = weights.async_load_lora_adapter
    async_unload_lora_adapter = weights.async_unload_lora_adapter
    lora_adapters = weights.lora_adapters
    open_session = admin.open_session
    close_session = admin.close_session
    register_logit_processor = call_options.register_logit_processor
    abort = admin.abort
    pause_generation = admin.pause_generation
    continue_generation = admin.continue_generation
    flush_cache = admin.flush_cache
    freeze_gc = admin.freeze_gc
    ping = admin.ping
    stats = admin.stats
    get_server_info = info.get_server_info
    get_model_info = info.get_model_info
    get_load = info.get_load
    get_all_child_pids = admin.get_all_child_pids
    start_profile = admin.start_profile
    stop_profile = admin.stop_profile
    steps_told = admin.steps_told
    start_expert_distribution_record = admin.start_expert_distribution_record
    stop_expert_distribution_record = admin.start_expert_distribution_record
    dump_expert_distribution_record = admin.start_expert_distribution_record
    collective_rpc = admin.collective_rpc
    save_sharded_model = admin.save_sharded_model
    save_remote_model = admin.save_remote_model
