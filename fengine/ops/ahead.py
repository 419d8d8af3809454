"""Kernels compiled ahead of their first launch, many at once.

The first start on a machine compiles some fifty kernels, each when it is first launched. Inside `compiling` a thread's
launches only ask for their kernels: other threads compile what was asked for, and nothing runs. What an op returns
meanwhile is what its memory happened to hold, so nothing but our own kernels may take it for an index."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fengine.ops.registration import triton

THREADS = 12  # more gain nothing: a third of the work holds the interpreter's lock


class Asked(threading.local):
    """The kernels that this thread has asked for since it began to ask; None: it launches."""

    kernels: set[Any] | None = None


ASKED = Asked()


def asking() -> bool:
    """Whether this thread's launches only ask for their kernels."""
    return ASKED.kernels is not None


def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """`kernel[grid]`, or what asks for the kernel."""
    return kernel[grid] if ASKED.kernels is None else lambda *args, **options: _ask(kernel, grid, args, options)


def _ask(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    asked = ASKED.kernels
    assert asked is not None
    kinds = tuple(_kind(x, p.is_constexpr, p.do_not_specialize) for x, p in zip(args, kernel.params, strict=False))
    key = (kernel, kinds, tuple(sorted(options.items())))
    if key not in asked:  # Triton hashes the sources each time until the kernel is there
        asked.add(key)
        kernel.warmup(*args, grid=grid, **options)


def _kind(x: Any, constant: bool, general: bool) -> Any:
    """What of an argument decides which kernel it is, as in Triton. Pure."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, int) and not constant:
        return None if general else (x == 1, x % 16 == 0)
    if block := getattr(x, "block_shape", None):  # a tensor descriptor
        return tuple(block), x.base.dtype  # pyright: ignore[reportAttributeAccessIssue]
    return x if constant else type(x)


@contextmanager
def compiling() -> Iterator[None]:
    """Within, this thread's launches ask for their kernels; at the end all that were asked for are compiled. A kernel
    that does not compile is left to its first launch, which says why. Where Triton cannot do so, each kernel is
    compiled at its first launch as ever, and nothing is asked for."""
    if not hasattr(triton, "AsyncCompileMode"):
        yield
        return
    threads = min(THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        ASKED.kernels = set()
        try:
            yield
        finally:
            ASKED.kernels = None
