"""`Worker`: what computes steps, of an engine or a rank of one, compiled and warm; `Features`: what plugs into it."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from fengine.config import Algorithm, EngineConfig, LoraConfig, Numerics
from fengine.core.speculation import Speculation
from fengine.engine.load import Loaded
from fengine.errors import ConfigError, OutOfMemoryError
from fengine.models.kv_pages import init_kv
from fengine.models.kv_state import KVState, Params
from fengine.models.spec import ModelSpec
from fengine.ops.columns import Group
from fengine.worker.cuda_runner import CudaRunner
from fengine.worker.cuda_start import prepare
from fengine.worker.device import device_of, refuse_unbuilt_shape
from fengine.worker.images import ImageInputs, letters_of
from fengine.worker.input_batch import InputBatch
from fengine.worker.kv_pool import PoolSize, new_pool, pool_size, windows_of
from fengine.worker.logits import logits_stages
from fengine.worker.process_group import least, ranked_rows
from fengine.worker.step import CpuRunner, make_forward, make_unembed, sample_rows
from fengine.worker.step_input import LogitsStage


class AdapterSlots(Protocol):
    """LoRA adapters, as far as a step needs them."""

    @property
    def slots(self) -> int: ...

    def write(self, slot: int, number: int) -> None:
        """Copies a load to a slot of the device."""
        ...


@dataclass(frozen=True)
class Features:
    """What plugs into an engine, made by packages that stand above it."""

    tokenizer: Callable[..., Any]  # of a directory, for a context_length
    adapters: Callable[[LoraConfig, ModelSpec, Params, str, Group | None], AdapterSlots | None]  # modifies the params
    speculation: Callable[[EngineConfig, ModelSpec, Params], Speculation | None]  # loads the draft, if there is one
    images: Callable[[EngineConfig, Path, ModelSpec, Any], Any]  # what reads a call's images; may be None
    shared: Callable[[LoraConfig, Callable[..., Any], str], Any]  # of replicas: who asks all, a folder that they see


class Worker(NamedTuple):
    """What computes steps: of an engine, or of a rank of one."""

    runner: CpuRunner | CudaRunner
    input_batch: InputBatch
    adapters: AdapterSlots | None
    kv: KVState
    kv_dtype: torch.dtype
    size: PoolSize
    compile_seconds: float
    pool_seconds: float  # for the memory of the KV pool


def make_worker(
    config: EngineConfig, loaded: Loaded, features: Features, group: Group | None, kv_bytes: int = 0
) -> Worker:
    """Compiled and warm; a token of the pool takes `kv_bytes` beside its keys and values. Errors: as `build`."""
    spec, page_size = loaded.spec, config.cache.page
    refuse_unbuilt_shape(spec, device_of(config), activation_dtype(loaded.params))
    adapters = features.adapters(config.lora, spec, loaded.params, str(loaded.model_dir), group)
    slots = 0 if adapters is None else adapters.slots
    rows = config.scheduler.max_running_requests or 1
    edits = group is None or group.rank == 0  # whose logits are edited
    stages = logits_stages(rows, spec.vocab_size, torch.device(device_of(config))) if edits else ()
    runner = make_runner(config, loaded, stages, slots, group)
    images = None
    if spec.vision:
        graphs = runner.graphs if isinstance(runner, CudaRunner) and config.compile.cuda_graph else None
        images = ImageInputs(config, spec, loaded.params, loaded.context_length, rows, group, graphs)
    before = time.perf_counter()
    kv_dtype = torch.float32 if device_of(config) == "cpu" else activation_dtype(loaded.params)
    same = int if group is None else partial(least, group=group)
    size, kv, pool_seconds = ready(config, loaded, runner, kv_dtype, same, kv_bytes)
    seconds = time.perf_counter() - before
    write = None if adapters is None else adapters.write
    width = -(-loaded.context_length // page_size)
    guesses = len(runner.last_token_R) - len(runner.guess_token_S), len(runner.guess_token_S) // rows
    input_batch = InputBatch(rows, width, page_size, stages, slots, write, images, runner.grouped, guesses)
    return Worker(runner, input_batch, adapters, kv, kv_dtype, size, seconds - pool_seconds, pool_seconds)


def make_runner(
    config: EngineConfig, loaded: Loaded, stages: tuple[LogitsStage, ...], slots: int, group: Group | None
) -> CpuRunner | CudaRunner:
    """What runs steps on the configured device. `slots`: of LoRA adapters."""
    sampler = sample_rows if group is None else ranked_rows(group)
    rows, tokens = config.scheduler.max_running_requests or 1, config.scheduler.max_step_tokens or 1
    stepped = replace(loaded.spec.part(config.parallel.tp_size), exact=config.numerics is Numerics.exact)
    forward, unembed = make_forward(stepped, compiled=bool(config.compile.enabled)), make_unembed(stepped)
    windows, drafts = windows_of(config, stepped, loaded.context_length), config.speculation
    guesses = rows * ((drafts.num_draft_tokens or 1) - 1) if drafts.algorithm.drafts and group is None else 0
    grouped = windows is not None and not windows.alone
    if device_of(config) == "cpu":
        return CpuRunner(loaded.params, forward, unembed, slots, sampler, letters_of(loaded.spec), grouped,
                         bool(config.compile.enabled))  # fmt: skip
    return CudaRunner(
        loaded.params, forward, unembed, stages, tokens=tokens, vocab=loaded.spec.vocab_size,
        rows=max(rows, 0 if drafts.algorithm is Algorithm.none else drafts.step_tokens or 0), guesses=guesses,
        width=-(-loaded.context_length // config.cache.page), graphs=config.compile.cuda_graph,
        prefill_graphs=config.compile.prefill_graphs, graph_rows=config.compile.graph_rows,
        device=device_of(config), adapter_slots=slots, sampler=sampler, images=letters_of(loaded.spec),
        grouped=grouped,
    )  # fmt: skip


def ready(
    config: EngineConfig, loaded: Loaded, runner: CpuRunner | CudaRunner, kv_dtype: torch.dtype,
    least: Callable[[int], int] = int, kv_bytes: int = 0,
) -> tuple[PoolSize, KVState, float]:  # fmt: skip
    """Compiles and captures, and makes the KV pool: its size, itself, and the seconds for it. Errors: as `build`."""
    rows, page_size = config.scheduler.max_running_requests or 1, config.cache.page
    spec, device, activations = loaded.spec.part(config.parallel.tp_size), device_of(config), 0
    with _faults_of_start(config):
        if isinstance(runner, CudaRunner):
            small = init_kv(spec, 1, page_size, kv_dtype, device)
            eager = make_forward(replace(spec, exact=config.numerics is Numerics.exact))
            activations = prepare(runner, small, eager)
        size = pool_size(config, spec, kv_dtype, rows, loaded.context_length, activations, kv_bytes, least)
        begun = time.perf_counter()
        pool = new_pool(spec, size, page_size, kv_dtype, device)
        seconds = time.perf_counter() - begun
        return size, runner.warm_up(pool, page_size), seconds


@contextmanager
def _faults_of_start(config: EngineConfig) -> Iterator[None]:
    """Errors: OutOfMemoryError, ConfigError for what torch raises in their place."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        rows, tokens = config.scheduler.max_running_requests, config.scheduler.max_step_tokens
        raise OutOfMemoryError(
            f"no memory beside weights and KV pool for a step of {tokens} tokens and {rows} rows, or for CUDA graphs: "
            f"{str(error)[:300]}\nLower scheduler.max_step_tokens, scheduler.max_running_requests, "
            "cache.mem_fraction_static or cache.max_total_tokens."
        ) from error
    except Exception as error:
        if not any(kind.__module__.startswith("torch._dynamo") for kind in type(error).__mro__):
            raise
        raise ConfigError(
            f"torch.compile failed: {str(error)[:2000]}\nIt needs a C++ compiler (apt install g++, or set CXX) and an "
            f"undamaged cache (delete {os.environ.get('TORCHINDUCTOR_CACHE_DIR')}); compile.enabled=false does without"
        ) from error


def activation_dtype(params: Params) -> torch.dtype:
    """Activations, and on CUDA the KV pages, have the dtype of the norm weights."""
    return params["final_norm_D"].dtype
