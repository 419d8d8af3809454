"""How many pages the KV pool has, and the state that holds them."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from fengine.config import EngineConfig
from fengine.core.window_pages import Windows
from fengine.errors import ConfigError, OutOfMemoryError
from fengine.models.kv_pages import init_kv
from fengine.models.kv_state import KVState
from fengine.models.spec import ModelSpec
from fengine.ops.attention_launch import block_of
from fengine.worker.device import device_of

CPU_POOL_BYTES = 512 << 20  # the default KV pool on a CPU
CUDA_MARGIN = 2 << 30  # bytes left free: graphs themselves, library workspaces, prompt logprobs

CACHED = 16  # of so many pages one keeps its windowed layers' keys for a prefix that no running request sees
IDS = 8  # page ids for each page of a model whose layers are all windowed


def kv_bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of all layers."""
    head = spec.head_dim + 1 if spec.few_kv else spec.head_dim * dtype.itemsize
    return 2 * spec.num_layers * spec.num_kv_heads * head


class PoolSize(NamedTuple):
    """Pages of the KV pool, the null page included; and of windowed layers, where these give pages back."""

    pages: int
    windows: Windows | None

    @property
    def stored(self) -> tuple[int, int]:
        """Pages for which there is memory: of layers that share theirs, and of windowed layers with their own."""
        if self.windows is None:
            return self.pages, 0
        return (self.windows.num_pages, 0) if self.windows.alone else (self.pages, self.windows.num_pages)


def windows_of(config: EngineConfig, spec: ModelSpec, context: int) -> Windows | None:
    """How pages of windowed layers go back while a request runs; its number of them is not known yet. Pure. None: no
    token leaves anything behind, or a draft's own KV, which rank 0 alone has, lies under ids that only windows have."""
    alone = len(spec.window_layers) == spec.num_layers
    page_size, step_tokens = config.cache.page, config.scheduler.max_step_tokens or 1
    drafts = config.speculation.algorithm.drafts
    windows = Windows(spec.window, block_of(spec.head_dim), page_size, 0, step_tokens, alone)
    if not spec.causal or not spec.window or not windows.window_start(context) or (alone and drafts):
        return None
    return windows


def pool_size(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, rows: int, context: int, activations: int = 0,
    beside: int = 0, least: Callable[[int], int] = int,
) -> PoolSize:  # fmt: skip
    """As many pages as are asked for, or as fit with `beside` more bytes for each token; of all ranks the `least`.

    Windowed layers get what all rows need at once and a share for cached prefixes, but no more than full layers. If
    there are no full ones, rows are bound by what windows hold: there are more page ids than pages.
    Errors: OutOfMemoryError naming the knobs."""
    page_size = config.cache.page
    most = rows * (-(-context // page_size))  # more could never be used at once
    windows, asked = windows_of(config, spec, context), config.cache.max_total_tokens
    need = 0 if windows is None else rows * windows.least + windows.step_tokens // page_size
    if asked is not None:
        pages = asked // page_size
    else:
        whole = (kv_bytes_per_token(spec, dtype) + beside) * page_size  # bytes of a page
        own = kv_bytes_per_token(spec, dtype) * page_size * len(spec.window_layers) // spec.num_layers
        grouped = windows is not None and not windows.alone
        memory = pool_memory(config, spec, rows, activations)
        pages = min(most, fitting(memory, whole, own, need) if grouped else memory // whole)
        if pages < 1:
            raise OutOfMemoryError(
                f"no memory is left for the KV pool: one page of {page_size} tokens needs {whole / 2**20:.1f} MiB. "
                "Raise cache.mem_fraction_static, set cache.max_total_tokens, or use a smaller model or dtype."
            )
    if windows is None:
        return PoolSize(least(pages) + 1, None)
    held = pages if windows.alone else min(pages, need + pages // CACHED)
    if windows.alone and held >= windows.least:
        pages = max(held, min(most, IDS * held))
    pages, held = least(pages), least(held)
    return PoolSize(pages + 1, windows._replace(num_pages=held + 1) if held else None)


def fitting(memory: int, whole: int, own: int, need: int) -> int:
    """How many pages of `whole` bytes fit, if windowed layers, whose part of a page is `own` bytes, have `need` pages
    and a share for cached prefixes. Pure."""
    return max(memory // whole, CACHED * (memory - need * own) // (CACHED * (whole - own) + own))


def pool_memory(config: EngineConfig, spec: ModelSpec, rows: int, activations: int) -> int:
    """Bytes for the KV pool. On CUDA that is all that `mem_fraction_static` leaves; by default all that is free but for
    the captured graphs, which share a memory pool of the largest step's `activations` (bytes), a step outside of
    graphs, the counts of drawn ids that penalties need, and a margin."""
    if device_of(config) == "cpu":
        return CPU_POOL_BYTES
    free, total = torch.cuda.mem_get_info(device_of(config))
    fraction = config.cache.mem_fraction_static
    margin = CUDA_MARGIN * (1 + config.lora.on)  # with adapters there are twice as many graphs
    counts = rows * spec.vocab_size * 4  # made for the first request with penalties
    return free - (2 * activations + counts + margin if fraction is None else int((1 - fraction) * total))


def new_pool(spec: ModelSpec, size: PoolSize, page_size: int, dtype: torch.dtype, device: str) -> KVState:
    """A zeroed KV state. Errors: OutOfMemoryError; ConfigError if its slots could not be numbered in int32."""
    pages, own = size.stored
    if pages * page_size > 2**31 - 1:
        raise ConfigError(
            f"a KV pool of {pages * page_size} slots is too large (limit 2**31 - 1); lower max_total_tokens"
        )
    try:
        return init_kv(spec, pages, page_size, dtype, device, own)
    except (OSError, MemoryError, torch.OutOfMemoryError) as error:
        raise OutOfMemoryError(
            f"no memory for a KV pool of {pool_bytes(spec, size, page_size, dtype) / 2**20:.0f} MiB on {device}: "
            f"{error}; lower cache.max_total_tokens"
        ) from error


def pool_bytes(spec: ModelSpec, size: PoolSize, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values. Pure."""
    pages, own = size.stored
    layers = len(spec.window_layers) if own else 0
    each = kv_bytes_per_token(spec, dtype) * page_size // spec.num_layers
    return each * (pages * (spec.num_layers - layers) + own * layers)
