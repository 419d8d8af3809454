"""The mixture of experts on the CPU: cpu_experts.c through ctypes, under the rules of cpu.py."""

from torch import Tensor

from fengine.ops.cpu_library import KIND, no_room, plain, readable, schedule


def experts(
    x: Tensor, logits: Tensor, gate_up: Tensor | None, down: Tensor | None, shared: Tensor | None, gate: Tensor | None,
    correction: Tensor | None, gate_up_bias: Tensor | None, down_bias: Tensor | None, gate_up_scale: None,
    down_scale: None, group: int, top_k: int, renormalise: bool, sigmoid: bool, scale: float, limit: float,
    width: int,
) -> Tensor:  # fmt: skip
    """x [T, D], logits [T, E] -> [T, D]; gate_up [E, ceil(2F/32), D, 32], down [E, ceil(D/32), F, 32].

    Experts in few bits are dequantized when they are loaded: there are no scales. Of half of a rank: see experts.py.
    """
    x, logits = plain(x, "experts' x"), plain(logits, "experts' logits")
    gate_up, down = (None if w is None else readable(w, "experts' weights") for w in (gate_up, down))
    shared = None if shared is None else plain(shared, "experts' shared")
    gate = None if gate is None else plain(gate, "experts' gate")
    correction = None if correction is None else plain(correction, "experts' correction")
    biases = [None if b is None else readable(b, "experts' bias") for b in (gate_up_bias, down_bias)]
    tokens, count = logits.shape
    d, f = x.shape[1] if gate_up is not None else width, width if down is None else down.shape[2]
    y = x.new_empty((tokens * (top_k if down is None else 1), width))
    library, threads = schedule(tokens * top_k * 3 * d * f)
    kinds = (0 if t is None else KIND[t.dtype] for t in (gate_up, down, *biases))
    if tokens and library.fengine_experts(
        x.data_ptr(), logits.data_ptr(),
        *(None if t is None else t.data_ptr() for t in (gate_up, down, shared, gate, correction, *biases)),
        y.data_ptr(), tokens, count, top_k, f, d, *kinds, renormalise, sigmoid, threads, scale, limit,
        schedule(16 * tokens * top_k * f)[1],
    ):  # fmt: skip
        raise no_room("experts")
    return y
