"""From a configuration to a running engine: model, weights, KV pool, step, scheduler, engine core."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from fengine.config import Algorithm, EngineConfig, LoraConfig, Numerics, resolve
from fengine.core.images import ImageRows
from fengine.core.kv_pages import PagePool
from fengine.core.plain import from_plain
from fengine.core.prefix_cache import PrefixCache
from fengine.core.recording import RecordedScheduler
from fengine.core.scheduler import Scheduler
from fengine.core.speculation import Speculation
from fengine.core.window_pages import WindowPages
from fengine.engine.engine_core import EngineCore
from fengine.engine.load import Loaded, load, read_spec
from fengine.engine.memory import DeviceMemory, Memory
from fengine.engine.parallel.child import NOTHING, Link
from fengine.engine.parallel.follower import Follower
from fengine.engine.parallel.ranks import Ranks
from fengine.engine.parallel.replicas import open_replicas
from fengine.engine.parts import Parts, compile_count
from fengine.engine.profiling import Profile
from fengine.engine.weights.live import LiveWeights
from fengine.engine.weights.updates import WeightUpdates
from fengine.errors import ConfigError, OutOfMemoryError
from fengine.models.kv_pages import init_kv
from fengine.models.kv_state import KVState, Params
from fengine.models.spec import ModelSpec
from fengine.ops.columns import Group
from fengine.ops.compiler import private_cache_dir
from fengine.ops.proof import sources_digest
from fengine.worker.cuda_runner import CudaRunner
from fengine.worker.cuda_start import prepare
from fengine.worker.device import (
    current_device,
    detect_hardware,
    device_of,
    refuse_default_device,
    refuse_unbuilt_shape,
)
from fengine.worker.images import ImageInputs, image_rows, letters_of
from fengine.worker.input_batch import InputBatch
from fengine.worker.kv_pool import PoolSize, new_pool, pool_bytes, pool_size, windows_of
from fengine.worker.logits import logits_stages
from fengine.worker.process_group import check_parts, group_of, least, process_group, ranked_rows
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

    tokenizer: Callable[[Path], Any]  # of a directory
    adapters: Callable[[LoraConfig, ModelSpec, Params, str, Group | None], AdapterSlots | None]  # modifies the params
    speculation: Callable[[EngineConfig, ModelSpec, Params], Speculation | None]  # loads the draft, if there is one
    images: Callable[[EngineConfig, Path, ModelSpec, Any], Any]  # what reads a call's images; may be None


def _from_compiler(error: Exception) -> bool:
    return any(kind.__module__.startswith("torch._dynamo") for kind in type(error).__mro__)


@torch.inference_mode(False)  # whatever the caller's mode: steps, in another thread, write to what is made here
def build(config: EngineConfig, features: Features) -> Parts:
    """Loads, compiles, warms up and starts. Errors: ConfigError, ModelLoadError and kinds, OutOfMemoryError."""
    started = time.perf_counter()
    config = resolve(config, detect_hardware())
    device_of(config)  # refused before anything is read
    refuse_default_device()
    use_private_caches()
    if config.parallel.dp_size > 1:
        return open_replicas(config, load(config, features.tokenizer, weights=False), started)
    with current_device(device_of(config)), ranks_of(config) as ranks:
        loaded = load(config, features.tokenizer, None if ranks is None else ranks.group)
        return assemble(config, loaded, features, ranks, started=started)


@contextmanager
def ranks_of(config: EngineConfig) -> Iterator[Ranks | None]:
    """The other ranks, which have begun to load, if there are any; they end where what is inside fails."""
    if config.parallel.tp_size > 1:
        check_parts(config, read_spec(config)[2])
    if config.parallel.tp_size == 1:
        yield None
        return
    ranks = Ranks(config)
    try:
        with ranks.named():
            yield ranks
    except BaseException:
        ranks.close()
        raise


class Worker(NamedTuple):
    """What computes steps: of an engine, or of a rank of one."""

    runner: CpuRunner | CudaRunner
    input_batch: InputBatch
    adapters: AdapterSlots | None
    kv: KVState
    kv_dtype: torch.dtype
    size: PoolSize
    compile_seconds: float


def make_worker(
    config: EngineConfig, loaded: Loaded, features: Features, group: Group | None, kv_bytes: int = 0
) -> Worker:  # fmt: skip
    """Compiled and warm; a token of the pool takes `kv_bytes` beside its keys and values. Errors: as `build`."""
    spec, page_size = loaded.spec, config.cache.page_size or 16
    refuse_unbuilt_shape(spec, device_of(config), activation_dtype(loaded.params))
    adapters = features.adapters(config.lora, spec, loaded.params, str(loaded.model_dir), group)
    slots = 0 if adapters is None else adapters.slots
    rows = config.scheduler.max_running_requests or 1
    images = ImageInputs(config, spec, loaded.params, loaded.context_length, rows, group) if spec.vision else None
    edits = group is None or group.rank == 0  # whose logits are edited
    stages = logits_stages(rows, spec.vocab_size, torch.device(device_of(config))) if edits else ()
    runner = make_runner(config, loaded, stages, slots, group)
    before = time.perf_counter()
    kv_dtype = torch.float32 if device_of(config) == "cpu" else activation_dtype(loaded.params)
    same = int if group is None else partial(least, group=group)
    size, kv = ready(config, loaded, runner, kv_dtype, same, kv_bytes)
    seconds = time.perf_counter() - before
    write = None if adapters is None else adapters.write
    width = -(-loaded.context_length // page_size)
    input_batch = InputBatch(rows, width, page_size, stages, slots, write, images, runner.grouped)
    return Worker(runner, input_batch, adapters, kv, kv_dtype, size, seconds)


def follow(link: Link, start: dict[str, Any], features: Features) -> None:
    """A rank beside rank 0, until that ends: loads its part, then computes its part of every step."""
    config = from_plain(EngineConfig, start["config"], NOTHING)
    device = device_of(config)
    with link.telling():
        use_private_caches()
        with current_device(device):
            name, rank, folder, sockets = start["group"]
            link.folder = folder
            group = group_of(name, rank, folder, sockets, device)
            loaded = load(config, features.tokenizer, group)
            link.say(loaded=True)
            link.told.get()  # every rank has
            with process_group(group, device):
                worker = make_worker(config, loaded, features, group)
                new_kv = pool_of(config, loaded.spec, worker)
                weights = LiveWeights(loaded.params, loaded.spec, loaded.model_dir, loaded.from_disk, group)
                follower = Follower(link, worker.runner, worker.input_batch, worker.kv, weights, new_kv, group)
                del worker  # it names the first KV state, which may be released
                follower.run()


def pool_of(config: EngineConfig, spec: ModelSpec, worker: Worker) -> Callable[[], KVState]:
    """What makes another KV state of the size and shape of the worker's."""
    part, page_size = spec.part(config.parallel.tp_size), config.cache.page_size or 16
    return partial(new_pool, part, worker.size, page_size, worker.kv_dtype, device_of(config))


