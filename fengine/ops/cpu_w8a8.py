"""Products of e4m3 activations and weights on the CPU: cpu_w8a8.c through ctypes, under the rules of cpu.py."""

import torch
from torch import Tensor

from fengine.ops.cpu_library import KIND, no_room, plain, readable, schedule


def e4m3_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """(the nearest e4m3 numbers, as float32, of x [T, K] over its scales; the scales [T, groups])."""
    x, (m, k) = plain(x, "w8a8_linear's x"), x.shape
    q, scale = torch.empty_like(x), x.new_empty((m, -(-k // group)))
    library, threads = schedule(8 * x.numel())
    library.fengine_e4m3_rows(x.data_ptr(), q.data_ptr(), scale.data_ptr(), m, k, group, threads)
    return q, scale


def w8a8_linear(
    x: Tensor, packed: Tensor, scale: Tensor, n: int, step: int, by_step: bool, bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """x [T, K] in e4m3 @ w.T + bias -> [T, n]; packed uint8 [B, K, 32], scale [B, steps or 1, 32] of B blocks."""
    (m, k), bias_kind = x.shape, 0
    q, x_scale = e4m3_rows(x, step if by_step else max(k, 1))
    y = x.new_empty((m, n))
    library, threads = schedule(m * n * k)
    if bias is not None:
        bias = readable(bias, "w8a8_linear's bias")
        bias_kind = KIND[bias.dtype]
    if library.fengine_w8a8_linear(
        q.data_ptr(), x_scale.data_ptr(), packed.data_ptr(), scale.data_ptr(), None if bias is None else
        bias.data_ptr(), y.data_ptr(), m, n, k, step, by_step, bias_kind, threads,
    ):  # fmt: skip
        raise no_room("w8a8_linear")
    return y if out_dtype is None or out_dtype == torch.float32 else y.to(out_dtype)
