"""The one place where Gluon is imported: the language of the kernels for NVIDIA Hopper.

Gluon comes with Triton and is experimental. Where it is missing or has changed, TensorDescriptor is None: a kernel
stays a plain function that nobody calls, as each op's `usable` says no.
"""

from types import SimpleNamespace
from typing import Any

from torch import Tensor

gluon: Any
gl: Any
TensorDescriptor: Any
fence_async_shared: Any
mbarrier: Any
mma_v2: Any
async_copy: Any
async_load: Any
async_store: Any
gdc_launch_dependents: Any
gdc_wait: Any
store_wait: Any
HAS_REINTERPRET: Any
warpgroup_mma: Any
warpgroup_mma_wait: Any
try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # its older names
    async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
    store_wait = tma.store_wait
    HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # else `_reinterpret`
except (ImportError, AttributeError):
    TensorDescriptor = None
    gluon = SimpleNamespace(jit=lambda fn=None, **options: fn or (lambda kernel: kernel))
    gl = SimpleNamespace(constexpr=lambda value: value)
    fence_async_shared = mbarrier = async_copy = async_load = async_store = store_wait = warpgroup_mma = (
        warpgroup_mma_wait
    ) = None
    HAS_REINTERPRET = gdc_launch_dependents = gdc_wait = mma_v2 = None


def describe(t: Tensor, *block: int) -> Any:
    """A descriptor by which the copy engine brings blocks of a tensor of 16-bit numbers or 32-bit words."""
    kind = gl.bfloat16 if t.element_size() == 2 else gl.int32  # fp16 lies as bfloat16 does
    return TensorDescriptor.from_tensor(t, list(block), gl.NVMMASharedLayout.get_default_for(list(block), kind))
