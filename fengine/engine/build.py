"""From a configuration to a running engine: model, worker, scheduler, engine core; or to a rank of one."""

import errno
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fengine.config import EngineConfig, Hardware, resolve
from fengine.core.images import ImageRows
from fengine.core.kv_pages import PagePool
from fengine.core.plain import from_plain
from fengine.core.prefix_cache import PrefixCache
from fengine.core.recording import RecordedScheduler
from fengine.core.scheduler import Scheduler
from fengine.core.speculation import Speculation
from fengine.core.window_pages import WindowPages
from fengine.engine.deadlines import Deadlines
from fengine.engine.engine_core import EngineCore
from fengine.engine.load import Loaded, load, read_spec
from fengine.engine.memory import DeviceMemory, Memory
from fengine.engine.parallel.child import NOTHING, Link
from fengine.engine.parallel.follower import Follower
from fengine.engine.parallel.ranks import Ranks, told_of
from fengine.engine.parallel.remote import parts_of
from fengine.engine.parallel.replicas import Replicas
from fengine.engine.parts import Parts, compile_count
from fengine.engine.profiling import Profile
from fengine.engine.weights.live import LiveWeights
from fengine.engine.weights.updates import WeightUpdates
from fengine.engine.workers import Features, Worker, make_worker
from fengine.errors import ConfigError, FengineError, OutOfMemoryError
from fengine.models.kv_state import KVState
from fengine.models.spec import ModelSpec
from fengine.ops.compiler import private_cache_dir
from fengine.ops.proof import sources_digest
from fengine.worker.device import current_device, device_of, refuse_default_device
from fengine.worker.images import image_rows
from fengine.worker.kv_pool import PoolSize, new_pool, pool_bytes
from fengine.worker.process_group import check_parts, dock_of, group_of, process_group


