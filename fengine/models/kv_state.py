"""The values that flow through a step, and the operations on KV state.

Dimension key: T tokens in this step, padded · R request rows, padded · B row boundaries (R+1) · P pages (page 0 = null
page, target of padding writes) · S slots per page · N page-table width · L layers · D model · F mlp · H query heads ·
G kv heads · K head width · V vocabulary. Of LoRA: A tokens with an adapter · S slots of adapters.

The contract of purity: a step reads its arguments, may overwrite only the storage of the `kv` it was given, and that
`kv` is dead after the call; the returned `kv` is the only live one (JAX's buffer donation, stated openly).
"""

import math
import mmap
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fengine.errors import InvalidRequestError, StaleStateError
from fengine.models.spec import ModelSpec

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
    these streams side by side, of X columns. A pytree."""

    k_PSGK: tuple[Tensor, ...]
    v_PSGK: tuple[Tensor, ...]
    feature_PSX: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.k_PSGK + self.v_PSGK + self.feature_PSX

    @property
    def num_pages(self) -> int:
        return self.k_PSGK[0].shape[0]

    @property
    def page_size(self) -> int:
        return self.k_PSGK[0].shape[1]


class AdapterBatch(NamedTuple):
    """The tokens of rows with a LoRA adapter: slot s owns token_A[start_S[s] : start_S[s + 1]]. All int32."""

    token_A: Tensor  # index into T; behind start_S[-1] it is padding
    start_S: Tensor  # slots + 1 of them


class StepBatch(NamedTuple):
    """Everything a forward pass may know about requests. All int32; I is T where images may be.

    Row r owns tokens q_start_B[r] : q_start_B[r+1]; they are the last of its kv_len_R[r] tokens, so token j of the row
    stands at position pos_T = kv_len_R[r] - row_tokens + j. Padding tokens lie behind q_start_B[-1] and write to slot 0
    (inside the null page); padding rows have no tokens and kv_len 0.
    """

    token_T: Tensor
    pos_T: Tensor
    slot_T: Tensor  # slot = page * S + offset, where k and v of the token go
    q_start_B: Tensor
    kv_len_R: Tensor  # tokens of the row after this step, cached ones included
    page_table_RN: Tensor
    logit_index_R: Tensor  # index into T of each row's last token
    adapters: AdapterBatch | None = None  # None: no row has an adapter
    image_row_I: Tensor | None = None  # of each token: its row of the table of images' embeddings; -1: it is a word
    rope_pos_3I: Tensor | None = None  # where tokens stand on the three axes of rotary embedding; None: at pos_T


def row_batch(token_ids: list[int], start: int, pages: list[int], page_size: int) -> StepBatch:
    """A step of one row, for calling the pure functions by hand: tokens at positions start, start + 1, … in `pages`."""

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    end = start + len(token_ids)
    slots = [pages[p // page_size] * page_size + p % page_size for p in range(start, end)]
    return StepBatch(
        ints(token_ids), ints(list(range(start, end))), ints(slots), ints([0, len(token_ids)]), ints([end]),
        ints(pages)[None, :], ints([len(token_ids) - 1]),
    )  # fmt: skip


def row_sampling(position: int, seed: int = 0, temperature: float = 1.0, top_k: int = 1 << 30) -> dict[str, Tensor]:
    """Sampling parameters of one row; top_k = 1 is greedy. `position` is where the drawn token will stand."""
    floats, ints = {"temperature_R": temperature, "top_p_R": 1.0, "min_p_R": 0.0}, {"top_k_R": top_k, "pos_R": position}
    return {
        **{name: torch.tensor([value], dtype=torch.float32) for name, value in floats.items()},
        **{name: torch.tensor([value], dtype=torch.int32) for name, value in ints.items()},
        "seed_R": torch.tensor([seed], dtype=torch.int64),
    }


class PageSnapshot(NamedTuple):
    """A copy of some pages: `k_LPSGK[l][i]` holds page i of the list the snapshot was taken from."""

    k_LPSGK: tuple[Tensor, ...]
    v_LPSGK: tuple[Tensor, ...]
    feature_PSX: tuple[Tensor, ...] = ()


def init_kv(spec: ModelSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str) -> KVState:
    """A zeroed KV state; page 0 is the null page. Zeros rather than garbage: unused slots never hold NaN.

    Keys and values of `spec.few_kv` are bytes, laid out as ops/kv_fp8.py says, not of `dtype`.
    """
    shape = (num_pages, page_size, spec.num_kv_heads, spec.head_dim + spec.few_kv)
    stored = torch.uint8 if spec.few_kv else dtype

    def layer() -> Tensor:
        if torch.device(device).type == "cpu":
            return _huge_zeros(shape, stored)
        return torch.zeros(shape, dtype=stored, device=device)

    k_PSGK, v_PSGK = (tuple(layer() for _ in range(spec.num_layers)) for _ in "kv")
    width = len(spec.feature_layers) * spec.hidden_size
    features = (torch.zeros(num_pages, page_size, width, dtype=dtype, device=device),) if width else ()
    return KVState(k_PSGK, v_PSGK, features)


def _huge_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in huge memory pages where the system has them, all touched now: attention reads KV pages in no order, and
    would wait for address translation more than for the data; and a step never waits for the system to map memory."""
    count = math.prod(shape)
    memory = mmap.mmap(-1, max(count * dtype.itemsize, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape).zero_()


def _page_index(kv: KVState, pages: list[int], name: str) -> Tensor:
    bad = [p for p in pages if not 0 < p < kv.num_pages]
    if bad:
        raise InvalidRequestError(
            f"{name} has page {bad[0]}; pages run from 1 to {kv.num_pages - 1} (0 is the null page)"
        )
    return torch.tensor(pages, dtype=torch.int64, device=kv.k_PSGK[0].device)


def snapshot(kv: KVState, pages: list[int]) -> PageSnapshot:
    """Copies `pages` out of `kv`. Pure: `kv` stays live."""
    index = _page_index(kv, pages, "pages")
    return PageSnapshot(*(tuple(pages.index_select(0, index) for pages in part) for part in kv))


def restore(kv: KVState, saved: PageSnapshot, pages: list[int]) -> KVState:
    """Writes a snapshot into `pages` (same count). Modifies: the storage of `kv`, which is dead after the call."""
    index = _page_index(kv, pages, "pages")
    if len(pages) != saved.k_LPSGK[0].shape[0]:
        raise InvalidRequestError(
            f"snapshot holds {saved.k_LPSGK[0].shape[0]} pages but {len(pages)} targets were given"
        )
    for targets, sources in zip(kv, saved, strict=True):
        for target, source in zip(targets, sources, strict=True):
            target.index_copy_(0, index, source)
    return KVState(*kv)


def fork(kv: KVState, source: list[int], target: list[int]) -> KVState:
    """Copies pages `source` onto `target`, so two rows can go on from one past. Modifies: as `restore`."""
    return restore(kv, snapshot(kv, source), target)


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
