"""The device an engine runs on: what is there, what the configuration asks for, and what cannot be had."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from fengine.config import EngineConfig
from fengine.errors import ConfigError, UnsupportedArchitectureError, UnsupportedFeatureError
from fengine.models.spec import ModelSpec


def device_of(config: EngineConfig) -> str:
    device = config.model.device or "cpu"
    if not re.fullmatch("cpu|cuda(:[0-9]+)?", device):
        raise ConfigError(f"model.device must be cpu, cuda or cuda:NUMBER, got {device!r}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"model.device is {device!r} but torch sees no CUDA device; use model.device=cpu")
    if device.startswith("cuda:") and int(device[5:]) >= torch.cuda.device_count():
        raise ConfigError(f"model.device is {device!r}, and torch sees {torch.cuda.device_count()} CUDA devices")
    return device


@contextmanager
def current_device(device: str) -> Iterator[None]:
    """Inside, a GPU is the current one of this thread: launches and streams that name no device are on the current one.
    Modifies: torch's current device, in this thread."""
    with torch.cuda.device(device) if device.startswith("cuda") else nullcontext():
        yield


def enter(device: torch.device) -> None:
    """Makes a GPU the current one of the calling thread: the loop's, or the one that builds it. What runs there, such
    as a logit processor, may have chosen another since."""
    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        torch.cuda.set_device(device)


def refuse_default_device() -> None:
    """Host buffers are made without naming a device. Only this thread's default counts, and only now. Errors:
    ConfigError."""
    if torch.get_default_device().type != "cpu":
        raise ConfigError(
            f"torch's default device is {torch.get_default_device()}; make the Engine before torch.set_default_device, "
            "or outside of `with torch.device(...)`: its own device is the parameter device"
        )


_started: set[int] = set()  # processes with engines, this one and those that it was forked from


def refuse_forked() -> None:
    """A fork has none of the threads on which torch's and our own kernels run: the first one would wait for them for
    ever, in silence. Errors: ConfigError in the child of a process that has made an engine."""
    if _started and os.getpid() not in _started and torch.get_num_threads() > 1:
        raise ConfigError(
            "this process was forked from one that has an Engine, and kernels would wait for that one's threads: start "
            "it by multiprocessing.get_context('spawn'), or both with OMP_NUM_THREADS=1"
        )
    _started.add(os.getpid())


def refuse_unbuilt_shape(spec: ModelSpec, device: str, dtype: torch.dtype) -> None:
    """What the CUDA kernels do not take; `dtype` is that of activations. Errors: UnsupportedArchitectureError,
    UnsupportedFeatureError."""
    if device.startswith("cuda") and spec.few_kv and dtype != torch.bfloat16:
        raise UnsupportedFeatureError(
            f"kv_cache_dtype='fp8_e4m3' with {str(dtype).removeprefix('torch.')} on CUDA is not built: use "
            "dtype=bfloat16."
        )
    if device.startswith("cuda") and spec.head_dim < 16:
        raise UnsupportedArchitectureError(
            f"head_dim is {spec.head_dim}; attention on CUDA needs at least 16 (one matrix tile). Use device=cpu."
        )