def assemble(
    config: EngineConfig, loaded: Loaded, features: Features, ranks: Ranks | None = None, *, started: float
) -> Parts:
    """The running engine over a loaded model. `started`: when its start began, of `time.perf_counter`."""
    compiles, spec, page_size = compile_count(), loaded.spec, config.cache.page_size or 16
    speculation = features.speculation(config, spec, loaded.params)
    if speculation is not None:
        loaded = replace(loaded, spec=replace(spec, feature_layers=speculation.feature_layers))
    if ranks is not None:
        ranks.join()
    group = None if ranks is None else ranks.group
    worker = make_worker(config, loaded, features, group, 0 if speculation is None else speculation.kv_bytes)
    if speculation is not None:
        speculation.open(worker.kv, worker.input_batch)
    size, kv_dtype, adapters = worker.size, worker.kv_dtype, worker.adapters
    images = image_rows(config, loaded.params)
    scheduler = make_scheduler(config, spec, size, speculation, 0 if adapters is None else adapters.slots, images)
    runner = worker.runner if ranks is None else ranks.over(worker.runner, worker.input_batch.images)
    core = EngineCore(scheduler, worker.input_batch, runner, worker.kv, overlap=bool(config.scheduler.overlap))
    weights = LiveWeights(loaded.params, spec, loaded.model_dir, loaded.from_disk, group)
    updates = WeightUpdates(weights, core, ranks)
    empty, input_batch = pool_of(config, loaded.spec, worker), worker.input_batch

    def new_kv() -> KVState:  # names no worker, whose first KV state it would keep
        kv = empty()
        if speculation is not None:
            speculation.open(kv, input_batch)
        return kv

    memory = DeviceMemory(worker.runner, weights, new_kv, page_size, core.stepper.swap_kv)
    if ranks is not None:
        ranks.attach(core)
    return Parts(
        config=config, spec=spec, tokenizer=loaded.tokenizer, context_length=loaded.context_length,
        pool_tokens=(size.pages - 1) * page_size, eos_ids=loaded.eos_ids, core=core, model_dir=loaded.model_dir,
        start_seconds=time.perf_counter() - started, compile_seconds=worker.compile_seconds,
        compiles_at_start=compiles, weights=weights, updates=updates, profile=Profile(core),
        kv_dtype=kv_dtype, kv_bytes=pool_bytes(spec, size, page_size, kv_dtype),
        adapters=adapters, memory=Memory(core, memory, updates.lose, ranks), pooling=loaded.pooling, ranks=ranks,
        images=features.images(config, loaded.model_dir, spec, loaded.tokenizer),
    )  # fmt: skip


