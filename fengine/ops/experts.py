"""A mixture of experts: each token's own top A of E gated products, weighted and added.

Reduction tree, for each token by itself, whatever the other tokens are:
  logits   the chain of linear.py over D, kept in fp32
  choice   the A experts first in order of (logit descending, id ascending); NaN comes first, so it is seen
  weights  exp(logit - largest) / sum, the sum over the chosen (`renormalise`) or over all experts: later half added to
           earlier half, again and again, over the ids padded with zeros to a power of two. With `sigmoid`: 1 / (1 +
           exp(-logit)), chosen by that + correction, over the sum of the chosen + 1e-20 or as it is. Then times `scale`
  expert   the trees of `gated_linear` and `linear` over its own weights; biases are added in fp32 after the sums
  parts    weight * fp32 sum of the down product, rounded to the output dtype once
  result   0 + the parts by ascending expert id in fp32, the shared expert's output last; one rounding

Grouping, tile heights, sorting or none are schedules: no sum contains another token's term. Softmax over the chosen
logits is softmax over all, renormalised. Families: Qwen3-MoE (norm_topk_prob), Mixtral, Granite-MoE and gpt-oss
renormalise; Qwen2-MoE and OLMoE do not, unless norm_topk_prob says so; GLM-4.5 and DeepSeek-V3 choose by sigmoid with a
correction and a scale.

Packed weights: CUDA keeps [E, 2F, D] (gate above up) and [E, D, F] as stored; the CPU wants each expert's as linear.py
packs them.
"""

from typing import Any, NamedTuple

import torch
from einops import einsum, rearrange
from torch import Tensor

from fengine.ops import cpu_experts, experts_hopper, silu_mul
from fengine.ops import experts_kernels as kernels
from fengine.ops import linear as linear_op
from fengine.ops.ahead import launcher
from fengine.ops.experts_schedules import REFERENCE, Schedule, Tiles, schedules, tiles_at_most
from fengine.ops.proof import captured, proofs
from fengine.ops.registration import MIDDLE, dependent_launch, plain, register, shared_memory, triton, wide

ALPHA = 1.702  # of the clamped gate


class Routing(NamedTuple):
    """How a token chooses its experts and weighs them; the fields stand in the module docstring."""

    top_k: int
    renormalise: bool = True
    sigmoid: bool = False
    scale: float = 1.0


class Weights(NamedTuple):
    """Experts' weights as `pack_experts` gives them. Biases are [E, 2F] and [E, D]; correction is float32 [E]."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    correction: Tensor | None = None


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
              limit: float = 0.0) -> Tensor:  # fmt: skip
    """The math, over all experts of unpacked weights, in fp32 (fp64 where x is). Pure."""
    dtype = x_TD.dtype
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
    return (total_TD if shared_TD is None else total_TD + shared_TD).to(dtype)


def _gated_reference(x_ET2F: Tensor, limit: float) -> Tensor:
    if not limit:
        return silu_mul.reference(x_ET2F)
    gate, up = wide(x_ET2F).chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * (gate * (ALPHA * gate).sigmoid())).to(x_ET2F.dtype)


class Call(NamedTuple):
    """The arguments of one call, on a CUDA device."""

    x_TD: Tensor
    logits_TE: Tensor
    weights: Weights
    routing: Routing
    shared_TD: Tensor | None
    limit: float

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(T, E, A, F, D)"""
        return (*self.logits_TE.shape, self.routing.top_k, self.weights.down.shape[2], self.x_TD.shape[1])


def run(call: Call, s: Schedule) -> Tensor:
    """Computes the result under schedule `s`. Pure."""
    return few(call, s) if s.kind == "few" else many(call, s)


def few(call: Call, s: Schedule) -> Tensor:
    """Every pair by itself. Pure."""
    t, e, a, f, d = call.sizes
    x_TD, w, r, device = call.x_TD, call.weights, call.routing, call.x_TD.device.index
    h_PF, y_TD = x_TD.new_empty(t * a, f), torch.empty_like(x_TD)
    launcher(kernels.few_gate_kernel, (t * a * triton.cdiv(f, s.gate.block_n),))(
        call.logits_TE, w.correction, x_TD, w.gate_up, w.gate_up_bias, h_PF, e, f, d, call.limit, a, r.sigmoid,
        w.correction is not None, w.gate_up_bias is not None, call.limit > 0, *s.gate[:4], d % s.gate.block_k == 0,
        _power(e), **_options(x_TD, s.gate, 2), **dependent_launch(device, MIDDLE)
    )  # fmt: skip
    launcher(kernels.few_down_kernel, (t * triton.cdiv(d, s.down.block_n),))(
        call.logits_TE, w.correction, h_PF, w.down, w.down_bias, call.shared_TD, y_TD, e, d, f, r.scale, a, _power(a),
        r.renormalise, r.sigmoid, w.correction is not None, w.down_bias is not None, call.shared_TD is not None,
        *s.down[:3], f % s.down.block_k == 0, _power(e), **_options(x_TD, s.down, _power(a)),
        **dependent_launch(device)
    )  # fmt: skip
    return y_TD


