"""KV states made, pages of them copied out, put back and forked; steps of one row, for calling the pure functions."""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from fengine.errors import InvalidRequestError
from fengine.models.kv_state import BATCH, KVState, Tensors
from fengine.models.spec import ModelSpec


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


def init_kv(
    spec: ModelSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str,
    window_pages: int = 0,
) -> KVState:  # fmt: skip
    """A zeroed KV state; page 0 is the null page. Zeros rather than garbage: unused slots never hold NaN. With
    `window_pages` layers with a window have so many pages of their own. Keys and values of `spec.few_kv` are bytes,
    laid out as ops/kv_fp8.py says, not of `dtype`."""
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


def snapshot(kv: KVState, pages: list[int], windows: Sequence[int] = ()) -> KVState:
    """A copy of these pages alone, and of `window_layers` of the pages `windows`, in this order. Pure: `kv` stays
    live."""
    parts = zip(kv.parts, _page_indexes(kv, pages, list(windows)), strict=True)
    k_PSGK, v_PSGK, features = (tuple(x.index_select(0, i) for x, i in zip(*part, strict=True)) for part in parts)
    return KVState(k_PSGK, v_PSGK, features, kv.window_layers)


def restore(kv: KVState, saved: KVState, pages: list[int], windows: Sequence[int] = ()) -> KVState:
    """Writes a snapshot into `pages` and `windows` (same counts). Modifies: the storage of `kv`, which is dead then."""
    parts = zip(kv.parts, saved.parts, _page_indexes(kv, pages, list(windows)), strict=True)
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
