"""`Memory`: gives the memory of an idle engine back, and takes it again.

    kv_cache     the page pool; the prefix cache is emptied
    weights      the parameters (the rope table stays); read again from their checkpoint if they are its very values
    cuda_graph   captured graphs; on a CPU there are none

Graphs hold addresses, so whatever is released they go too, and are captured again as soon as everything is back.
Compiled code stays. While anything is released requests are refused, and so are weights that nobody has given back.
"""

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any

import torch

from fengine.engine.engine_core import Driver
from fengine.engine.profiling import unwatched
from fengine.engine.weights.live import LiveWeights
from fengine.errors import EngineBusyError, InvalidRequestError, MemoryReleasedError, ModelLoadError, OutOfMemoryError
from fengine.models.kv_state import KVHandle, KVState
from fengine.worker.cuda_runner import CudaRunner

TAGS = ("weights", "kv_cache", "cuda_graph")  # in the order in which they come back


def checked_tags(tags: Any) -> list[str]:
    """The tags asked for; all of them for None. Errors: InvalidRequestError."""
    asked = list(TAGS) if tags is None else [tags] if isinstance(tags, str) else tags
    if not isinstance(asked, (list, tuple, set, frozenset)) or not asked or any(tag not in TAGS for tag in asked):
        raise InvalidRequestError(f"tags must be None or some of {', '.join(TAGS)}, got {tags!r:.80}.")
    return [tag for tag in TAGS if tag in asked]


class Memory:
    """Modifies, in the loop's thread: the driver's KV handle, the parameters' storage, the runner's graphs."""

    def __init__(self, driver: Driver, weights: LiveWeights, new_kv: Callable[[], KVState], page_size: int) -> None:
        self.driver, self.weights, self.new_kv, self.page_size = driver, weights, new_kv, page_size
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []  # of released weights, in bytes

    def release(self, tags: Any = None) -> None:
        """Gives memory back. None: all that is not released yet.

        Errors: InvalidRequestError, EngineBusyError, MemoryReleasedError for what is released already.
        """
        asked = checked_tags(tags)
        self.driver.call(lambda: self._release(asked, everything=tags is None))

    def resume(self, tags: Any = None) -> None:
        """Takes memory again. None: all that is released. KV pages come back empty.

        Errors: InvalidRequestError, MemoryReleasedError for what is not released, OutOfMemoryError.
        """
        asked = checked_tags(tags)
        self.driver.call(lambda: self._resume(asked, everything=tags is None))

    # -- in the loop's thread ------------------------------------------------------------------------------------------

    def _choose(self, asked: list[str], released: bool, everything: bool) -> list[str]:
        """Those of the asked tags that are (not) released. Errors: MemoryReleasedError if one is in the wrong state."""
        fit = [tag for tag in asked if (tag in self.driver.refusals) == released]
        if not fit or (len(fit) < len(asked) and not everything):
            wrong = [tag for tag in asked if tag not in fit]
            state, call = ("not released", "release") if released else ("released already", "resume")
            raise MemoryReleasedError(f"{', '.join(wrong)}: {state}; call {call}_memory_occupation first")
        return fit

    def _release(self, asked: list[str], everything: bool) -> None:
        driver = self.driver
        tags = self._choose(asked, released=False, everything=everything)
        with driver.door:  # nobody comes in between the look and the refusal
            if driver.scheduler.has_work or driver.entering:
                raise EngineBusyError(
                    "memory is not released while requests run or wait: let them finish, or abort them first"
                )
            for tag in tags:
                driver.refusals[tag] = (
                    f"the memory of {tag!r} is released: call resume_memory_occupation(tags=[{tag!r}]) first"
                )
        driver.quiesce()
        if driver.scheduler.cache is not None and "kv_cache" in tags:
            driver.scheduler.cache.flush()
        runner = unwatched(driver.runner)
        if isinstance(runner, CudaRunner):
            runner.graphs.clear()
        if "kv_cache" in tags:
            self._free_kv(driver.kv.take())
        if "weights" in tags:
            storages = [place.leaf.untyped_storage() for place in self.weights.places.values()]
            own = {s.data_ptr(): s for s in storages if s.resizable()}  # not what is somebody else's memory
            self._sizes = [(s, s.nbytes()) for s in own.values()]
            self._free_weights()
        trim()

    def _free_kv(self, kv: KVState) -> None:
        for tensor in kv.k_PSGK + kv.v_PSGK:
            if tensor.is_cuda:  # the runner still names these tensors; a CPU's are freed with their last name
                tensor.untyped_storage().resize_(0)

    def _free_weights(self) -> None:
        for storage, _ in self._sizes:
            storage.resize_(0)

    def _resume(self, asked: list[str], everything: bool) -> None:
        driver = self.driver
        for tag in self._choose(asked, released=True, everything=everything):
            if tag == "weights":
                self._resume_weights()
            elif tag == "kv_cache":
                driver.kv = KVHandle(self.new_kv())
            with driver.door:
                del driver.refusals[tag]
        runner = unwatched(driver.runner)
        if isinstance(runner, CudaRunner) and not any(tag in driver.refusals for tag in TAGS):
            self._capture(runner)
        trim()  # what was read from disk

    def _capture(self, runner: CudaRunner) -> None:
        """Graphs over the new addresses. Without memory for them they count as released, and may be asked for again."""
        driver, kv = self.driver, self.driver.kv.take()
        try:
            driver.kv = KVHandle(runner.warm_up(kv, self.page_size))
        except Exception:
            runner.graphs.clear()
            driver.kv = KVHandle(kv)
            with driver.door:
                driver.refusals["cuda_graph"] = (
                    "the graphs could not be captured again: call resume_memory_occupation(tags=['cuda_graph'])"
                )
            raise

    def _resume_weights(self) -> None:
        """Storage for every parameter, and its values where the checkpoint that they came from is unchanged."""
        weights = self.weights
        try:
            for storage, size in self._sizes:
                storage.resize_(size)
        except (RuntimeError, MemoryError) as error:
            self._free_weights()
            size = sum(size for _, size in self._sizes) / 2**20
            raise OutOfMemoryError(
                f"no memory for weights of {size:.0f} MiB: {str(error).partition('.')[0]}. Free some and resume again"
            ) from None
        self._sizes = []
        weights.lose(set(weights.places))
        origin = weights.origin
        try:
            if origin is not None and type(origin).of(origin.directory) == origin:
                weights.write(weights.check(weights.read_origin(origin), set()))
        except (ModelLoadError, InvalidRequestError):
            return  # lost: requests are refused until an update gives every tensor


def trim() -> None:
    """Gives freed memory back to the system: torch's and the C library's."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim"):  # glibc
            library.malloc_trim(0)
