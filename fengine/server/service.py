"""`Service`: one engine behind HTTP. Begins calls off the event loop, counts rows, ends calls when clients go."""

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch

from fengine import __version__
from fengine.api.collector import OutputCollector
from fengine.api.engine import Engine
from fengine.api.io_struct import EncodeReqInput, GenerateReqInput
from fengine.api.outputs import Output
from fengine.errors import ConfigError
from fengine.server import chat, completions, embeddings, tokens
from fengine.server.config import ServerConfig
from fengine.server.errors import ApiError, api_error_of
from fengine.server.metrics import Meter
from fengine.server.openai_body import READERS, OpenAIRequest
from fengine.server.responses import Form
from fengine.worker.generation_config import read_sampling_defaults

THREADS = 8  # that tokenize and check; a template may run for seconds
PROBE_SECONDS = 5.0
SLOWEST = 0.25  # seconds between two chunks, however many streams there are
Result = TypeVar("Result")


class ClientGone(Exception):
    """The client has closed its connection; nobody reads the answer."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A request under way."""

    request: OpenAIRequest
    form: Form
    call: OutputCollector


class Service:
    """Not tied to a web framework. Methods are for one event loop's thread, but for `begin_*`, which run in threads."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        """Errors: ConfigError if the engine has no tokenizer; ModelLoadError for a bad generation_config.json."""
        if engine.tokenizer is None:
            raise ConfigError("a server speaks text: make the engine without skip_tokenizer_init")
        self.engine, self.config, self.tokenizer, self.meter = engine, config, engine.tokenizer, Meter()
        self.model = config.model_name or str(engine.config.model.path)
        self.fingerprint, self.created = fingerprint_of(engine), int(time.time())
        self.sampling_defaults = {} if config.sampling_defaults == "openai" else defaults_of(engine)
        self.rows = 0  # that are open
        self._lock = threading.Lock()  # of `rows`
        self._template_facts = cache(partial(chat.template_facts, self.tokenizer))
        self._pool = ThreadPoolExecutor(THREADS, "fengine-serve")
        self._probe: asyncio.Future[Any] | None = None

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _reserve(self, rows: int) -> None:
        """Errors: ApiError 429 when they would be too many."""
        with self._lock:
            if self.rows + rows > self.config.max_rows:
                message = (
                    f"{self.rows} rows are open, and {rows} more would exceed serve.max_rows={self.config.max_rows}"
                )
                raise ApiError(429, f"{message}; try again later.", code="queue_full", headers={"Retry-After": "1"})
            self.rows += rows

    def _release(self, rows: int) -> None:
        with self._lock:
            self.rows -= rows

    def end(self, call: OutputCollector) -> None:
        """Aborts what is open of a call and gives its rows back; called once, however the call ends."""
        call.abort()
        for state in call.states:
            self.meter.ended(state)
        self._release(len(call.states))

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def generate(self, body: Mapping[str, Any], path: str) -> Begun:
        """A body of completions or of chat completions, checked and queued; `end` its call. Errors: ApiError."""
        adapter = self.adapter_of(body)
        if adapter is not None:
            if body.get("lora_path") not in (None, adapter):
                raise ApiError(400, "model and lora_path name two adapters; give one.", "lora_path", "invalid_value")
            body = {**body, "lora_path": adapter}
        begin = partial(self._begin_generate, body, path, asyncio.get_running_loop())
        return await self._in_thread(begin, lambda begun: self.end(begun.call))

    def _begin_generate(self, body: Mapping[str, Any], path: str, loop: asyncio.AbstractEventLoop) -> Begun:
        words: Mapping[str, str] = {}
        try:
            request = READERS[path](body, self.config.max_samples)
            words = request.words
            if request.chat is None:
                arguments, form = request.arguments, completions.form_of(request, self.tokenizer)
            else:
                facts = self._template_facts(request.chat.tools is not None)
                arguments, form = chat.prepare(request, self.tokenizer, facts, self.engine.chat_ids)
            arguments["sampling_params"] = self.sampling_defaults | arguments["sampling_params"]
            req = GenerateReqInput(**arguments, stream=request.stream)
            call = self._holding(
                request.prompts * request.samples,
                lambda: self.engine.submit(req, loop, deltas=True, pace=self._pace),
            )
            return Begun(request, form, call)
        except Exception as error:
            raise api_error_of(error, body, words) from error

    async def encode(self, body: Mapping[str, Any]) -> tuple[OutputCollector, bool]:
        """A body of embeddings, checked and queued, and whether base64 is wanted; `end` its call. Errors: ApiError."""
        adapter = self.adapter_of(body)
        begin = partial(self._begin_encode, body, adapter, asyncio.get_running_loop())
        return await self._in_thread(begin, lambda begun: self.end(begun[0]))

    def _begin_encode(self, body: Mapping[str, Any], adapter: str | None, loop: Any) -> tuple[OutputCollector, bool]:
        try:
            arguments, prompts, as_base64 = embeddings.read(body)
            req = EncodeReqInput(**arguments, lora_path=adapter)
            return self._holding(prompts, lambda: self.engine.submit_encode(req, loop)), as_base64
        except Exception as error:
            raise api_error_of(error, body, embeddings.WORDS) from error

    async def tokenize(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Errors: ApiError."""
        self.adapter_of(body)
        context = self.engine.get_server_info()["context_length"]
        return await self._told(partial(tokens.tokenize, body, self.tokenizer, self.engine.chat_ids, context), body)

    async def detokenize(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Errors: ApiError."""
        self.adapter_of(body)
        return await self._told(partial(tokens.detokenize, body, self.tokenizer), body)

    async def _told(self, work: Callable[[], Result], body: Mapping[str, Any]) -> Result:
        """What `work` returns, in a thread. Errors: ApiError."""
        try:
            return await self._in_thread(work, lambda _: None)
        except Exception as error:
            raise api_error_of(error, body) from error

    def _holding(self, rows: int, begin: Callable[[], Result]) -> Result:
        """What `begin` returns, with its rows reserved; not if it fails."""
        self._reserve(rows)
        try:
            return begin()
        except BaseException:
            self._release(rows)
            raise

    async def _in_thread(self, begin: Callable[[], Result], undo: Callable[[Result], None]) -> Result:
        """`begin()` in a thread. If this task is cancelled meanwhile, what begins all the same is undone."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, begin)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: done.cancelled() or done.exception() or undo(done.result()))
            raise

    async def outputs(self, wait: Awaitable[Any], gone: Awaitable[None]) -> list[Output]:
        """The results of a call. Errors: ApiError; ClientGone when `gone` is done first."""
        work, watch = asyncio.ensure_future(wait), asyncio.ensure_future(gone)
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientGone
            found = work.result()
            return found if isinstance(found, list) else [found]
        except Exception as error:
            raise error if isinstance(error, ClientGone) else api_error_of(error) from error
        finally:
            for task in (work, watch):
                task.cancel()

    def _pace(self) -> float:
        """The moment (perf_counter) for the next chunks: the same for all streams, so that they leave in one go."""
        every, now = min(self.rows / self.config.chunks_per_second, SLOWEST), time.perf_counter()
        return now - now % every + every if every else now

    # -- what the server tells about itself ----------------------------------------------------------------------------

    def adapter_of(self, body: Mapping[str, Any]) -> str | None:
        """The LoRA adapter that a body's model is; None: the model itself, which it is without a name or as "default".

        Errors: ApiError (400, 404).
        """
        name, adapters = body.get("model") or "default", self.engine.lora_adapters()
        if not isinstance(name, str):
            raise ApiError(400, f"model must be a string, got {name!r:.80}.", "model", "invalid_value")
        if name in (self.model, "default"):
            return None
        if name not in adapters:
            known = ", ".join([self.model, *adapters])
            raise ApiError(
                404, f"the model {name!r:.200} does not exist; there is {known:.500}.", "model", "model_not_found"
            )
        return name

    def cards(self) -> dict[str, dict[str, Any]]:
        """The model and its adapters by name, in OpenAI's words and vLLM's `max_model_len` and `parent`. Pure."""
        length = self.engine.get_server_info()["context_length"]
        told = {"object": "model", "created": self.created, "owned_by": "fengine", "max_model_len": length}
        told["sampling_defaults"] = self.sampling_defaults
        cards = {name: {"id": name, **told, "parent": self.model} for name in self.engine.lora_adapters()}
        return {self.model: {"id": self.model, **told, "parent": None}, **cards}

    async def healthy(self) -> str | None:
        """None if the engine answers now, else what is wrong. One probe at a time, whoever asks."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.get_running_loop().run_in_executor(None, self.engine.ping)
        try:
            await asyncio.wait_for(asyncio.shield(self._probe), PROBE_SECONDS)
        except TimeoutError:
            return f"the engine's loop has not answered for {PROBE_SECONDS:g} seconds"
        except Exception as error:
            return str(error)
        return None

    async def metrics(self) -> str:
        up = await self.healthy() is None
        return self.meter.page(self.engine.stats(), up, self.rows)


def defaults_of(engine: Engine) -> dict[str, Any]:
    """The sampling parameters that the model's files recommend. Errors: ModelLoadError."""
    return read_sampling_defaults(engine._parts.model_dir)


def fingerprint_of(engine: Engine) -> str:
    """Names what an output's bits depend on besides request and weights: code, libraries, device, configuration."""
    facts = {"fengine": __version__, "torch": torch.__version__, "config": asdict(engine.config)}
    if (engine.config.model.device or "").startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name(engine.config.model.device)
    return "fp_" + hashlib.sha256(json.dumps(facts, default=str, sort_keys=True).encode()).hexdigest()[:12]