def make_runner(
    config: EngineConfig, loaded: Loaded, stages: tuple[LogitsStage, ...], slots: int, group: Group | None
) -> CpuRunner | CudaRunner:  # fmt: skip
    """What runs steps on the configured device. `slots`: of LoRA adapters."""
    sampler = sample_rows if group is None else ranked_rows(group)
    rows, tokens = config.scheduler.max_running_requests or 1, config.scheduler.max_step_tokens or 1
    stepped = replace(loaded.spec.part(config.parallel.tp_size), exact=config.numerics is Numerics.exact)
    forward, unembed = make_forward(stepped, compiled=bool(config.compile.enabled)), make_unembed(stepped)
    windows = windows_of(config, stepped, loaded.context_length)
    grouped = windows is not None and not windows.alone
    if device_of(config) == "cpu":
        return CpuRunner(loaded.params, forward, unembed, slots, sampler, letters_of(loaded.spec), grouped)
    return CudaRunner(
        loaded.params, forward, unembed, stages, tokens=tokens, vocab=loaded.spec.vocab_size,
        rows=max(rows, 0 if config.speculation.algorithm is Algorithm.none else config.speculation.step_tokens or 0),
        width=-(-loaded.context_length // (config.cache.page_size or 16)), graphs=config.compile.cuda_graph,
        prefill_graphs=config.compile.prefill_graphs, graph_rows=config.compile.graph_rows,
        device=device_of(config), adapter_slots=slots, sampler=sampler, images=letters_of(loaded.spec),
        grouped=grouped,
    )  # fmt: skip


def ready(
    config: EngineConfig,
    loaded: Loaded,
    runner: CpuRunner | CudaRunner,
    kv_dtype: torch.dtype,
    least: Callable[[int], int] = int,
    kv_bytes: int = 0,
) -> tuple[PoolSize, KVState]:
    """Compiles and captures, and makes the KV pool: its size, and itself. Errors: as `build`."""
    rows, page_size, device = (
        config.scheduler.max_running_requests or 1,
        config.cache.page_size or 16,
        device_of(config),
    )
    spec, activations = loaded.spec.part(config.parallel.tp_size), 0
    with _faults_of_start(config):
        if isinstance(runner, CudaRunner):
            small = init_kv(spec, 1, page_size, kv_dtype, device)
            eager = make_forward(replace(spec, exact=config.numerics is Numerics.exact))
            activations = prepare(runner, small, eager)
        size = pool_size(config, spec, kv_dtype, rows, loaded.context_length, activations, kv_bytes, least)
        return size, runner.warm_up(new_pool(spec, size, page_size, kv_dtype, device), page_size)


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
        if not _from_compiler(error):
            raise
        raise ConfigError(
            f"torch.compile failed: {str(error)[:2000]}\nIt needs a C++ compiler (apt install g++, or set CXX) and an "
            f"undamaged cache (delete {os.environ.get('TORCHINDUCTOR_CACHE_DIR')}); compile.enabled=false does without"
        ) from error


def make_scheduler(
    config: EngineConfig, spec: ModelSpec, size: PoolSize, speculation: Speculation | None, slots: int,
    images: ImageRows | None = None,
) -> Scheduler:  # fmt: skip
    """The scheduler over a pool of that size. Errors: OSError if its steps cannot be recorded; ConfigError."""
    pool = PagePool(size.pages) if size.windows is None else WindowPages(size.pages, size.windows)
    page_size = config.cache.page_size or 16
    record = config.scheduler.record
    if record is not None and images is not None:
        raise ConfigError("scheduler.record tells no images: leave it out for a model that takes them")
    return (Scheduler if record is None else partial(RecordedScheduler, Path(record)))(
        pool,
        PrefixCache(pool, page_size) if config.cache.prefix_cache and spec.causal else None,
        page_size=page_size,
        max_running_requests=config.scheduler.max_running_requests or 1,
        max_step_tokens=config.scheduler.max_step_tokens or 1,
        policy=config.scheduler.policy,
        speculation=speculation,
        adapter_slots=slots,
        whole_prompts=not spec.causal,
        max_queued=config.scheduler.max_queued_requests,
        images=images,
    )


def activation_dtype(params: Params) -> torch.dtype:
    """Activations, and on CUDA the KV pages, have the dtype of the norm weights."""
    return params["final_norm_D"].dtype


def use_private_caches() -> None:
    """Keeps torch's and Triton's compiled code in a directory that only this user can write. Modifies: os.environ,
    where they look; a value that the user has set stays, torch's own default in the shared /tmp does not."""
    root, shared = private_cache_dir(), os.path.join(tempfile.gettempdir(), "torchinductor_")
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", shared).startswith(shared):
        name = f"inductor-{sources_digest()[:16]}"  # compiled code calls our ops by their arguments of that state
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(root / name)
    os.environ.setdefault("TRITON_CACHE_DIR", str(root / "triton"))
