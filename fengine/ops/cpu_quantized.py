"""Products with weights in few bits on the CPU: cpu_quantized.c through ctypes, under the rules of cpu.py."""

import torch
from torch import Tensor

from fengine.ops.cpu_library import KIND, no_room, plain, readable, schedule

KINDS = ("int4", "int8", "fp8", "fp4")


def quantized_linear(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, index: Tensor | None, n: int, group: int, kind: str,
    dtype: torch.dtype, bias: Tensor | None, out_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """x [T, K] @ w.T + bias -> [T, n].

    packed: 4 bits int32 [B, ceil(K/8), 32], 8 bits uint8 [B, K, 32]; scale, zero [B, G, 32]; B blocks of 32 outputs,
    an even number. dtype: bfloat16 or float16.
    """
    x, (m, k) = plain(x, "quantized_linear's x"), x.shape
    y = x.new_empty((m, n))
    library, threads = schedule(2 * m * n * k)
    bias = None if bias is None else readable(bias, "quantized_linear's bias")
    at = [None if t is None else t.data_ptr() for t in (zero, index, bias)]
    bias_kind = 0 if bias is None else KIND[bias.dtype]
    if library.fengine_quantized_linear(
        x.data_ptr(), packed.data_ptr(), scale.data_ptr(), *at, y.data_ptr(), m, n, k, scale.shape[1], group,
        KINDS.index(kind), KIND[dtype], bias_kind, threads,
    ):  # fmt: skip
        raise no_room("quantized_linear")
    return y if out_dtype is None or out_dtype == torch.float32 else y.to(out_dtype)
