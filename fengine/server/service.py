"""`Service`: one engine behind HTTP. Begins calls off the event loop, counts rows, ends calls when clients go."""

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch

from fengine import __version__
from fengine.api.engine import Engine
from fengine.api.io_struct import GenerateReqInput
from fengine.api.outputs import Output
from fengine.api.streams import OutputCollector
from fengine.api.weights import lora_adapters
from fengine.core.parameter_kinds import MAX_BIAS
from fengine.engine.memory import checked_tags
from fengine.errors import MemoryReleasedError
from fengine.server.answers import Plan
from fengine.server.choices import ChoiceWriter
from fengine.server.config import ServerConfig
from fengine.server.draw_limits import DrawLimits, also_barring
from fengine.server.errors import ApiError, api_error_of, invalid, tokenizer_of, unsupported
from fengine.server.metrics import Meter
from fengine.server.template_facts import template_facts
from fengine.server.tool_calls import FORMS
from fengine.tokenizer.tokenizer import Tokenizer
from fengine.worker.generation_config import read_sampling_defaults

THREADS = 8  # that tokenize and check; a template may run for seconds
PROBE_SECONDS = 5.0
SLOWEST = 0.25  # seconds between two chunks, however many streams there are
Result = TypeVar("Result")
Body = Mapping[str, Any]
Words = Mapping[str, str]


class ClientGone(Exception):
    """The client has closed its connection; nobody reads the answer."""


@dataclass(frozen=True, slots=True)
class Call:
    """A plan under way."""

    plan: Plan
    collector: OutputCollector


