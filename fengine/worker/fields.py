"""How fields lie in one packed buffer, which goes to the device and comes back. Pure, but `pack`."""

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fengine.worker.step_input import Arrays, Field, Pad, Sizes, blank_value

Targets = list[tuple[Field, np.ndarray]]


class Slot(NamedTuple):
    """A field's place in a packed buffer, in bytes."""

    field: Field
    shape: tuple[int, ...]
    start: int
    end: int


def layout(fields: Iterable[Field], sizes: Sizes) -> list[Slot]:
    """Where each field lies in one packed byte buffer, 16-byte aligned; fields with a letter that `sizes` lacks do not.

    Fields in front keep their places whatever stands behind them.
    """
    slots, at = [], 0
    for field in fields:
        if all(letter in sizes or letter.isdigit() for letter in field.letters):
            shape = field.shape(sizes)
            end = at + prod(shape) * field.dtype.itemsize
            slots.append(Slot(field, shape, at, end))
            at = -(-end // 16) * 16
    return slots


def views(buffer: Tensor, slots: Iterable[Slot]) -> dict[str, Tensor]:
    """Typed views of a packed byte buffer, by name."""
    return {slot.field.name: buffer[slot.start : slot.end].view(slot.field.dtype).view(slot.shape) for slot in slots}


def pack(arrays: Arrays, targets: Targets) -> None:
    """Writes arrays where their fields lie, padded. Modifies: the targets."""
    for field, target in targets:
        source = arrays.get(field.name)
        if source is None:
            if field.pad is not Pad.NONE:
                target[...] = blank_value(field)
            continue
        if field.pad is not Pad.NONE:
            behind = 0 if source.ndim > 1 else len(source)  # two dimensions are padded in both
            target[behind:] = source[-1] if field.pad is Pad.LAST else blank_value(field)
        target[tuple(map(slice, source.shape))] = source


class StaticBuffers:
    """Fields in packed buffers whose addresses graphs hold: two on the host, pinned, and two on the device.

    Modifies: these buffers.
    """

    def __init__(self, fields: tuple[Field, ...], most: Sizes, device: torch.device) -> None:
        self.fields = fields
        size = max(slot.end for slot in layout(fields, most)) + 64
        self.host = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.device = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self.places: dict[tuple[tuple[str, int], ...], tuple[list[Slot], list[Targets]]] = {}

    def place(self, sizes: Sizes) -> tuple[list[Slot], list[Targets]]:
        """The fields' places and, in both of the host's buffers, their arrays. Made once for each size: to make them
        for a short step would take as long as to launch it."""
        key = tuple(sizes.items())
        if key not in self.places:
            slots = layout(self.fields, sizes)
            found = [views(host, slots) for host in self.host]
            self.places[key] = slots, [[(s.field, tensors[s.field.name].numpy()) for s in slots] for tensors in found]
        return self.places[key]

    def fill(self, arrays: Arrays, sizes: Sizes, turn: int) -> None:
        """Packs the arrays into the host's buffer `turn`."""
        pack(arrays, self.place(sizes)[1][turn])

    def send(self, turn: int, which: int, sizes: Sizes, lines: int | None = None) -> None:
        """Starts the copy of the host's buffer `turn` to the device's `which`; of the last field so many lines."""
        last = self.place(sizes)[0][-1]
        end = last.end if lines is None else last.start + (last.end - last.start) // last.shape[0] * lines
        self.device[which][:end].copy_(self.host[turn][:end], non_blocking=True)

    def fetch(self, turn: int, which: int, sizes: Sizes) -> None:
        """Starts the copy of the device's buffer `which` to the host's `turn`."""
        end = self.place(sizes)[0][-1].end
        self.host[turn][:end].copy_(self.device[which][:end], non_blocking=True)

    def arrays(self, turn: int, sizes: Sizes) -> Arrays:
        """The fields in the host's buffer `turn`."""
        return {field.name: array for field, array in self.place(sizes)[1][turn]}

    def tensors(self, which: int, sizes: Sizes) -> dict[str, Tensor]:
        """The fields in the device's buffer `which`."""
        return views(self.device[which], self.place(sizes)[0])
