"""A mixture of experts: each token's own top A of E gated products, weighted and added.

Reduction tree, for each token by itself, whatever the other tokens are:
  logits   the chain of linear.py over D, kept in fp32
  choice   the A experts first in order of (logit descending, id ascending); NaN comes first, so it is seen
  weights  exp(logit - largest) / sum, the sum over the chosen (`renormalise`) or over all experts: later half added to
           earlier half, again and again, over the ids padded with zeros to a power of two. With `sigmoid`: 1 / (1 +
           exp(-logit)), chosen by that + correction, over the sum of the chosen + 1e-20 or as it is. Then times `scale`
  expert   the trees of `gated_linear` and `linear` over its own weights; biases are added in fp32 after the sums
  parts    weight * fp32 sum of the down product, rounded to the output dtype once
  result   0 + the parts by ascending expert id in fp32, the shared expert's output last; one rounding. The output is
           first multiplied by 1 / (1 + exp(-gate)) and rounded, where there is a gate

Grouping, tile heights, sorting or none are schedules: no sum contains another token's term. Softmax over the chosen
logits is softmax over all, renormalised. Families: Qwen3-MoE (norm_topk_prob), Mixtral, Granite-MoE and gpt-oss
renormalise; Qwen2-MoE and OLMoE do not, unless norm_topk_prob says so; GLM-4.5 and DeepSeek-V3 choose by sigmoid with a
correction and a scale.

Weights are packed by linear.py's `pack`, which takes [E, 2F, D] (gate above up) and [E, D, F] as well. Those of w8a8.py
(`W8A8`, as `pack` makes it of matrices below each other) have its trees in place of linear.py's: x is rounded to e4m3
for the gated products, and these, rounded to the output dtype first, for the down products.

A rank of a group holds columns of every expert: of its gate and up, and of its down (columns.py). It computes halves
of the op: the gated products [T A, F] of a token's experts by ascending id, which are gathered; and its
columns of the result.
"""

from typing import Any

import torch
from einops import einsum, rearrange
from torch import Tensor

from fengine.ops import activations, w8a8
from fengine.ops import linear as linear_op
from fengine.ops.columns import Columns, Group, gather
from fengine.ops.cpu import contiguous, maybe, readable, schedule
from fengine.ops.experts_launch import Routing, Weights, launch
from fengine.ops.quantized import Quantized
from fengine.ops.registration import register, wide

ALPHA = 1.702  # of the clamped gate


