"""`Memory`: gives the memory of an idle engine back, and takes it again.

    kv_cache     the page pool; the prefix cache is emptied
    weights      the parameters (the rope table stays); read again from their checkpoint if they are its very values
    cuda_graph   captured graphs; on a CPU there are none

Graphs hold addresses, so whatever is released they go too, and are captured again as soon as everything is back.
Compiled code stays. While anything is released requests are refused, and so are weights that nobody has given back."""

import ctypes
import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from fengine.core.scalars import told
from fengine.core.speculation import Speculation
from fengine.engine.engine_core import EngineCore
from fengine.engine.parallel.ranks import Ranks
from fengine.engine.stepper import Runner
from fengine.engine.weights.live import LiveWeights
from fengine.errors import InvalidRequestError, MemoryReleasedError, ModelLoadError, OutOfMemoryError
from fengine.models.kv_state import KVState
from fengine.worker.cuda_runner import CudaRunner

TAGS = ("weights", "kv_cache", "cuda_graph")  # in the order in which they come back
GPU_MEMORY_TYPE_WEIGHTS, GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_CUDA_GRAPH = TAGS  # as in SGLang


def checked_tags(tags: Any) -> list[str]:
    """The tags asked for; all of them for None. Errors: InvalidRequestError."""
    asked = list(TAGS) if tags is None else [tags] if isinstance(tags, str) else tags
    if not isinstance(asked, (list, tuple, set, frozenset)) or not asked or any(tag not in TAGS for tag in asked):
        raise InvalidRequestError(f"tags must be None or some of {', '.join(TAGS)}, got {told(tags)}.")
    return [tag for tag in TAGS if tag in asked]


class DeviceMemory:
    """What one process holds, of a group its rank's part. Modifies: the KV state, the parameters' storage, the graphs.
    Between two steps."""

    def __init__(
        self, runner: Runner, weights: LiveWeights, new_kv: Callable[[], KVState], page_size: int,
        swap_kv: Callable[[Callable[[KVState | None], KVState | None]], None], drafts: Speculation | None = None,
    ) -> None:  # fmt: skip
        """`swap_kv` replaces the KV state by what a function makes of it. `drafts`: whose graphs and KV go, too."""
        self.runner, self.weights, self.new_kv, self.page_size, self.swap_kv = (
            runner, weights, new_kv, page_size, swap_kv
        )  # fmt: skip
        self.drafts = drafts
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []  # of released weights, in bytes
        self._kept: list[torch.UntypedStorage] = []  # their copies

    def drop_graphs(self) -> None:
        """Releases what holds addresses."""
        if isinstance(self.runner, CudaRunner):
            self.runner.graphs.clear()
        if self.drafts is not None:
            self.drafts.release(False)

    def release(self, tags: Sequence[str], keep: bool) -> None:
        """`keep`: weights stay in CPU memory."""
        self.drop_graphs()
        if "kv_cache" in tags:
            self.swap_kv(self._free_kv)
            if self.drafts is not None:
                self.drafts.release(True)
        if "weights" in tags:
            storages = [tensor.untyped_storage() for tensor in self.weights.tensors()]
            own = {s.data_ptr(): s for s in storages if s.resizable()}  # not what is somebody else's memory
            self._sizes = [(s, s.nbytes()) for s in own.values()]
            if keep or self.weights.spec.quantization is not None:
                self._kept = [s.cpu() if s.is_cuda else s.clone() for s in own.values()]
            self._free_weights()
        trim()

    def _free_kv(self, kv: KVState | None) -> None:
        for tensor in () if kv is None else kv.tensors:
            if tensor.is_cuda:  # the runner still names these tensors; a CPU's are freed with their last name
                tensor.untyped_storage().resize_(0)

    def _free_weights(self) -> None:
        for storage, _ in self._sizes:
            storage.resize_(0)

    def resume(self, tag: str) -> bool:
        """Whether it holds its values again. Errors: OutOfMemoryError."""
        if tag == "kv_cache":
            self.swap_kv(lambda kv: self.new_kv())
        holds = tag != "weights" or self._resume_weights()
        trim()  # what was read from disk
        return holds

    def _resume_weights(self) -> bool:
        """Storage for every parameter, and its values: kept ones, or those of a checkpoint that is unchanged. In a
        group all hold theirs, or none counts as holding them."""
        try:
            for storage, size in self._sizes:
                storage.resize_(size)
        except (RuntimeError, MemoryError) as error:
            self._free_weights()
            self.weights.agreed(False)
            size = sum(size for _, size in self._sizes) / 2**20
            raise OutOfMemoryError(
                f"no memory for weights of {size:.0f} MiB: {str(error).partition('.')[0]}. Free some and resume again"
            ) from None
        (sizes, self._sizes), (copies, self._kept) = (self._sizes, []), (self._kept, [])
        for (storage, _), kept in zip(sizes, copies, strict=bool(copies)):
            storage.copy_(kept, non_blocking=False)
        try:
            held = bool(copies) or self.weights.read_again()
        except (ModelLoadError, InvalidRequestError):
            held = False
        return self.weights.agreed(held)

    def capture(self) -> None:
        """Graphs over the new addresses. Errors: what torch raises, and there are none."""
        runner = self.runner
        if isinstance(runner, CudaRunner):
            try:
                self.swap_kv(lambda kv: None if kv is None else runner.warm_up(kv, self.page_size))
                if self.drafts is not None:
                    self.drafts.warm_up()
            except Exception:
                self.drop_graphs()
                raise