def many(call: Call, s: Schedule) -> Tensor:
    """Lists of each expert's pairs, and products over them. Pure."""
    t, e, a, f, d = call.sizes
    x_TD, w, r, pdl = call.x_TD, call.weights, call.routing, dependent_launch(call.x_TD.device.index)
    id_P, weight_P = x_TD.new_empty(t * a, dtype=torch.int32), x_TD.new_empty(t * a, dtype=torch.float32)
    at_once = s.kind == "hopper"  # so many pairs that the lists take longer than adding to a count
    rows_ET, index_P = id_P.new_empty(e, t), torch.empty_like(id_P)
    count_E = id_P.new_zeros(e) if at_once else id_P.new_empty(e)
    launcher(kernels.route_kernel, (t,))(
        call.logits_TE, w.correction, id_P, weight_P, rows_ET, count_E, index_P, t, e, a, r.renormalise, r.sigmoid,
        w.correction is not None, r.scale, at_once, _power(e), num_warps=1, **pdl
    )  # fmt: skip
    base_E = torch.empty_like(count_E)
    if at_once:
        parts = _sorted(call, s, weight_P, rows_ET, count_E, base_E)
    else:
        launcher(kernels.members_kernel, (e,))(
            id_P, rows_ET, count_E, t, a, 1024 if t * a <= 8192 else 4096, num_warps=4, **pdl
        )
        h_PF, parts = x_TD.new_empty(t * a, f), x_TD.new_empty(t * a, d)
        _grouped(call, s.gate, x_TD, w.gate_up, w.gate_up_bias, rows_ET, count_E, None, h_PF)
        _grouped(call, s.down, h_PF, w.down, w.down_bias, rows_ET, count_E, weight_P, parts)
    y_TD = torch.empty_like(x_TD)
    launcher(kernels.combine_kernel, (t, triton.cdiv(d, 1024)))(
        parts, id_P, index_P, base_E, call.shared_TD, y_TD, d, a, at_once, call.shared_TD is not None, 1024,
        num_warps=4, **pdl
    )  # fmt: skip
    return y_TD


def _grouped(call: Call, tiles: Tiles, x: Tensor, w: Tensor, bias: Tensor | None, rows_ET: Tensor, count_E: Tensor,
             weight_P: Tensor | None, y: Tensor) -> None:  # fmt: skip
    """One product over the lists: gated, or weighted where there are weights. Modifies: y."""
    t, e, a, *_ = call.sizes
    n, k, gated = y.shape[1], w.shape[2], weight_P is None
    grid = (tiles_at_most(t * a, e, tiles.block_m) * triton.cdiv(n, tiles.block_n),)
    launcher(kernels.grouped_kernel, grid)(
        x, w, bias, rows_ET, count_E, weight_P, y, t, e, n, k, call.limit, a, gated, bias is not None, call.limit > 0,
        *tiles[:4], k % tiles.block_k == 0, _power(e), **_options(x, tiles, 1 + gated),
        **dependent_launch(x.device.index)
    )  # fmt: skip