def route_reference(logits_TE: Tensor, routing: Routing, correction_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(ids [T, A] ascending, their weights [T, A]) by the math. Pure."""
    score_TE = logits_TE.sigmoid() if routing.sigmoid else logits_TE.softmax(-1)
    by_TE = score_TE if routing.sigmoid else logits_TE
    by_TE = by_TE if correction_E is None else by_TE + correction_E
    id_TA = by_TE.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k].sort(dim=-1).values
    weight_TA = score_TE.gather(1, id_TA)
    if routing.renormalise:
        weight_TA = weight_TA / (weight_TA.sum(-1, keepdim=True) + 1e-20 * routing.sigmoid)
    return id_TA, weight_TA * routing.scale


def reference(x_TD: Tensor, logits_TE: Tensor, weights: Weights, routing: Routing, shared_TD: Tensor | None = None,
              gate_T1: Tensor | None = None, limit: float = 0.0) -> Tensor:  # fmt: skip
    """The math, over all experts of unpacked weights, in fp32 (fp64 where x is). Pure."""
    dtype = x_TD.dtype
    assert weights.gate_up is not None and weights.down is not None
    id_TA, weight_TA = route_reference(wide(logits_TE), routing, weights.correction)
    x_TD, gate_up_EFD, down_EDF = wide(x_TD), *(w.to(wide(x_TD).dtype) for w in (weights.gate_up, weights.down))
    both_ETF = einsum(x_TD, gate_up_EFD, "t d, e f d -> e t f")
    if weights.gate_up_bias is not None:
        both_ETF = both_ETF + rearrange(weights.gate_up_bias, "e f -> e 1 f")
    h_ETF = wide(_gated_reference(both_ETF.to(dtype), limit))
    y_ETD = einsum(h_ETF, down_EDF, "e t f, e d f -> e t d")
    if weights.down_bias is not None:
        y_ETD = y_ETD + rearrange(weights.down_bias, "e d -> e 1 d")
    total_TD = torch.zeros_like(x_TD)
    for expert, y_TD in enumerate(y_ETD):
        chosen_TA = id_TA == expert
        part_TD = (y_TD * rearrange(torch.where(chosen_TA, weight_TA, 0).sum(-1), "t -> t 1")).to(dtype)
        total_TD = torch.where(rearrange(chosen_TA.any(-1), "t -> t 1"), total_TD + part_TD, total_TD)
    if shared_TD is not None and gate_T1 is not None:
        shared_TD = (wide(shared_TD) * wide(gate_T1).sigmoid()).to(dtype)
    return (total_TD if shared_TD is None else total_TD + shared_TD).to(dtype)


def _gated_reference(x_ET2F: Tensor, limit: float) -> Tensor:
    if not limit:
        return rearrange(
            activations.reference(rearrange(x_ET2F, "e t f -> (e t) f")), "(e t) f -> e t f", e=len(x_ET2F)
        )
    gate, up = wide(x_ET2F).chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * (gate * (ALPHA * gate).sigmoid())).to(x_ET2F.dtype)


def on_cpu(
    x: Tensor, logits: Tensor, gate_up: Tensor | None, down: Tensor | None, shared: Tensor | None, gate: Tensor | None,
    correction: Tensor | None, gate_up_bias: Tensor | None, down_bias: Tensor | None, gate_up_scale: Tensor | None,
    down_scale: Tensor | None, group: int, down_group: int, top_k: int, renormalise: bool, sigmoid: bool, scale: float,
    limit: float, width: int,
) -> Tensor:  # fmt: skip
    """x [T, D], logits [T, E] -> [T, D]; gate_up [E, ceil(2F/32), D, 32], down [E, ceil(D/32), F, 32].

    Experts in few bits are dequantized when they are loaded: only those of w8a8.py have scales. Half of a rank: see
    above.
    """
    x, logits = contiguous(x, "experts' x"), contiguous(logits, "experts' logits")
    weights, scales = zip(*(of_matrices(*each) for each in ((gate_up, gate_up_scale), (down, down_scale))), strict=True)
    biases = [maybe(readable, bias, "experts' bias") for bias in (gate_up_bias, down_bias)]
    extras = [maybe(contiguous, t, "experts' shared, gate or correction") for t in (shared, gate, correction)]
    tokens, count = logits.shape
    d, f = x.shape[1] if gate_up is not None else width, width if down is None else down.shape[2]
    y = fake(x, logits, down, top_k, width)
    library, threads = schedule(tokens * top_k * 3 * d * f)
    if tokens:
        library.fengine_experts(
            x.data_ptr(), logits.data_ptr(), *(at for _, at, _ in (*weights, *extras, *biases, *scales)), y.data_ptr(),
            tokens, count, top_k, f, d, *(step for *_, step in scales), *(kind for *_, kind in (*weights, *biases)),
            renormalise, sigmoid, threads, scale, limit, schedule(16 * tokens * top_k * f)[1],
        )  # fmt: skip
    return y


def of_matrices(w: Tensor | None, scale: Tensor | None) -> tuple[tuple[Any, int | None, int], ...]:
    """As `cpu.maybe` gives it: of the weights, and of their scales, with the columns of one in place of the kind."""
    if w is None or scale is None:
        return maybe(readable, w, "experts' weights"), (None, None, 0)
    step, by_step = w8a8.tree_of(w.shape[2], scale.shape[2])
    return (w, w.data_ptr(), 0), (scale, scale.data_ptr(), step if by_step else 0)


def fake(x: Tensor, logits: Tensor, down: Tensor | None, top_k: int, width: int) -> Tensor:
    return x.new_empty((logits.shape[0] * (top_k if down is None else 1), width))


_op = register(
    "experts", launch, on_cpu, lambda x, logits, gate_up, down, *more: fake(x, logits, down, more[9], more[-1])
)


def weights_of(gate_up: linear_op.Leaf, down: linear_op.Leaf, gate_up_bias: Tensor | None, down_bias: Tensor | None,
               correction: Tensor | None) -> tuple[Weights, Group | None]:  # fmt: skip
    """The weights of two leaves, each whole or in few bits; and the group of which they are a rank's part. Pure."""
    ranks = gate_up.group if isinstance(gate_up, Columns) else None
    leaves: Any = [leaf.leaf if isinstance(leaf, Columns) else leaf for leaf in (gate_up, down)]
    gate_up_scale, down_scale = (getattr(leaf, "scale", None) for leaf in leaves)
    groups = (leaf.group if isinstance(leaf, Quantized) else 0 for leaf in leaves)
    biases = (gate_up_bias, down_bias, correction)
    return Weights(leaves[0].packed, leaves[1].packed, *biases, gate_up_scale, down_scale, *groups), ranks


def experts(x_TD: Tensor, logits_TE: Tensor, weights: Weights, routing: Routing, shared_TD: Tensor | None = None,
            gate_T1: Tensor | None = None, limit: float = 0.0, width: int = 0) -> Tensor:  # fmt: skip
    """The chosen experts' sum as [T, D], in x's dtype, plus `shared_TD` times the sigmoid of `gate_T1`. Pure.

    logits and gate: float32. `limit` > 0: an expert's gate and up are clamped, and their product is (up + 1) * gate *
    sigmoid(1.702 gate). `width`: the columns of the result where there is only half of the weights.
    """
    return _op(
        x_TD, logits_TE, weights.gate_up, weights.down, shared_TD, gate_T1, weights.correction, weights.gate_up_bias,
        weights.down_bias, weights.gate_up_scale, weights.down_scale, weights.group, weights.down_group,
        *routing, limit, width or x_TD.shape[1],
    )  # fmt: skip


def moe(
    x_TD: Tensor, router: linear_op.Leaf, weights: Weights, routing: Routing, router_bias_E: Tensor | None = None,
    shared_TD: Tensor | None = None, gate_T1: Tensor | None = None, limit: float = 0.0, ranks: Group | None = None,
    size: int = 0,
) -> Tensor:  # fmt: skip
    """The whole block: `experts` of the logits x @ router.T + bias in float32. Pure.

    `ranks`: the weights are a rank's columns of every expert, which has `size` columns in all between its products.
    """
    logits_TE = linear_op.linear(x_TD, router, router_bias_E, out_dtype=torch.float32)
    if ranks is None:
        return experts(x_TD, logits_TE, weights, routing, shared_TD, gate_T1, limit)
    first, last = weights.halves()
    h_PF = gather(experts(x_TD, logits_TE, first, routing, limit=limit, width=size // ranks.size), size, ranks)
    d = x_TD.shape[1] // ranks.size
    shared_TD = None if shared_TD is None else shared_TD.narrow(1, ranks.rank * d, d)
    return gather(experts(h_PF, logits_TE, last, routing, shared_TD, gate_T1, width=d), x_TD.shape[1], ranks)
