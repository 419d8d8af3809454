"""What `CudaRunner` uses of CUDA, on the CPU: tests see what it pads, stages, captures and replays.

A graph records ops with the tensors that they were called with. As on a device, nothing runs when it is captured, of
whatever lies in its inputs then: our ops only tell shapes, and what torch's have written outside is put back. A replay
runs all over the same storage. After both the graph's own memory is spoilt, for it belongs to whichever runs next.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from loops import in_loop
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fengine.engine.parts import Parts
from fengine.models.kv_state import KVHandle
from fengine.worker.cuda_graphs import Graphs
from fengine.worker.cuda_runner import CudaRunner


def tensors(values: Any) -> list[Tensor]:
    """Those in tuples, lists and dicts at any depth; torch's own walk takes several times as long."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = list(values.values())
    return [x for value in values for x in tensors(value)] if isinstance(values, (tuple, list)) else []


def storage(x: Tensor) -> Tensor:
    """All of it, as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


class Recorder(TorchDispatchMode):
    """Notes ops, the outputs that take memory, and what was where they write outside of that."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.own: dict[int, Tensor] = {}
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for argument, x in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                whole = storage(x)
                if whole.data_ptr() not in self.own:
                    self.before.setdefault(whole.data_ptr(), (whole, whole.clone()))
        if func.namespace == "fengine":
            told = func(*tree_map_only(Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), args))
            out = tree_map_only(Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype), told)
        else:
            out = func(*args, **kwargs)
        known = {storage(x).data_ptr() for x in tensors((args, kwargs))}
        new = [x for x in tensors(out) if x.numel() and storage(x).data_ptr() not in known]
        self.own |= {storage(x).data_ptr(): x for x in new}
        self.calls.append((func, args, kwargs, tensors(out) if new else []))
        return out


class Handles(threading.local):
    cublas = False


HANDLES = Handles()


class Graph:
    begun = 0  # captures under way

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.replays = 0

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert pool is not None and capture_error_mode == "thread_local" and not Graph.begun
        assert HANDLES.cublas, "it would be made in the capture, where it cannot"
        Graph.begun += 1
        self.recorder.__enter__()

    def capture_end(self) -> None:
        self.recorder.__exit__(None, None, None)
        Graph.begun -= 1
        for whole, old in self.recorder.before.values():
            whole.copy_(old)
        self.recorder.before.clear()  # else every graph keeps a copy of the KV pool
        self._spoil()

    def replay(self) -> None:
        assert not Graph.begun
        for func, args, kwargs, outputs in self.recorder.calls:
            found = func(*args, **kwargs)
            for x, y in zip(outputs, tensors(found), strict=True) if outputs else ():
                x.copy_(y)
        self.replays += 1
        self._spoil()

    def _spoil(self) -> None:
        for x in self.recorder.own.values():
            x.fill_(torch.nan if x.is_floating_point() else 0)


class Now:
    """A stream or an event, of a device that does everything at once."""

    def __init__(self, device: Any = None) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


class Cuda:
    Stream = Event = current_stream = Now
    CUDAGraph = Graph
    graph_pool_handle = object

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    @contextmanager
    def stream(stream: Any) -> Iterator[None]:
        yield

    @staticmethod
    def current_blas_handle() -> None:
        HANDLES.cublas = True

    @staticmethod
    def set_device(device: Any) -> None: ...

    @staticmethod
    def set_stream(stream: Any) -> None: ...

    @staticmethod
    def synchronize(device: Any) -> None: ...

    @staticmethod
    def is_current_stream_capturing() -> bool:
        return Graph.begun > 0

    @staticmethod
    def mem_get_info(device: Any) -> tuple[int, int]:
        return 1 << 40, 1 << 40


class Torch:
    cuda = Cuda

    def zeros(self, *size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return torch.zeros(*size, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def use_graphs(parts: Parts, monkeypatch: Any) -> CudaRunner:
    """Has an engine that was built for the CPU go on with a `CudaRunner`."""
    for module in ("cuda_runner", "cuda_graphs", "static_buffers"):
        monkeypatch.setattr(f"fengine.worker.{module}.torch", Torch())
    core, speculation = parts.core, parts.core.stepper.scheduler.speculation
    old: Any = core.stepper.runner
    limits: Any = parts.config.scheduler
    page_size: Any = parts.config.cache.page_size
    rows = max(limits.max_running_requests, speculation.step_tokens if speculation else 0)
    stages = tuple(core.stepper.input_batch.stages.values())
    runner = CudaRunner(
        old.params, old.forward, old.unembed, stages, rows=rows, tokens=limits.max_step_tokens,
        width=core.stepper.input_batch.page_table.shape[1], vocab=parts.spec.vocab_size, graphs=True, device="cpu",
        adapter_slots=old.adapter_slots, guesses=limits.max_running_requests * speculation.most if speculation else 0,
        grouped=core.stepper.input_batch.window_table is not None,
    )  # fmt: skip
    core.stepper.input_batch.guesses = rows, speculation.most if speculation else 0

    def swap() -> None:
        core.stepper.kv = KVHandle(runner.warm_up(core.stepper.kv.take(), page_size))
        core.stepper.runner = parts.memory.device.runner = runner

    in_loop(core, swap)
    return runner


def use_draft_graphs(parts: Parts, monkeypatch: Any) -> Graphs:
    """Has a draft model that was made for the CPU go on with graphs; `use_graphs` has been called."""
    monkeypatch.setattr("fengine.speculative.chain.torch", Torch())
    monkeypatch.setattr("fengine.speculative.chain.HELD", (16, 64))  # a CPU computes what a graph of 1,024 tokens pads
    stepper: Any = parts.core.stepper
    speculation: Any = stepper.scheduler.speculation
    speculation.propose.graphs = True

    def reopen() -> None:
        kv = stepper.kv.take()
        stepper.kv = KVHandle(kv)
        speculation.open(kv, stepper.input_batch, stepper.runner.last_token_R)
        speculation.warm_up()

    in_loop(parts.core, reopen)
    return speculation.propose.chain.graphs
