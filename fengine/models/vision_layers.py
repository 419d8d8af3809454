"""What vision towers are made of, as functions. A tower takes one image at a time, so no bit of it depends on others.

Weights of towers are declared here, too: Params["vision"] holds a tower's leaves, its layers under "layers".
"""

from math import prod
from typing import NamedTuple

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
        """Pure."""
        found = (tensor.T if self.turned else tensor).reshape(self.size)
        behind = [whole - count for count, whole in zip(self.size, self.shape(()), strict=True)]
        return pad(found, [x for count in reversed(behind) for x in (0, count)])

    def theirs(self, tensor: Tensor) -> Tensor:
        """The inverse of `ours`. Pure."""
        found = tensor[tuple(map(slice, self.size))]
        return found.T if self.turned else found.reshape(self.stored)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of ours. Pure."""
        return tuple(-(-n // TILE) * TILE if i == self.tiled else n for i, n in enumerate(self.size))


def laid(name: str, stored: tuple[int, ...], *size: int, tiled: int | None = None, turned: bool = False) -> Source:
    """A tensor of the checkpoint that is `Laid`. Pure."""
    return Source(name, stored, Laid(stored, size, tiled, turned))


def tiled(x_IK: Tensor) -> Tensor:
    """The same with columns of zeros up to a whole number of tiles, which change no sum. Pure."""
    return pad(x_IK, (0, -x_IK.shape[1] % TILE))


def vector(key: str, name: str, size: int, *above: str | int, norm: bool = False, bias: bool = False) -> Weight:
    """A bias, or a norm's weight, its bias behind it. Pure."""
    sources = tuple(Source(f"{name}.{kind}" if norm else name, (size,)) for kind in ("weight", "bias")[: 1 + bias])
    return Weight(("vision", *above, key), sources, "D", fill="one" if norm else "small")


def matrix(
    key: str, names: list[str], rows: int, columns: int, *above: str | int, bias: bool = True, inner: str = "",
) -> list[Weight]:  # fmt: skip
    """The joined matrices of linear layers with `rows` outputs each, and their biases under the key "b…". `inner`:
    which side is the inner one of an MLP, "rows" or "columns". Pure."""
    path, side = ("vision", *above), {"rows": 0, "columns": 1}.get(inner)
    parts = tuple(laid(f"{name}.weight", (rows, columns), rows, columns, tiled=side) for name in names)
    found = [Weight((*path, f"w{key}"), parts, "CD")]
    biases = tuple(laid(f"{name}.bias", (rows,), rows, tiled=side) for name in names)
    return found + ([Weight((*path, f"b{key}_C"), biases, "C", fill="small")] if bias else [])


def patch_matrix(name: str, vision: VisionSpec, frames: tuple[int, ...] = (), bias: bool = False) -> list[Weight]:
    """The matrix of patches. Pure."""
    kernel = (vision.channels, *frames, vision.patch, vision.patch)
    source = laid(f"{name}.weight", (vision.width, *kernel), vision.width, prod(kernel), tiled=1)
    found = [Weight(("vision", "wpatch"), (source,), "DI")]
    return found + ([vector("bpatch_C", f"{name}.bias", vision.width)] if bias else [])


def project(x_IK: Tensor, params: Params, key: str) -> Tensor:
    """x @ w.T + bias of the leaves w<key> and b<key>_C. Pure."""
    return linear.linear(x_IK, params[f"w{key}"], params.get(f"b{key}_C"))


def act(x_IF: Tensor, kind: str) -> Tensor:
    """Pure."""
    return x_IF * torch.sigmoid(1.702 * x_IF) if kind == "quick_gelu" else activations.activate(x_IF, kind)


def attend(q_IHK: Tensor, k_IHK: Tensor, v_IHK: Tensor, lengths: tuple[int, ...] = ()) -> Tensor:
    """Attention of all patches to all; with `lengths`, of each window to its own. Pure."""
    lengths = lengths or (len(q_IHK),)
    pages = [-(-length // PAGE) for length in lengths]
    k_PSHK, v_PSHK = (paged(x, lengths, pages) for x in (k_IHK, v_IHK))
    table, at = torch.zeros(len(lengths), max(pages), dtype=torch.int32), 0
    for row, count in enumerate(pages):
        table[row, :count] = torch.arange(at, at + count, dtype=torch.int32)
        at += count
    length_R = torch.tensor(lengths, dtype=torch.int32)
    start_B = pad(length_R.cumsum(0, dtype=torch.int32), (1, 0))
    start_B, length_R, table = (x.to(q_IHK.device) for x in (start_B, length_R, table))
    scale = q_IHK.shape[2] ** -0.5
    return attention.attention(q_IHK.contiguous(), k_PSHK, v_PSHK, start_B, length_R, table, scale, causal=False)


def paged(x_IHK: Tensor, lengths: tuple[int, ...], pages: list[int]) -> Tensor:
    """Each window's patches in whole pages of their own. Pure."""
    parts = [
        pad(part, (0, 0, 0, 0, 0, count * PAGE - len(part)))
        for part, count in zip(x_IHK.split(lengths), pages, strict=True)
    ]
    return torch.cat(parts).unflatten(0, (-1, PAGE)).contiguous()
