"""The engine of a command line: opened late, kept while points agree about it; and how its errors are told."""

import gc
import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path
from typing import Any

from fengine.config import EngineConfig, ModelConfig
from fengine.core.sampling_params import SamplingParams
from fengine.errors import ConfigError, FengineError, GrammarError, MissingExtraError
from fengine.eval.cli.lines import say


def open_engine(config: EngineConfig) -> Any:
    """An Engine. Imports torch, which nothing before it did. Errors: ConfigError, ModelLoadError and kinds."""
    gc.disable()  # the import makes a million objects that stay; looking for garbage among them is a tenth of the start
    try:
        from fengine.api.engine import Engine

        return Engine.from_config(config)
    finally:
        gc.enable()


def refuse_sampling(config: EngineConfig, params: SamplingParams, tokens: int | None) -> None:
    """Refuses before a model is loaded what it would refuse of every request: a grammar that cannot be compiled, and
    more `tokens` than the context has room for. Imports torch. Errors: ConfigError; ModelLoadError and kinds;
    MissingExtraError."""
    if params.grammar_key is not None:
        from fengine.structured_output.backend import Grammars, Source, Whitespace

        kind, text = params.grammar_key
        if params.stop or params.stop_regex:
            raise ConfigError(f"sampling.{kind} says where a text ends; leave out sampling.stop and stop_regex")
        with closing(Grammars(lambda: ([bytes([byte]) for byte in range(256)], False), Whitespace())) as grammars:
            try:
                grammars.compile(Source(kind, text))
            except GrammarError as error:
                raise ConfigError(f"sampling.{kind}: {error}") from error
    if tokens is not None:
        from fengine.engine.load import context_length, read_spec

        if tokens >= (most := context_length(config, read_spec(config)[2])):
            name = f"max_new_tokens={tokens:,} leaves no room for a prompt in the context of {config.model.path}"
            raise ConfigError(f"{name}, which has {most:,} tokens: at most {most - 1:,}")


def responder(engine: Any) -> Callable[..., Any]:
    """What answers requests as a server of this engine does: `server.batch.respond`. Errors: MissingExtraError."""
    try:
        from fengine.server.batch import CONFIG, respond
        from fengine.server.service import Service
    except ModuleNotFoundError as error:
        raise MissingExtraError.of("fengine batch", str(error.name), "serve") from error

    return partial(respond, Service(engine, CONFIG))


def model_directory(config: ModelConfig) -> Path:
    """Where a model's files are; those of a hub id once they are downloaded. Imports torch. Errors: ModelLoadError."""
    from fengine.worker.hub import resolve_model

    return resolve_model(config.path, config.revision, cache_dir=config.download_dir)


def devices() -> dict[str, Any]:
    """Torch, its threads, and the GPUs that it sees. Imports torch."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_properties(i) for i in range(count)]
    told = [f"{one.name} ({one.total_memory >> 30} GiB, {one.major}.{one.minor})" for one in gpus]
    version = f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, {torch.get_num_threads()} threads"
    return {"torch": version, "gpus": ", ".join(told)}


def transformers_model(engine: Any) -> Callable[[list[list[int]], int], None]:
    """What draws tokens of an engine's checkpoint greedily with Transformers, for prompts of one length. Imports torch.
    Errors: whatever Transformers raises."""
    import torch
    from transformers import AutoModelForCausalLM

    parts, device = engine._parts, engine.config.model.device
    model: Any = AutoModelForCausalLM.from_pretrained(parts.model_dir, dtype=parts.kv_dtype)
    model.to(device).eval()

    def draw(prompts: list[list[int]], count: int) -> None:
        ids = torch.tensor(prompts, device=device)
        fixed = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), **fixed)

    return draw


def model_families() -> dict[str, list[str]]:
    """The architectures of each family, by the names under which people know it. Imports torch."""
    from fengine.models import FAMILIES

    return {title: list(family.models()) for title, family in FAMILIES.items()}


class EngineCache(AbstractContextManager["EngineCache"]):
    """At most one open engine, kept while consecutive points ask for an equal config. Closed at the end of `with`."""

    def __init__(self, open_: Callable[[EngineConfig], Any] | None = None) -> None:
        self._open = open_ or (lambda config: open_engine(config))
        self._config: EngineConfig | None = None
        self._engine: Any = None

    def __exit__(self, *_: object) -> None:
        try:
            self.close()  # frozen: the command ends, and going through a million objects would only take its time
        finally:
            gc.unfreeze()

    def holds(self, config: EngineConfig) -> bool:
        return self._engine is not None and self._config == config

    def get(self, config: EngineConfig) -> Any:
        """The engine of `config`; one of another config is closed first, to free its memory. While it is open the
        collector is spared what is there by then: torch and its kind are 200,000 objects or more, and a full
        collection, which may come between any two steps, would go through them for 0.1 to 0.4 s."""
        if not self.holds(config):
            gc.unfreeze()
            self.close()
            self._engine = self._open(config)
            self._config = config
            gc.freeze()
        return self._engine

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()


def report(error: FengineError) -> None:
    """The message alone, very long words cut; with HYDRA_FULL_ERROR=1 the traceback too."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exception(error)
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    text = re.sub(r"\S{600,}", lambda word: f"{word[0][:300]}… ({len(word[0]):,} characters)", f"{kind}{error}")
    say(f"fengine: {text}", stream=sys.stderr)
