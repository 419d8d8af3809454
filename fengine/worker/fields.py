"""What goes to the device and comes back, by name: `Field`s, and how they lie in one packed buffer. Pure, but `pack`.

A field's dimensions stand behind the last "_" of its name: letters of the dimension key, or a number as it is. Layout,
views, padding and warm-up derive from the declaration; steps find their inputs by name.
"""

from collections.abc import Iterable, Mapping
from enum import Enum
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Arrays = dict[str, np.ndarray]
Tensors = Mapping[str, Tensor]
Sizes = Mapping[str, int]
Targets = list[tuple["Field", np.ndarray]]


class Pad(Enum):
    """Paddings that are no constant."""

    LAST = "last"  # the last value again
    NONE = "none"  # whatever lies there: nothing reads it


class Field(NamedTuple):
    """One array of a step. `pad` stands behind what the step fills in, and everywhere if it fills in nothing."""

    name: str
    dtype: torch.dtype
    pad: float | Pad = 0

    @property
    def letters(self) -> str:
        return self.name.rpartition("_")[2]

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(int(letter) if letter.isdigit() else sizes[letter] for letter in self.letters)


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
                target[...] = _constant(field)
            continue
        if field.pad is not Pad.NONE:
            behind = 0 if source.ndim > 1 else len(source)  # two dimensions are padded in both
            target[behind:] = source[-1] if field.pad is Pad.LAST else _constant(field)
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


def blank(field: Field, sizes: Sizes) -> np.ndarray:
    """The field with nothing filled in."""
    array: np.ndarray = torch.empty(0, dtype=field.dtype).numpy()
    return np.full(field.shape(sizes), _constant(field), array.dtype)


def _constant(field: Field) -> float:
    return 0 if isinstance(field.pad, Pad) else field.pad


def built(kind: Any, tensors: Tensors) -> Any:
    """A NamedTuple of tensors from those that have its fields' names."""
    return kind(**{name: tensors[name] for name in kind._fields if name in tensors})