@contextmanager
def memory_told() -> Iterator[None]:
    """What Python, torch and the kernel raise where the host's memory ends while an engine is made is one error."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        ended = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
        ended = ended or str(error).startswith("can't start new thread") or "DefaultCPUAllocator" in str(error)
        if isinstance(error, FengineError) or not ended:
            raise
        raise OutOfMemoryError(
            f"the host's memory ended while the engine was made ({error!s:.200}); free some, let this process have "
            "more, or lower cache.max_total_tokens, scheduler.max_running_requests or scheduler.max_step_tokens"
        ) from error


@memory_told()
@torch.inference_mode(False)  # whatever the caller's mode: steps, in another thread, write to what is made here
def build(config: EngineConfig, features: Features) -> Parts:
    """Loads, compiles, warms up and starts. Errors: ConfigError, ModelLoadError and kinds, OutOfMemoryError."""
    started = time.perf_counter()
    config = resolve(config, Hardware("cuda" if torch.cuda.is_available() else "cpu"))
    device_of(config)  # refused before anything is read
    refuse_default_device()
    use_private_caches()
    if config.parallel.dp_size > 1:
        loaded = load(config, features.tokenizer, weights=False)
        core = Replicas(config, 1 << 16, {"tokenizer": loaded.tokenizer and loaded.tokenizer.sha256})
        return parts_of(core, config, loaded, features, started)
    with current_device(device_of(config)), ranks_of(config) as ranks:
        loaded = load(config, features.tokenizer, None if ranks is None else ranks.group)
        return assemble(config, loaded, features, ranks, started=started)


@contextmanager
def ranks_of(config: EngineConfig) -> Iterator[Ranks | None]:
    """The other ranks, which have begun to load, if there are any; they end where what is inside fails."""
    if config.parallel.tp_size == 1:
        yield None
        return
    check_parts(config, read_spec(config)[2])
    ranks = Ranks(config)
    try:
        with ranks.named():
            yield ranks
    except BaseException:
        ranks.close()
        raise


def follow(link: Link, start: dict[str, Any], features: Features) -> None:
    """A rank beside rank 0, until that ends: loads its part, then computes its part of every step."""
    config = from_plain(EngineConfig, start["config"], NOTHING)
    device = device_of(config)
    with link.telling():
        use_private_caches()
        with current_device(device):
            name, rank, folder, sockets = start["group"]
            group = group_of(name, rank, folder, sockets, device)
            loaded = load(config, features.tokenizer, group)
            link.say(loaded=True, read=told_of(loaded.origin))
            link.told.get()  # every rank has
            with process_group(group, device, dock_of(config, loaded.spec)):
                worker = make_worker(config, loaded, features, group)
                new_kv = kv_maker(config, loaded.spec, worker)
                weights = LiveWeights(loaded.params, loaded.spec, loaded.model_dir, loaded.origin, group)
                follower = Follower(link, worker.runner, worker.input_batch, worker.kv, weights, new_kv, group)
                del worker  # it names the first KV state, which may be released
                follower.run()


def assemble(
    config: EngineConfig, loaded: Loaded, features: Features, ranks: Ranks | None = None, *, started: float
) -> Parts:
    """The running engine over a loaded model. `started`: when its start began, of `time.perf_counter`."""
    compiles, spec, page_size = compile_count(), loaded.spec, config.cache.page
    speculation = features.speculation(config, spec, loaded.params)
    if speculation is not None:
        loaded = replace(loaded, spec=replace(spec, feature_layers=speculation.feature_layers))
    group = None if ranks is None else ranks.join(dock_of(config, spec), loaded.origin)
    worker = make_worker(config, loaded, features, group, 0 if speculation is None else speculation.kv_bytes)
    if speculation is not None:
        speculation.open(worker.kv, worker.input_batch, worker.runner.last_token_R)
        speculation.warm_up()
    size, kv_dtype, adapters = worker.size, worker.kv_dtype, worker.adapters
    slots, images = 0 if adapters is None else adapters.slots, image_rows(config, loaded.params)
    scheduler = make_scheduler(config, spec, size, speculation, slots, images)
    runner = worker.runner if ranks is None else ranks.over(worker.runner, worker.input_batch.images)
    core = EngineCore(scheduler, worker.input_batch, runner, worker.kv, overlap=bool(config.scheduler.overlap))
    if (limits := (config.scheduler.waiting_timeout, config.scheduler.running_timeout)) != (None, None):
        core.stepper.watch(Deadlines(core.requests, *limits))
    weights = LiveWeights(loaded.params, spec, loaded.model_dir, loaded.origin, group)
    updates = WeightUpdates(weights, core, ranks, config.model.download_dir)
    new_kv = kv_maker(config, loaded.spec, worker, speculation)
    memory = DeviceMemory(worker.runner, weights, new_kv, page_size, core.stepper.swap_kv, speculation)
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
        phases={**loaded.seconds, "kv_cache_allocation": worker.pool_seconds},
    )  # fmt: skip


def kv_maker(
    config: EngineConfig, spec: ModelSpec, worker: Worker, speculation: Speculation | None = None
) -> Callable[[], KVState]:
    """Of empty KV states as the worker's first, a draft's beside it. It does not name the worker, which keeps that."""
    spec, page_size, device = spec.part(config.parallel.tp_size), config.cache.page, device_of(config)
    size, kv_dtype, input_batch, tokens = worker.size, worker.kv_dtype, worker.input_batch, worker.runner.last_token_R

    def new_kv() -> KVState:
        kv = new_pool(spec, size, page_size, kv_dtype, device)
        if speculation is not None:
            speculation.open(kv, input_batch, tokens)
        return kv

    return new_kv


def make_scheduler(
    config: EngineConfig, spec: ModelSpec, size: PoolSize, speculation: Speculation | None, slots: int,
    images: ImageRows | None = None,
) -> Scheduler:  # fmt: skip
    """The scheduler over a pool of that size. Errors: StorageError if its steps cannot be recorded; ConfigError."""
    pool = PagePool(size.pages) if size.windows is None else WindowPages(size.pages, size.windows)
    page_size = config.cache.page
    record = config.scheduler.record
    return (Scheduler if record is None else partial(RecordedScheduler, Path(record)))(
        pool, PrefixCache(pool, page_size) if config.cache.prefix_cache and spec.causal else None, page_size=page_size,
        max_running_requests=config.scheduler.max_running_requests or 1,
        max_step_tokens=config.scheduler.max_step_tokens or 1, policy=config.scheduler.policy, speculation=speculation,
        adapter_slots=slots, whole_prompts=not spec.causal, max_queued=config.scheduler.max_queued_requests,
        images=images,
    )  # fmt: skip


def use_private_caches() -> None:
    """Keeps torch's and Triton's compiled code in a directory that only this user can write. Modifies: os.environ,
    where they look; a value that the user has set stays, torch's own default in the shared /tmp does not."""
    try:
        root, shared = private_cache_dir(), os.path.join(tempfile.gettempdir(), "torchinductor_")
    except FileNotFoundError as error:  # none of those that Python looks for can be written
        raise ConfigError(f"{error.strerror}; make room in one, or set TMPDIR") from error
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", shared).startswith(shared):
        name = f"inductor-{sources_digest()[:16]}"  # compiled code calls our ops by their arguments of that state
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(root / name)
    os.environ.setdefault("TRITON_CACHE_DIR", str(root / "triton"))