class Service:
    """Not tied to a web framework. Methods are for one event loop's thread, but for what plans call, in threads."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        """Errors: ModelLoadError for a bad generation_config.json."""
        self.engine, self.config = engine, config
        self.model, self.context = config.model_name or str(engine.config.model.path), engine._parts.context_length
        self.meter = Meter(self.model, engine.config.cache)
        self.fingerprint, self.created = fingerprint_of(engine), int(time.time())
        model_dir = engine._parts.model_dir
        self.sampling_defaults = {} if config.sampling_defaults == "openai" else read_sampling_defaults(model_dir)
        self.rows = 0  # that are open
        self._lock = threading.Lock()  # of `rows`
        form = FORMS.get(config.tool_call_parser or "")
        self.template_facts = cache(lambda tools: template_facts(self.tokenizer, tools, form))
        self._pool = ThreadPoolExecutor(THREADS, "fengine-serve")
        self._probe: asyncio.Future[Any] | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """Errors: ApiError, where the engine has none."""
        return tokenizer_of(self.engine)

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def begin(self, plan: Callable[["Service", Body], Plan], body: Body, words: Words) -> Call:
        """A body of what `plan` reads, checked and queued; `end` its call. Errors: ApiError."""
        return await self._in_thread(partial(self._begin, plan, body, words, asyncio.get_running_loop()), self.end)

    def _begin(self, plan: Any, body: Body, words: Words, loop: asyncio.AbstractEventLoop) -> Call:
        try:
            self.adapter_of(body)  # a wrong name is told first
            found: Plan = plan(self, body)
            words = {**found.words, **words}  # those of a chat, then those of a body that was turned into one
            self._reserve(found.rows)
            try:
                return Call(found, self._submitted(found, loop))
            except BaseException:
                self._reserve(-found.rows)
                raise
        except Exception as error:
            raise api_error_of(error, body, words) from error

    def _submitted(self, plan: Plan, loop: asyncio.AbstractEventLoop) -> OutputCollector:
        images = self.engine._parts.images
        if images is not None and plan.request.image_data is not None:  # whoever asks may not read this machine's files
            plan.request.image_data = images.read_all(plan.request.image_data, inside=True)
        how: dict[str, Any] = {"deltas": True, "pace": self._pace} if plan.deltas else {}
        return self.engine.submit(plan.request, loop, plan.hidden, **how)

    def _reserve(self, rows: int) -> None:
        """Errors: ApiError 429 when they would be too many, 400 when they always would."""
        if rows > (most := self.config.max_rows):
            raise ApiError(400, f"{rows} rows are more than serve.max_rows={most}; ask for fewer at once.")
        with self._lock:
            if rows > 0 and self.rows + rows > most:
                told = f"{self.rows} rows are open, and {rows} more would exceed serve.max_rows={most}"
                raise ApiError(429, f"{told}; try again later.", code="queue_full", headers={"Retry-After": "1"})
            self.rows += rows

    def end(self, call: Call) -> None:
        """Aborts what is open of a call and gives its rows back; called once, however the call ends."""
        call.collector.abort()
        for state in call.collector.states:
            self.meter.ended(state)
        self._reserve(-call.plan.rows)

    async def ask(self, work: Callable[[], Result], body: Body, words: Words) -> Result:
        """What `work` returns, in a thread. Errors: ApiError."""
        try:
            self.adapter_of(body)
            return await self._in_thread(work, lambda _: None)
        except Exception as error:
            raise api_error_of(error, body, words) from error

    async def _in_thread(self, begin: Callable[[], Result], undo: Callable[[Result], None]) -> Result:
        """`begin()` in a thread. If this task is cancelled meanwhile, what begins all the same is undone."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, begin)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: done.cancelled() or done.exception() or undo(done.result()))
            raise

    async def outputs(self, call: Call, gone: Awaitable[None]) -> list[Output]:
        """The results of a call. Errors: ApiError; ClientGone when `gone` is done first."""
        work, watch = asyncio.ensure_future(call.collector.wait_async()), asyncio.ensure_future(gone)
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

    def turn(self, change: Callable[[list[str]], None], tags: Any) -> dict[str, Any]:
        """`change` gives memory with these tags back, or takes it again; what is so already stays so, as with vLLM.
        Errors: those of `change`."""
        for tag in checked_tags(tags):
            with suppress(MemoryReleasedError):
                change([tag])
        return {"success": True}

    def _pace(self) -> float:
        """The moment (perf_counter) for the next chunks: the same for all streams, so that they leave in one go."""
        every, now = min(self.rows / self.config.chunks_per_second, SLOWEST), time.perf_counter()
        return now - now % every + every if every else now

    # -- what plans are made of ----------------------------------------------------------------------------------------

    def request_of(self, body: Body, arguments: dict[str, Any], writer: ChoiceWriter) -> GenerateReqInput:
        """The call's arguments, with the server's sampling defaults, the body's adapter and limits of what is drawn.
        Errors: ApiError."""
        sampling, given = self.sampling_defaults | arguments["sampling_params"], writer.given
        texts = [text for word in given["bad_words"] for text in (word, f" {word.lstrip()}")]  # as it may be tokenized
        barred = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        bias = sampling.get("logit_bias", {})
        if barred and isinstance(bias, dict):  # another is the engine's to refuse
            sampling["logit_bias"] = bias | {str(ids[0]): -MAX_BIAS for ids in barred if len(ids) == 1}
        allowed, together = (
            given["allowed_token_ids"] and [*set(given["allowed_token_ids"])],
            [ids for ids in barred if len(ids) > 1],
        )
        asked = {"allowed_token_ids": allowed, "bad_words": together, "thinking_token_budget": writer.limit}
        if names := [name for name, value in asked.items() if value]:
            told = dict.fromkeys([*names, *also_barring(body, sampling)])
            limits = DrawLimits(allowed, together, writer.limit, [*told])
            self._check_limits(names[0], limits, arguments.get("custom_logit_processor"))
            arguments |= {"custom_logit_processor": limits}
        arguments |= {"sampling_params": sampling, "lora_path": self.lora_path(body, arguments.get("lora_path"))}
        return GenerateReqInput(**arguments, stream=given["stream"])

    def _check_limits(self, name: str, limits: DrawLimits, processor: Any) -> None:
        """Errors: ApiError for what a processor of the server's own cannot do here."""
        if not self.engine.server_args.enable_custom_logit_processor:
            told = "needs a server with --enable-custom-logit-processor; only bad_words of one token each do not."
            raise unsupported(name, f"{name} {told}")
        if processor is not None:
            raise invalid(name, f"{name} and custom_logit_processor are two processors; give one.")
        size = self.engine._parts.spec.vocab_size
        if wrong := [id for id in limits.allowed or () if id >= size]:
            raise invalid(name, f"{name} contains out-of-vocab token id {wrong[0]}: ids are in [0, {size - 1}].")

    def head(self, body: Body) -> dict[str, Any]:
        """What OpenAI's answers tell of the model. Errors: ApiError."""
        return {"model": self.name_of(body), "system_fingerprint": self.fingerprint}

    def name_of(self, body: Body) -> str:
        """What an answer calls the model. Errors: ApiError."""
        return self.adapter_of(body) or self.model

    def lora_path(self, body: Body, given: Any) -> Any:
        """The adapter that a body asks for, by its model or its lora_path. Errors: ApiError."""
        adapter = self.adapter_of(body)
        if adapter is not None and given not in (None, adapter):
            raise invalid("lora_path", "model and lora_path name two adapters; give one.")
        return given if adapter is None else adapter

    def adapter_of(self, body: Body) -> str | None:
        """The LoRA adapter that a body's model is; None: the model itself, which it is without a name or as "default".
        An adapter's name may stand behind the model's, with a colon. Errors: ApiError (400, 404)."""
        name, adapters = "default" if body.get("model") is None else body["model"], lora_adapters(self.engine)
        if not isinstance(name, str):
            raise invalid("model", f"model must be a string, got {name!r:.80}.")
        adapter = name.removeprefix(f"{self.model}:")
        if adapter in adapters:
            return adapter
        if not adapter or name in (self.model, "default") or adapter == name and self.config.any_model_name:
            return None
        raise self._unknown(name)

    # -- what the server tells about itself ----------------------------------------------------------------------------

    def _unknown(self, name: str) -> ApiError:
        known = ", ".join([self.model, *self.engine.lora_adapters()])
        told = f"The model `{name:.200}` does not exist. The served model name is `{self.model}`"
        told += f"; there is {known:.500}."
        if name.startswith(f"{self.model}:") and self.engine._parts.adapters is None:
            told += " LoRA is not enabled, so there are no adapters: start the server with lora.paths or --enable-lora."
        return ApiError(404, told, "model", "model_not_found")

    def card(self, name: str) -> dict[str, Any]:
        """Of the model or an adapter by its own name. Errors: ApiError."""
        cards = self.cards()
        if name not in cards:
            raise self._unknown(name)
        return cards[name]

    def cards(self) -> dict[str, dict[str, Any]]:
        """The model and its adapters by name, in OpenAI's words and vLLM's `max_model_len` and `parent`. Pure."""
        told = {"object": "model", "created": self.created, "owned_by": "fengine", "max_model_len": self.context}
        told["sampling_defaults"] = self.sampling_defaults
        known = {self.model: (self.model, None)}
        known |= {name: (path, self.model) for name, path in self.engine.lora_adapters().items()}
        return {name: {"id": name, **told, "root": root, "parent": parent} for name, (root, parent) in known.items()}

    def server_info(self) -> dict[str, Any]:
        """The engine's, but for what its command line may have held."""
        info = self.engine.get_server_info()
        return {name: value for name, value in info.items() if name != "launch_command" and "key" not in name}

    async def healthy(self) -> str | None:
        """None if the engine answers now, else what is wrong. One probe at a time, whoever asks."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.get_running_loop().run_in_executor(None, self.engine.ping)
            self._probe.add_done_callback(lambda probe: probe.cancelled() or probe.exception())  # if nobody waits on
        try:
            await asyncio.wait_for(asyncio.shield(self._probe), PROBE_SECONDS)
        except TimeoutError:
            return f"the engine's loop has not answered for {PROBE_SECONDS:g} seconds"
        except Exception as error:
            return str(error)
        return None


def fingerprint_of(engine: Engine) -> str:
    """Names what an output's bits depend on besides request and weights: code, libraries, device, configuration."""
    facts = {"fengine": __version__, "torch": torch.__version__, "config": asdict(engine.config)}
    if (engine.config.model.device or "").startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name(engine.config.model.device)
    return "fp_" + hashlib.sha256(json.dumps(facts, default=str, sort_keys=True).encode()).hexdigest()[:12]
