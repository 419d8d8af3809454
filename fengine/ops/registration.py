"""How an op is registered, and the one place where Triton and Gluon are imported.

Triton exists on Linux only. Where it is missing, `jit` leaves a kernel as a plain function that nobody calls: every op
still imports, and runs on the CPU. Gluon, the language of the kernels for NVIDIA Hopper, comes with Triton and is
experimental: where it is missing or has changed, TensorDescriptor is None, and `runs_gluon` says no."""
# pyright: reportInvalidTypeForm=false

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

triton: Any
tl: Any
gluon: Any
gl: Any
gdc_launch_dependents: Any = None
gdc_wait: Any = None
TensorDescriptor: Any = None
fence_async_shared: Any
mbarrier: Any
mma_v2: Any
async_copy: Any
async_load: Any = None
async_store: Any = None
store_wait: Any = None
HAS_REINTERPRET: Any = None
warpgroup_mma: Any
warpgroup_mma_wait: Any
WITHOUT = SimpleNamespace(jit=lambda fn=None, **options: fn or (lambda kernel: kernel), constexpr=lambda value: value)
try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    triton = tl = WITHOUT
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

    async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # its older names
    async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
    store_wait = tma.store_wait
    HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # else `_reinterpret`
except (ImportError, AttributeError):
    TensorDescriptor, gluon, gl = None, WITHOUT, WITHOUT
    async_copy = mma_v2 = fence_async_shared = mbarrier = warpgroup_mma = warpgroup_mma_wait = None

LIBRARY = torch.library.Library("fengine", "DEF")
Face = TypeVar("Face", bound=Callable[..., Any])


