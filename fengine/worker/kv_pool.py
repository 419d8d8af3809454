"""How many pages the KV pool has, and the state that holds them."""

import torch

from fengine.config import EngineConfig
from fengine.errors import ConfigError, OutOfMemoryError
from fengine.models.kv_state import KVState, init_kv
from fengine.models.spec import ModelSpec
from fengine.worker.device import device_of

CPU_POOL_BYTES = 512 << 20  # the default KV pool on a CPU
CUDA_MARGIN = 2 << 30  # bytes left free: graphs themselves, library workspaces, prompt logprobs


def kv_bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Keys and values of all layers."""
    head = spec.head_dim + 1 if spec.few_kv else spec.head_dim * dtype.itemsize
    return 2 * spec.num_layers * spec.num_kv_heads * head


def pool_pages(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    rows: int,
    context: int,
    activations: int = 0,
    beside: int = 0,
) -> int:
    """Pages of the pool, the null page included: asked for, or what fits with `beside` more bytes for each token.

    On CUDA that is all that `mem_fraction_static` leaves; by default all that is free but for the captured graphs,
    which share a memory pool of the largest step's `activations` (bytes), a step outside of graphs, the counts of drawn
    ids that penalties need, and a margin.
    Errors: OutOfMemoryError naming the knobs.
    """
    page_size = config.cache.page_size or 16
    most = rows * (-(-context // page_size))  # more could never be used at once
    asked = config.cache.max_total_tokens
    if asked is not None:
        return asked // page_size + 1
    per_page = (kv_bytes_per_token(spec, dtype) + beside) * page_size
    if device_of(config) == "cpu":
        fit = CPU_POOL_BYTES // per_page
    else:
        free, total = torch.cuda.mem_get_info(device_of(config))
        fraction = config.cache.mem_fraction_static
        margin = CUDA_MARGIN * (1 + config.lora.on)  # with adapters there are twice as many graphs
        counts = rows * spec.vocab_size * 4  # made for the first request with penalties
        reserve = 2 * activations + counts + margin if fraction is None else int((1 - fraction) * total)
        fit = (free - reserve) // per_page
    if fit < 1:
        raise OutOfMemoryError(
            f"no memory is left for the KV pool: one page of {page_size} tokens needs {per_page / 2**20:.1f} MiB. "
            "Raise cache.mem_fraction_static, set cache.max_total_tokens, or use a smaller model or dtype."
        )
    return min(fit, most) + 1


def new_pool(spec: ModelSpec, pages: int, page_size: int, dtype: torch.dtype, device: str) -> KVState:
    """A zeroed KV state. Errors: OutOfMemoryError; ConfigError if its slots could not be numbered in int32."""
    if pages * page_size > 2**31 - 1:
        raise ConfigError(
            f"a KV pool of {pages * page_size} slots is too large (limit 2**31 - 1); lower max_total_tokens"
        )
    try:
        return init_kv(spec, pages, page_size, dtype, device)
    except (OSError, MemoryError, torch.OutOfMemoryError) as error:
        size = kv_bytes_per_token(spec, dtype) * pages * page_size
        raise OutOfMemoryError(
            f"no memory for a KV pool of {size / 2**20:.0f} MiB on {device}: {error}; lower cache.max_total_tokens"
        ) from error
