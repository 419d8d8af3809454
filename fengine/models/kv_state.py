"""The values that flow through a step, and the operations on KV state.

Dimension key: T tokens in this step, padded · R request rows, padded · B row boundaries (R+1) · P pages (page 0 = null
page, target of padding writes) · S slots per page · N page-table width · L layers · D model · F mlp · H query heads ·
G kv heads · K head width · V vocabulary. Of LoRA: A tokens with an adapter · S slots of adapters. Where windowed layers
have pages of their own: U tokens, as T · Y page-table width, as N.

The contract of purity: a step reads its arguments, may overwrite only the storage of the `kv` it was given, and that
`kv` is dead after the call; the returned `kv` is the only live one (JAX's buffer donation, stated openly).
"""

import math
import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fengine.errors import InvalidRequestError, StaleStateError
from fengine.models.spec import ModelSpec

# What a forward pass may know of requests, by name: those of BATCH, and where there is such a thing the others.
#   token_T, pos_T, slot_T       of each token; slot = page * S + offset, where its k and v go
#   q_start_B, kv_len_R          row r owns tokens q_start_B[r] : q_start_B[r+1], the last of its kv_len_R[r] tokens
#   logit_index_R                index into T of each row's last token
#   window_slot_U, window_table_RY   slot_T and page_table_RN of layers with a window that have pages of their own
#   token_A, start_S             of LoRA: adapter slot s owns token_A[start_S[s] : start_S[s + 1]]; behind is padding
#   image_row_I                  of each token its row of the table of images' embeddings; -1: it is a word
#   last_key_J                   the position of the last key that each token sees; else its own
#   rope_pos_3I                  where tokens stand on the three axes of rotary embedding; else at pos_T
# All int32. Padding tokens lie behind q_start_B[-1] and write to slot 0, in the null page; padding rows have no tokens.
Tensors = Mapping[str, Tensor]
BATCH = ("token_T", "pos_T", "slot_T", "q_start_B", "kv_len_R", "page_table_RN", "logit_index_R")
Params = dict[str, Any]  # nested dicts and lists; leaf keys carry the shape: params["layers"][3]["wqkv"]


def param_bytes(params: Params) -> int:
    """Of all its tensors. Pure."""
    return sum(x.nbytes for x in tree_leaves(params) if isinstance(x, Tensor))


