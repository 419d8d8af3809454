"""The tower of a model that takes images, on its device.

On CUDA a size of image that comes again is captured: to launch a tower's kernels one by one takes a CPU longer than a
GPU needs to run them.
"""

import weakref
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fengine.core.images import Image
from fengine.models.kv_state import Params
from fengine.models.spec import ModelSpec
from fengine.models.vision_family import Vision
from fengine.worker.cuda_graphs import Graphs
from fengine.worker.device import current_device

SIZES = 8  # sizes of images that are captured at most: those that came last


class Static(NamedTuple):
    """Of a captured size: what its graph reads and writes outside of its own memory."""

    arrays: dict[str, Tensor]
    found_ID: Tensor
    read: tuple[Tensor, ...]  # whoever else knows them, such as a cache of layouts, may forget them


class Reads(TorchDispatchMode):
    """Notes which tensors ops read, and holds none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, weakref.ref[Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor):
                self.seen[id(x)] = weakref.ref(x)
        return func(*args, **(kwargs or {}))

    def alive(self) -> tuple[Tensor, ...]:
        return tuple(x for x in (seen() for seen in self.seen.values()) if x is not None)


class Tower:
    """Encodes one image after the other. Modifies: what it keeps for sizes, and `graphs`."""

    def __init__(self, family: Vision, params: Params, spec: ModelSpec, graphs: Graphs | None = None) -> None:
        """`graphs`: of the runner, which are dropped with the memory that they name; None: nothing is captured."""
        self.family, self.params, self.spec, self.graphs = family, params, spec, graphs
        self.dtype, self.device = params["final_norm_D"].dtype, params["final_norm_D"].device
        self.coming = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.sizes: OrderedDict[Hashable, None] = OrderedDict()  # that have come

    def encode(self, image: Image) -> Tensor:
        """The embeddings of its tokens, which hold until the next image. Pure but for what it keeps."""
        with torch.no_grad(), current_device(str(self.device)):
            arrays = {name: self._sent(torch.from_numpy(array)) for name, array in image.arrays.items()}
            key = ("tower", *((name, x.shape, _facts(x)) for name, x in sorted(arrays.items())))
            static = self._known(key, arrays)
            if static is None:
                return self._run(arrays)
            for name, x in static.arrays.items():
                x.copy_(arrays[name])
            assert self.graphs is not None and self.graphs.replay(key)
            return static.found_ID

    def _known(self, key: Hashable, arrays: dict[str, Tensor]) -> Static | None:
        """Of a size that has come before, which is captured then. Modifies: itself."""
        if self.graphs is None:
            return None
        if key in self.sizes and key not in self.graphs.beside:
            self._capture(key, arrays)
        self.sizes[key] = None
        self.sizes.move_to_end(key)
        if len(self.sizes) > SIZES:
            oldest, _ = self.sizes.popitem(last=False)
            self.graphs.captured.pop(oldest, None)
            self.graphs.beside.pop(oldest, None)
        return self.graphs.beside.get(key)

    def _capture(self, key: Hashable, arrays: dict[str, Tensor]) -> None:
        """If there is room. Its kernels have run before, so nothing is compiled or proved in the capture."""
        assert self.graphs is not None
        if not self.graphs.room:
            return
        with Reads() as reads:
            found_ID = self._run(arrays)

        def run() -> None:
            found_ID.copy_(self._run(arrays))

        self.graphs.capture_late(key, run)
        if key in self.graphs.captured:
            self.graphs.beside[key] = Static(arrays, found_ID, reads.alive())

    def _sent(self, x: Tensor) -> Tensor:
        """In the tower's dtype on the device, where it arrives while the image before is encoded; whole numbers, which
        decide shapes, stay. Pure."""
        if self.coming is None or not x.is_floating_point():
            return x
        stream, pinned = torch.cuda.current_stream(self.device), torch.empty(x.shape, dtype=self.dtype, pin_memory=True)
        pinned.copy_(x)
        with torch.cuda.stream(self.coming):
            found = pinned.to(self.device, non_blocking=True)
        stream.wait_stream(self.coming)
        found.record_stream(stream)
        return found

    def _run(self, arrays: dict[str, Tensor]) -> Tensor:
        return self.family.encode(self.params["vision"], self.spec.vision, arrays).to(self.dtype)


def _facts(x: Tensor) -> Hashable:
    """What of an array decides which kernels run: of whole numbers each. Pure."""
    return x.dtype if x.is_floating_point() else tuple(x.flatten().tolist())
