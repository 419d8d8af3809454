"""The ops on the CPU: C kernels through ctypes. Each function allocates its outputs; none keeps anything.

Activations and KV pages are float32, integers int32 (seeds int64); weights are float32, bfloat16 or float16 and are
widened in registers. A non-contiguous input is copied first. Bits do not depend on the number of threads, nor on the
compiler, nor on AVX2, AVX-512 or NEON.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from fengine.errors import UnsupportedFeatureError
from fengine.ops import kv_fp8
from fengine.ops.cpu_library import KIND, no_room, plain, readable, schedule

LANES = 32  # outputs side by side in a packed weight


def linear(x: Tensor, packed: Tensor, n: int, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """x [T, K] @ w.T + bias -> [T, n]; packed [ceil(n/32), K, 32]."""
    x = plain(x, "linear's x")
    packed = readable(packed, "linear's weight")
    m, k = x.shape
    y = x.new_empty((m, n))
    library, threads = schedule(m * n * k)
    bias_at, bias_kind = None, 0
    if bias is not None:
        bias = readable(bias, "linear's bias")
        bias_at, bias_kind = bias.data_ptr(), KIND[bias.dtype]
    if library.fengine_linear(
        x.data_ptr(), packed.data_ptr(), bias_at, y.data_ptr(), m, n, k, KIND[packed.dtype], bias_kind, threads
    ):
        raise no_room("linear")
    return y if out_dtype is None or out_dtype == torch.float32 else y.to(out_dtype)


linear_fast = linear  # nothing is gained by another order of summation


def gated_linear(x: Tensor, packed: Tensor, n: int, bias: Tensor | None) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T) -> [T, n]; packed holds 2n outputs, gate first."""
    x, packed = plain(x, "gated_linear's x"), readable(packed, "gated_linear's weight")
    m, k = x.shape
    y = x.new_empty((m, n))
    library, threads = schedule(m * 2 * n * k)
    bias_at, bias_kind = None, 0
    if bias is not None:
        bias = readable(bias, "gated_linear's bias")
        bias_at, bias_kind = bias.data_ptr(), KIND[bias.dtype]
    if library.fengine_gated_linear(
        x.data_ptr(), packed.data_ptr(), bias_at, y.data_ptr(), m, n, k, KIND[packed.dtype], bias_kind, threads,
        schedule(16 * m * n)[1],
    ):  # fmt: skip
        raise no_room("gated_linear")
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    """x [..., D] -> (shift + weight) * x / rms(x)."""
    x = plain(x, "rms_norm's x")
    weight = readable(weight, "rms_norm's weight")
    d = x.shape[-1]
    y = torch.empty_like(x)
    library, threads = schedule(8 * x.numel())
    library.fengine_rms_norm(
        x.data_ptr(), None, weight.data_ptr(), y.data_ptr(), None, x.numel() // max(d, 1), d, KIND[weight.dtype], eps,
        shift, threads,
    )  # fmt: skip
    return y


def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, D] -> weight * (x - mean(x)) / deviation(x), plus the bias behind the weight in [2D]."""
    x, weight = plain(x, "layer_norm's x"), readable(weight, "layer_norm's weight")
    d = x.shape[-1]
    y = torch.empty_like(x)
    library, threads = schedule(12 * x.numel())
    library.fengine_layer_norm(
        x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // max(d, 1), d, KIND[weight.dtype], eps,
        weight.numel() > d, threads,
    )  # fmt: skip
    return y


def rows_rms_norm(
    packed: Tensor, index: Tensor, weight: Tensor, eps: float, shift: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(rms_norm(rows), rows) for rows `index` of a packed weight [ceil(n/32), K, 32], widened."""
    packed, weight = readable(packed, "the embeddings"), readable(weight, "rms_norm's weight")
    index = plain(index, "index", torch.int32)
    count, d = index.shape[0], packed.shape[1]
    y, rows = weight.new_empty((count, d), dtype=torch.float32), weight.new_empty((count, d), dtype=torch.float32)
    library, threads = schedule(16 * count * d)
    library.fengine_rows_rms_norm(
        packed.data_ptr(), index.data_ptr(), weight.data_ptr(), y.data_ptr(), rows.data_ptr(), count, d,
        KIND[packed.dtype], KIND[weight.dtype], eps, shift, threads,
    )  # fmt: skip
    return y, rows


