"""The CPU forms of the ops: C kernels through ctypes. Their signatures, how a call runs, what arguments it can read.

Activations and KV pages are float32, integers int32 (seeds int64); weights are float32, bfloat16 or float16 and are
widened in registers. A non-contiguous input is copied first. Bits do not depend on the number of threads, nor on the
compiler, nor on AVX2, AVX-512 or NEON. Each op's own file says how it calls its kernel, in `on_cpu`.

Kernels run on torch's own OpenMP threads, as many as `torch.get_num_threads()` says. Small calls keep the GIL (giving
it away costs more than the call, and waiting for it back may cost a switch interval); large ones release it, so that
host threads go on.
"""

import ctypes
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fengine.errors import OutOfMemoryError, UnsupportedFeatureError
from fengine.ops import compiler

LANES = 32  # outputs side by side in a packed weight
KIND = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SHORT = 1 << 19
"""Work (multiply-adds or elements) below which a call stays in the calling thread and keeps the GIL: some 10 µs."""

# Kernels with memory of their own return whether there was none.
ALLOCATING = "linear gated_linear quantized_linear w8a8_linear lora_add experts attention draw logprobs top_ids".split()
_P, _I, _T, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
SIGNATURES = {
    "fengine_linear": [_P] * 4 + [_I] * 3 + [_T] * 3,
    "fengine_quantized_linear": [_P] * 7 + [_I] * 5 + [_T] * 4,
    "fengine_e4m3_rows": [_P] * 3 + [_I] * 3 + [_T],
    "fengine_w8a8_linear": [_P] * 6 + [_I] * 4 + [_T] * 3,
    "fengine_rms_norm": [_P] * 6 + [_I] * 2 + [_T, _F, _F, _T],
    "fengine_layer_norm": [_P] * 3 + [_I] * 2 + [_T, _F, _T, _T],
    "fengine_rows_rms_norm": [_P] * 5 + [_I] * 2 + [_T, _T, _F, _F, _T],
    "fengine_rope_kv_write": [_P] * 9 + [_I] * 5 + [_T, _T, _F, _F, _T],
    "fengine_lora_add": [_P] * 9 + [_I] * 9 + [_T],
    "fengine_silu_mul": [_P] * 2 + [_I] * 2 + [_T] * 3,
    "fengine_soft_cap": [_P] * 2 + [_I, _F, _T],
    "fengine_gated_linear": [_P] * 4 + [_I] * 3 + [_T] * 5,
    "fengine_attention": [_P] * 7 + [_I] * 8 + [_T, _F, _F, _P, _P, _T, _T],
    "fengine_experts": [_P] * 12 + [_I] * 7 + [_T] * 7 + [_F, _F, _T],
    "fengine_draw": [_P] * 9 + [_I] * 2 + [_T],
    "fengine_logprobs": [_P] * 4 + [_I] * 3 + [_T],
    "fengine_top_ids": [_P] * 2 + [_I] * 3 + [_T],
    "fengine_penalize": [_P] * 6 + [_I] * 2 + [_F],
    "fengine_add_at": [_P] * 4 + [_I] * 3 + [_F],
    "fengine_count": [_P] * 3 + [_I] * 2,
    "fengine_apply_bitmask": [_P] * 3 + [_I] * 2 + [_F],
    "fengine_feed": [_P] * 5 + [_I],
    "fengine_take": [_P] * 3 + [_I] * 2,
    "fengine_philox": [_P, _I, _P, _I],
}


def openmp_runtime() -> str | None:
    """Path of the OpenMP runtime that this process has loaded (torch's), None if there is none to be seen."""
    try:
        found = re.findall(r"\S*/lib(?:gomp|omp|iomp5)[-.\w]*", Path("/proc/self/maps").read_text(encoding="utf-8"))
    except OSError:
        found = [str(path) for path in sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*.dylib"))]
    return min(found, key=lambda path: "/torch" not in path, default=None)


@cache
def kernels() -> tuple[Any, Any]:
    """The library twice: calls that keep the GIL, and calls that release it."""
    runtime = openmp_runtime()
    if runtime:
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)  # our GOMP_parallel resolves to torch's
    keeping = compiler.load("cpu", compiler.SOURCES, compiler.HEADERS, ctypes.PyDLL)
    releasing = ctypes.CDLL(keeping._name)
    for library in (keeping, releasing):
        for name, types in SIGNATURES.items():
            function, op = getattr(library, name), name.removeprefix("fengine_")
            function.argtypes, function.restype = types, None
            if op in ALLOCATING:
                function.restype, function.errcheck = _T, partial(_check_room, op)
    return keeping, releasing


def _check_room(op: str, failed: int, *call: Any) -> None:
    """Errors: OutOfMemoryError."""
    if failed:
        raise OutOfMemoryError(
            f"{op} finds no memory to work in: lower scheduler.max_step_tokens or cache.max_total_tokens, or free some"
        )


def schedule(work: int) -> tuple[Any, int]:
    """(library, threads) for a call of this much work."""
    keeping, releasing = kernels()
    return (keeping, 1) if work < SHORT else (releasing, torch.get_num_threads())


def contiguous(x: Tensor, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """`x`, contiguous. Errors: UnsupportedFeatureError for another dtype."""
    if x.dtype != dtype:
        raise UnsupportedFeatureError(f"{name} is {x.dtype}; on the CPU it must be {dtype}")
    return x if x.is_contiguous() else x.contiguous()


def integers(x: Tensor, name: str) -> Tensor:
    """As `contiguous`, of int32, without a second call: a short step has forty of these."""
    if x.dtype != torch.int32:
        return contiguous(x, name, torch.int32)
    return x if x.is_contiguous() else x.contiguous()


def readable(w: Tensor, name: str) -> Tensor:
    """A weight, contiguous. Errors: UnsupportedFeatureError for a dtype that kernels do not widen."""
    if w.dtype not in KIND:
        raise UnsupportedFeatureError(f"{name} is {w.dtype}; on the CPU weights are float32, bfloat16 or float16")
    return w if w.is_contiguous() else w.contiguous()


def maybe(read: Callable[[Tensor, str], Tensor], x: Tensor | None, name: str) -> tuple[Any, int | None, int]:
    """(what is to be kept until the call has ended, its address, its KIND) of an optional argument."""
    if x is None:
        return None, None, 0
    x = read(x, name)
    return x, x.data_ptr(), KIND[x.dtype]


def rounded(y: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A product in the dtype that was asked for. Pure."""
    return y if dtype is None else y.to(dtype)
