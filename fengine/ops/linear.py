"""y = x @ w.T (+ bias), and the gated product of an MLP: act(x @ gate.T) * (x @ up.T).

Reduction tree: plain left to right over K, accumulated in fp32 from zero; the bias is added in fp32 after the sum, then
one rounding to the output dtype. On the tensor cores every tile shape, operand order and pipeline depth computes this
tree bit for bit as long as K is not split, so the schedule may follow the number of rows M. In fp32 the tree is a chain
of fused multiply-adds. The gated product rounds both sums to the output dtype first, as two ops would.

Schedules (linear_launch.py): our kernel under a table of tile shapes, its specialised form for Hopper
(linear_hopper.py), and the library (cuBLAS), which computes the same tree for many sizes.

Packed weights: CUDA keeps w_NK as stored. The CPU wants blocks of 32 outputs side by side (its lanes run over n):
`[ceil(N/32), K, 32]`, zero padded."""

from typing import Any, NamedTuple, Protocol

import torch
from einops import rearrange
from torch import Tensor

from fengine.ops import activations
from fengine.ops.activations import ACTS
from fengine.ops.cpu import KIND, LANES, contiguous, maybe, readable, rounded, schedule
from fengine.ops.e4m3 import Rows
from fengine.ops.linear_launch import fake, fast_launch, gated_launch, launch
from fengine.ops.registration import register, wide


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


def on_cpu(x: Tensor, packed: Tensor, n: int, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    x, packed, (m, k) = contiguous(x, "linear's x"), readable(packed, "linear's weight"), x.shape
    y = x.new_empty((m, n))
    library, threads = schedule(m * n * k)
    bias, bias_at, bias_kind = maybe(readable, bias, "linear's bias")
    library.fengine_linear(
        x.data_ptr(), packed.data_ptr(), bias_at, y.data_ptr(), m, n, k, KIND[packed.dtype], bias_kind, threads
    )
    return rounded(y, out_dtype)


def gated_on_cpu(x: Tensor, packed: Tensor, n: int, bias: Tensor | None, act: int = 0) -> Tensor:
    x, packed, (m, k) = contiguous(x, "gated_linear's x"), readable(packed, "gated_linear's weight"), x.shape
    y = x.new_empty((m, n))
    library, threads = schedule(m * 2 * n * k)
    bias, bias_at, bias_kind = maybe(readable, bias, "gated_linear's bias")
    library.fengine_gated_linear(
        x.data_ptr(), packed.data_ptr(), bias_at, y.data_ptr(), m, n, k, KIND[packed.dtype], bias_kind, act, threads,
        schedule(16 * m * n)[1],
    )  # fmt: skip
    return y


_op = register("linear", launch, on_cpu, fake)
_fast_op = register("linear_fast", fast_launch, on_cpu, fake)
_gated_op = register(
    "gated_linear", gated_launch, gated_on_cpu, lambda x, packed, n, bias, act=0: fake(x, packed, n, bias, None)
)


class Dense(NamedTuple):
    """A matrix of N x K weights as stored: the plain kind of leaf. Made by `pack`; [E, N, K] for stacked experts."""

    packed: Tensor
    n: int

    @property
    def dtype(self) -> torch.dtype:
        return self.packed.dtype

    x_group = 0

    def linear(
        self, x_TK: Tensor, bias_N: Tensor | None, adapters: Any, out_dtype: torch.dtype | None, exact: bool
    ) -> Tensor:
        return (_op if exact else _fast_op)(x_TK, self.packed, self.n, bias_N, out_dtype)

    def gated(self, x_TK: Tensor, bias_N: Tensor | None, adapters: Any, exact: bool, act: str, group: int) -> Tensor:
        return _gated_op(x_TK, self.packed, self.n // 2, bias_N, *((ACTS.index(act),) if act != "silu" else ()))


class Leaf(Protocol):
    """A weight that knows how to multiply: `linear` and `gated` are the functions below, of it. Pure. Another kind of
    leaf (adapted, quantized) is another op behind `linear`."""

    @property
    def x_group(self) -> int:
        """Not 0: it multiplies `e4m3.Rows` with a scale for so many columns, and makes such of other inputs itself."""
        ...

    def linear(
        self, x_TK: Any, bias_N: Tensor | None, adapters: Any, out_dtype: torch.dtype | None, exact: bool
    ) -> Tensor: ...

    def gated(self, x_TK: Any, bias_N: Tensor | None, adapters: Any, exact: bool, act: str, group: int) -> Any: ...


def in_two(leaf: Leaf, x_TK: Any, bias_N: Tensor | None, adapters: Any, exact: bool, act: str, group: int) -> Any:
    """`gated_linear` in two ops, with the same bits. Pure."""
    return activations.silu_mul(leaf.linear(x_TK, bias_N, adapters, None, exact), act, group)


def pack(w_NK: Tensor) -> Dense:
    """The layout that `linear` reads on w's device (see the module docstring), once at load. Pure."""
    n = w_NK.shape[-2]
    if w_NK.device.type != "cpu":
        return Dense(w_NK.contiguous(), n)
    padded = torch.nn.functional.pad(w_NK, (0, 0, 0, -n % LANES))
    return Dense(rearrange(padded, "... (block lane) k -> ... block k lane", lane=LANES).contiguous(), n)


def unpack(w: Dense) -> Tensor:
    return w.packed if w.packed.device.type != "cpu" else unpacked(w.packed, w.n)


def linear(
    x_TK: Tensor | Rows, w: Leaf, bias_N: Tensor | None = None, adapters: Any = None,
    out_dtype: torch.dtype | None = None, exact: bool = True,
) -> Tensor:  # fmt: skip
    """x @ w.T + bias as [T, N], in `out_dtype` (default: x's). Pure.

    CPU: x float32, weights and bias float32, bfloat16 or float16. CUDA: weights in x's dtype. `adapters`: the tokens
    with LoRA adapters, which an adapted leaf adds. With `exact` False any library may take any order of summation, and
    a row's bits may depend on the other rows. Only a leaf with an `x_group` takes rows in e4m3."""
    return w.linear(x_TK, bias_N, adapters, out_dtype, exact)


def gated_linear(
    x_TK: Tensor | Rows, w: Leaf, bias_N: Tensor | None = None, adapters: Any = None, exact: bool = True,
    act: str = "silu", group: int = 0,
) -> Any:  # fmt: skip
    """act(x @ gate.T) * (x @ up.T) as [T, N/2], in x's dtype; `w` holds gate above up. Pure. `group`: of the leaf that
    takes the product, which may come as such rows."""
    return w.gated(x_TK, bias_N, adapters, exact, act, group)
