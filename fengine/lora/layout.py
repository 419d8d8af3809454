"""Where the parts of a LoRA adapter lie: one stretch of bytes holds an adapter, and every slot is one such stretch.

    slot 0  | layer 0: wqkv  A B scale rank | wo  A B … | wgate_up … | wdown … | layer 1: … |     one image
    slot 1  | …                                                                             |

So an adapter is laid out once, when it is loaded, and comes to a slot as it is. Ranks are padded with zeros to those of
the largest adapter. The stacks that steps read (`ops.lora.Stack`) are views of all slots at once.

While an adapter is read and laid out another thread launches steps. So it is done in short pieces with rests between:
of threads that need the interpreter again and again, one that does not rest makes the others wait 5 ms each time. And
torch is given no more at once than it computes in the calling thread: its team, which spins for a while after each
part, would take the cores of the loop.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fengine import models
from fengine.errors import UnsupportedFeatureError
from fengine.models.kv_state import Params
from fengine.models.sources import Source
from fengine.models.spec import ModelSpec
from fengine.ops.columns import Columns, Group
from fengine.ops.lora import RANKS, Adapted, Stack

ALIGNMENT = 128  # bytes
ALONE = 32768 - 1  # elements: what is not more torch computes in the calling thread (at::internal::GRAIN_SIZE)
REST = 0.0005  # seconds
PIECE = 1 << 20  # bytes; while the driver pins some it launches nothing
EXPONENT = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}


class Module(NamedTuple):
    """A linear layer of the checkpoint, such as "model.layers.0.self_attn.q_proj", or a rank's `own` outputs of it."""

    name: str
    outputs: int
    inputs: int
    source: Source
    own: tuple[slice, ...] = ()

    @property
    def kind(self) -> str:
        return self.name.rpartition(".")[2]


class Site(NamedTuple):
    """A fused linear layer: its leaf of Params, and the modules it is made of."""

    path: tuple[str | int, ...]
    modules: tuple[Module, ...]


class Update(NamedTuple):
    """What an adapter adds to one module: scale * B A. a [r, inputs], b [outputs, r], float, on the CPU."""

    a: Tensor
    b: Tensor
    scale: float


def rest() -> None:
    """Lets the loop go on, after some tenths of a millisecond of work."""
    time.sleep(REST)


def all_finite(tensor: Tensor) -> bool:
    """Whether no value of a CPU tensor, in a dtype of EXPONENT, is infinite or NaN. Pure."""
    kind, mask = EXPONENT[tensor.dtype]
    bits = tensor.contiguous().view(-1).view(kind).numpy()
    return not any(((bits[at : at + ALONE] & mask) == mask).any() for at in range(0, len(bits), ALONE))


def fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether finite values stay finite in `dtype`. Pure."""
    if tensor.dtype == dtype or dtype == torch.float32:
        return True
    return all(all_finite(piece.to(dtype)) for piece in tensor.contiguous().view(-1).split(ALONE))


def place(target_NK: Tensor, source_NK: Tensor) -> None:
    """Modifies: target_NK."""
    count = max(1, ALONE // max(1, source_NK.shape[1]))
    for target, source in zip(target_NK.split(count), source_NK.split(count), strict=True):
        target.copy_(source)


def all_sites(spec: ModelSpec, group: Group | None = None) -> list[Site]:
    """The linear layers that adapters may change, in the order of the forward pass; a rank's part of them. Pure."""
    found = []
    for weight in models.lookup(spec.architecture).weights(spec):
        if weight.adapts:
            rows = [()] * len(weight.sources) if group is None else weight.rows(group.rank, group.size)
            modules = []
            for source, own in zip(weight.sources, rows, strict=True):
                outputs = sum(part.stop - part.start for part in own) if own else source.shape[0]
                name = source.name.removesuffix(".weight")
                modules.append(Module(name, outputs, source.shape[1], source, tuple(own)))
            found.append(Site(weight.path, tuple(modules)))
    return found


def kinds_of(spec: ModelSpec) -> tuple[str, ...]:
    """The last words of the modules' names: "q_proj", … Pure. Errors: UnsupportedFeatureError for an encoder, whose
    modules PEFT knows by other names."""
    if spec.embed_norm:
        raise UnsupportedFeatureError(
            f"LoRA of an encoder ({spec.architecture}) is not built: leave enable_lora and lora_paths out; an "
            "adapter can be merged into the weights with PEFT's merge_and_unload()."
        )
    return tuple(dict.fromkeys(module.kind for site in all_sites(spec) for module in site.modules))


