"""y = x @ w.T (+ bias), and the gated product of an MLP: silu(x @ gate.T) * (x @ up.T).

Reduction tree: plain left to right over K, accumulated in fp32 from zero; the bias is added in fp32 after the sum, then
one rounding to the output dtype. On the tensor cores every tile shape, operand order and pipeline depth computes this
tree bit for bit as long as K is not split, so the schedule may follow the number of rows M. In fp32 the tree is a chain
of fused multiply-adds. The gated product rounds both sums to the output dtype first, as two ops would.

Schedules: our kernel under a table of tile shapes, its specialised form for Hopper (linear_hopper.py), and the library
(cuBLAS), which computes the same tree for many sizes. One is chosen at run time, by M, and used only where it was
proved equal on this machine (see proof.py); where none was, the reference schedule computes.

Packed weights: CUDA keeps w_NK as stored. The CPU wants blocks of 32 outputs side by side (its lanes run over n):
`[ceil(N/32), K, 32]`, zero padded.
"""
# pyright: reportInvalidTypeForm=false

from typing import Any, NamedTuple, Protocol

import torch
from einops import rearrange
from torch import Tensor

from fengine.ops import linear_hopper, silu_mul
from fengine.ops.ahead import launcher
from fengine.ops.cpu import LANES
from fengine.ops.linear_kernels import linear_kernel
from fengine.ops.linear_schedules import LIBRARY, REFERENCE, Schedule, gated_schedules, schedules
from fengine.ops.proof import captured, proofs
from fengine.ops.registration import (
    dependent_launch,
    multiprocessors,
    plain,
    register,
    shared_memory,
    triton,
    wide,
)


def unpacked(packed: Tensor, n: int) -> Tensor:
    """[..., N, K] from the blocks of the CPU's layout. Pure."""
    return rearrange(packed, "... block k lane -> ... (block lane) k")[..., :n, :]


