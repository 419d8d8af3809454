"""One call of a mixture of experts on a CUDA device, under a schedule: which kernels, over which buffers."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fengine.ops import experts_few_hopper, experts_hopper, experts_w8a8_launch, fragments, quantized_hopper
from fengine.ops import experts_kernels as kernels
from fengine.ops.ahead import launcher
from fengine.ops.experts_routing import Routed, Routing, lists_of, power, routed, tiled
from fengine.ops.experts_schedules import REFERENCE, FewBits, Schedule, Tiles, schedules, tiles_at_most
from fengine.ops.experts_w8a8_launch import Pairs
from fengine.ops.fragments import Fragments
from fengine.ops.proof import proved, random_rows, same_bits
from fengine.ops.registration import dependent_launch, plain, stages_that_fit, triton

AnySchedule = Schedule | FewBits | Pairs


class Weights(NamedTuple):
    """Experts' weights as linear's `pack(w).packed`, in few bits as `Fragments` in groups of so many columns (of the
    down product's matrix: `down_group`), or those of a `W8A8`.

    Biases are [E, 2F] and [E, D]; correction is float32 [E]. One of the matrices: the half of a call.
    """

    gate_up: Tensor | None
    down: Tensor | None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    correction: Tensor | None = None
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None
    group: int = 0
    down_group: int = 0

    def halves(self) -> tuple["Weights", "Weights"]:
        """Those of the gated products, and those of what follows. Pure."""
        first = self._replace(down=None, down_bias=None, down_scale=None)
        return first, self._replace(gate_up=None, gate_up_bias=None, gate_up_scale=None)

    @property
    def in_fp8(self) -> set[bool]:
        """Whether the matrices that there are multiply with activations in FP8."""
        return {w.dtype == torch.uint8 for w in (self.gate_up, self.down) if w is not None}

    def whole(self, sizes: tuple[int, int, int, int, int]) -> "Weights":
        """The matrices dequantized to scratch. Pure."""
        _, e, _, f, d = sizes

        def matrices(w: Tensor | None, scale: Tensor | None, n: int, group: int, gated: bool) -> Tensor | None:
            if w is None or scale is None:
                return w
            return fragments.unpack(Fragments(w, scale), n, group, gated).view(e, n, -1)

        gate_up = matrices(self.gate_up, self.gate_up_scale, 2 * f, self.group, True)
        down = matrices(self.down, self.down_scale, d, self.down_group, False)
        return self._replace(gate_up=gate_up, down=down, gate_up_scale=None, down_scale=None)


class Call(NamedTuple):
    """The arguments of one call, on a CUDA device. Without gate_up, x are the pairs' gated products [T A, F]."""

    x_TD: Tensor
    logits_TE: Tensor
    weights: Weights
    routing: Routing
    shared_TD: Tensor | None
    gate_T1: Tensor | None  # float32
    limit: float
    width: int = 0  # columns of the result, of a half

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(T, E, A, F, D)"""
        (t, e), w, k = self.logits_TE.shape, self.weights, self.x_TD.shape[1]
        if w.gate_up is None:
            f, d = k, self.width
        elif w.down is None:
            f, d = self.width, k
        else:
            f, d = w.down.shape[2] if w.down.dim() == 3 else w.down.shape[1] * 64, k
        return t, e, self.routing.top_k, f, d


def run(call: Call, s: AnySchedule) -> Tensor:
    """Computes the result under schedule `s`. Pure."""
    if isinstance(s, Pairs):
        return _in_fp8(call, s)
    if isinstance(s, FewBits):
        return _few_bits(call, s)
    call = call._replace(weights=call.weights.whole(call.sizes))
    return (narrow if s.kind == "narrow" else many)(call, s)


def narrow(call: Call, s: Schedule) -> Tensor:
    """Every pair by itself. Pure."""
    t, _, a, f, _ = call.sizes
    x_TD, w, r = call.x_TD, call.weights, call.routing
    assert w.gate_up is not None and w.down is not None
    h_PF, y_TD, by = x_TD.new_empty(t * a, f), torch.empty_like(x_TD), (call.logits_TE, w.correction, r)
    experts_few_hopper.gate(x_TD, w.gate_up, w.gate_up_bias, *by, call.limit, h_PF, s.gate)
    experts_few_hopper.down(h_PF, w.down, w.down_bias, *by, call.shared_TD, call.gate_T1, y_TD, s.down)
    return y_TD


def many(call: Call, s: Schedule) -> Tensor:
    """Lists of each expert's pairs, and products over them. Pure."""
    t, _, a, f, d = call.sizes
    x_TD, w = call.x_TD, call.weights
    found = routed(call.logits_TE, w.correction, call.routing, s.kind == "hopper")
    if s.kind == "hopper":
        return _combined(call, *_sorted(call, s, found))
    h_PF, parts_PD = x_TD, x_TD.new_empty(t * a, d)
    if w.gate_up is not None:
        h_PF = x_TD.new_empty(t * a, f)
        _grouped(call, s.gate, x_TD, w.gate_up, w.gate_up_bias, found, h_PF)
    if w.down is None:
        return h_PF
    _grouped(call, s.down, h_PF, w.down, w.down_bias, found, parts_PD, weighted=True)
    return _combined(call, parts_PD, None)


def _combined(call: Call, parts: Tensor, places: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
    """The sum of each token's parts, in order of pairs or where `places` (id_P, index_P, base_E) say. Pure."""
    t, _, a, _, d = call.sizes
    y_TD = call.x_TD.new_empty(t, d)
    launcher(kernels.combine_kernel, (t, triton.cdiv(d, 1024)))(
        parts, *(places or (None, None, None)), call.shared_TD, call.gate_T1, y_TD, d, a, places is not None,
        call.shared_TD is not None, call.gate_T1 is not None, 1024,
        num_warps=4, **dependent_launch(call.x_TD.device.index)
    )  # fmt: skip
    return y_TD


def _grouped(call: Call, tiles: Tiles, x: Tensor, w: Tensor, bias: Tensor | None, found: Routed, y: Tensor,
             weighted: bool = False) -> None:  # fmt: skip
    """One product over the lists: gated, or times the weights. Modifies: y."""
    t, e, a, *_ = call.sizes
    n, k = y.shape[1], w.shape[2]
    grid = (tiles_at_most(t * a, e, tiles.block_m) * triton.cdiv(n, tiles.block_n),)
    launcher(kernels.grouped_kernel, grid)(
        x, w, bias, found.rows_ET, found.count_E, found.weight_P, y, t, e, n, k, call.limit, a, not weighted,
        bias is not None, call.limit > 0, *tiles[:4], k % tiles.block_k == 0, power(e),
        **_options(x, tiles, 2 - weighted), **dependent_launch(x.device.index)
    )  # fmt: skip


def _sorted(call: Call, s: Schedule, found: Routed) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Parts of the pairs, each expert's together, and where they lie. Pure."""
    t, e, a, f, d = call.sizes
    x_TD, w, rows = call.x_TD, call.weights, experts_hopper.BM
    assert w.gate_up is not None and w.down is not None
    tile_X2, base_E = tiled(found.count_E, tiles_at_most(t * a, e, rows), rows)
    h_XF, parts_XD = (x_TD.new_empty(len(tile_X2) * rows, width) for width in (f, d))
    lists = (found.rows_ET, found.count_E, tile_X2, found.weight_P)
    for x, weight, bias, y, tile in ((x_TD, w.gate_up, w.gate_up_bias, h_XF, s.gate),
                                     (h_XF, w.down, w.down_bias, parts_XD, s.down)):  # fmt: skip
        experts_hopper.launch(x, weight, bias, *lists, y, a, call.limit, y is h_XF, tile.block_n, tile.stages)
    return parts_XD, (found.id_P, found.index_P, base_E)


def _few_bits(call: Call, s: FewBits) -> Tensor:
    """Both products, or the one that there is, of weights in four bits. Pure."""
    t, e, a, f, d = call.sizes
    w, h, rows = call.weights, call.x_TD, s.gate.block_m
    tiles, half = tiles_at_most(t * a, e, rows), w.gate_up is None or w.down is None
    lists = quantized_hopper.Lists(*lists_of(call.logits_TE, w.correction, call.routing, tiles, rows), a)
    if w.gate_up is not None and w.gate_up_scale is not None:
        h, of_w = call.x_TD.new_empty(t * a if half else tiles * rows, f), Fragments(w.gate_up, w.gate_up_scale)
        quantized_hopper.launch(call.x_TD, of_w, w.group, w.gate_up_bias, h, s.gate, lists, True, call.limit, half)
    if w.down is None or w.down_scale is None:
        return h
    parts_PD, of_w = call.x_TD.new_empty(t * a, d), Fragments(w.down, w.down_scale)
    quantized_hopper.launch(h, of_w, w.down_group, w.down_bias, parts_PD, s.down, lists, half=half)
    return _combined(call, parts_PD, None)


def _in_fp8(call: Call, s: Pairs) -> Tensor:
    """Both products, or the one that there is, in FP8. Pure."""
    t, e, a, f, d = call.sizes
    w, h, rows = call.weights, call.x_TD, s.gate.block_m
    tiles, half = tiles_at_most(t * a, e, rows), w.gate_up is None or w.down is None
    lists = lists_of(call.logits_TE, w.correction, call.routing, tiles, rows)
    if w.gate_up is not None and w.gate_up_scale is not None:
        product = experts_w8a8_launch.product(w.gate_up, w.gate_up_scale, w.gate_up_bias, call.limit)
        tiled = isinstance(s.gate, experts_w8a8_launch.Tiles) and not half
        h = call.x_TD.new_empty(tiles * rows if tiled else t * a, f)
        experts_w8a8_launch.launch(call.x_TD, product, lists, a, h, s.gate, half)
    if w.down is None or w.down_scale is None:
        return h
    parts_PD = call.x_TD.new_empty(t * a, d)
    product = experts_w8a8_launch.product(w.down, w.down_scale, w.down_bias)
    experts_w8a8_launch.launch(h, product, lists, a, parts_PD, s.down, half)
    return _combined(call, parts_PD, None)


def _options(x: Tensor, tiles: Tiles, factor: int) -> dict[str, int]:
    """Launch options of a product; `factor`: tiles of weights, or of pairs, that a stage holds."""
    per_stage = (tiles.block_m + tiles.block_n) * tiles.block_k * x.element_size() * factor
    return {"num_warps": tiles.warps, "num_stages": stages_that_fit(x, tiles.stages, per_stage)}


def is_proved(call: Call, s: AnySchedule) -> bool:
    """Whether `s` gives the bits of the reference on this device; compared once for these sizes of the experts.

    The kernels are ours and do not change with the number of tokens: one number stands for all.
    """
    if s in (REFERENCE, experts_w8a8_launch.REFERENCE):
        return True
    w = call.weights
    there = [x is not None for x in (*w[:-2], call.shared_TD, call.gate_T1)]
    scales = [None if scale is None else tuple(scale.shape[1:]) for scale in (w.gate_up_scale, w.down_scale)]
    facts = f"{there} {call.limit > 0} {w.group} {w.down_group} {scales}"
    key = f"experts {call.x_TD.dtype} {call.sizes[1:]} {call.routing} {facts} {s}"
    return proved(call.x_TD.device, key, lambda: _compare(call, s))


def _compare(call: Call, s: AnySchedule) -> bool:
    """Random tokens under both schedules."""
    t, e, *_ = call.sizes
    width = call.x_TD.shape[1]
    x_XTD = random_rows(len(call.x_TD), width, width, call.x_TD)
    generator = torch.Generator(x_XTD.device).manual_seed(e)
    logits_XTE = torch.randn(len(x_XTD), t, e, device=x_XTD.device, generator=generator)

    def results(s: AnySchedule) -> Tensor:
        pairs = zip(x_XTD, logits_XTE, strict=True)
        return torch.stack([run(call._replace(x_TD=plain(x), logits_TE=plain(z)), s) for x, z in pairs])

    want_XTD = results(experts_w8a8_launch.REFERENCE if isinstance(s, Pairs) else REFERENCE)
    return same_bits(want_XTD, lambda: results(s), not isinstance(s, Schedule) or s.kind != "grouped")


def launch(
    x: Tensor, logits: Tensor, gate_up: Tensor | None, down: Tensor | None, shared: Tensor | None, gate: Tensor | None,
    correction: Tensor | None, gate_up_bias: Tensor | None, down_bias: Tensor | None, gate_up_scale: Tensor | None,
    down_scale: Tensor | None, group: int, down_group: int, top_k: int, renormalise: bool, sigmoid: bool, scale: float,
    limit: float, width: int,
) -> Tensor:  # fmt: skip
    x, logits = plain(x), plain(logits)
    shared, gate = (None if t is None else plain(t) for t in (shared, gate))
    if x.shape[0] == 0:
        return x.new_empty((0, width))
    scales = (gate_up_scale, down_scale, group, down_group)
    weights = Weights(gate_up, down, gate_up_bias, down_bias, correction, *scales)
    call = Call(x, logits, weights, Routing(top_k, renormalise, sigmoid, scale), shared, gate, limit, width)
    if len(weights.in_fp8) == 1:
        return best(call)
    first, last = weights.halves()  # each by its own kernels
    return best(call._replace(weights=last, x_TD=best(call._replace(weights=first, width=call.sizes[3]))))


def best(call: Call) -> Tensor:
    """The result under the first schedule that is proved. Pure."""
    return run(call, next((s for s in _candidates(call) if is_proved(call, s)), REFERENCE))


def _candidates(call: Call) -> Sequence[AnySchedule]:
    """Schedules of a call, fastest first. Pure."""
    w, x = call.weights, call.x_TD
    there = [(m, scale) for m, scale in ((w.gate_up, w.gate_up_scale), (w.down, w.down_scale)) if m is not None]
    in_few = [(m, scale) for m, scale in there if scale is not None]
    if True in w.in_fp8:
        return experts_w8a8_launch.candidates(len(call.logits_TE) * call.routing.top_k, in_few)
    few_bits = len(in_few) == len(there) and quantized_hopper.serves(x.device)
    hopper = w.gate_up is not None and w.down is not None and experts_hopper.usable(x, w.gate_up, w.down)
    found = schedules(*call.sizes, x.dtype, hopper, max(w.group, w.down_group) if few_bits else 0)
    if w.gate_up is None or w.down is None:  # what lies between the halves is in the order of pairs
        return [s for s in found if isinstance(s, FewBits) or s.kind == "grouped"]
    return found
