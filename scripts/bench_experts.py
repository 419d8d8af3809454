"""Times a mixture of experts (router to sum) on this machine's GPU, against torch's grouped product and the floors.

    python scripts/bench_experts.py --out scripts/results/bench_experts.json

Every time is of replays of a CUDA graph with several layers of random weights, so that no weights come from the cache.
Random routers choose evenly: `experts` is how many a layer reads, which the bytes of the floor count. Ends with status
1 if a schedule's bits differ from the reference schedule's, or the baseline's result from ours by more than rounding.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from floors import BYTES, FLOPS
from measure import environment, graph_us, summary
from torch import Tensor

from fengine.ops import experts as op
from fengine.ops import experts_launch, experts_w8a8_launch, quantized, w8a8
from fengine.ops.experts_schedules import REFERENCE, Schedule, Tiles
from fengine.ops.linear import Dense, linear

BF16 = torch.bfloat16
grouped_mm = getattr(torch, "_grouped_mm", None) or torch.nn.functional.grouped_mm
ROUNDS = 7
FIXED = Schedule("grouped", Tiles(64, 64, 32, False, 4, 3), Tiles(64, 64, 32, False, 4, 3))
"""One tile for every batch, as engines do that fix the schedule to fix the bits."""


class Shape(NamedTuple):
    experts: int
    top_k: int
    d: int
    f: int
    layers: int
    kind: str = (
        "bf16"  # or "fp4"; "w8a8", whose scales are each for `group` columns of 128 rows, or for a row if it is 0
    )
    group: int = 0

    @property
    def reference(self) -> Any:
        return experts_w8a8_launch.REFERENCE if self.kind == "w8a8" else REFERENCE


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768, 4),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, 4),
    "gpt-oss-20b-mxfp4": Shape(32, 4, 2880, 2880, 4, "fp4", 32),
    "qwen3-30b-a3b-w8a8": Shape(128, 8, 2048, 768, 4, "w8a8"),
    "qwen3-30b-a3b-w8a8-blocks": Shape(128, 8, 2048, 768, 4, "w8a8", 128),
    "mixtral-8x7b": Shape(8, 2, 4096, 14336, 2),
}


class Layer(NamedTuple):
    x_TD: Tensor
    router_ED: Tensor
    weights: op.Weights


def layers(shape: Shape, tokens: int, weights: list[tuple[Tensor, op.Weights]]) -> list[Layer]:
    """Twice as many as there are weights, each with tokens of its own."""
    return [Layer(torch.randn(tokens, shape.d, device="cuda").to(BF16), *w) for w in 2 * weights]


def random_weights(shape: Shape) -> list[tuple[Tensor, op.Weights]]:
    def random(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", dtype=BF16) / size[-1] ** 0.5

    def leaf(n: int, k: int, gated: bool) -> Any:
        if shape.kind == "bf16":
            return Dense(random(e, n, k), n)
        codes = quantized.encoded(random(e * n, k), shape.kind, shape.group)
        if shape.kind == "w8a8":
            return w8a8.pack(codes, e)
        packed = quantized.pack_experts(codes, e, gated, BF16)
        if packed is None:
            raise SystemExit("this GPU reads no experts in four bits")
        return packed

    e, _, d, f, count = shape[:5]
    return [
        (random(e, d), op.weights_of(leaf(2 * f, d, True), leaf(d, f, False), None, None, None)[0])
        for _ in range(count)
    ]


def under(s: Any, shape: Shape) -> Callable[[Layer], Tensor]:
    """The block under a schedule; None: under the one that the op chooses."""
    routing = op.Routing(shape.top_k)

    def compute(layer: Layer) -> Tensor:
        if s is None:
            return op.moe(layer.x_TD, Dense(layer.router_ED, shape.experts), layer.weights, routing)
        logits_TE = linear(layer.x_TD, Dense(layer.router_ED, shape.experts), out_dtype=torch.float32)
        return experts_launch.run(
            experts_launch.Call(layer.x_TD, logits_TE, layer.weights, routing, None, None, 0.0), s
        )

    return compute


def torch_block(shape: Shape) -> Callable[[Layer], Tensor]:
    """The same block of torch's own parts: sorted rows, two grouped products, an addition by index."""

    def compute(layer: Layer) -> Tensor:
        weights: Any = whole(shape, layer)
        logits_TE = torch.mm(layer.x_TD, layer.router_ED.T, out_dtype=torch.float32)
        value_TA, id_TA = logits_TE.topk(shape.top_k, -1)
        order_P = id_TA.flatten().argsort(stable=True)
        ends_E = torch.searchsorted(
            id_TA.flatten()[order_P], torch.arange(shape.experts, device="cuda"), right=True, out_int32=True
        )
        rows_PD = layer.x_TD[order_P // shape.top_k]
        both_P2F = grouped_mm(rows_PD, weights.gate_up.transpose(1, 2), offs=ends_E)
        gate_PF, up_PF = both_P2F.chunk(2, -1)
        h_PF = torch.nn.functional.silu(gate_PF) * up_PF
        y_PD = grouped_mm(h_PF, weights.down.transpose(1, 2), offs=ends_E)
        y_PD = y_PD * value_TA.softmax(-1).flatten()[order_P, None].to(BF16)
        return torch.zeros_like(layer.x_TD).index_add_(0, order_P // shape.top_k, y_PD)

    return compute


def whole(shape: Shape, layer: Layer) -> op.Weights:
    """The weights in 16 bits."""

    def matrices(codes: Any, scale: Any) -> Tensor:
        scale_ENG = scale.mT.repeat_interleave(-(-codes.shape[2] // scale.shape[1]), 2)
        return (codes.view(torch.float8_e4m3fn).float() * scale_ENG).to(BF16)

    w = layer.weights
    if shape.kind != "w8a8":
        return w.whole((len(layer.x_TD), shape.experts, shape.top_k, shape.f, shape.d))
    return op.Weights(matrices(w.gate_up, w.gate_up_scale), matrices(w.down, w.down_scale))


def graph_times(compute: Callable[[Layer], Tensor], over: list[Layer]) -> list[float]:
    """Microseconds a layer, of ROUNDS replays of a graph of all of them."""
    return graph_us(lambda number: compute(over[number]), len(over), ROUNDS)


def distinct(shape: Shape, over: list[Layer]) -> float:
    """Experts that a layer's tokens choose, on average."""
    counts = []
    for layer in over:
        logits_TE = torch.mm(layer.x_TD, layer.router_ED.T, out_dtype=torch.float32)
        counts.append(len(logits_TE.topk(shape.top_k, -1).indices.unique()))
    return statistics.mean(counts)


def floor_us(shape: Shape, tokens: int, experts: float) -> dict[str, float]:
    """What the bytes of the weights that are read, and the products, take at least."""
    size, each = 3 * shape.d * shape.f, {"bf16": 2, "fp4": 17 / 32, "w8a8": 1}[shape.kind]
    flops = FLOPS * (1 + (shape.kind == "w8a8"))
    return {
        "bytes": (experts * size * each + shape.experts * shape.d * 2) / BYTES * 1e6,
        "products": 2 * tokens * shape.top_k * size / flops * 1e6,
    }


def measure(shape: Shape, tokens: int, weights: list[tuple[Tensor, op.Weights]]) -> dict[str, Any]:
    """One row of the table; `equal`: whether the bits are those of the reference schedule."""
    over = layers(shape, tokens, weights)
    ours, reference = under(None, shape), under(shape.reference, shape)
    fixed = shape.reference if shape.kind == "w8a8" else FIXED
    equal = all(ours(layer).equal(reference(layer)) for layer in over[:2])
    near = torch_block(shape)(over[0]).float(), ours(over[0]).float()
    read = distinct(shape, over)
    row = {
        "tokens": tokens, "experts": read, "equal": equal,
        "baseline_error": ((near[0] - near[1]).norm() / near[1].norm()).item(),
        "floor_us": floor_us(shape, tokens, read),
        "us": {name: summary(graph_times(compute, over)) for name, compute in (
            ("exact", ours), ("one tile", under(fixed, shape)), ("torch", torch_block(shape)))},
    }  # fmt: skip
    median = row["us"]["exact"]["median"]
    row["times_floor"] = median / max(row["floor_us"].values())
    row["tflops"] = 2 * tokens * shape.top_k * 3 * shape.d * shape.f / median / 1e6
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--shapes", default="qwen3-30b-a3b")
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {"environment": environment(), "settings": {"rounds": ROUNDS}, "shapes": {}}
    wrong = False
    for name in args.shapes.split(","):
        shape = SHAPES[name]
        weights, rows = random_weights(shape), []
        print(f"{name}: tokens experts | us exact, one tile, torch | times floor, TFLOP/s")
        for tokens in map(int, args.tokens.split(",")):
            row = measure(shape, tokens, weights)
            rows.append(row)
            wrong |= not row["equal"] or not row["baseline_error"] < (8e-2 if shape.kind == "w8a8" else 2e-2)
            us = [f"{row['us'][kind]['median']:9.1f}" for kind in ("exact", "one tile", "torch")]
            print(f"{tokens:6d} {row['experts']:6.1f} |", *us, f"| {row['times_floor']:.2f} {row['tflops']:.0f}",
                  "" if row["equal"] else "BITS DIFFER", f"{row['baseline_error']:.1e}", flush=True)  # fmt: skip
        found["shapes"][name] = {"shape": shape._asdict(), "rows": rows}
        del weights
        torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
