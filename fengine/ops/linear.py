"""y = x @ w.T (+ bias).

Reduction tree: plain left to right over K, accumulated in fp32 from zero; the bias is added in fp32 after the sum, then
one rounding to the output dtype. On the tensor cores every tile shape, operand order and pipeline depth computes this
tree bit for bit as long as K is not split, so the schedule may follow the number of rows M. In fp32 the tree is a chain
of fused multiply-adds.

Packed weights: CUDA keeps w_NK as stored. The CPU wants blocks of 32 outputs side by side (its lanes run over n):
`[ceil(N/32), K, 32]`, zero padded.
"""
# pyright: reportInvalidTypeForm=false

from typing import NamedTuple

import torch
from torch import Tensor

from fengine.ops.registration import plain, register, shared_memory, tl, triton, wide

LANES = 32  # outputs per CPU block


def reference(x_TK: Tensor, packed: Tensor, n: int, bias_N: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """The math, in fp32 (fp64 where x is). Pure."""
    w_NK = packed if packed.dim() == 2 else packed.transpose(1, 2).reshape(-1, packed.shape[1])[:n]
    y_TN = wide(x_TK) @ w_NK.to(wide(x_TK).dtype).T
    if bias_N is not None:
        y_TN = y_TN + bias_N
    return y_TN.to(out_dtype or x_TK.dtype)


@triton.jit(do_not_specialize=["M"])
def linear_kernel(x_ptr, w_ptr, bias_ptr, y_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                  SWAP: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr, FEW: tl.constexpr,
                  EVEN: tl.constexpr):  # fmt: skip
    """One BM x BN tile of y. SWAP makes the weights the M side of the MMA, which suits few rows."""
    pid = tl.program_id(0)
    blocks_m = tl.cdiv(M, BM)
    # GROUP row blocks walk the columns together, so the weights they share are still in L2.
    group = pid // (GROUP * tl.cdiv(N, BN))
    first_m = group * GROUP
    group_m = min(blocks_m - first_m, GROUP)
    local = pid % (GROUP * tl.cdiv(N, BN))
    row = (first_m + local % group_m) * BM + tl.arange(0, BM)
    col = (local // group_m) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # Rows and columns behind the edge wrap around: their loads need no mask and their results are not stored. Not so
    # when FEW rows would be read again and again by every program at once.
    x_tile = x_ptr + (row % M).to(tl.int64)[:, None] * K + k[None, :]
    w_tile = w_ptr + (col % N).to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    for start in range(0, K, BK):
        if EVEN:
            x = tl.load(x_tile, mask=(row < M)[:, None], other=0.0) if FEW else tl.load(x_tile)
            w = tl.load(w_tile)
        else:
            x = tl.load(x_tile, mask=(row < M)[:, None] & (start + k < K)[None, :], other=0.0)
            w = tl.load(w_tile, mask=(start + k < K)[None, :], other=0.0)
        if SWAP:
            acc = tl.dot(w, x.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
        x_tile += BK
        w_tile += BK
    if SWAP:
        acc = acc.T
    if BIAS:
        acc += tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    y_tile = y_ptr + row.to(tl.int64)[:, None] * N + col[None, :]
    tl.store(y_tile, acc.to(y_ptr.dtype.element_ty), mask=(row < M)[:, None] & (col < N)[None, :])


class Schedule(NamedTuple):
    """How the tree is computed; free to differ per call, because the bits do not depend on it."""

    block_m: int
    block_n: int
    block_k: int
    swap: bool
    warps: int
    stages: int


# Found on an H200. The first entry with m <= largest M, n >= least N and k >= least K is taken.
FEW_ROWS = (
    (16, 20000, 0, Schedule(16, 64, 128, True, 4, 3)),
    (16, 9000, 0, Schedule(16, 64, 128, True, 4, 4)),
    (16, 5000, 0, Schedule(16, 64, 128, True, 4, 6)),
    (16, 0, 4096, Schedule(16, 32, 256, False, 2, 6)),
    (16, 0, 0, Schedule(16, 64, 128, True, 4, 6)),
    (32, 0, 0, Schedule(32, 64, 128, True, 4, 6)),
    (64, 5000, 0, Schedule(64, 64, 64, True, 4, 6)),
    (64, 0, 0, Schedule(64, 32, 128, False, 4, 6)),
    (128, 9000, 0, Schedule(128, 128, 64, True, 8, 5)),
    (128, 5000, 0, Schedule(128, 64, 64, True, 4, 6)),
    (128, 0, 0, Schedule(64, 64, 128, True, 4, 4)),
)
# More rows: from large tiles to small, the first with enough tiles for the device.
MANY_ROWS = (
    Schedule(256, 128, 64, True, 8, 3),
    Schedule(128, 128, 64, False, 4, 3),
    Schedule(64, 128, 64, False, 4, 5),
    Schedule(64, 64, 128, False, 4, 4),
)
FLOAT32 = (Schedule(16, 64, 32, False, 4, 2), Schedule(64, 64, 32, False, 4, 2))
FULL_DEVICE = 90  # tiles


def schedule(m: int, n: int, k: int, dtype: torch.dtype) -> Schedule:
    """The schedule for m rows of k inputs and n outputs. Pure."""
    if dtype == torch.float32:
        return FLOAT32[m > 16]
    for largest_m, least_n, least_k, few in FEW_ROWS:
        if m <= largest_m and n >= least_n and k >= least_k:
            return few
    for many in MANY_ROWS:
        if triton.cdiv(m, many.block_m) * triton.cdiv(n, many.block_n) >= FULL_DEVICE:
            return many
    return MANY_ROWS[-1]


def launch(x_TK: Tensor, w_NK: Tensor, n: int, bias_N: Tensor | None, out_dtype: torch.dtype | None,
           chosen: Schedule | None = None) -> Tensor:  # fmt: skip
    """Runs the kernel under `chosen`, by default the table's schedule."""
    x_TK = plain(x_TK)
    m, k = x_TK.shape
    y_TN = torch.empty(m, n, dtype=out_dtype or x_TK.dtype, device=x_TK.device)
    if m == 0:
        return y_TN
    s = chosen or schedule(m, n, k, x_TK.dtype)
    stages = s.stages
    if x_TK.is_cuda:
        per_stage = (s.block_m + s.block_n) * s.block_k * x_TK.element_size()
        stages = max(1, min(stages, shared_memory(x_TK.device.index) // per_stage))
    grid = (triton.cdiv(m, s.block_m) * triton.cdiv(n, s.block_n),)
    linear_kernel[grid](
        x_TK, w_NK, bias_N, y_TN, m, n, k, s.block_m, s.block_n, s.block_k, s.swap, 8, bias_N is not None,
        m < s.block_m, k % s.block_k == 0, num_warps=s.warps, num_stages=stages
    )  # fmt: skip
    return y_TN


def fake(x_TK: Tensor, packed: Tensor, n: int, bias_N: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    return x_TK.new_empty((x_TK.shape[0], n), dtype=out_dtype or x_TK.dtype)


_op = register("linear(Tensor x, Tensor packed, int n, Tensor? bias, ScalarType? out_dtype) -> Tensor", launch, fake)


def pack(w_NK: Tensor) -> Tensor:
    """The layout that `linear` reads on w's device (see the module docstring), once at load. Pure."""
    if w_NK.device.type != "cpu":
        return w_NK.contiguous()
    n, k = w_NK.shape
    blocks = -(-n // LANES)
    packed = w_NK.new_zeros(blocks * LANES, k)
    packed[:n] = w_NK
    return packed.reshape(blocks, LANES, k).transpose(1, 2).contiguous()


def rows(packed: Tensor, index_T: Tensor) -> Tensor:
    """Rows of the weight that `packed` was made from, [T, K] in its dtype: tied embeddings are stored once. Pure."""
    if packed.dim() == 2:
        return packed[index_T]
    return packed[index_T // LANES, :, index_T % LANES]


def linear(
    x_TK: Tensor, packed: Tensor, n: int, bias_N: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x @ w.T + bias as [T, n], in `out_dtype` (default: x's). `packed` comes from `pack`. Pure.

    CPU: x float32, weights and bias float32, bfloat16 or float16. CUDA: weights in x's dtype.
    """
    return _op(x_TK, packed, n, bias_N, out_dtype)
