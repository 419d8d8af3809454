"""Methods of `Engine` that change weights, adapters and memory. SGLang's signatures; fengine's own are keyword-only."""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from fengine.api.context import HasContext
from fengine.core.scalars import told
from fengine.engine.weights.group import GroupError, Groups
from fengine.engine.weights.updates import UpdateResult
from fengine.errors import FengineError, InvalidRequestError, UnsupportedFeatureError
from fengine.lora.adapters import Adapters

GROUP_TIMEOUT = 300.0  # seconds


def update_weights_from_disk(
    engine: HasContext, model_path: str, load_format: str | None = None, *, weight_version: str | None = None,
    abort_all_requests: bool = False,
) -> UpdateResult:  # fmt: skip
    """All weights from a checkpoint of the same model; on any fault (False, reason) and the old ones stay. Between two
    steps. The prefix cache is emptied. Requests that run are computed again from their tokens and go on with the new
    weights, or end first with `abort_all_requests`. `weight_version` labels what is drawn from then."""
    return engine._parts.updates.update_from_disk(
        model_path, load_format, version=weight_version, abort=abort_all_requests
    )


def update_weights_from_tensor(
    engine: HasContext, named_tensors: Any, load_format: str | None = None, flush_cache: bool = True, *,
    weight_version: str | None = None, abort_all_requests: bool = False,
) -> UpdateResult:  # fmt: skip
    """Some or all weights, as (name, tensor) pairs or a dict in Hugging Face names; as `update_weights_from_disk`. The
    prefix cache is emptied also with flush_cache=False: its pages were computed with the old weights."""
    return engine._parts.updates.update_from_tensor(
        named_tensors, load_format, version=weight_version, abort=abort_all_requests
    )


def update_weights_from_distributed(
    engine: HasContext, names: list[str], dtypes: list[Any], shapes: list[list[int]],
    group_name: str = "weight_update_group", flush_cache: bool = True, load_format: str | None = None, *,
    weight_version: str | None = None, abort_all_requests: bool = False,
) -> UpdateResult:  # fmt: skip
    """Weights that rank 0 of a group broadcasts in this order; as `update_weights_from_tensor`."""
    return engine._parts.updates.update_from_distributed(
        names, dtypes, shapes, group_name, load_format, version=weight_version, abort=abort_all_requests
    )


def update_weights_from_ipc(engine: HasContext, zmq_handles: Any, flush_cache: bool = True) -> UpdateResult:
    others = "Use update_weights_from_tensor or update_weights_from_distributed."
    raise UnsupportedFeatureError(f"update_weights_from_ipc is not built: its handles are pickles. {others}")


def init_weights_update_group(
    engine: HasContext, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str,
    backend: str = "nccl", *, timeout: float = GROUP_TIMEOUT,
) -> UpdateResult:  # fmt: skip
    """Joins a trainer's group, whose rank 0 is the trainer. `timeout`: seconds to wait for it, and for each broadcast.
    `backend`: "nccl" on CUDA, or "gloo". (False, reason) if it cannot be joined."""
    arguments = (master_address, master_port, rank_offset, world_size, group_name, backend, timeout)
    joined = f"rank {rank_offset} of {world_size} is in group {group_name!r}"
    return _of_group(engine, joined, lambda groups: groups.join(*arguments))


def destroy_weights_update_group(engine: HasContext, group_name: str) -> UpdateResult:
    """Leaves a group. (False, reason) if it is in none of that name."""
    return _of_group(engine, f"left group {group_name!r}", lambda groups: groups.leave(group_name))


def _of_group(engine: HasContext, done: str, change: Callable[[Groups], None]) -> UpdateResult:
    engine._parts.core.call("ping")  # a closed engine says so
    try:
        change(engine._parts.updates.groups)
    except GroupError as error:
        return UpdateResult(False, str(error))
    return UpdateResult(True, done)


def begin_weight_update(engine: HasContext, selector: str = "all") -> UpdateResult:
    """Updates are collected from here on, and take effect together in `end_weight_update`: with the last label that one
    of them gave, unless that gives its own, and behind an abort if any asked for it."""
    return engine._parts.updates.begin(selector)


