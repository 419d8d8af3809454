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


class Flat(NamedTuple):
    """A convolution's kernel as the matrix of its patches, with columns of zeros up to a whole number of tiles."""

    kernel: tuple[int, ...]

    def ours(self, tensor: Tensor) -> Tensor:
        """[out, columns]. Pure."""
        return tiled(tensor.flatten(1))

    def theirs(self, tensor: Tensor) -> Tensor:
        """The inverse of `ours`. Pure."""
        return tensor[:, : prod(self.kernel)].unflatten(1, self.kernel)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What a tensor of `shape` becomes. Pure."""
        return shape[0], -(-prod(shape[1:]) // TILE) * TILE


class Padded(NamedTuple):
    """Rows, or the columns of a matrix, with zeros behind them up to a whole number of tiles: of an MLP's inner side,
    where they change no sum."""

    count: int
    columns: bool

    def ours(self, tensor: Tensor) -> Tensor:
        """Pure."""
        return (
            tiled(tensor) if self.columns else tiled(tensor.view(self.count, -1).T).T.reshape(self.shape(tensor.shape))
        )

    def theirs(self, tensor: Tensor) -> Tensor:
        """The inverse of `ours`. Pure."""
        return tensor[:, : self.count] if self.columns else tensor[: self.count]

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What a tensor of `shape` becomes. Pure."""
        whole = -(-self.count // TILE) * TILE
        return (shape[0], whole) if self.columns else (whole, *shape[1:])


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
    order = Padded(columns if inner == "columns" else rows, inner == "columns") if inner else None
    path, parts = ("vision", *above), [Source(f"{name}.weight", (rows, columns), order) for name in names]
    found = [Weight((*path, f"w{key}"), tuple(parts), "CD")]
    biases = tuple(Source(f"{name}.bias", (rows,), order if inner == "rows" else None) for name in names)
    return found + ([Weight((*path, f"b{key}_C"), biases, "C", fill="small")] if bias else [])


def patch_matrix(name: str, vision: VisionSpec, frames: tuple[int, ...] = (), bias: bool = False) -> list[Weight]:
    """The matrix of patches. Pure."""
    kernel = (vision.channels, *frames, vision.patch, vision.patch)
    source = Source(f"{name}.weight", (vision.width, *kernel), Flat(kernel))
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
