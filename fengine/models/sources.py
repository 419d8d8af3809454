"""Where a leaf's tensors stand in a checkpoint, and how: rows of heads or experts in another order than ours."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch
from einops import rearrange
from torch import Tensor


class Order(Protocol):
    """How a tensor of a checkpoint stands otherwise than ours. Pure."""

    def ours(self, tensor: Tensor) -> Tensor: ...

    def theirs(self, tensor: Tensor) -> Tensor: ...  # the inverse

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]: ...  # of ours, of one that is stored in `shape`


class HeadOrder(NamedTuple):
    """How the rows of q and k stand in a checkpoint whose rotary embedding pairs them otherwise than our two halves do.
    Of the first `heads` heads of `width` rows, the first `rotary` rows turn: pairs are neighbours (`interleaved`), or
    the two halves of these rows. Scores q · k do not change when both are ordered alike."""

    heads: int
    width: int
    rotary: int
    interleaved: bool

    def ours(self, tensor: Tensor) -> Tensor:
        return self._rows(tensor)[self.index(self._rows(tensor).shape[0]).to(tensor.device)].view(tensor.shape)

    def theirs(self, tensor: Tensor) -> Tensor:
        index = self.index(self._rows(tensor).shape[0]).argsort()
        return self._rows(tensor)[index.to(tensor.device)].view(tensor.shape)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def _rows(self, tensor: Tensor) -> Tensor:
        """A norm's weights of each head are rows, too."""
        return tensor.flatten() if tensor.shape == (self.heads, self.width) else tensor

    @cache  # noqa: B019 (a few values, all small)
    def index(self, rows: int) -> Tensor:
        """int64 [rows]: our row i is row index[i] of the checkpoint. Pure."""
        turned = torch.arange(self.rotary)
        first, second = (turned[0::2], turned[1::2]) if self.interleaved else turned.chunk(2)
        rest = torch.arange(self.rotary, self.width).chunk(2) if self.rotary < self.width else (turned[:0], turned[:0])
        head = torch.cat((first, rest[0], second, rest[1]))
        index = torch.arange(rows)
        index[: self.heads * self.width] = (torch.arange(self.heads)[:, None] * self.width + head).flatten()
        return index


class ExpertOrder(NamedTuple):
    """How gpt-oss stores experts: matrices [E, in, out] or biases [E, out]; gate and up take turns if `paired`."""

    paired: bool

    def ours(self, tensor: Tensor) -> Tensor:
        """[E, out, in] or [E, out], gate above up. Pure."""
        tensor = tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
        return rearrange(tensor, "e (f part) ... -> e (part f) ...", part=2) if self.paired else tensor

    def theirs(self, tensor: Tensor) -> Tensor:
        tensor = rearrange(tensor, "e (part f) ... -> e (f part) ...", part=2) if self.paired else tensor
        return tensor.transpose(1, 2) if tensor.dim() == 3 else tensor

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[:1] + shape[:0:-1]

    def stored(self, rows: Sequence[slice]) -> slice:
        """Where our rows, as many of gate as of up, stand along the last axis of the checkpoint. Pure."""
        return slice(rows[0].start * len(rows), rows[0].stop * len(rows))


class Source(NamedTuple):
    """A tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    order: Order | None = None  # None: as stored

    def ours(self, tensor: Tensor) -> Tensor:
        """A tensor of the checkpoint, or the rows of a LoRA update, in our order. Pure."""
        return tensor if self.order is None else self.order.ours(tensor)

    def theirs(self, tensor: Tensor) -> Tensor:
        return tensor if self.order is None else self.order.theirs(tensor)

    @property
    def plain(self) -> "Source":
        """The same tensor in our order."""
        return self if self.order is None else Source(self.name, self.order.shape(self.shape))
