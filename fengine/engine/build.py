"""From a configuration to a running engine: model, weights, KV pool, compiled step, scheduler, driver."""

import gc
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fengine.config import EngineConfig, LoadFormat, Numerics, resolve
from fengine.core.kv_pages import PagePool
from fengine.core.prefix_cache import PrefixCache
from fengine.core.scheduler import Scheduler
from fengine.engine.engine_core import Driver
from fengine.engine.memory import Memory
from fengine.engine.profiling import Profile
from fengine.engine.weights.live import LiveWeights
from fengine.engine.weights.updates import WeightUpdates
from fengine.errors import ConfigError, OutOfMemoryError, UnsupportedFeatureError
from fengine.lora.adapters import Adapters, open_adapters, write_slot
from fengine.models.kv_state import KVState, Params, init_kv
from fengine.models.spec import ModelSpec, embedding_spec
from fengine.ops.ahead import compiling
from fengine.ops.compiler import private_cache_dir
from fengine.speculative.ngram import speculation_of
from fengine.tokenizer.tokenizer import Tokenizer
from fengine.worker.cuda_runner import CudaRunner
from fengine.worker.device import detect_hardware, device_of, refuse_default_device, refuse_unbuilt_shape
from fengine.worker.hub import resolve_model
from fengine.worker.input_batch import InputBatch
from fengine.worker.kv_pool import new_pool, pool_pages
from fengine.worker.loader import load_params, read_config, read_generation_config, spec_from_config
from fengine.worker.model_runner import CpuRunner
from fengine.worker.pooling import Pooling, read_pooling
from fengine.worker.sampler import logits_stages
from fengine.worker.step import make_forward, make_unembed


@dataclass
class Parts:
    """Everything that makes up one engine. Built once; `close` ends it."""

    config: EngineConfig
    spec: ModelSpec
    tokenizer: Tokenizer | None
    context_length: int
    pool_tokens: int
    eos_ids: frozenset[int]
    driver: Driver
    model_dir: Path
    start_seconds: float
    compile_seconds: float
    compiles_at_start: int
    weights: LiveWeights
    updates: WeightUpdates
    memory: Memory
    profile: Profile
    kv_dtype: torch.dtype
    adapters: Adapters | None = None  # of LoRA, where it is enabled
    pooling: Pooling | None = None  # of an embedding model or classifier
    closed: bool = field(default=False)
    ready_at: float = field(default_factory=time.perf_counter)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.profile.close()
            self.driver.close()
            self.updates.close()
            self.weights.close()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def stats(self) -> dict[str, Any]:
        """Counters since the start and gauges of this moment, as plain numbers."""
        counters = self.driver.scheduler.counters()
        return {
            "running": counters["running"],
            "waiting": counters["waiting"],
            "finished": counters["finished"],
            "pages_total": counters["pages"],
            "pages_used": counters["used_pages"],
            "pages_cached": counters["cached_pages"],
            "preemptions": counters["preemptions"],
            "computed_tokens": counters["computed_tokens"] - counters["drafts"] + counters["correct_drafts"],
            "cached_tokens": counters["hit_tokens"],
            "output_tokens": self.driver.output_tokens + counters["correct_drafts"],
            "draft_tokens": counters["drafts"],
            "correct_draft_tokens": counters["correct_drafts"],
            "steps": self.driver.steps,
            "compiles": compile_count() - self.compiles_at_start,
            "compile_seconds": self.compile_seconds,
            "start_seconds": self.start_seconds,
        }


def compile_count() -> int:
    """How many graphs torch.compile has made in this process so far."""
    if "torch._dynamo" not in sys.modules:  # importing it takes longer than importing torch
        return 0
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _from_compiler(error: Exception) -> bool:
    return any(kind.__module__.startswith("torch._dynamo") for kind in type(error).__mro__)