def add_rms_norm(
    delta: Tensor, residual: Tensor, weight: Tensor, eps: float, shift: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(rms_norm(residual + delta), residual + delta)."""
    delta, residual = plain(delta, "add_rms_norm's delta"), plain(residual, "add_rms_norm's residual")
    weight = readable(weight, "add_rms_norm's weight")
    d = delta.shape[-1]
    y, total = torch.empty_like(delta), torch.empty_like(delta)
    library, threads = schedule(8 * delta.numel())
    library.fengine_rms_norm(
        delta.data_ptr(), residual.data_ptr(), weight.data_ptr(), y.data_ptr(), total.data_ptr(),
        delta.numel() // max(d, 1), d, KIND[weight.dtype], eps, shift, threads,
    )  # fmt: skip
    return y, total


def rope_kv_write_(
    qkv: Tensor, rope: Tensor, pos: Tensor, slot: Tensor, k_pages: Tensor, v_pages: Tensor, num_heads: int,
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float, shift: float = 0.0,
) -> Tensor:  # fmt: skip
    """Rotated q [T, H, K]. Modifies: slots `slot` of k_pages and v_pages, which must be contiguous.

    q_norm and k_norm are both given, in one dtype, or both None.
    """
    qkv, rope = plain(qkv, "rope's qkv"), plain(rope, "rope's table")
    pos, slot = plain(pos, "rope's pos", torch.int32), plain(slot, "rope's slot", torch.int32)
    few = kv_fp8.is_few(k_pages)
    if not (few or k_pages.dtype == torch.float32) or not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise UnsupportedFeatureError(f"KV pages are {k_pages.dtype}; on the CPU they must be contiguous float32")
    q_norm_at, k_norm_at, kind = None, None, 0
    if q_norm is not None and k_norm is not None:
        q_norm, k_norm = readable(q_norm, "q_norm"), readable(k_norm, "k_norm")
        if q_norm.dtype != k_norm.dtype:
            raise UnsupportedFeatureError(f"q_norm is {q_norm.dtype} and k_norm {k_norm.dtype}; they must be alike")
        q_norm_at, k_norm_at, kind = q_norm.data_ptr(), k_norm.data_ptr(), KIND[q_norm.dtype]
    tokens, (size, groups), width = qkv.shape[0], k_pages.shape[1:3], kv_fp8.width_of(k_pages)
    q = qkv.new_empty((tokens, num_heads, width))
    library, threads = schedule(8 * qkv.numel())
    library.fengine_rope_kv_write(
        qkv.data_ptr(), rope.data_ptr(), pos.data_ptr(), slot.data_ptr(), q.data_ptr(), k_pages.data_ptr(),
        v_pages.data_ptr(), q_norm_at, k_norm_at, tokens, num_heads, groups, width, size, kind, few, eps, shift,
        threads,
    )  # fmt: skip
    return q


def qkv_rope_write_(
    x: Tensor, packed: Tensor, bias: Tensor | None, rope: Tensor, pos: Tensor, slot: Tensor, k_pages: Tensor,
    v_pages: Tensor, num_heads: int, q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    """`linear` to the (H + 2G) K channels of q, k and v, then `rope_kv_write_`."""
    groups, width = k_pages.shape[2], kv_fp8.width_of(k_pages)
    qkv = linear(x, packed, (num_heads + 2 * groups) * width, bias, None)
    return rope_kv_write_(qkv, rope, pos, slot, k_pages, v_pages, num_heads, q_norm, k_norm, eps)


def attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, q_start: Tensor, kv_len: Tensor, page_table: Tensor, scale: float,
    causal: bool = True, window: int = 0, cap: float = 0.0, sinks: Tensor | None = None, last: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Paged attention -> [T, H, K]; tokens behind q_start[-1] give zeros."""
    few = kv_fp8.is_few(k_pages)
    stored = torch.uint8 if few else torch.float32
    q, k_pages, v_pages = (
        plain(q, "attention's q"),
        plain(k_pages, "k pages", stored),
        plain(v_pages, "v pages", stored),
    )
    q_start, kv_len = plain(q_start, "q_start", torch.int32), plain(kv_len, "kv_len", torch.int32)
    page_table = plain(page_table, "page_table", torch.int32)
    sinks = None if sinks is None else plain(sinks, "attention's sinks")
    last = None if last is None else plain(last, "attention's last", torch.int32)
    tokens, heads, width = q.shape
    rows, table_width = page_table.shape
    o = torch.empty_like(q)
    # The kernel knows how many keys there are, so it picks the threads; here only a bound on short calls is needed.
    library, _ = schedule(tokens * heads * width * table_width * k_pages.shape[1])
    if library.fengine_attention(
        q.data_ptr(), k_pages.data_ptr(), v_pages.data_ptr(), o.data_ptr(), q_start.data_ptr(), kv_len.data_ptr(),
        page_table.data_ptr(), tokens, rows, heads, k_pages.shape[2], width, k_pages.shape[1], table_width, window,
        causal, scale, cap, *(None if x is None else x.data_ptr() for x in (sinks, last)), few, torch.get_num_threads(),
    ):  # fmt: skip
        raise no_room("attention")
    return o


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap)."""
    x = plain(x, "soft_cap's x")
    y = torch.empty_like(x)
    library, threads = schedule(16 * x.numel())
    library.fengine_soft_cap(x.data_ptr(), y.data_ptr(), x.numel(), cap, threads)
    return y


def silu_mul(x: Tensor, act: int = 0, gated: bool = True) -> Tensor:
    """x [T, 2F] -> act(x[:, :F]) * x[:, F:]; not gated, x [T, F] -> act(x). The order of `act` is silu_mul.py's."""
    x = plain(x, "silu_mul's x")
    rows, f = x.shape[0], x.shape[1] // (1 + gated)
    y = x.new_empty((rows, f))
    library, threads = schedule(8 * x.numel())
    library.fengine_silu_mul(x.data_ptr(), y.data_ptr(), rows, f, act, gated, threads)
    return y