@dataclass(frozen=True)
class Layout:
    """`ranks` is the padded largest rank. Pure, but for what its functions are told to write to."""

    sites: tuple[Site, ...]
    ranks: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(
        cls, spec: ModelSpec, max_rank: int, kinds: Sequence[str], dtype: torch.dtype, device: torch.device,
        group: Group | None = None,
    ) -> "Layout":  # fmt: skip
        """For modules of these kinds, of a rank its part; activations in `dtype`."""
        sites = [site for site in all_sites(spec, group) if any(module.kind in kinds for module in site.modules)]
        return cls(tuple(sites), -(-max_rank // RANKS) * RANKS, dtype, device)

    @cached_property
    def size(self) -> int:
        """Bytes of one adapter."""
        return sum(-(-size // ALIGNMENT) * ALIGNMENT for site in self.sites for _, _, size in self._regions(site))

    def _regions(self, site: Site) -> list[tuple[tuple[int, ...], torch.dtype, int]]:
        """Shape, dtype and bytes of A, B, scale and rank of one slot."""
        parts, inputs = len(site.modules), site.modules[0].inputs
        outputs = sum(module.outputs for module in site.modules)
        shapes = [((parts, self.ranks, inputs), self.dtype), ((outputs, self.ranks), self.dtype)]
        shapes += [((parts,), torch.float32), ((parts,), torch.int32)]
        return [(shape, dtype, prod(shape) * dtype.itemsize) for shape, dtype in shapes]

    def stacks(self, memory: Tensor) -> Iterator[tuple[Site, Stack]]:
        """Views of `memory`, uint8 [slots, size]."""
        at, on_cpu = 0, self.device.type == "cpu"
        for site in self.sites:
            views = []
            for shape, dtype, size in self._regions(site):
                stored = list(shape)
                if swapped := on_cpu and len(shape) > 1:  # see ops.lora.Stack
                    stored[-2:] = reversed(stored[-2:])
                view = memory[:, at : at + size].view(dtype).unflatten(1, stored)
                views.append(view.transpose(-1, -2) if swapped else view)
                at += -(-size // ALIGNMENT) * ALIGNMENT
            a_SPRK, b_SNR, scale_SP, rank_SP = views
            yield site, Stack(a_SPRK, b_SNR, scale_SP, rank_SP, tuple(module.outputs for module in site.modules))

    def memory(self, slots: int) -> Tensor:
        """Empty slots on the device: every rank is 0."""
        return torch.zeros(slots, self.size, dtype=torch.uint8, device=self.device)

    def image(self, updates: Mapping[str, Update]) -> Tensor:
        """The bytes of an adapter on the CPU, from what it adds to modules by name. They are no more than `ranks`."""
        empty = np.empty(self.size, np.uint8)
        for at in range(0, self.size, PIECE):
            empty[at : at + PIECE].fill(0)
            rest()
        memory = torch.from_numpy(empty)[None]
        for site, stack in self.stacks(memory):
            first = 0
            for part, module in enumerate(site.modules):
                if update := updates.get(module.name):
                    rank = len(update.a)
                    place(stack.a_SPRK[0, part, :rank], update.a)
                    b_NR = module.source.ours(update.b)
                    b_NR = torch.cat([b_NR[rows] for rows in module.own]) if module.own else b_NR
                    place(stack.b_SNR[0, first : first + module.outputs, :rank], b_NR)
                    rest()
                    stack.scale_SP[0, part] = update.scale
                    stack.rank_SP[0, part] = rank
                first += module.outputs
        return memory[0]

    def attach(self, params: Params, memory: Tensor) -> None:
        """Modifies: params, whose leaves at the sites become `Adapted` by the stacks of the slots."""
        for site, stack in self.stacks(memory):
            parent: Any = params
            for key in site.path[:-1]:
                parent = parent[key]
            leaf = parent[site.path[-1]]
            cut = isinstance(leaf, Columns)
            parent[site.path[-1]] = leaf._replace(leaf=Adapted(leaf.leaf, stack)) if cut else Adapted(leaf, stack)