def register(
    name: str, on_cuda: Callable[..., Any], on_cpu: Callable[..., Any], fake: Callable[..., Any] | None = None,
    mutates: Sequence[str] = (),
) -> Any:  # fmt: skip
    """Defines `fengine::<name>`; returns the op. Its schema follows from the signature of `on_cpu`, unless `name` is a
    schema. `mutates`: the arguments that it writes to. `fake` gives empty results of the exact shapes and dtypes: None,
    if the result is like the first argument, or there is none.

    `Library.define` rather than `custom_op`: half the dispatch time, and a decode step of a small model is ~40 calls.
    """
    schema = name
    if "(" not in name:  # an op's numbers are known where it is compiled
        schema = torch.library.infer_schema(on_cpu, mutates_args=mutates, op_name=name)
        schema = schema.replace("SymInt", "int")
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, on_cpu, "CPU")
    LIBRARY.impl(name, on_cuda, "CUDA")
    fake = fake or (nothing if schema.endswith("()") else alike)
    torch.library.register_fake(f"fengine::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.fengine, name).default


def op(
    on_cuda: Callable[..., Any], fake: Callable[..., Any] | None = None, mutates: Sequence[str] = (),
    name: str | None = None,
) -> Callable[[Face], Face]:  # fmt: skip
    """Makes a function on the CPU the op itself. `name`: where it is not the function's; the rest is as for
    `register`."""
    return lambda face: register(name or face.__name__, on_cuda, face, fake, mutates)


def alike(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def nothing(*_: Any) -> None:
    """Of an op that writes to its arguments."""


def wide(x: Tensor) -> Tensor:
    """`x` in the precision that references compute in: float32, or float64 where it came as float64. Pure."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def plain(x: Tensor) -> Tensor:
    """`x` contiguous and 16-byte aligned; a copy if it was not. Pure. Triton compiles another kernel, with another
    thread layout, for an unaligned pointer; a reduction would then add in another order."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


# When a kernel lets the next one start (programmatic dependent launch), as the constexpr PDL of its launch: at its own
# start, once the kernels in front of it have ended, or when its sums are done. NEVER: launched as any other kernel.
NEVER, EARLY, MIDDLE, LATE = 0, 1, 2, 3


@triton.jit
def begin(PDL: tl.constexpr):
    """First words of a kernel that may start before the one in front of it has ended. Until `wait` it reads weights
    only, and in a layer what a pass is given: positions, slots, lengths, page tables. For the first kernel of a pass,
    rows_rms_norm, begins when all in front of the pass has ended."""
    if PDL == 1:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Waits for the end of every kernel in front: before the first read of activations and before any write."""
    if PDL:
        gdc_wait()
    if PDL == 2:
        gdc_launch_dependents()


@triton.jit
def end(PDL: tl.constexpr):
    """Behind the sums, of kernels that know LATE."""
    if PDL == 3:
        gdc_launch_dependents()


@cache
def dependent_launch(device: int | None, trigger: int = EARLY) -> dict[str, int]:
    """Options of a launch whose kernel calls `begin`, `wait` and perhaps `end`: it may overlap its neighbours. Needs a
    device of compute capability 9 or more (NVIDIA Hopper)."""
    able = device is not None and torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] >= 9
    return {"PDL": trigger, "launch_pdl": True} if able and trigger else {"PDL": NEVER}


@cache
def shared_memory(device: int) -> int:
    """Bytes of shared memory that one block may take on CUDA device `device`."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def stages_that_fit(x: Tensor, stages: int, per_stage: int) -> int:
    """At most `stages`, as many as find room in shared memory with so many bytes each. Pure."""
    return max(1, min(stages, shared_memory(x.device.index) // per_stage)) if x.is_cuda else stages


@cache
def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] == 9


def runs_gluon(device: torch.device) -> bool:
    """Whether the kernels for NVIDIA Hopper run on this device, with this Triton."""
    return TensorDescriptor is not None and is_hopper(device)


def row_warps(block: int) -> int:
    """Warps that reduce a row of `block` values: part of the tree of ops over rows. Pure."""
    return min(max(block // 512, 1), 16)


def describe(t: Tensor, *block: int) -> Any:
    """A descriptor by which the copy engine brings blocks of a tensor of e4m3, 16-bit numbers or 32-bit words."""
    kind = {1: gl.float8e4nv, 2: gl.bfloat16}.get(t.element_size(), gl.int32)  # fp16 lies as bfloat16 does
    return TensorDescriptor.from_tensor(t, list(block), gl.NVMMASharedLayout.get_default_for(list(block), kind))


def describe_rows(t: Tensor, rows: int, columns: int) -> Any:
    """`describe(t, rows, columns)` of e4m3 or 16-bit numbers for `copy_rows`. A tensor's only row is copied alone: the
    copy engine takes several times as long for rows outside a tensor, which it fills with zeros."""
    if len(t) > 1 and rows > 1:
        return describe(t, rows, columns)
    return describe(t.view(torch.bfloat16), 1, columns * t.element_size() // 2)


@gluon.jit
def copy_rows(desc, tile, row, column, full):
    """Rows from `row` on and columns from `column` on of `describe_rows`, on their way to a tile in shared memory. A
    single row is the tile's first, whose order the layout of tiles leaves as it is; what lies in the others is
    nobody's."""
    if desc.block_shape[0] == 1:
        WORDS: gl.constexpr = desc.block_shape[1]  # of two bytes
        alone = tile._reinterpret(gl.bfloat16, [1, WORDS], desc.layout)
        async_load(desc, [row, column // (tile.shape[1] // WORDS)], full, alone)
    else:
        async_load(desc, [row, column], full, tile)


@gluon.jit
def barriers(COUNT: gl.constexpr, WRITTEN: gl.constexpr, READ: gl.constexpr):
    """(full, empty) of the slots of a ring: after so many arrivals each is WRITTEN, or has been READ."""
    return barrier_ring(COUNT, WRITTEN), barrier_ring(COUNT, READ)


@gluon.jit
def barrier_ring(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers that wait for so many arrivals. Whoever makes some uses all: the compiler gives the memory of an unused
    one to other values, and a GPU that interrupts the kernel for another process writes the barrier over them."""
    ring = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(COUNT):
        mbarrier.init(ring.index(slot), count=ARRIVALS)
    return ring
