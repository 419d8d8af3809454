"""The mixture of experts on the CPU: cpu_experts.c through ctypes, under the rules of cpu.py."""

from torch import Tensor

from fengine.ops.cpu_library import KIND, no_room, plain, readable, schedule


def experts(
    x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, shared: Tensor | None, gate: Tensor | None,
    correction: Tensor | None, gate_up_bias: Tensor | None, down_bias: Tensor | None, gate_up_scale: None,
    down_scale: None, group: int, top_k: int, renormalise: bool, sigmoid: bool, scale: float, limit: float,
) -> Tensor:  # fmt: skip
    """x [T, D], logits [T, E] -> [T, D]; gate_up [E, ceil(2F/32), D, 32], down [E, ceil(D/32), F, 32].

    Experts in few bits are dequantized when they are loaded: there are no scales.
    """
    x, logits = plain(x, "experts' x"), plain(logits, "experts' logits")
    gate_up, down = readable(gate_up, "experts' gate_up"), readable(down, "experts' down")
    shared = None if shared is None else plain(shared, "experts' shared")
    gate = None if gate is None else plain(gate, "experts' gate")
    correction = None if correction is None else plain(correction, "experts' correction")
    biases = [None if b is None else readable(b, "experts' bias") for b in (gate_up_bias, down_bias)]
    (tokens, d), count, f = x.shape, logits.shape[1], down.shape[2]
    y = x.new_empty((tokens, d))
    library, threads = schedule(tokens * top_k * 3 * d * f)
    if tokens and library.fengine_experts(
        x.data_ptr(), logits.data_ptr(), gate_up.data_ptr(), down.data_ptr(),
        *(None if t is None else t.data_ptr() for t in (shared, gate, correction, *biases)), y.data_ptr(), tokens,
        count, top_k, f, d, KIND[gate_up.dtype], KIND[down.dtype], *(0 if b is None else KIND[b.dtype] for b in biases),
        renormalise, sigmoid, threads, scale, limit, schedule(16 * tokens * top_k * f)[1],
    ):  # fmt: skip
        raise no_room("experts")
    return y
