"""The least seconds a GPU needs for a workload: prefill FLOPs over the rate of its matrix units, plus, per decode step,
the larger of weight bytes over its memory rate and GEMM FLOPs over the matrix rate, plus KV bytes over the memory rate.

A mixture of experts reads, per step, the experts that its rows choose if they choose evenly. Every request is taken to
start at once. A prompt token counts the output head too, as if all of its logits were made.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from workloads import Work

SHAPES = Path(__file__).resolve().parent / "shapes"
FLOPS = 790e12  # per second, a large bf16 matrix product measured on an H200
BYTES = 4.3e12  # per second, a device copy measured on an H200
ITEM = 2  # bytes of a bf16 weight, key or value


class Floor(NamedTuple):
    """Seconds."""

    prefill: float
    weights: float  # decode steps: weights read, or their products, whichever is longer
    kv: float  # decode steps: keys and values read

    @property
    def total(self) -> float:
        return sum(self)


def shape(model: str) -> dict[str, Any]:
    """The config of a file of scripts/shapes, named without .json."""
    if not (SHAPES / f"{model}.json").is_file():
        known = ", ".join(sorted(path.stem for path in SHAPES.glob("*.json")))
        raise SystemExit(f"there is no shape {model!r} in scripts/shapes; there are {known}")
    return json.loads((SHAPES / f"{model}.json").read_text())


def cached_prefixes(work: Work) -> list[tuple[int, int]]:
    """(prompt tokens, how many of them an earlier prompt has begun with) of every request. Pure."""
    found, before = [], []
    for ids, _ in sorted(work):
        same = next(
            (i for i, (a, b) in enumerate(zip(ids, before, strict=False)) if a != b), min(len(ids), len(before))
        )
        found.append((len(ids), min(same, len(ids) - 1)))
        before = ids
    return found


def floor(config: dict[str, Any], work: Work) -> Floor:
    """Of all requests of `work`, in bf16. Pure."""
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    kv_heads, width = config["num_key_value_heads"], config.get("head_dim") or hidden // heads
    experts, chosen = (
        config.get("num_experts") or config.get("num_local_experts", 1),
        config.get("num_experts_per_tok", 1),
    )
    expert = 3 * hidden * config.get("moe_intermediate_size", config["intermediate_size"])
    shared = layers * (2 * heads + 2 * kv_heads) * width * hidden + hidden * config["vocab_size"]
    weights = shared + layers * chosen * expert
    prefill = sum(
        2 * weights * (n - c) + 2 * layers * heads * width * (n * n - c * c) for n, c in cached_prefixes(work)
    )
    decode = 0.0
    for step in range(1, max(n for _, n in work)):
        rows = sum(n > step for _, n in work)
        read = shared + layers * experts * (1 - (1 - chosen / experts) ** rows) * expert
        decode += max(read * ITEM / BYTES, 2 * weights * rows / FLOPS)
    keys = sum(sum(len(ids) + step for step in range(1, n)) for ids, n in work)
    return Floor(prefill / FLOPS, decode, keys * 2 * layers * kv_heads * width * ITEM / BYTES)
