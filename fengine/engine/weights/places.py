"""Where each checkpoint tensor lies in the parameters: rows of a leaf, which may be fused and packed.

    "model.layers.3.self_attn.k_proj.weight"  ->  rows [q, q + kv) of params["layers"][3]["wqkv"]

Reads and writes go through views of the leaf's storage, so nothing is allocated on the device and every address stays:
compiled code and captured graphs remain valid."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from fengine.models.kv_state import Params
from fengine.models.sources import Source
from fengine.models.weights import Weight
from fengine.ops.columns import Columns, Group
from fengine.ops.linear import LANES, Dense
from fengine.ops.lora import Adapted
from fengine.ops.quantized import Quantized
from fengine.ops.w8a8 import W8A8

FUSED = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}  # SGLang's name of a leaf, from that of its first part


class Cut(NamedTuple):
    """How a tensor, in our order, lies in the ranks of a group: the rows of each, one after the other."""

    rows: tuple[tuple[slice, ...], ...]
    rank: int  # this one
    axis: int

    def own(self, tensor: Tensor) -> Tensor:
        before = (slice(None),) * self.axis
        return torch.cat([tensor[*before, rows] for rows in self.rows[self.rank]], self.axis)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of this rank's part of a tensor. Pure."""
        return (*shape[: self.axis], self.count(self.rank), *shape[self.axis + 1 :])

    def count(self, rank: int) -> int:
        """The rows of a rank; rank 0 has most. Pure."""
        return sum(rows.stop - rows.start for rows in self.rows[rank])

    def joined(self, parts: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The tensor of all ranks' parts. Pure."""
        whole, before = parts.new_empty(shape), (slice(None),) * self.axis
        for part, own in zip(parts, self.rows, strict=True):
            at = 0
            for rows in own:
                whole[*before, rows] = part[*before, at : at + rows.stop - rows.start]
                at += rows.stop - rows.start
        return whole


class Place(NamedTuple):
    """Rows [start, start + rows) of `leaf`, where a tensor of the checkpoint lies. `lanes`: in blocks of LANES rows.
    `cut`: only a rank's rows of it do."""

    leaf: Tensor
    start: int
    source: Source
    lanes: bool = False
    cut: Cut | None = None

    @property
    def held(self) -> "Place":
        """The place of what is here of it, in our order."""
        plain = self.source.plain
        if self.cut is not None:
            plain = Source(plain.name, self.cut.shape(plain.shape))
        return self._replace(source=plain, cut=None)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the checkpoint's tensor."""
        return self.source.shape

    @property
    def views(self) -> Iterator[tuple[int, Tensor]]:
        """The place as views of the leaf's storage: (first row within the place, [rows], or [..., rows, columns])."""
        if len(self.shape) == 3:  # the matrices of all experts
            _, rows, columns = self.shape
            for expert, leaf in enumerate(self.leaf):
                one = Place(leaf, 0, Source(self.source.name, (rows, columns)), self.lanes)
                yield from ((expert * rows + first, view) for first, view in one.views)
            return
        at, stop = self.start, self.start + self.shape[0]
        if not self.lanes:
            yield 0, self.leaf[at:stop]
            return
        while at < stop:  # blocks of LANES rows side by side: what is left of one, whole ones, the beginning of one
            block, lane = divmod(at, LANES)
            whole = (stop - at) // LANES if lane == 0 else 0
            if whole:
                yield at - self.start, rearrange(self.leaf[block : block + whole], "block k lane -> block lane k")
                at += whole * LANES
            else:
                end = min(stop, (block + 1) * LANES)
                yield at - self.start, rearrange(self.leaf[block, :, lane : lane + end - at], "k lane -> lane k")
                at = end

    def write(self, tensor: Tensor) -> None:
        """Copies a tensor of the place's shape and dtype, on any device. Modifies: the leaf's storage."""
        tensor, held = self.source.ours(tensor), self.held
        tensor = tensor if self.cut is None else self.cut.own(tensor)
        tensor = tensor.flatten(0, 1) if tensor.dim() == 3 else tensor
        for first, view in held.views:
            rows = view.numel() // (view.shape[-1] if len(held.shape) > 1 else 1)
            view.copy_(tensor[first : first + rows].reshape(view.shape))

    def read(self, rows: int | None = None) -> Tensor:
        """The first `rows` rows (default: all) of what is here, as a new tensor on the CPU. Pure."""
        if self.source.order is not None:
            return self.source.theirs(self._replace(source=self.source.plain).read())[:rows]
        shape = (self.shape[0] if rows is None else min(rows, self.shape[0]), *self.shape[1:])
        out = self.leaf.new_empty(shape, device="cpu")
        lines = out.flatten(0, 1) if out.dim() == 3 else out
        for first, view in self._replace(source=self.source._replace(shape=shape)).views:
            flat = view.reshape(-1, *lines.shape[1:])
            lines[first : first + flat.shape[0]] = flat
        return out


def found_at(params: Params, weight: Weight) -> Any:
    """The leaf of a weight, or a rank's part, without its adapters; None if the model does without it."""
    parent: Any = params
    for key in weight.path[:-1]:
        parent = parent[key]
    leaf = parent.get(weight.path[-1])
    leaf = leaf.leaf if isinstance(leaf, Columns) else leaf
    return leaf.base if isinstance(leaf, Adapted) else leaf


def few_bits_of(params: Params, weights: list[Weight]) -> dict[str, list[Tensor]]:
    """By the names of the checkpoint, what holds the matrices that are in few bits. Pure."""
    leaves = {source.name: found_at(params, weight) for weight in weights for source in weight.sources}
    few_bits = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, (Quantized, W8A8))}
    return {name: [part for part in leaf if isinstance(part, Tensor)] for name, leaf in few_bits.items()}


def leaf_of(params: Params, weight: Weight) -> Tensor | None:
    """The tensor that holds a weight, or a rank's part; None if the model does without it, or has it in few bits."""
    leaf = found_at(params, weight)
    return None if isinstance(leaf, (Quantized, W8A8)) else leaf.packed if isinstance(leaf, Dense) else leaf


def places_of(params: Params, weights: list[Weight], group: Group | None = None) -> dict[str, Place]:
    """Every tensor of the checkpoint by its Hugging Face name, in the order of the forward pass. Pure."""
    found = {}
    for weight in weights:
        leaf, start = leaf_of(params, weight), 0
        if leaf is None:
            continue
        lanes = weight.matrix and leaf.device.type == "cpu"
        for index, source in enumerate(weight.sources):
            cut = None
            if group is not None and weight.shard:
                rows = (tuple(weight.rows(rank, group.size)[index]) for rank in range(group.size))
                cut = Cut(tuple(rows), group.rank, weight.axis)
            each = weight.shape[1] // (1 if cut is None or group is None else group.size) if weight.stack else 0
            at, first = divmod(start, each) if weight.stack else (0, start)
            found[source.name] = Place(leaf[at] if weight.stack else leaf, first, source, lanes, cut)
            start += found[source.name].held.shape[0]
    return found


def fused_names(weights: list[Weight]) -> dict[str, tuple[str, ...]]:
    """The names that SGLang gives to fused leaves, and the tensors that each holds, in order. Pure."""
    found = {}
    for weight in weights:
        names = tuple(source.name for source in weight.sources if not weight.stack)
        for part, fused in FUSED.items():
            if len(names) > 1 and f".{part}." in names[0]:
                found[names[0].replace(part, fused)] = names
    return found
