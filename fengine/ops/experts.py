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

Weights are packed by linear.py's `pack`, which takes [E, 2F, D] (gate above up) and [E, D, F] as well.

A rank of a group holds columns of every expert: of its gate and up, and of its down (columns.py). It computes halves
of the op: the gated products [T A, F] of a token's experts by ascending id, which are gathered; and its
columns of the result.
"""

from typing import Any

import torch
from einops import einsum, rearrange
from torch import Tensor

from fengine.ops import cpu_experts, experts_hopper, quantized_hopper, silu_mul
from fengine.ops import linear as linear_op
from fengine.ops.columns import Columns, Group, gather
from fengine.ops.experts_launch import Call, Routing, Weights, run
from fengine.ops.experts_schedules import REFERENCE, FewBits, Schedule, schedules
from fengine.ops.proof import captured, proofs
from fengine.ops.quantized import Quantized
from fengine.ops.registration import plain, register, wide

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
        return rearrange(silu_mul.reference(rearrange(x_ET2F, "e t f -> (e t) f")), "(e t) f -> e t f", e=len(x_ET2F))
    gate, up = wide(x_ET2F).chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * (gate * (ALPHA * gate).sigmoid())).to(x_ET2F.dtype)


def proved(call: Call, s: Schedule | FewBits) -> bool:
    """Whether `s` gives the bits of REFERENCE on this device; compared once for these sizes of the experts.

    The kernels are ours and do not change with the number of tokens: one number stands for all.
    """
    if s == REFERENCE or not call.x_TD.is_cuda:
        return True
    known = proofs(call.x_TD.device.index)
    there = [x is not None for x in (*call.weights[:-1], call.shared_TD, call.gate_T1)]
    key = f"experts {call.x_TD.dtype} {call.sizes[1:]} {call.routing} {there} {call.limit > 0} {call.weights.group} {s}"
    if torch.cuda.is_current_stream_capturing():  # no time to compare; warm-up has asked before
        return known.known.get(key, False)

    def compare() -> bool:
        try:
            return _compare(call, s)
        except Exception:
            if isinstance(s, FewBits) or s.kind != "grouped":  # whatever a compiler says, it is not for this machine
                return False
            raise

    return known.holds(key, compare)


COMPARED = 1 << 16  # elements at least


def _compare(call: Call, s: Schedule | FewBits) -> bool:
    """Random tokens under both schedules: by themselves, and inside a captured graph."""
    t, e, *_ = call.sizes
    draws, device = max(1, COMPARED // call.x_TD.numel()), call.x_TD.device
    generator = torch.Generator(device).manual_seed(t)
    x_XTD = torch.randn(draws, *call.x_TD.shape, device=device, generator=generator).to(call.x_TD.dtype)
    logits_XTE = torch.randn(draws, t, e, device=device, generator=generator)

    def results(s: Schedule | FewBits) -> Tensor:
        pairs = zip(x_XTD, logits_XTE, strict=True)
        return torch.stack([run(call._replace(x_TD=plain(x), logits_TE=plain(z)), s) for x, z in pairs])

    want_XTD = results(REFERENCE)
    if not torch.equal(want_XTD, results(s)):
        return False
    reacts = bool((want_XTD != want_XTD[:1, :1, :1]).any())  # results of weights that are all zero prove nothing
    return torch.equal(want_XTD, captured(lambda: results(s))) and reacts


def launch(
    x: Tensor, logits: Tensor, gate_up: Tensor | None, down: Tensor | None, shared: Tensor | None, gate: Tensor | None,
    correction: Tensor | None, gate_up_bias: Tensor | None, down_bias: Tensor | None, gate_up_scale: Tensor | None,
    down_scale: Tensor | None, group: int, top_k: int, renormalise: bool, sigmoid: bool, scale: float, limit: float,
    width: int,
) -> Tensor:  # fmt: skip
    x, logits = plain(x), plain(logits)
    shared, gate = (None if t is None else plain(t) for t in (shared, gate))
    if x.shape[0] == 0:
        return x.new_empty((0, width))
    weights = Weights(gate_up, down, gate_up_bias, down_bias, correction, gate_up_scale, down_scale, group)
    call = Call(x, logits, weights, Routing(top_k, renormalise, sigmoid, scale), shared, gate, limit)
    few_bits = gate_up_scale is not None and down_scale is not None and quantized_hopper.serves(x.device)
    hopper = gate_up is not None and down is not None and experts_hopper.usable(x, gate_up, down)
    candidates = schedules(*call.sizes, x.dtype, hopper, group if few_bits else 0)
    if gate_up is None or down is None:  # what lies between the halves is in the order of pairs
        candidates = [s for s in candidates if isinstance(s, Schedule) and s.kind == "grouped"]
    return run(call, next((s for s in candidates if proved(call, s)), REFERENCE))


def fake(x: Tensor, logits: Tensor, gate_up: Tensor | None, down: Tensor | None, *more: Any) -> Tensor:
    return x.new_empty((logits.shape[0] * (more[8] if down is None else 1), more[-1]))


_op = register(
    "experts(Tensor x, Tensor logits, Tensor? gate_up, Tensor? down, Tensor? shared, Tensor? gate, Tensor? correction, "
    "Tensor? gate_up_bias, Tensor? down_bias, Tensor? gate_up_scale, Tensor? down_scale, int group, int top_k, "
    "bool renormalise, bool sigmoid, float scale, float limit, int width) -> Tensor",
    launch, fake, cpu_experts.experts,
)  # fmt: skip


def weights_of(gate_up: linear_op.Leaf, down: linear_op.Leaf, gate_up_bias: Tensor | None, down_bias: Tensor | None,
               correction: Tensor | None) -> tuple[Weights, Group | None]:  # fmt: skip
    """The weights of two leaves, each whole or in few bits; and the group of which they are a rank's part. Pure."""
    ranks = gate_up.group if isinstance(gate_up, Columns) else None
    leaves: Any = [leaf.leaf if isinstance(leaf, Columns) else leaf for leaf in (gate_up, down)]
    few = [leaf if isinstance(leaf, Quantized) else None for leaf in leaves]
    gate_up_scale, down_scale = (None if leaf is None else leaf.scale for leaf in few)
    group = max(0 if leaf is None else leaf.group for leaf in few)
    biases = (gate_up_bias, down_bias, correction)
    return Weights(leaves[0].packed, leaves[1].packed, *biases, gate_up_scale, down_scale, group), ranks


