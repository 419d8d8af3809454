"""A configuration's model, read into memory: its spec, parameters, tokenizer, and what its files say beside these."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fengine.config import EngineConfig, LoadFormat
from fengine.engine.weights.incoming import Origin
from fengine.errors import UnsupportedFeatureError
from fengine.models.kv_state import Params
from fengine.models.quantization import chosen
from fengine.models.spec import Config, ModelSpec, embedding_spec
from fengine.ops.columns import Group
from fengine.worker.device import device_of
from fengine.worker.generation_config import read_eos_ids, read_sampling_defaults
from fengine.worker.hub import resolve_model
from fengine.worker.loader import length_of, load_params, spec_from_config
from fengine.worker.pooling import Pooling, read_pooling
from fengine.worker.safetensors_file import read_config

logger = logging.getLogger("fengine")


@dataclass(frozen=True)
class Loaded:
    """A model in memory. `origin`: where its weights may be read again; None: nowhere. `seconds`: what each part of
    reading it took."""

    spec: ModelSpec
    params: Params
    context_length: int
    eos_ids: frozenset[int]
    model_dir: Path
    tokenizer: Any = None
    origin: Origin | None = None
    pooling: Pooling | None = None  # of an embedding model or classifier
    seconds: Mapping[str, float] = field(default_factory=dict)


def load(
    config: EngineConfig, make_tokenizer: Callable[..., Any], group: Group | None = None, weights: bool = True
) -> Loaded:
    """Reads model and tokenizer, without `weights` no parameters. Errors: ConfigError, ModelLoadError and kinds,
    OutOfMemoryError."""
    model = config.model
    model_dir, hf_config, spec = read_spec(config)
    if spec.generates and not spec.causal:
        raise UnsupportedFeatureError(
            "config.json has is_causal = false: every token sees those that follow, so nothing can be generated; "
            "Engine(..., is_embedding=True) gives its embeddings."
        )
    pooling = None if spec.generates else read_pooling(model_dir, hf_config)
    context = context_length(config, spec)
    tokenizer, begun = None, time.perf_counter()
    if not model.skip_tokenizer_init:
        path = model.tokenizer_path
        folder = resolve_model(path, weights=False, cache_dir=model.download_dir) if path else model_dir
        tokenizer = make_tokenizer(folder, context_length=context)
    eos_ids = read_eos_ids(model_dir, model.json_overrides) | (tokenizer.eos_ids if tokenizer else frozenset())
    behind = sorted(token for token in eos_ids if token >= spec.vocab_size)
    if behind and spec.generates and not (group and group.rank):  # as a config class of transformers has by default
        logger.warning("eos_token_id has %s, behind the vocabulary of %d: they end no text", behind, spec.vocab_size)
    read = time.perf_counter()
    # Before the weights are read: their files may change meanwhile.
    origin = None if model.load_format is LoadFormat.dummy else Origin.of(model_dir)
    params: Params = {}
    if weights:
        params = load_params(
            model_dir, spec, dtype=model.dtype, device=device_of(config), context_length=context,
            load_format=model.load_format, group=group,
        )  # fmt: skip
    seconds = {"tokenizer_e2e": read - begun, "load_weight": time.perf_counter() - read}
    return Loaded(spec, params, context, eos_ids, model_dir, tokenizer, origin, pooling, seconds)


def read_spec(config: EngineConfig) -> tuple[Path, Config, ModelSpec]:
    """(the model's directory, its parsed config.json, what it is). Errors: as `load`."""
    model = config.model
    dummy = model.load_format is LoadFormat.dummy
    model_dir = resolve_model(model.path, model.revision, weights=not dummy, cache_dir=model.download_dir)
    hf_config = read_config(model_dir, model.json_overrides)
    spec = spec_from_config(hf_config)
    if model.sampling_defaults == "model":
        read_sampling_defaults(model_dir)  # which may refuse
    few_kv = config.cache.kv_cache_dtype == "fp8_e4m3"
    spec = replace(spec, quantization=chosen(spec.quantization, model.quantization), few_kv=few_kv)
    if spec.vision is not None and config.scheduler.record:
        raise UnsupportedFeatureError("scheduler.record with a model that takes images is not built; leave it out.")
    return model_dir, hf_config, embedding_spec(spec) if model.is_embedding else spec


def context_length(config: EngineConfig, spec: ModelSpec) -> int:
    """The context in force. Errors: as `length_of`."""
    return length_of(spec, config.model.context_length)
