"""Shared by all tests: no network, and GPU tests only where there is a GPU."""

import atexit
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import chain, groupby
from types import SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):  # threads beyond the cores only spin
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    # Code that torch compiled for other states of the ops is not found: it would call them by other arguments. Set
    # before torch is imported, which sets it to a folder that stays; one for all workers, whom this process starts.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-")

    @atexit.register
    def remove(pid: int = os.getpid(), folder: str = os.environ["TORCHINDUCTOR_CACHE_DIR"]) -> None:
        if os.getpid() == pid:
            shutil.rmtree(folder, ignore_errors=True)


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job; some tests send themselves one
    signal.signal(signal.SIGINT, signal.default_int_handler)

from typing import Any

import forked
import hypothesis
import pytest

# At the end Triton's bindings report what the collector cannot take. Not sooner: pytest's own end collects five times.
atexit.register(gc.unfreeze)

# What the imports of a collection make stays: looking for garbage among it is a tenth of their time.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.enable()


# No example is judged by how long a busy machine takes for it.
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")


@pytest.fixture(autouse=True, scope="session")
def small_pools() -> None:
    """The engines of tests need no more: the pool that users get is four fifths of a small model's start."""
    pool: Any = sys.modules.get("fengine.worker.kv_pool")
    if pool is not None:  # what collects no engine needs no torch
        pool.CPU_POOL_BYTES = 8 << 20


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # A file of the slow lane comes behind every fourth other: the last that workers are given are quick, so that none
    # is left alone.
    files = [list(of_file) for _, of_file in groupby(items, lambda item: item.path)]
    slow = [file for file in files if file[0].path.parent.name == "slow"]
    files = [file for file in files if file[0].path.parent.name != "slow"]
    for number, file in enumerate(slow):
        files.insert(5 * number, file)
    items[:] = chain.from_iterable(files)
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch  # the unit lane needs none

    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For modules of tiny models, which are slower with more."""
    import torch  # the unit lane needs none

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """What lives by now is no garbage: an engine that ends collects, and need not walk through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def kept_frozen() -> None:
    """Commands thaw it where they end: each of a module's engines behind one would walk through all that lives."""
    engines: Any = sys.modules.get("fengine.eval.cli.engines")
    if engines is not None:
        engines.gc = SimpleNamespace(**vars(gc) | {"freeze": lambda: None, "unfreeze": lambda: None})


@pytest.fixture(autouse=True, scope="session")
def forked_ranks() -> None:
    """Of engines in a test's own process: each would import torch. Those of an engine in a process of its own do."""
    child: Any = sys.modules.get("fengine.engine.parallel.child")
    if child is not None:
        child.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": forked.Fork})


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """What a test sets of the package's logger, by a server's start say, ends with it."""
    package = logging.getLogger("fengine")
    level, propagate, handlers = package.level, package.propagate, package.handlers.copy()
    yield
    package.setLevel(level)
    package.propagate, package.handlers[:] = propagate, handlers