def end_weight_update(
    engine: HasContext, *, weight_version: str | None = None, abort_all_requests: bool = False
) -> UpdateResult:
    """All that was collected takes effect; nothing, if any part of it was refused."""
    return engine._parts.updates.end(version=weight_version, abort=abort_all_requests)


def get_weights_by_name(engine: HasContext, name: str, truncate_size: int = 100) -> list[Any] | None:
    """The first `truncate_size` rows of a tensor as lists of floats; None for a name that the model has not."""
    return engine._parts.updates.read(name, truncate_size)


def release_memory_occupation(engine: HasContext, tags: list[str] | None = None) -> None:
    """Gives memory back: "kv_cache", "weights", "cuda_graph", or for None all. Requests are refused meanwhile. Errors:
    EngineBusyError while requests run, MemoryReleasedError for what is released, InvalidRequestError."""
    engine._parts.memory.release(tags)


def resume_memory_occupation(engine: HasContext, tags: list[str] | None = None) -> None:
    """Takes memory again; for None all that is released. Weights come back if they were those of a checkpoint that is
    unchanged; else requests are refused until an update has given every tensor. Errors: MemoryReleasedError for what is
    not released, OutOfMemoryError, InvalidRequestError."""
    engine._parts.memory.resume(tags)


class AdapterResult(NamedTuple):
    """SGLang's answer about LoRA adapters. Without success, nothing was changed."""

    success: bool
    error_message: str
    loaded_adapters: dict[str, str]  # path by name


NOT_ENABLED = "LoRA is not enabled. Please set `--enable-lora` (enable_lora=True) to enable LoRA."


def load_lora_adapter(engine: HasContext, lora_name: str, lora_path: str, pinned: bool = False) -> AdapterResult:
    """Loads a PEFT adapter from a directory or hub id; requests name it with `lora_path=lora_name`. Its files are read
    and checked while steps go on; what is wrong with them is the answer. `pinned`: once it has come to a slot of the
    device it stays there."""
    return _change(engine, lambda adapters: adapters.load(lora_name, lora_path, pinned))


def load_lora_adapter_from_tensors(
    engine: HasContext, lora_name: str, tensors: Any, config_dict: dict[str, Any], load_format: str | None = None
) -> AdapterResult:
    """Loads an adapter from tensors under PEFT's names, and the values of its adapter_config.json."""
    if load_format is not None:
        raise InvalidRequestError(f"load_format={told(load_format)} is not built; give tensors by name, a dict.")
    return _change(engine, lambda adapters: adapters.load_tensors(lora_name, tensors, config_dict))


def unload_lora_adapter(engine: HasContext, lora_name: str) -> AdapterResult:
    """Forgets an adapter. Requests that came before finish with it; its slot and memory are free then."""
    return _change(engine, lambda adapters: adapters.unload(lora_name))


async def async_load_lora_adapter(
    engine: HasContext, lora_name: str, lora_path: str, pinned: bool = False
) -> AdapterResult:
    """As `load_lora_adapter`; the event loop goes on meanwhile."""
    return await asyncio.to_thread(load_lora_adapter, engine, lora_name, lora_path, pinned)


async def async_unload_lora_adapter(engine: HasContext, lora_name: str) -> AdapterResult:
    """As `unload_lora_adapter`."""
    return await asyncio.to_thread(unload_lora_adapter, engine, lora_name)


def lora_adapters(engine: HasContext) -> dict[str, str]:
    """Names and paths of the adapters that requests may name."""
    return {} if engine._parts.adapters is None else engine._parts.adapters.paths()


def _change(engine: HasContext, change: Callable[[Adapters], None]) -> AdapterResult:
    engine._parts.core.call("ping")  # a closed engine says so
    adapters = engine._parts.adapters
    if adapters is None:
        return AdapterResult(False, NOT_ENABLED, {})
    try:
        change(adapters)
    except InvalidRequestError:
        raise
    except FengineError as error:
        return AdapterResult(False, str(error), adapters.paths())
    return AdapterResult(True, "", adapters.paths())
