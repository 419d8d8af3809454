"""Methods of `Engine` that steer it and tell about it: sessions, aborts, caches, information, profiles."""

import atexit
import gc
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from fengine.api.context import HasContext
from fengine.core.scalars import told
from fengine.core.step_trace import StepRecord
from fengine.errors import EngineClosedError, EngineDeadError, InvalidRequestError, UnsupportedFeatureError

PAUSE_MODES = ("abort", "retract", "in_place")


def open_session(
    engine: HasContext, capacity_of_str_len: int, session_id: str | None = None, streaming: bool = False,
    timeout: float | None = None,
) -> str | None:  # fmt: skip
    """A new session's id, for `session_params={"id": …}`; None if that id is in use. As `Sessions.open`.
    `capacity_of_str_len` bounds nothing, as in SGLang: the model's context length does."""
    return engine._context.sessions.open(session_id, streaming, timeout)


def close_session(engine: HasContext, session_id: str) -> None:
    """Forgets a session; a turn that runs goes on to its end. Errors: SessionError if there is none."""
    engine._context.sessions.close(session_id)


def abort(engine: HasContext, rid: str | None = None, abort_all: bool = False) -> None:
    """Ends the request with exactly this rid, or all of a call that was given it, or all; their calls return what there
    is, finish type "abort". A rid that is unknown, or has finished, is left alone. Returns at once. Errors:
    InvalidRequestError."""
    if not abort_all and not isinstance(rid, str):
        raise InvalidRequestError(f"abort needs a rid (a string) or abort_all=True, got rid={told(rid)}.")
    core = engine._parts.core
    core.abort_rids(None if abort_all else core.requests.rids_of(str(rid)))


def pause_generation(engine: HasContext, mode: str = "abort") -> None:
    """No step is planned until `continue_generation`; requests that come meanwhile wait. "abort" first ends all
    requests as `abort` does. "in_place" leaves them as they are, with their KV. "retract" sends them back to the queue:
    they give their pages back, so that `flush_cache` works, and are computed again. Returns when it holds. Errors:
    InvalidRequestError for another mode."""
    if mode not in PAUSE_MODES:
        raise InvalidRequestError(f"Invalid mode: {told(mode)}. Expected one of {list(PAUSE_MODES)}.")
    engine._parts.core.call("pause", mode=mode)


def continue_generation(engine: HasContext) -> None:
    """Steps are planned again."""
    engine._parts.core.call("resume")


class FlushResult(NamedTuple):
    """SGLang's answer to `flush_cache`."""

    success: bool
    message: str


def flush_cache(engine: HasContext) -> FlushResult:
    """Empties the prefix cache. Refused (success False) while requests run or wait; of a paused engine only while some
    run."""
    if engine._parts.core.call("flush_cache"):
        return FlushResult(True, "the prefix cache is empty")
    return FlushResult(False, "the cache was not flushed: requests are running; wait for them or abort them")


def freeze_gc(engine: HasContext) -> None:
    """Collects garbage once, then exempts all that is left from later collections (`gc.freeze`)."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or Triton's bindings would report at the end what the collector cannot take


def ping(engine: HasContext) -> None:
    """Returns once the loop has answered, which it does between two steps. Errors: EngineDeadError."""
    engine._parts.core.call("ping")
    engine._parts.core.check_threads()


def stats(engine: HasContext) -> dict[str, Any]:
    """Counters since the start, and gauges of this moment."""
    return engine._parts.stats()


def get_all_child_pids(engine: HasContext) -> list[int]:
    """The processes of its other ranks, or of its replicas; all else runs in threads of this one."""
    ranks = engine._parts.ranks
    return [] if ranks is None else ranks.pids


def start_profile(engine: HasContext, **kwargs: Any) -> None:
    """Records a trace, from step `start_step` on and for `num_steps` steps, or until `stop_profile`.

    Keywords: output_dir (default: FENGINE_TORCH_PROFILER_DIR or SGLang's variable, else the temporary folder),
    start_step, num_steps, activities (of "CPU", "GPU"), with_stack, record_shapes, profile_id, profile_prefix. The
    file is `[prefix-]id.trace.json.gz`. Errors: ProfileError if profiling is on or the folder cannot be written,
    InvalidRequestError, UnsupportedFeatureError."""
    engine._parts.profile.start(**kwargs)


def stop_profile(engine: HasContext) -> None:
    """Writes the trace. Errors: ProfileError if nothing is being profiled."""
    engine._parts.profile.stop()


@contextmanager
def steps_told(engine: HasContext, tell: Callable[[StepRecord], None]) -> Iterator[None]:
    """fengine's own: inside, `tell` gets every step of the scheduler, in the loop's thread: it should be quick. Errors:
    what `tell` raised, at the end; after it nothing more is reported."""
    core, key, fault = engine._parts.core, uuid.uuid4().hex, None
    core.call("watch_steps", tell, key=key)
    try:
        yield
    finally:
        with suppress(EngineClosedError, EngineDeadError):  # then there are no more steps
            fault = core.call("unwatch_steps", key=key)
    if fault is not None:
        raise fault


def start_expert_distribution_record(engine: HasContext) -> None:
    raise UnsupportedFeatureError("expert distributions are not recorded.")


RPC = ("save_sharded_model", "flush_cache", "release_memory_occupation", "resume_memory_occupation", "freeze_gc")


def collective_rpc(engine: HasContext, method: str, **kwargs: Any) -> None:
    """Calls one of RPC: there is one rank, and it is this engine. Errors: UnsupportedFeatureError for other names."""
    if method not in RPC:
        raise UnsupportedFeatureError(f"collective_rpc({told(method)}) is not built; there are {', '.join(RPC)}.")
    getattr(engine, method)(**kwargs)


def save_sharded_model(engine: HasContext, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
    """Writes the live weights, with config and tokenizer, as a folder that `model_path` takes; shards of `max_size`
    bytes at most. Errors: InvalidRequestError, StorageError, MemoryReleasedError."""
    parts = engine._parts
    parts.updates.save(parts.model_dir, parts.config.model.json_overrides, path, pattern, max_size)


def save_remote_model(engine: HasContext, **kwargs: Any) -> None:
    raise UnsupportedFeatureError("save_remote_model is not built: save_sharded_model writes a folder.")
