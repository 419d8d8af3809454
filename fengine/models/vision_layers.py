"""What vision towers are made of, as functions. A tower takes one image at a time, so no bit of it depends on others.
Weights of towers are declared here, too: Params["vision"] holds a tower's leaves, its layers under "layers"."""

from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fengine.models.kv_state import Params
from fengine.models.sources import Source
from fengine.models.spec import VisionSpec
from fengine.models.weights import Weight
from fengine.ops import activations, attention, linear

PAGE = 64  # slots of the pages that attention reads an image's keys from
TILE = 64  # columns of a matrix come in such tiles


class Laid(NamedTuple):
    """A tensor of a checkpoint in another shape, `turned` with rows and columns exchanged; dimension `tiled` has zeros
    behind it up to a whole number of tiles, where they change no sum."""

    stored: tuple[int, ...]
    size: tuple[int, ...]  # without the zeros
    tiled: int | None = None
    turned: bool = False

    def ours(self, tensor: Tensor) -> Tensor:
        found = (tensor.T if self.turned else tensor).reshape(self.size)
        behind = [whole - count for count, whole in zip(self.size, self.shape(()), strict=True)]
        return pad(found, [x for count in reversed(behind) for x in (0, count)])

    def theirs(self, tensor: Tensor) -> Tensor:
        found = tensor[tuple(map(slice, self.size))]
        return found.T if self.turned else found.reshape(self.stored)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-n // TILE) * TILE if i == self.tiled else n for i, n in enumerate(self.size))


def laid(name: str, stored: tuple[int, ...], *size: int, tiled: int | None = None, turned: bool = False) -> Source:
    return Source(name, stored, Laid(stored, size, tiled, turned))


def tiled(x_IK: Tensor) -> Tensor:
    """The same with columns of zeros up to a whole number of tiles, which change no sum. Pure."""
    return pad(x_IK, (0, -x_IK.shape[1] % TILE))


def vector(key: str, name: str, size: int, *above: str | int, norm: bool = False, bias: bool = False) -> Weight:
    """A bias, or a norm's weight, its bias behind it. Pure."""
    sources = tuple(Source(f"{name}.{kind}" if norm else name, (size,)) for kind in ("weight", "bias")[: 1 + bias])
    return Weight(("vision", *above, key), sources, "D", fill="one" if norm else "small")


def matrix(
    key: str, names: list[str], rows: int, columns: int, *above: str | int, bias: bool = True, inner: str = ""
) -> list[Weight]:
    """The joined matrices of linear layers with `rows` outputs each, and their biases under the key "b…". `inner`:
    which side is the inner one of an MLP, "rows" or "columns". Pure."""
    path, side = ("vision", *above), {"rows": 0, "columns": 1}.get(inner)
    parts = tuple(laid(f"{name}.weight", (rows, columns), rows, columns, tiled=side) for name in names)
    found = [Weight((*path, f"w{key}"), parts, "CD")]
    biases = tuple(laid(f"{name}.bias", (rows,), rows, tiled=side) for name in names)
    return found + ([Weight((*path, f"b{key}_C"), biases, "C", fill="small")] if bias else [])


def patch_matrix(name: str, vision: VisionSpec, frames: tuple[int, ...] = (), bias: bool = False) -> list[Weight]:
    kernel = (vision.channels, *frames, vision.patch, vision.patch)
    source = laid(f"{name}.weight", (vision.width, *kernel), vision.width, prod(kernel), tiled=1)
    found = [Weight(("vision", "wpatch"), (source,), "DI")]
    return found + ([vector("bpatch_C", f"{name}.bias", vision.width)] if bias else [])


def project(x_IK: Tensor, params: Params, key: str) -> Tensor:
    """x @ w.T + bias of the leaves w<key> and b<key>_C. Pure."""
    return linear.linear(x_IK, params[f"w{key}"], params.get(f"b{key}_C"))


def projector(hidden: int, columns: int) -> list[Weight]:
    """LLaVA's: from a tower's columns, by two linear layers with gelu between, to embeddings. Pure."""
    sizes = enumerate((columns, hidden), 1)
    return [leaf for i, size in sizes for leaf in matrix(f"project{i}", [f"projector.linear_{i}"], hidden, size)]


def projected(x_IK: Tensor, params: Params) -> Tensor:
    """The embeddings that `projector` makes. Pure."""
    return project(activations.activate(project(x_IK, params, "project1"), "gelu"), params, "project2")


def act(x_IF: Tensor, kind: str) -> Tensor:
    return x_IF * torch.sigmoid(1.702 * x_IF) if kind == "quick_gelu" else activations.activate(x_IF, kind)


class Layout(NamedTuple):
    """Where patches see each other: windows of so many, which follow each other. On the image's device."""

    pos_I: Tensor  # int32, in the image: rows of the rope's table
    slot_I: Tensor  # int32, in pages of their own
    start_B: Tensor
    length_R: Tensor
    table_RN: Tensor
    pages: int


@lru_cache(maxsize=32)
def layout(lengths: tuple[int, ...], device: torch.device) -> Layout:
    """Pure; kept, since every layer and every image of a size asks for the same."""
    pages = [-(-length // PAGE) for length in lengths]
    first = np.cumsum([0, *pages])
    slots = [np.arange(length) + at * PAGE for length, at in zip(lengths, first, strict=False)]
    table = np.zeros((len(lengths), max(pages)), np.int32)
    for row, count in enumerate(pages):
        table[row, :count] = np.arange(first[row], first[row] + count)
    arrays = (np.arange(sum(lengths)), np.concatenate(slots), np.cumsum([0, *lengths]), np.array(lengths), table)
    pos_I, slot_I, start_B, length_R, table_RN = (torch.from_numpy(x.astype(np.int32)).to(device) for x in arrays)
    return Layout(pos_I, slot_I, start_B, length_R, table_RN, int(first[-1]))


def attend(q_IHK: Tensor, k_IHK: Tensor, v_IHK: Tensor) -> Tensor:
    """Attention of all patches to all. Pure."""
    at = layout((len(q_IHK),), q_IHK.device)
    k_PSHK, v_PSHK = (paged(x, at.pages) for x in (k_IHK, v_IHK))
    where, scale = (at.start_B, at.length_R, at.table_RN), q_IHK.shape[2] ** -0.5
    return attention.attention(q_IHK.contiguous(), k_PSHK, v_PSHK, *where, scale, causal=False)


def paged(x_IHK: Tensor, pages: int) -> Tensor:
    """The patches in whole pages; slots behind them are nobody's. Pure."""
    x_SHK = x_IHK.new_empty((pages * PAGE, *x_IHK.shape[1:]))
    x_SHK[: len(x_IHK)] = x_IHK
    return x_SHK.unflatten(0, (-1, PAGE))