@torch.inference_mode(False)  # whatever the caller's mode: steps, in another thread, write to what is made here
def build(config: EngineConfig) -> Parts:
    """Loads, compiles, warms up and starts. Errors: ConfigError, ModelLoadError and kinds, OutOfMemoryError."""
    started = time.perf_counter()
    config = resolve(config, detect_hardware())
    device_of(config)  # refused before anything is read
    refuse_default_device()
    use_private_caches()
    compiles = compile_count()
    dummy = config.model.load_format is LoadFormat.dummy
    model_dir = resolve_model(config.model.path, config.model.revision, weights=not dummy)
    hf_config = read_config(model_dir, config.model.json_overrides)
    spec = spec_from_config(hf_config)
    if config.model.is_embedding:
        spec = embedding_spec(spec)
    if spec.generates and not spec.causal:
        raise UnsupportedFeatureError(
            "config.json has is_causal = false: every token sees those that follow, so nothing can be generated; "
            "Engine(..., is_embedding=True) gives its embeddings."
        )
    pooling = None if spec.generates else read_pooling(model_dir, hf_config)
    context = context_length(config, spec)
    tokenizer = None
    if not config.model.skip_tokenizer_init:
        tokenizer_path = config.model.tokenizer_path
        tokenizer = Tokenizer.from_directory(
            resolve_model(tokenizer_path, weights=False) if tokenizer_path else model_dir
        )
    generation = read_generation_config(model_dir, config.model.json_overrides)
    eos_ids = frozenset(generation.eos_ids) | (frozenset(tokenizer.eos_ids) if tokenizer else frozenset())
    params = load_params(
        model_dir,
        spec,
        dtype=config.model.dtype,
        device=device_of(config),
        context_length=context,
        load_format=config.model.load_format,
    )
    return assemble(
        config, spec, params, tokenizer, context, eos_ids, model_dir, started=started, compiles_at_start=compiles,
        from_disk=not dummy, pooling=pooling,
    )  # fmt: skip


