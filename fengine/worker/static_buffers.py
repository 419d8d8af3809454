"""How fields lie in packed buffers, which go to the device and come back: layout, views and padding follow from what
`step_input.Field` declares. Graphs hold the buffers' addresses; a step on a CPU needs none."""

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fengine.worker.step_input import Arrays, Field, Pad, Sizes, blank_value


class Target(NamedTuple):
    """Where a field of a step lies on the host, and what stands behind what the step fills in: None: whatever does."""

    name: str
    array: np.ndarray
    blank: float | None
    last: bool  # in its place the last value again


class Slot(NamedTuple):
    """A field's place in a packed buffer, in bytes."""

    field: Field
    shape: tuple[int, ...]
    start: int
    end: int


def layout(fields: Iterable[Field], sizes: Sizes) -> list[Slot]:
    """Where each field lies in one packed byte buffer, 16-byte aligned; fields with a letter that `sizes` lacks do not.
    Fields in front keep their places whatever stands behind them."""
    slots, at = [], 0
    for one in fields:
        if all(letter in sizes or letter.isdigit() for letter in one.letters):
            shape = one.shape(sizes)
            end = at + prod(shape) * one.dtype.itemsize
            slots.append(Slot(one, shape, at, end))
            at = -(-end // 16) * 16
    return slots


def views(buffer: Tensor, slots: Iterable[Slot]) -> dict[str, Tensor]:
    """Typed views of a packed byte buffer, by name."""
    return {slot.field.name: buffer[slot.start : slot.end].view(slot.field.dtype).view(slot.shape) for slot in slots}


def target_of(field: Field, array: np.ndarray) -> Target:
    return Target(field.name, array, None if field.pad is Pad.NONE else blank_value(field), field.pad is Pad.LAST)


def pack(arrays: Arrays, targets: Iterable[Target]) -> None:
    """Writes arrays where their fields lie, padded. Modifies: the targets."""
    for name, target, blank, last in targets:
        source = arrays.get(name)
        if source is None or source.ndim > 1:  # padded in both dimensions
            if blank is not None:
                target.fill(blank)
            if source is not None:
                target[tuple(map(slice, source.shape))] = source
            continue
        held = len(source)
        target[:held] = source
        if held < len(target) and blank is not None:
            target[held:] = source[-1] if last else blank


class Place(NamedTuple):
    """Where fields of one size lie: in each of the host's buffers, in each of the device's; and the bytes of both that
    hold them."""

    host: list[list[Target]]
    device: list[dict[str, Tensor]]
    host_bytes: list[Tensor]
    device_bytes: list[Tensor]


class StaticBuffers:
    """Fields in packed buffers whose addresses graphs hold: two on the host, pinned, and two on the device, which
    `turn` and `which` name. Without `device` kernels read the host's. Modifies: these buffers."""

    def __init__(self, fields: tuple[Field, ...], most: Sizes, device: torch.device | None) -> None:
        self.fields = fields
        size = max(slot.end for slot in layout(fields, most)) + 64
        self.host = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.device = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)] if device else self.host
        self.places: dict[tuple[tuple[str, int], ...], Place] = {}

    def place(self, sizes: Sizes) -> Place:
        """Made once for each size: to make it for a short step would take as long as to launch it."""
        key = tuple(sizes.items())
        if key not in self.places:
            slots = layout(self.fields, sizes)
            host, device = [views(b, slots) for b in self.host], [views(b, slots) for b in self.device]
            targets = [[target_of(field, found[field.name].numpy()) for field, *_ in slots] for found in host]
            held = ([buffer[: slots[-1].end] for buffer in buffers] for buffers in (self.host, self.device))
            self.places[key] = Place(targets, device, *held)
        return self.places[key]

    def fill(self, arrays: Arrays, sizes: Sizes, turn: int) -> None:
        pack(arrays, self.place(sizes).host[turn])

    def send(self, turn: int, which: int, sizes: Sizes) -> None:
        """Starts the copy of the host's buffer `turn` to the device's `which`."""
        place = self.place(sizes)
        place.device_bytes[which].copy_(place.host_bytes[turn], non_blocking=True)

    def fetch(self, turn: int, which: int, sizes: Sizes) -> None:
        place = self.place(sizes)
        place.host_bytes[turn].copy_(place.device_bytes[which], non_blocking=True)

    def arrays(self, turn: int, sizes: Sizes) -> Arrays:
        return {target.name: target.array for target in self.place(sizes).host[turn]}

    def tensors(self, which: int, sizes: Sizes) -> dict[str, Tensor]:
        return dict(self.place(sizes).device[which])
