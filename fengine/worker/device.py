"""The device an engine runs on: what is there, what the configuration asks for, and what cannot be had."""

import torch

from fengine.config import EngineConfig, Hardware
from fengine.errors import ConfigError, UnsupportedArchitectureError
from fengine.models.spec import ModelSpec


def detect_hardware() -> Hardware:
    return Hardware(device="cuda" if torch.cuda.is_available() else "cpu")


def device_of(config: EngineConfig) -> str:
    device = config.model.device or "cpu"
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"model.device must be cpu or cuda, got {device!r}")
    if device.startswith("cpu:"):
        raise ConfigError(f"model.device is {device!r}; a CPU has no number: use device=cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"model.device is {device!r} but torch sees no CUDA device; use device=cpu")
    if device.partition(":")[2] and not device.partition(":")[2].isdigit():
        raise ConfigError(f"model.device must be cpu or cuda, got {device!r}")
    if device.startswith("cuda:") and int(device[5:]) > 0:  # streams and launches are those of the current device
        raise ConfigError(
            f"model.device is {device!r}, and an engine runs on the first device that it sees: set "
            f"CUDA_VISIBLE_DEVICES={int(device[5:])} and use device=cuda"
        )
    return device


def refuse_default_device() -> None:
    """Host buffers are made without naming a device. Only this thread's default counts, and only now. Errors:
    ConfigError."""
    if torch.get_default_device().type != "cpu":
        raise ConfigError(
            f"torch's default device is {torch.get_default_device()}; make the Engine before torch.set_default_device, "
            "or outside of `with torch.device(...)`: its own device is the parameter device"
        )


def refuse_unbuilt_shape(spec: ModelSpec, device: str) -> None:
    """Shapes that the CUDA kernels do not take. Errors: UnsupportedArchitectureError."""
    if device.startswith("cuda") and spec.head_dim < 16:
        raise UnsupportedArchitectureError(
            f"head_dim is {spec.head_dim}; attention on CUDA needs at least 16 (one matrix tile). Use device=cpu."
        )
