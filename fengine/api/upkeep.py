"""`Upkeep`: the calls of `Engine` that are not about prompts: weights, memory, caches, information, profiling."""

import atexit
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from fengine.api import info
from fengine.api.server_args import ServerArgs
from fengine.core.step_trace import StepRecord, StepTrace
from fengine.engine.build import Parts
from fengine.engine.weights.group import GroupError
from fengine.engine.weights.updates import UpdateResult
from fengine.errors import EngineClosedError, EngineDeadError, UnsupportedFeatureError

GROUP_TIMEOUT = 300.0  # seconds


class FlushResult(NamedTuple):
    """SGLang's answer to `flush_cache`."""

    success: bool
    message: str


class Upkeep:
    """SGLang's signatures; what fengine adds is keyword-only. Errors everywhere: EngineClosedError, EngineDeadError."""

    _parts: Parts
    server_args: ServerArgs

    # -- weights -------------------------------------------------------------------------------------------------------

    def update_weights_from_disk(
        self, model_path: str, load_format: str | None = None, *, weight_version: str | None = None,
        abort_all_requests: bool = False,
    ) -> UpdateResult:  # fmt: skip
        """All weights from a checkpoint of the same model; on any fault (False, reason) and the old ones stay.

        Between two steps. The prefix cache is emptied. Requests that run are computed again from their tokens and go on
        with the new weights, or end first with `abort_all_requests`. `weight_version` labels what is drawn from then.
        """
        return self._parts.updates.update_from_disk(
            model_path, load_format, version=weight_version, abort=abort_all_requests
        )

    def update_weights_from_tensor(
        self, named_tensors: Any, load_format: str | None = None, flush_cache: bool = True, *,
        weight_version: str | None = None, abort_all_requests: bool = False,
    ) -> UpdateResult:  # fmt: skip
        """Some or all weights, as (name, tensor) pairs or a dict in Hugging Face names; as `update_weights_from_disk`.

        The prefix cache is emptied also with flush_cache=False: its pages were computed with the old weights.
        """
        return self._parts.updates.update_from_tensor(
            named_tensors, load_format, version=weight_version, abort=abort_all_requests
        )

    def update_weights_from_distributed(
        self, names: list[str], dtypes: list[Any], shapes: list[list[int]], group_name: str = "weight_update_group",
        flush_cache: bool = True, load_format: str | None = None, *, weight_version: str | None = None,
        abort_all_requests: bool = False,
    ) -> UpdateResult:  # fmt: skip
        """Weights that rank 0 of a group broadcasts in this order; as `update_weights_from_tensor`."""
        return self._parts.updates.update_from_distributed(
            names, dtypes, shapes, group_name, load_format, version=weight_version, abort=abort_all_requests
        )

    def update_weights_from_ipc(self, zmq_handles: Any, flush_cache: bool = True) -> UpdateResult:
        raise UnsupportedFeatureError(
            "update_weights_from_ipc is not built: its handles are pickles. Use update_weights_from_tensor or "
            "update_weights_from_distributed."
        )

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str,
        backend: str = "nccl", *, timeout: float = GROUP_TIMEOUT,
    ) -> UpdateResult:  # fmt: skip
        """Joins a trainer's group (its rank is 0) and waits for it up to `timeout` seconds, which is also how long a
        broadcast may take. `backend`: "nccl" on CUDA, or "gloo"."""
        self._parts.driver.call(lambda: None)
        try:
            self._parts.updates.groups.join(
                master_address, master_port, rank_offset, world_size, group_name, backend, timeout
            )
        except GroupError as error:
            return UpdateResult(False, str(error))
        return UpdateResult(True, f"rank {rank_offset} of {world_size} is in group {group_name!r}")

    def destroy_weights_update_group(self, group_name: str) -> UpdateResult:
        """Leaves a group."""
        self._parts.driver.call(lambda: None)
        try:
            self._parts.updates.groups.leave(group_name)
        except GroupError as error:
            return UpdateResult(False, str(error))
        return UpdateResult(True, f"left group {group_name!r}")

    def begin_weight_update(self, selector: str = "all") -> UpdateResult:
        """Updates are collected from here on, and take effect together in `end_weight_update`."""
        return self._parts.updates.begin(selector)

    def end_weight_update(
        self, *, weight_version: str | None = None, abort_all_requests: bool = False
    ) -> UpdateResult:  # fmt: skip
        """All that was collected takes effect; nothing, if any part of it was refused."""
        return self._parts.updates.end(version=weight_version, abort=abort_all_requests)

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any] | None:
        """The first `truncate_size` rows of a tensor as lists of floats; None for a name that the model has not."""
        return self._parts.weights.read(name, truncate_size)

    # -- memory --------------------------------------------------------------------------------------------------------

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Gives memory back: "kv_cache", "weights", "cuda_graph", or for None all. Requests are refused meanwhile.

        Errors: EngineBusyError while requests run, MemoryReleasedError for what is released, InvalidRequestError.
        """
        self._parts.memory.release(tags)

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Takes memory again; for None all that is released.

        Weights come back if they were those of a checkpoint that is unchanged; else requests are refused until an
        update has given every tensor. Errors: MemoryReleasedError for what is not released, OutOfMemoryError,
        InvalidRequestError.
        """
        self._parts.memory.resume(tags)

    def flush_cache(self) -> FlushResult:
        """Empties the prefix cache; refused (success False) while requests run."""
        return self._parts.driver.call(self._flush)

    def _flush(self) -> FlushResult:
        scheduler = self._parts.driver.scheduler
        held = self._parts.driver.paused and not scheduler.counters()["running"]  # those that wait hold no pages
        if scheduler.has_work and not held:
            return FlushResult(False, "the cache was not flushed: requests are running; wait for them or abort them")
        if scheduler.cache is not None:
            scheduler.cache.flush()
        return FlushResult(True, "the prefix cache is empty")

    def freeze_gc(self) -> None:
        """Collects garbage once, then exempts all that is left from later collections (`gc.freeze`)."""
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # or Triton's bindings would report at the end what the collector cannot take

    # -- information ---------------------------------------------------------------------------------------------------

    def get_server_info(self) -> dict[str, Any]:
        """Every setting as resolved, sizes, version, and the internal state."""
        return self._parts.driver.call(lambda: info.server_info(self._parts, self.server_args))

    def get_model_info(self) -> dict[str, Any]:
        """What kind of model runs."""
        return self._parts.driver.call(lambda: info.model_info(self._parts, self.server_args))

    def get_load(self) -> list[dict[str, int]]:
        """Requests that run and wait, and the tokens that they hold."""
        return self._parts.driver.call(lambda: info.load(self._parts))

    def get_all_child_pids(self) -> list[int]:
        """Child processes of this engine: there are none, everything runs in threads of this process."""
        return []

    # -- profiling -----------------------------------------------------------------------------------------------------

    def start_profile(self, **kwargs: Any) -> None:
        """Records a trace, from step `start_step` on and for `num_steps` steps, or until `stop_profile`.

        Keywords: output_dir (default: FENGINE_TORCH_PROFILER_DIR, or the temporary folder), start_step, num_steps,
        activities (of "CPU", "GPU"), with_stack, record_shapes, profile_id, profile_prefix. The file is
        `[prefix-]id.trace.json.gz`. Errors: ProfileError if profiling is on or the folder cannot be written,
        InvalidRequestError, UnsupportedFeatureError.
        """
        self._parts.profile.start(**kwargs)

    def stop_profile(self) -> None:
        """Writes the trace. Errors: ProfileError if nothing is being profiled."""
        self._parts.profile.stop()

    @contextmanager
    def steps_told(self, tell: Callable[[StepRecord], None]) -> Iterator[None]:
        """fengine's own: inside, `tell` gets every step of the scheduler, in the loop's thread: it should be quick.

        Errors: what `tell` raised, at the end; after it nothing more was told.
        """
        driver = self._parts.driver
        teller = StepTrace(driver.scheduler, tell)
        driver.call(lambda: driver.watchers.append(teller))
        try:
            yield
        finally:
            with suppress(EngineClosedError, EngineDeadError):  # then no step will be told any more
                driver.call(lambda: driver.watchers.remove(teller))
        if teller.fault is not None:
            raise teller.fault

    # -- SGLang's calls that have nothing to act on here ---------------------------------------------------------------

    def start_expert_distribution_record(self) -> None:
        raise UnsupportedFeatureError("expert distributions are not recorded: no model with experts is built.")

    stop_expert_distribution_record = dump_expert_distribution_record = start_expert_distribution_record

    def collective_rpc(self, method: str, **kwargs: Any) -> None:
        raise UnsupportedFeatureError(f"collective_rpc({method!r}) is not built: there are no scheduler processes.")

    def save_sharded_model(self, **kwargs: Any) -> None:
        raise UnsupportedFeatureError("save_sharded_model is not built: save from the trainer, as safetensors.")

    def save_remote_model(self, **kwargs: Any) -> None:
        raise UnsupportedFeatureError("save_remote_model is not built: save from the trainer, as safetensors.")
