"""How an op is registered, and the one place where Triton is imported.

Triton exists on Linux only. Where it is missing, `jit` leaves a kernel as a plain function that nobody calls: every op
still imports, and runs on the CPU.
"""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fengine.ops import cpu

triton: Any
tl: Any
try:
    import triton
    import triton.language as tl
except ImportError:
    triton = SimpleNamespace(jit=lambda fn=None, **options: fn or (lambda kernel: kernel))
    tl = SimpleNamespace(constexpr=object)

LIBRARY = torch.library.Library("fengine", "DEF")


def register(schema: str, cuda: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Defines `fengine::<schema>` with an exact fake, to run `cuda` or `cpu.py`'s function of its name; returns the op.

    `Library.define` rather than `custom_op`: half the dispatch time, and a decode step of a small model is ~40 calls.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, getattr(cpu, name), "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"fengine::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.fengine, name).default


def wide(x: Tensor) -> Tensor:
    """`x` in the precision that references compute in: float32, or float64 where it came as float64. Pure."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def plain(x: Tensor) -> Tensor:
    """`x` contiguous and 16-byte aligned; a copy if it was not. Pure.

    Triton compiles another kernel, with another thread layout, for an unaligned pointer; a reduction would then add in
    another order.
    """
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@cache
def shared_memory(device: int) -> int:
    """Bytes of shared memory that one block may take on CUDA device `device`."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@cache
def multiprocessors(device: int) -> int:
    """Number of multiprocessors of CUDA device `device`."""
    return torch.cuda.get_device_properties(device).multi_processor_count