def reference(x_TK: Tensor, packed: Tensor, n: int, bias_N: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """The math, in fp32 (fp64 where x is). Pure."""
    w_NK = packed if packed.dim() == 2 else unpacked(packed, n)
    y_TN = wide(x_TK) @ w_NK.to(wide(x_TK).dtype).T
    if bias_N is not None:
        y_TN = y_TN + bias_N
    return y_TN.to(out_dtype or x_TK.dtype)


def run(x_TK: Tensor, w_NK: Tensor, n: int, bias_N: Tensor | None, out_dtype: torch.dtype | None,
        s: Schedule, gated: bool = False) -> Tensor:  # fmt: skip
    """Computes the product under schedule `s`. Pure."""
    if s == LIBRARY:
        return library(x_TK, w_NK, bias_N, out_dtype)
    m, k = x_TK.shape
    y_TN = torch.empty(m, n, dtype=out_dtype or x_TK.dtype, device=x_TK.device)
    if s.hopper:
        linear_hopper.launch(x_TK, w_NK, bias_N, y_TN, gated, s.block_m, s.block_n, s.stages)
        return y_TN
    stages = s.stages
    if x_TK.is_cuda:
        per_stage = (s.block_m + s.block_n * (1 + gated)) * s.block_k * x_TK.element_size()
        stages = max(1, min(stages, shared_memory(x_TK.device.index) // per_stage))
    grid = (triton.cdiv(m, s.block_m) * triton.cdiv(n, s.block_n),)
    ahead = s.ahead if s.ahead <= k and k % 8 == 0 else 0  # the copy engine wants 16-byte aligned rows
    launcher(linear_kernel, grid)(
        x_TK, w_NK, bias_N, y_TN, m, n, k, s.block_m, s.block_n, s.block_k, s.swap, 8, bias_N is not None,
        m < s.block_m, k % s.block_k == 0, gated, ahead, max(32 * s.warps // s.block_n, 1),
        num_warps=s.warps, num_stages=stages, **dependent_launch(x_TK.device.index, s.trigger)
    )  # fmt: skip
    return y_TN


def library(x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """The product by torch's own matrix multiplication. Pure."""
    if out_dtype is None or out_dtype == x_TK.dtype:
        return torch.mm(x_TK, w_NK.T) if bias_N is None else torch.addmm(bias_N, x_TK, w_NK.T)
    y_TN = torch.mm(x_TK, w_NK.T, out_dtype=out_dtype)
    return y_TN if bias_N is None else y_TN + bias_N


def proved(x_TK: Tensor, w_NK: Tensor, n: int, bias_N: Tensor | None, out_dtype: torch.dtype | None,
           s: Schedule, gated: bool = False) -> bool:  # fmt: skip
    """Whether `s` gives the bits of REFERENCE for these sizes on this device; compared once, with random x."""
    if s == REFERENCE or not x_TK.is_cuda:  # without a device only our own kernel runs, in Triton's interpreter
        return s != LIBRARY
    m, k = x_TK.shape
    known = proofs(x_TK.device.index)
    key = f"linear {x_TK.dtype} {out_dtype} {bias_N is not None} {gated} {m}x{n}x{k} {tuple(s)}"
    if torch.cuda.is_current_stream_capturing():  # no time to compare; warm-up has asked before
        return known.known.get(key, False)

    def compare() -> bool:
        try:
            return _compare(x_TK, w_NK, n, bias_N, out_dtype, s, gated)
        except Exception:
            if s.hopper:  # an experimental compiler: whatever it says, the schedule is not for this machine
                return False
            raise

    return known.holds(key, compare)


COMPARED = 1 << 16  # elements at least: where K is split otherwise, some in 1,000 differ after rounding


def _compare(x_TK: Tensor, w_NK: Tensor, n: int, bias_N: Tensor | None, out_dtype: torch.dtype | None,
             s: Schedule, gated: bool) -> bool:  # fmt: skip
    """Random rows under both schedules, called as they are used: by themselves, and inside a captured graph."""
    m, k = x_TK.shape
    draws = max(1, COMPARED // (m * n))
    generator = torch.Generator(x_TK.device).manual_seed(m)
    x_XTK = torch.randn(draws, m, k, device=x_TK.device, generator=generator).to(x_TK.dtype)

    def product(x_TK: Tensor, s: Schedule, gated: bool) -> Tensor:
        return run(plain(x_TK), w_NK, n, bias_N, out_dtype, s, gated)

    want = [run(plain(x), w_NK, n * (1 + gated), bias_N, out_dtype, REFERENCE) for x in x_XTK]
    want_XTN = torch.stack([silu_mul.launch(y) for y in want] if gated else want)
    if not torch.equal(want_XTN, torch.stack([product(x, s, gated) for x in x_XTK])):
        return False
    captured_XTN = captured(lambda: torch.stack([product(x, s, gated) for x in x_XTK]))
    reacts = bool((want_XTN != want_XTN[:1, :1, :1]).any())  # equal results of weights that are all zero prove nothing
    return torch.equal(want_XTN, captured_XTN) and reacts


def hopper_processors(x_TK: Tensor, w_NK: Tensor, out_dtype: torch.dtype | None) -> int | None:
    """Number of multiprocessors of x's device if the Hopper kernel can run there."""
    if out_dtype in (None, x_TK.dtype) and linear_hopper.usable(x_TK, w_NK):
        return multiprocessors(x_TK.device.index)
    return None


def choose(x_TK: Tensor, w_NK: Tensor, n: int, bias_N: Tensor | None, out_dtype: torch.dtype | None) -> Schedule:
    """The first schedule in order of speed that is proved on this device."""
    m, k = x_TK.shape
    for s in schedules(m, n, k, x_TK.dtype, hopper_processors(x_TK, w_NK, out_dtype)):
        if proved(x_TK, w_NK, n, bias_N, out_dtype, s):
            return s
    return REFERENCE


def launch(x_TK: Tensor, w_NK: Tensor, n: int, bias_N: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    x_TK = plain(x_TK)
    if x_TK.shape[0] == 0:
        return fake(x_TK, w_NK, n, bias_N, out_dtype)
    return run(x_TK, w_NK, n, bias_N, out_dtype, choose(x_TK, w_NK, n, bias_N, out_dtype))


def fake(x_TK: Tensor, packed: Tensor, n: int, bias_N: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    return x_TK.new_empty((x_TK.shape[0], n), dtype=out_dtype or x_TK.dtype)


def fast_launch(x_TK: Tensor, w_NK: Tensor, n: int, bias_N: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """Any schedule, proved or not: what exactness costs is measured against this."""
    m, k = x_TK.shape
    if m == 0 or x_TK.dtype == torch.float32:
        return launch(x_TK, w_NK, n, bias_N, out_dtype)
    few = m <= 16 and k < 4 * n  # the library splits K there
    return run(plain(x_TK), w_NK, n, bias_N, out_dtype, schedules(m, n, k, x_TK.dtype)[-1] if few else LIBRARY)


def gated_launch(x_TK: Tensor, w_NK: Tensor, n: int, bias_N: Tensor | None) -> Tensor:
    """One kernel where that is faster than a product and silu_mul, and proved."""
    x_TK = plain(x_TK)
    if x_TK.shape[0]:
        for s in gated_schedules(x_TK.shape[0], n, x_TK.dtype, hopper_processors(x_TK, w_NK, None)):
            if proved(x_TK, w_NK, n, bias_N, None, s, gated=True):
                return run(x_TK, w_NK, n, bias_N, None, s, gated=True)
    return silu_mul.launch(launch(x_TK, w_NK, 2 * n, bias_N, None))


def gated_fake(x_TK: Tensor, packed: Tensor, n: int, bias_N: Tensor | None) -> Tensor:
    return x_TK.new_empty((x_TK.shape[0], n))


_op = register("linear(Tensor x, Tensor packed, int n, Tensor? bias, ScalarType? out_dtype) -> Tensor", launch, fake)
_fast_op = register(
    "linear_fast(Tensor x, Tensor packed, int n, Tensor? bias, ScalarType? out_dtype) -> Tensor", fast_launch, fake
)
_gated_op = register("gated_linear(Tensor x, Tensor packed, int n, Tensor? bias) -> Tensor", gated_launch, gated_fake)


class Dense(NamedTuple):
    """A matrix of N x K weights as stored: the plain kind of leaf. Made by `pack`; [E, N, K] for stacked experts."""

    packed: Tensor
    n: int

    @property
    def dtype(self) -> torch.dtype:
        return self.packed.dtype

    def linear(
        self, x_TK: Tensor, bias_N: Tensor | None, adapters: Any, out_dtype: torch.dtype | None, exact: bool
    ) -> Tensor:
        """As `linear`, for which see below. Pure."""
        return (_op if exact else _fast_op)(x_TK, self.packed, self.n, bias_N, out_dtype)

    def plain(self, adapters: Any) -> "Dense | None":
        """Itself: what kernels of several ops in one may read in place of `linear`."""
        return self


class Leaf(Protocol):
    """A weight that knows how to multiply. Another kind of leaf (adapted, quantized) is another op behind `linear`."""

    def linear(
        self, x_TK: Tensor, bias_N: Tensor | None, adapters: Any, out_dtype: torch.dtype | None, exact: bool
    ) -> Tensor: ...

    def plain(self, adapters: Any) -> Dense | None: ...


def pack(w_NK: Tensor) -> Dense:
    """The layout that `linear` reads on w's device (see the module docstring), once at load. Pure."""
    n = w_NK.shape[-2]
    if w_NK.device.type != "cpu":
        return Dense(w_NK.contiguous(), n)
    padded = torch.nn.functional.pad(w_NK, (0, 0, 0, -n % LANES))
    return Dense(rearrange(padded, "... (block lane) k -> ... block k lane", lane=LANES).contiguous(), n)


def unpack(w: Dense) -> Tensor:
    """The inverse of `pack`. Pure."""
    return w.packed if w.packed.device.type != "cpu" else unpacked(w.packed, w.n)


def linear(
    x_TK: Tensor, w: Leaf, bias_N: Tensor | None = None, adapters: Any = None, out_dtype: torch.dtype | None = None,
    exact: bool = True,
) -> Tensor:  # fmt: skip
    """x @ w.T + bias as [T, N], in `out_dtype` (default: x's). Pure.

    CPU: x float32, weights and bias float32, bfloat16 or float16. CUDA: weights in x's dtype. `adapters`: the tokens
    with LoRA adapters, which an adapted leaf adds. With `exact` False any library may take any order of summation, and
    a row's bits may depend on the other rows.
    """
    return w.linear(x_TK, bias_N, adapters, out_dtype, exact)


def gated_linear(
    x_TK: Tensor, w: Leaf, bias_N: Tensor | None = None, adapters: Any = None, exact: bool = True,
    act: str = "silu",
) -> Tensor:  # fmt: skip
    """act(x @ gate.T) * (x @ up.T) as [T, N/2], in x's dtype; `w` holds gate above up. Pure."""
    dense = w.plain(adapters) if act == "silu" else None
    if dense is None:  # the same bits in two ops
        return silu_mul.silu_mul(w.linear(x_TK, bias_N, adapters, None, exact), act)
    return _gated_op(x_TK, dense.packed, dense.n // 2, bias_N)