def experts(x_TD: Tensor, logits_TE: Tensor, weights: Weights, routing: Routing, shared_TD: Tensor | None = None,
            gate_T1: Tensor | None = None, limit: float = 0.0, width: int = 0) -> Tensor:  # fmt: skip
    """The chosen experts' sum as [T, D], in x's dtype, plus `shared_TD` times the sigmoid of `gate_T1`. Pure.

    logits and gate: float32. `limit` > 0: an expert's gate and up are clamped, and their product is (up + 1) * gate *
    sigmoid(1.702 gate). `width`: the columns of the result where there is only half of the weights.
    """
    return _op(
        x_TD, logits_TE, weights.gate_up, weights.down, shared_TD, gate_T1, weights.correction, weights.gate_up_bias,
        weights.down_bias, weights.gate_up_scale, weights.down_scale, weights.group, *routing, limit,
        width or x_TD.shape[1],
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
    first = weights._replace(down=None, down_bias=None)
    h_PF = gather(experts(x_TD, logits_TE, first, routing, limit=limit, width=size // ranks.size), size, ranks)
    d = x_TD.shape[1] // ranks.size
    shared_TD = None if shared_TD is None else shared_TD.narrow(1, ranks.rank * d, d)
    last = weights._replace(gate_up=None, gate_up_bias=None)
    return gather(experts(h_PF, logits_TE, last, routing, shared_TD, gate_T1, width=d), x_TD.shape[1], ranks)