def activate(x: Tensor, act: int) -> Tensor:
    """x [T, F] -> act(x)."""
    return silu_mul(x, act, False)


def lora_linear(
    x: Tensor, packed: Tensor, n: int, bias: Tensor | None, exact: bool, a: Tensor, b: Tensor, scale: Tensor,
    rank: Tensor, widths: Sequence[int], token: Tensor, start: Tensor,
) -> Tensor:  # fmt: skip
    """`linear`, and the adapters on top: a [slots, P, R, K] and b [slots, N, R] as lora.py's Stack says."""
    y = linear(x, packed, n, bias, None)
    a, b = a.transpose(2, 3), b.transpose(1, 2)
    x = plain(x, "lora_linear's x")
    token, start = plain(token, "token", torch.int32), plain(start, "start", torch.int32)
    if any(t.dtype != torch.float32 or not t.is_contiguous() for t in (a[0], b[0])):
        raise UnsupportedFeatureError("on the CPU A and B of lora_linear must be float32, and lie as Stack says")
    _, parts, k, ranks = a.shape
    library, threads = schedule(token.shape[0] * ranks * (parts * k + n))
    if library.fengine_lora_add(
        y.data_ptr(), x.data_ptr(), a.data_ptr(), b.data_ptr(), scale.data_ptr(), rank.data_ptr(),
        (ctypes.c_int64 * parts)(*widths), token.data_ptr(), start.data_ptr(), start.shape[0] - 1, n, k, parts, ranks,
        a.stride(0), b.stride(0), scale.stride(0), rank.stride(0), threads,
    ):  # fmt: skip
        raise no_room("lora_linear")
    return y


def feed(token: Tensor, last_token: Tensor, index: Tensor, from_: Tensor) -> Tensor:
    """`token`, or where `from_` says so last_token[index]."""
    token, last_token = plain(token, "token", torch.int32), plain(last_token, "last_token", torch.int32)
    index, from_ = plain(index, "index", torch.int32), plain(from_, "from_", torch.bool)
    out, tokens = torch.empty_like(token), token.shape[0]
    schedule(tokens)[0].fengine_feed(
        token.data_ptr(), last_token.data_ptr(), index.data_ptr(), from_.data_ptr(), out.data_ptr(), tokens
    )
    return out


def take(x: Tensor, index: Tensor) -> Tensor:
    """Rows `index` of x."""
    x, index = plain(x, "take's x"), plain(index, "index", torch.int32)
    rows, d = index.shape[0], x.shape[1]
    out = x.new_empty((rows, d))
    schedule(rows * d)[0].fengine_take(x.data_ptr(), index.data_ptr(), out.data_ptr(), rows, d)
    return out


def hand_on_(token: Tensor, logprob: Tensor, last_token: Tensor, out: Tensor) -> None:
    """Modifies: the first R of last_token; out [2, R]: tokens and the bits of the logprobs."""
    last_token[: token.shape[0]] = token
    out.copy_(torch.stack((token, logprob.view(torch.int32))))


# The same functions under the names of the ops that pass their last arguments.
bounded_attention = attention
shifted_rms_norm, shifted_add_rms_norm, shifted_rows_rms_norm = rms_norm, add_rms_norm, rows_rms_norm
shifted_rope_kv_write_ = rope_kv_write_
