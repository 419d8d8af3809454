"""`Field`: one array of a step, declared once by name; and how fields lie in a packed buffer, which goes to the device
and comes back. Layout, views, padding and warm-up derive from the declaration. A field's dimensions stand behind the
last "_" of its name: letters of the dimension key, or a number as it is."""

from collections.abc import Iterable, Mapping
from enum import Enum
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

Arrays = dict[str, np.ndarray]
Sizes = Mapping[str, int]


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


def blank(field: Field, sizes: Sizes) -> np.ndarray:
    """The field with nothing filled in."""
    array: np.ndarray = torch.empty(0, dtype=field.dtype).numpy()
    return np.full(field.shape(sizes), blank_value(field), array.dtype)


def blank_value(field: Field) -> float:
    return 0 if isinstance(field.pad, Pad) else field.pad


INPUTS = (  # of a forward pass, fed tokens and the draw; those of rows first, so that their places depend on R alone
    Field("logit_index_R", torch.int32),
    Field("temperature_R", torch.float32, 1),  # > 0; of greedy rows 1
    Field("top_k_R", torch.int32, 1),  # >= V means off; 1 is greedy
    Field("top_p_R", torch.float32, 1),  # in (0, 1]; 1 means off
    Field("min_p_R", torch.float32),  # in [0, 1]; 0 means off
    Field("seed_R", torch.int64),  # the request's own
    Field("pos_R", torch.int32),  # of the token being drawn: noise is keyed by (seed, position, vocabulary id)
    Field("kv_len_R", torch.int32),
    Field("q_start_B", torch.int32, Pad.LAST),
    Field("page_table_RN", torch.int32, Pad.NONE),
    Field("token_T", torch.int32),
    Field("pos_T", torch.int32),
    Field("slot_T", torch.int32),
    Field("window_slot_U", torch.int32),  # of layers with a window, where these have pages of their own
    Field("window_table_RY", torch.int32, Pad.NONE),
    Field("feed_index_T", torch.int32),  # where feed_from_T is true, the token is what this row of the step before drew
    Field("feed_from_T", torch.bool),
)
IMAGES = (
    Field("image_row_I", torch.int32, -1),  # I: the T of models with images
    Field("rope_pos_3I", torch.int32),
    Field("last_key_J", torch.int32),  # J: the T of those in which the tokens of an image see each other
)
ADAPTERS = (Field("token_A", torch.int32), Field("start_S", torch.int32))

Targets = list[tuple[Field, np.ndarray]]


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
        if source.ndim > 1:  # padded in both dimensions
            if field.pad is not Pad.NONE:
                target[...] = blank_value(field)
            target[tuple(map(slice, source.shape))] = source
            continue
        target[: len(source)] = source
        if len(source) < len(target):
            target[len(source) :] = source[-1] if field.pad is Pad.LAST else blank_value(field)


class StaticBuffers:
    """Fields in packed buffers whose addresses graphs hold: two on the host, pinned, and two on the device. Modifies:
    these buffers."""

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