def layer_kind(layer: Params) -> tuple[Any, ...]:
    """What layers of one kind have in common: parameters, their shapes and dtypes, the LayerKind. Pure."""
    facts = ((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in tree_leaves(layer))
    return (*sorted(layer), *facts)


def layer_kinds(layers: list[Params]) -> list[int]:
    """The first layer of each kind. Pure."""
    kinds = [layer_kind(layer) for layer in layers]
    return [kinds.index(each) for each in dict.fromkeys(kinds)]


class KVState(NamedTuple):
    """Keys and values of every page, one whole tensor per layer; and where the spec has `feature_layers`, one tensor of
    these streams side by side, of X columns. A pytree.

    `window_layers` have pages of their own, under other ids; where it is empty all layers share one group of pages.
    """

    k_PSGK: tuple[Tensor, ...]
    v_PSGK: tuple[Tensor, ...]
    feature_PSX: tuple[Tensor, ...] = ()
    window_layers: tuple[int, ...] = ()

    @property
    def parts(self) -> tuple[tuple[Tensor, ...], ...]:
        return self.k_PSGK, self.v_PSGK, self.feature_PSX

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.k_PSGK + self.v_PSGK + self.feature_PSX

    @property
    def num_pages(self) -> int:
        """Of the layers that are not `window_layers`."""
        return next(k.shape[0] for layer, k in enumerate(self.k_PSGK) if layer not in self.window_layers)

    @property
    def page_size(self) -> int:
        return self.k_PSGK[0].shape[1]


def row_batch(token_ids: list[int], start: int, pages: list[int], page_size: int) -> Tensors:
    """A step of one row, for calling the pure functions by hand: tokens at positions start, start + 1, … in `pages`."""

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    end = start + len(token_ids)
    slots = [pages[p // page_size] * page_size + p % page_size for p in range(start, end)]
    count = len(token_ids)
    found = (token_ids, list(range(start, end)), slots, [0, count], [end], pages, [count - 1])
    batch = {name: ints(values) for name, values in zip(BATCH, found, strict=True)}
    return {**batch, "page_table_RN": batch["page_table_RN"][None, :]}


def row_sampling(position: int, seed: int = 0, temperature: float = 1.0, top_k: int = 1 << 30) -> dict[str, Tensor]:
    """Sampling parameters of one row; top_k = 1 is greedy. `position` is where the drawn token will stand."""
    floats, ints = {"temperature_R": temperature, "top_p_R": 1.0, "min_p_R": 0.0}, {"top_k_R": top_k, "pos_R": position}
    return {
        **{name: torch.tensor([value], dtype=torch.float32) for name, value in floats.items()},
        **{name: torch.tensor([value], dtype=torch.int32) for name, value in ints.items()},
        "seed_R": torch.tensor([seed], dtype=torch.int64),
    }


class PageSnapshot(NamedTuple):
    """A copy of some pages: `k_LPSGK[l][i]` holds page i of the list that the snapshot of layer l was taken from."""

    k_LPSGK: tuple[Tensor, ...]
    v_LPSGK: tuple[Tensor, ...]
    feature_PSX: tuple[Tensor, ...] = ()


def init_kv(
    spec: ModelSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str,
    window_pages: int = 0,
) -> KVState:  # fmt: skip
    """A zeroed KV state; page 0 is the null page. Zeros rather than garbage: unused slots never hold NaN.

    With `window_pages` layers with a window have so many pages of their own.
    Keys and values of `spec.few_kv` are bytes, laid out as ops/kv_fp8.py says, not of `dtype`.
    """
    own = spec.window_layers if window_pages else ()
    line = (page_size, spec.num_kv_heads, spec.head_dim + spec.few_kv)
    stored = torch.uint8 if spec.few_kv else dtype

    def pages(layer: int) -> Tensor:
        shape = (window_pages if layer in own else num_pages, *line)
        if torch.device(device).type == "cpu":
            return _huge_zeros(shape, stored)
        return torch.zeros(shape, dtype=stored, device=device)

    k_PSGK, v_PSGK = (tuple(pages(layer) for layer in range(spec.num_layers)) for _ in "kv")
    width = len(spec.feature_layers) * spec.hidden_size
    features = (torch.zeros(num_pages, page_size, width, dtype=dtype, device=device),) if width else ()
    return KVState(k_PSGK, v_PSGK, features, own)


def _huge_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in huge memory pages where the system has them, all touched now: attention reads KV pages in no order, and
    would wait for address translation more than for the data; and a step never waits for the system to map memory."""
    count = math.prod(shape)
    memory = mmap.mmap(-1, max(count * dtype.itemsize, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape).zero_()


def _page_indexes(kv: KVState, pages: list[int], windows: list[int]) -> list[list[Tensor]]:
    """For each tensor of k, v and the features the pages that are meant. Errors: InvalidRequestError."""

    def index(pages: list[int], count: int) -> Tensor:
        if bad := [p for p in pages if not 0 < p < count]:
            raise InvalidRequestError(f"pages has page {bad[0]}; pages run from 1 to {count - 1} (0 is the null page)")
        return torch.tensor(pages, dtype=torch.int64, device=kv.k_PSGK[0].device)

    found = index(pages, kv.num_pages)
    if windows and not kv.window_layers:
        raise InvalidRequestError("windows has pages, but all layers share one group of pages: give them as pages")
    own = {layer: index(windows, kv.k_PSGK[layer].shape[0]) for layer in kv.window_layers}
    layers = [own.get(layer, found) for layer in range(len(kv.k_PSGK))]
    return [layers, layers, [found] * len(kv.feature_PSX)]


def snapshot(kv: KVState, pages: list[int], windows: Sequence[int] = ()) -> PageSnapshot:
    """Copies `pages` out of `kv`, and of `window_layers` the pages `windows`. Pure: `kv` stays live."""
    parts = zip(kv.parts, _page_indexes(kv, pages, list(windows)), strict=True)
    return PageSnapshot(*(tuple(x.index_select(0, i) for x, i in zip(*part, strict=True)) for part in parts))


def restore(kv: KVState, saved: PageSnapshot, pages: list[int], windows: Sequence[int] = ()) -> KVState:
    """Writes a snapshot into `pages` and `windows` (same counts). Modifies: the storage of `kv`, which is dead then."""
    parts = zip(kv.parts, saved, _page_indexes(kv, pages, list(windows)), strict=True)
    copies = [copy for part in parts for copy in zip(*part, strict=True)]
    for _, source, index in copies:
        if len(index) != len(source):
            raise InvalidRequestError(f"snapshot holds {len(source)} pages but {len(index)} targets were given")
    for target, source, index in copies:
        target.index_copy_(0, index, source)
    return KVState(*kv)


def fork(
    kv: KVState, source: list[int], target: list[int], windows: Sequence[int] = (), onto: Sequence[int] = ()
) -> KVState:
    """Copies pages `source` onto `target`, and of `window_layers` `windows` onto `onto`, so two rows can go on from one
    past. Modifies: as `restore`."""
    return restore(kv, snapshot(kv, source, windows), target, onto)


class KVHandle:
    """The one owner of a live KV state. `take()` gives the state away and kills the handle."""

    def __init__(self, kv: KVState) -> None:
        self._kv: KVState | None = kv

    @property
    def alive(self) -> bool:
        return self._kv is not None

    def take(self) -> KVState:
        """The state, once. Errors: StaleStateError on the second call."""
        if self._kv is None:
            raise StaleStateError(
                "this KV state was already given to a step, which may have overwritten it.\n"
                "  wrong:  step(params, spec, handle.take(), ...); step(params, spec, handle.take(), ...)\n"
                "  right:  kv, out = step(params, spec, handle.take(), ...); handle = KVHandle(kv)\n"
                "To keep a past state, snapshot its pages before the step."
            )
        kv, self._kv = self._kv, None
        return kv