class Memory:
    """Modifies, in the loop's thread: the core, and what this process and the other ranks hold."""

    def __init__(
        self, core: EngineCore, device: DeviceMemory, lose: Callable[[set[str]], None], ranks: Ranks | None = None
    ) -> None:
        """`lose` sets which tensors hold no values."""
        self.core, self.device, self.ranks, self._lose = core, device, ranks, lose
        self.keeps_weights = False  # released weights are kept in CPU memory
        core.handlers |= {"release_memory": self._release, "resume_memory": self._resume}

    def keep_weights(self, kept: bool) -> None:
        self.keeps_weights = kept

    def close(self) -> None:
        """Drops the graphs, and what names weights and pages. Nothing can be released any more."""
        self.device.drop_graphs()
        del self.device

    def release(self, tags: Any = None) -> None:
        """Gives memory back. None: all that is not released yet. Errors: InvalidRequestError, EngineBusyError,
        MemoryReleasedError for what is released already."""
        self.core.call("release_memory", tags=checked_tags(tags), everything=tags is None)

    def resume(self, tags: Any = None) -> None:
        """Takes memory again. None: all that is released. KV pages come back empty. Errors: InvalidRequestError,
        MemoryReleasedError for what is not released, OutOfMemoryError."""
        self.core.call("resume_memory", tags=checked_tags(tags), everything=tags is None)

    # -- in the loop's thread ------------------------------------------------------------------------------------------

    def _choose(self, asked: Sequence[str], released: bool, everything: bool) -> list[str]:
        """Those of the asked tags that are (not) released. Errors: MemoryReleasedError if one is in the wrong state."""
        fit = [tag for tag in asked if (self.core.refusals.get(tag) is not None) == released]
        if not fit or (len(fit) < len(asked) and not everything):
            wrong = [tag for tag in asked if tag not in fit]
            state, call = ("not currently released", "release") if released else ("already released", "resume")
            raise MemoryReleasedError(f"{', '.join(wrong)}: {state}; call {call}_memory_occupation first")
        return fit

    def _release(self, tags: Sequence[str], everything: bool) -> None:
        tags = self._choose(tags, released=False, everything=everything)
        reason = "the memory of {0!r} is released: call resume_memory_occupation(tags=[{0!r}]) first"
        self.core.refuse({tag: reason.format(tag) for tag in tags}, idle=True)
        self.core.stepper.drain()
        if self.ranks is not None:
            self.ranks.tell("release_memory", tags=tags, keep=self.keeps_weights)
        if "kv_cache" in tags:
            self.core.stepper.scheduler.flush_cache()
        self.device.release(tags, self.keeps_weights)

    def _resume(self, tags: Sequence[str], everything: bool) -> None:
        tags = self._choose(tags, released=True, everything=everything)
        left = [tag for tag in TAGS if self.core.refusals.get(tag) is not None and tag not in tags]
        with nullcontext() if self.ranks is None else self.ranks.told("resume_memory", tags=tags, capture=not left):
            for tag in tags:
                if not self.device.resume(tag):  # until an update gives every tensor
                    self._lose(set(self.device.weights.places))
                self.core.allow(tag)
        if not left:
            self._capture()

    def _capture(self) -> None:
        """Without memory for graphs they count as released, and may be asked for again. Errors: OutOfMemoryError."""
        try:
            self.device.capture()
        except Exception as error:
            again = "the graphs could not be captured again: call resume_memory_occupation(tags=['cuda_graph'])"
            self.core.refuse({"cuda_graph": again})
            if isinstance(error, torch.OutOfMemoryError):
                raise OutOfMemoryError(f"{str(error).partition('.')[0]}: {again} when there is more") from error
            raise


def trim() -> None:
    """Gives freed memory back to the system: torch's and the C library's."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim"):  # glibc
            library.malloc_trim(0)