def _sorted(call: Call, s: Schedule, weight_P: Tensor, rows_ET: Tensor, count_E: Tensor, base_E: Tensor) -> Tensor:
    """Parts of the pairs: each expert's together, from base_E. Modifies: base_E."""
    t, e, a, f, d = call.sizes
    x_TD, w = call.x_TD, call.weights
    tiles = tiles_at_most(t * a, e, experts_hopper.BM)
    tile_X2 = count_E.new_empty(tiles, 2)
    h_XF, parts_XD = (x_TD.new_empty(tiles * experts_hopper.BM, width) for width in (f, d))
    launcher(kernels.tiles_kernel, (tiles,))(
        count_E, tile_X2, base_E, e, experts_hopper.BM, _power(e), num_warps=1,
        **dependent_launch(x_TD.device.index)
    )  # fmt: skip
    lists = (rows_ET, count_E, tile_X2, weight_P)
    for x, weight, bias, y, tile in ((x_TD, w.gate_up, w.gate_up_bias, h_XF, s.gate),
                                     (h_XF, w.down, w.down_bias, parts_XD, s.down)):  # fmt: skip
        experts_hopper.launch(x, weight, bias, *lists, y, a, call.limit, y is h_XF, tile.block_n, tile.stages)
    return parts_XD


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _options(x: Tensor, tiles: Tiles, factor: int) -> dict[str, int]:
    """Launch options of a product; `factor`: tiles of weights, or of pairs, that a stage holds."""
    stages = tiles.stages
    if x.is_cuda:
        per_stage = (tiles.block_m + tiles.block_n) * tiles.block_k * x.element_size() * factor
        stages = max(1, min(stages, shared_memory(x.device.index) // per_stage))
    return {"num_warps": tiles.warps, "num_stages": stages}


def proved(call: Call, s: Schedule) -> bool:
    """Whether `s` gives the bits of REFERENCE on this device; compared once for these sizes of the experts.

    The kernels are ours and do not change with the number of tokens: one number stands for all.
    """
    if s == REFERENCE or not call.x_TD.is_cuda:
        return True
    known = proofs(call.x_TD.device.index)
    there = [x is not None for x in (*call.weights[2:], call.shared_TD)]
    key = f"experts {call.x_TD.dtype} {call.sizes[1:]} {call.routing} {there} {call.limit > 0} {s}"
    if torch.cuda.is_current_stream_capturing():  # no time to compare; warm-up has asked before
        return known.known.get(key, False)

    def compare() -> bool:
        try:
            return _compare(call, s)
        except Exception:
            if s.kind != "grouped":  # whatever a compiler says, the schedule is not for this machine
                return False
            raise

    return known.holds(key, compare)


COMPARED = 1 << 16  # elements at least


def _compare(call: Call, s: Schedule) -> bool:
    """Random tokens under both schedules: by themselves, and inside a captured graph."""
    t, e, _, _, d = call.sizes
    draws, device = max(1, COMPARED // (t * d)), call.x_TD.device
    generator = torch.Generator(device).manual_seed(t)
    x_XTD = torch.randn(draws, t, d, device=device, generator=generator).to(call.x_TD.dtype)
    logits_XTE = torch.randn(draws, t, e, device=device, generator=generator)

    def results(s: Schedule) -> Tensor:
        pairs = zip(x_XTD, logits_XTE, strict=True)
        return torch.stack([run(call._replace(x_TD=plain(x), logits_TE=plain(z)), s) for x, z in pairs])

    want_XTD = results(REFERENCE)
    if not torch.equal(want_XTD, results(s)):
        return False
    reacts = bool((want_XTD != want_XTD[:1, :1, :1]).any())  # results of weights that are all zero prove nothing
    return torch.equal(want_XTD, captured(lambda: results(s))) and reacts


def launch(
    x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, shared: Tensor | None, correction: Tensor | None,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, top_k: int, renormalise: bool, sigmoid: bool, scale: float,
    limit: float,
) -> Tensor:  # fmt: skip
    x, logits, shared = plain(x), plain(logits), None if shared is None else plain(shared)
    if x.shape[0] == 0:
        return torch.empty_like(x)
    weights = Weights(gate_up, down, gate_up_bias, down_bias, correction)
    call = Call(x, logits, weights, Routing(top_k, renormalise, sigmoid, scale), shared, limit)
    candidates = schedules(*call.sizes, x.dtype, experts_hopper.usable(x, gate_up, down))
    return run(call, next((s for s in candidates if proved(call, s)), REFERENCE))


def fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


_op = register(
    "experts(Tensor x, Tensor logits, Tensor gate_up, Tensor down, Tensor? shared, Tensor? correction, "
    "Tensor? gate_up_bias, Tensor? down_bias, int top_k, bool renormalise, bool sigmoid, float scale, float limit)"
    " -> Tensor",
    launch, fake, cpu_experts.experts,
)  # fmt: skip


def pack_experts(w_ENK: Tensor) -> Tensor:
    """The layout that `moe` reads on w's device (see the module docstring), once at load. Pure."""
    return w_ENK.contiguous() if w_ENK.device.type != "cpu" else torch.stack([linear_op.pack(w_NK) for w_NK in w_ENK])


def experts(x_TD: Tensor, logits_TE: Tensor, weights: Weights, routing: Routing, shared_TD: Tensor | None = None,
            limit: float = 0.0) -> Tensor:  # fmt: skip
    """The chosen experts' sum as [T, D], in x's dtype, plus `shared_TD`. Pure.

    logits: float32. `limit` > 0: gate and up are clamped, and the product is (up + 1) * gate * sigmoid(1.702 gate).
    """
    return _op(
        x_TD, logits_TE, weights.gate_up, weights.down, shared_TD, weights.correction, weights.gate_up_bias,
        weights.down_bias, *routing, limit
    )  # fmt: skip


def moe(x_TD: Tensor, router: Tensor, weights: Weights, routing: Routing, *, router_bias_E: Tensor | None = None,
        shared_TD: Tensor | None = None, limit: float = 0.0) -> Tensor:  # fmt: skip
    """The whole block: `experts` of the logits x @ router.T + bias in float32. `router` comes from linear's `pack`.
    Pure."""
    logits_TE = linear_op.linear(x_TD, router, weights.down.shape[0], router_bias_E, torch.float32)
    return experts(x_TD, logits_TE, weights, routing, shared_TD, limit)
