"""`Engine`: SGLang's offline Engine API over one driver. Callable from any thread and any event loop."""

import atexit
import os
import threading
from typing import Any

from fengine.api.adapters import AdapterCalls
from fengine.api.options import Door
from fengine.api.readout import Readout
from fengine.api.server_args import ServerArgs
from fengine.api.sessions import Sessions
from fengine.api.tokenizer_manager import TokenizerManager
from fengine.api.upkeep import Upkeep
from fengine.config import EngineConfig
from fengine.engine.build import Parts, build
from fengine.errors import EngineDeadError, InvalidRequestError, UnsupportedFeatureError
from fengine.structured_output.backend import Grammars
from fengine.tokenizer.token_texts import token_texts
from fengine.tokenizer.tokenizer import Tokenizer


class Engine(Readout, AdapterCalls, Upkeep):
    """`Engine(model_path=..., **ServerArgs fields)` or `Engine(server_args=ServerArgs(...))`.

    Errors at construction: ConfigError, ModelLoadError and their kinds. Use as a context manager, or call `shutdown`.
    """

    def __init__(self, *, server_args: ServerArgs | None = None, **kwargs: Any) -> None:
        if server_args is not None and kwargs:
            raise InvalidRequestError(f"give server_args or single fields, not both (got {', '.join(sorted(kwargs))})")
        args = server_args if server_args is not None else ServerArgs(**kwargs)
        parts = build(args.to_config())
        try:
            if parts.tokenizer is not None:
                parts.tokenizer = parts.tokenizer.with_chat_template(args.chat_template, args.hf_chat_template_name)
            self._start(parts, args)
        except BaseException:
            parts.close()
            raise

    @classmethod
    def from_config(cls, config: EngineConfig) -> "Engine":
        """An engine from fengine's own configuration, with timing keys in `meta_info` and every per-call option on."""
        return cls.from_parts(build(config))

    @classmethod
    def from_parts(cls, parts: Parts) -> "Engine":
        """An engine over parts that were assembled by hand: other weights, or another model function."""
        engine = cls.__new__(cls)
        args = ServerArgs(
            model_path=parts.config.model.path,
            enable_metrics=True,
            enable_return_hidden_states=True,
            enable_custom_logit_processor=True,
            enable_priority_scheduling=True,
        )
        engine._start(parts, args)
        return engine

    def _start(self, parts: Parts, args: ServerArgs) -> None:
        self.server_args = args
        self._parts = parts
        grammars = Grammars(lambda: token_texts(parts.tokenizer, parts.spec.vocab_size), args.whitespace)
        self._door = Door(parts, args, Sessions(parts.driver.abort), grammars, args.preferred())
        parts.driver.weight_version = args.weight_version
        self.tokenizer_manager = TokenizerManager(self, args)
        self.config = parts.config
        self._pid = os.getpid()
        self._next_index = 0
        self._lock = threading.Lock()
        atexit.register(self.shutdown)

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __reduce__(self) -> Any:
        raise UnsupportedFeatureError("an Engine cannot be pickled or copied, for it owns threads; make another.")

    def shutdown(self) -> None:
        """Ends running requests with EngineClosedError, stops the threads and frees the device. Idempotent."""
        if os.getpid() == self._pid:
            self._parts.close()
            self._door.grammars.close()
            atexit.unregister(self.shutdown)

    def ping(self) -> None:
        """Returns once the loop has answered, which it does between two steps. Errors: EngineDeadError,
        EngineClosedError."""
        driver = self._parts.driver
        driver.call(lambda: None)
        if not all(thread.is_alive() for thread in driver.threads):
            raise EngineDeadError("a thread of the engine has ended")

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._parts.tokenizer

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and gauges of this moment."""
        return self._parts.stats()
