"""Tensor parallelism by columns: every rank holds some outputs of each matrix, and activations are gathered.

Each output stays one sum over all of K, so the reduction tree, and every bit, is that of one device, however many ranks
there are; a product cut along K and added over the ranks would have another tree. The residual stream and the logits
are whole on every rank; heads and the inside of the MLP are cut. `gather` moves bits and computes nothing."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from fengine.ops import copy_engines, exchange, peers
from fengine.ops.linear import Leaf, in_two
from fengine.ops.registration import register

distributed: Any = dist  # with what its types do not tell of


class Group(NamedTuple):
    """Ranks that hold one model together, by the name that torch knows their process group on GPUs by."""

    name: str
    rank: int
    size: int
    folder: str = ""  # where they leave files for one another
    sockets: tuple[int, ...] = ()  # to the others, as of `peers.mesh`
    mail: exchange.Mail | None = None  # between GPUs; where it is not open torch's process group is used


def gather_(x_TN: Tensor, width: int, rank: int, sockets: Sequence[int], group: str) -> Tensor:
    """On GPUs, by torch's process group."""
    parts = x_TN.new_empty((len(sockets), *x_TN.shape))
    distributed.distributed_c10d._resolve_process_group(group)._allgather_base(
        parts.flatten(0, 1), x_TN.contiguous()
    ).wait()
    return side_by_side(parts, width)


def gather_cpu(x_TN: Tensor, width: int, rank: int, sockets: Sequence[int], group: str) -> Tensor:
    return side_by_side(peers.swap(x_TN, rank, sockets), width)


def side_by_side(parts_PTN: Tensor, width: int) -> Tensor:
    whole = parts_PTN.transpose(0, 1).flatten(1)
    return whole if whole.shape[1] == width else whole[:, :width].contiguous()


def fake(x_TN: Tensor, width: int, rank: int, sockets: Sequence[int], group: str) -> Tensor:
    return x_TN.new_empty((x_TN.shape[0], width))


_gather = register("gather", gather_, gather_cpu, fake)


def gather(x_TN: Tensor, width: int, group: Group) -> Tensor:
    """The columns of all ranks side by side, in order of ranks, cut at `width`; every rank has as many. Pure. Errors:
    RuntimeError if a rank is gone."""
    if group.mail is not None and group.mail.open and exchange.fits(x_TN, width):
        return exchange.gather(x_TN, width, group.rank, group.mail)
    return _gather(x_TN, width, group.rank, group.sockets, group.name)


def share(x: Tensor, group: Group) -> Tensor:
    """What rank 0 has; all have a tensor of its shape. Pure. Errors: as `gather`."""
    return gather(x.reshape(1, -1), x.numel(), group).view(x.shape)


def over_all(leaf: Leaf, x_TC: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """`run` of the columns of all ranks, as far as they are this rank's: `x_TC` is, if `leaf` is cut. Pure."""
    if not isinstance(leaf, Columns):
        return run(x_TC.contiguous())
    width, group = x_TC.shape[1], leaf.group
    return run(gather(x_TC.contiguous(), width * group.size, group)).narrow(1, group.rank * width, width)


def product(
    make: Callable[[Tensor], Tensor], x_TX: Tensor, w: "Columns", bias_N: Tensor | None, adapters: Any, exact: bool
) -> Tensor:
    """`linear` of make(x), which computes each row by itself: many rows in chunks, whose exchange is hidden. Pure."""
    if adapters is None and (dock := w.dock(x_TX)) is not None:
        return copy_engines.product(
            lambda rows: make(x_TX[rows]), lambda x_TK: w.leaf.linear(x_TK, bias_N, None, None, exact), len(x_TX),
            w.k, w.n, dock,
        )  # fmt: skip
    return w.linear(make(x_TX), bias_N, adapters, None, exact)


class Columns(NamedTuple):
    """A rank's outputs of a matrix of n x k, in order: each rank has `each`, the last may have fewer. An input that is
    cut is gathered first. The product is gathered where it is `whole`: the residual stream, logits."""

    leaf: Leaf
    n: int
    k: int
    each: int
    whole: bool
    group: Group

    x_group = 0

    def linear(
        self, x_TK: Tensor, bias_N: Tensor | None, adapters: Any, out_dtype: torch.dtype | None, exact: bool
    ) -> Tensor:
        if x_TK.shape[1] != self.k:
            if out_dtype is None and adapters is None and self.dock(x_TK) is not None:
                return product(lambda x_TK: x_TK, x_TK.contiguous(), self, bias_N, adapters, exact)
            x_TK = gather(x_TK, self.k, self.group)
        y_TN = self.leaf.linear(x_TK, bias_N, adapters, out_dtype, exact)
        if not self.whole:
            return y_TN
        missing = self.each - y_TN.shape[1]
        return gather(pad(y_TN, (0, missing)) if missing else y_TN, self.n, self.group)

    def dock(self, x_TX: Tensor) -> copy_engines.Dock | None:
        """What the exchanges of a product of these rows go through while it is computed. Pure."""
        dock = None if self.group.mail is None else self.group.mail.dock
        even = self.n == self.each * self.group.size and (self.n | self.k) % (8 * self.group.size) == 0
        if dock is None or not self.whole or not even or torch.compiler.is_compiling():
            return None
        return dock if dock.fits(len(x_TX), self.k + self.n, x_TX) else None

    def gated(self, x_TK: Any, bias_N: Tensor | None, adapters: Any, exact: bool, act: str, group: int) -> Any:
        """As `ops.linear.gated_linear`; input and product stay as they are, unless it is `whole`."""
        how = (x_TK, bias_N, adapters, exact, act, group)
        return in_two(self, *how) if self.whole else self.leaf.gated(*how)