def assemble(
    config: EngineConfig, spec: ModelSpec, params: Params, tokenizer: Tokenizer | None, context: int,
    eos_ids: frozenset[int], model_dir: Path, *, started: float, compiles_at_start: int, from_disk: bool = False,
    pooling: Pooling | None = None,
) -> Parts:  # fmt: skip
    """The running engine over loaded weights. `from_disk`: they are those in `model_dir`, and may be read again."""
    page_size = config.cache.page_size or 16
    rows, tokens = config.scheduler.max_running_requests or 1, config.scheduler.max_step_tokens or 1
    width = -(-context // page_size)
    refuse_unbuilt_shape(spec, device_of(config))
    kv_dtype = torch.float32 if device_of(config) == "cpu" else activation_dtype(params)
    stepped = replace(spec, exact=config.numerics is Numerics.exact)
    forward, unembed = make_forward(stepped, compiled=bool(config.compile.enabled)), make_unembed(stepped)
    speculation = speculation_of(config.speculation, spec.vocab_size)
    draws = rows if speculation is None else max(rows, speculation.step_tokens)
    adapters, adapter_memory = open_adapters(config.lora, spec, params, str(model_dir))
    slots = 0 if adapters is None else adapters.slots
    stages = logits_stages(rows, spec.vocab_size, torch.device(device_of(config)))
    runner: CpuRunner | CudaRunner
    if device_of(config) == "cpu":
        runner = CpuRunner(params, forward, unembed, slots)
    else:
        runner = CudaRunner(
            params, forward, unembed, stages, rows=draws, tokens=tokens, width=width, vocab=spec.vocab_size,
            graphs=config.compile.cuda_graph, device=device_of(config), adapter_slots=slots,
        )  # fmt: skip
    before = time.perf_counter()
    try:
        activations = 0
        if isinstance(runner, CudaRunner):
            small = init_kv(spec, 1, page_size, kv_dtype, device_of(config))
            activations = prepare(runner, small, ahead=not config.compile.enabled)
        pages = pool_pages(config, spec, kv_dtype, rows, context, activations)
        kv = runner.warm_up(new_pool(spec, pages, page_size, kv_dtype, device_of(config)), page_size)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"no memory beside weights and KV pool for a step of {tokens} tokens and {rows} rows, or for CUDA graphs: "
            f"{str(error)[:300]}\nLower scheduler.max_step_tokens, scheduler.max_running_requests, "
            "cache.mem_fraction_static or cache.max_total_tokens."
        ) from error
    except Exception as error:
        if not _from_compiler(error):
            raise
        raise ConfigError(
            f"torch.compile failed: {str(error)[:2000]}\nIt needs a C++ compiler (apt install g++, or set CXX) and an "
            f"undamaged cache (delete {os.environ.get('TORCHINDUCTOR_CACHE_DIR')}); compile.enabled=false does without"
        ) from error
    compile_seconds = time.perf_counter() - before
    pool = PagePool(pages)
    cache = PrefixCache(pool, page_size) if config.cache.prefix_cache and spec.causal else None
    scheduler = Scheduler(
        pool,
        cache,
        page_size=page_size,
        max_running_requests=rows,
        max_step_tokens=tokens,
        policy=config.scheduler.policy,
        speculation=speculation,
        adapter_slots=slots,
        whole_prompts=not spec.causal,
    )
    write = None if adapters is None else partial(write_slot, adapter_memory, adapters)
    tables = InputBatch(rows, width, page_size, stages, slots, write)
    driver = Driver(scheduler, tables, runner, kv, overlap=bool(config.scheduler.overlap))
    weights = LiveWeights(params, spec, driver, model_dir, from_disk)
    return Parts(
        config=config,
        spec=spec,
        tokenizer=tokenizer,
        context_length=context,
        pool_tokens=(pages - 1) * page_size,
        eos_ids=eos_ids,
        driver=driver,
        model_dir=model_dir,
        start_seconds=time.perf_counter() - started,
        compile_seconds=compile_seconds,
        compiles_at_start=compiles_at_start,
        weights=weights,
        updates=WeightUpdates(weights),
        memory=Memory(
            driver, weights, lambda: new_pool(spec, pages, page_size, kv_dtype, device_of(config)), page_size
        ),
        profile=Profile(driver),
        kv_dtype=kv_dtype,
        adapters=adapters,
        pooling=pooling,
    )


def prepare(runner: CudaRunner, kv: KVState, *, ahead: bool) -> int:
    """Compiles and proves every kernel of the engine, with any small KV state. Returns as `CudaRunner.prepare`.

    With `ahead` the kernels are compiled beside each other first; not so under torch.compile, whose kernels would run.
    """
    if ahead:
        with compiling():
            runner.prepare(kv)
    return runner.prepare(kv)


def activation_dtype(params: Params) -> torch.dtype:
    """Activations, and on CUDA the KV pages, have the dtype of the norm weights."""
    return params["final_norm_D"].dtype


def context_length(config: EngineConfig, spec: ModelSpec) -> int:
    """The context in force. Errors: ConfigError if more is asked than the checkpoint was made for."""
    asked = config.model.context_length
    if asked is None:
        return spec.max_position
    if asked > spec.max_position:
        raise ConfigError(
            f"model.context_length is {asked} but the checkpoint was made for {spec.max_position} positions; lower it"
        )
    return asked


def use_private_caches() -> None:
    """Keeps torch's and Triton's compiled code in a directory that only this user can write. Modifies: os.environ,
    where they look; a value that the user has set stays, torch's own default in the shared /tmp does not."""
    root, shared = private_cache_dir(), os.path.join(tempfile.gettempdir(), "torchinductor_")
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", shared).startswith(shared):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(root / "inductor")
    os.environ.setdefault("TRITON_CACHE_DIR", str(root / "triton"))
