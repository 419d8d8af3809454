"""Times the CPU kernels beside torch: `python scripts/bench_cpu_ops.py [--threads 2] [--only linear] [--quick]`.

linear: weights are rotated through copies larger than the caches, as a model's layers are. Each figure is the fastest
of several rounds; a round runs fengine and torch in turn, so that both see the same machine.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from fengine.ops import activations, attention, linear, rms_norm, rope, sampling
from fengine.ops.linear import pack

ROUNDS = 25
COLD_BYTES = 160 << 20  # copies of a weight together: beyond any cache

LINEARS = {  # model: (name, N, K)
    "Qwen2.5-0.5B": (
        ("qkv", 1152, 896),
        ("o", 896, 896),
        ("gate_up", 9728, 896),
        ("down", 896, 4864),
        ("lm_head", 151936, 896),
    ),
    "tiny": (("qkv", 512, 256), ("o", 256, 256), ("gate_up", 1536, 256), ("down", 256, 768), ("lm_head", 2048, 256)),
}


def seconds(calls: list[Callable[[], object]], budget: float) -> list[float]:
    """Time of each call in its fastest round, the calls in turn; a round repeats a call for about `budget` seconds."""
    repeats = []
    for call in calls:
        call()
        start = time.perf_counter()
        call()
        repeats.append(max(1, int(budget / max(time.perf_counter() - start, 1e-7))))
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for sample, call, repeat in zip(samples, calls, repeats, strict=True):
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            sample.append((time.perf_counter() - start) / repeat)
    return [min(sample) for sample in samples]


def rotating(function: Callable[[torch.Tensor], object], weights: list[torch.Tensor]) -> Callable[[], object]:
    state = {"next": 0}

    def call() -> object:
        state["next"] = (state["next"] + 1) % len(weights)
        return function(weights[state["next"]])

    return call


def bench_linear(budget: float) -> None:
    print(f"{'linear':22}{'M':>5}{'µs':>10}{'GFLOP/s':>9}{'GB/s':>7} | {'torch fp32 µs':>13}{'GFLOP/s':>9}{'ratio':>7}")
    for model, shapes in LINEARS.items():
        for name, n, k in shapes:
            copies = max(1, min(24, COLD_BYTES // (n * k * 4))) if model != "tiny" else 1
            wide = [torch.randn(n, k) * k**-0.5 for _ in range(copies)]
            packed = [pack(w.bfloat16()).packed for w in wide]
            across = [w.T.contiguous() for w in wide]
            for m in (1, 16, 64, 512):
                if m == 512 and name == "lm_head":
                    continue  # logits are needed for a row's last token only
                x = torch.randn(m, k)
                ours = rotating(lambda w, x=x, n=n: linear.on_cpu(x, w, n, None, None), packed)
                theirs = rotating(lambda w, x=x: torch.mm(x, w), across)
                a, b = seconds([ours, theirs], budget)
                flops = 2 * m * n * k
                print(
                    f"{model + ' ' + name:22}{m:5}{a * 1e6:10.1f}{flops / a / 1e9:9.1f}{n * k * 2 / a / 1e9:7.1f} | "
                    f"{b * 1e6:13.1f}{flops / b / 1e9:9.1f}{b / a:7.2f}"
                )


def paged(rows: int, new: int, kv_len: int, heads: int, groups: int, width: int, page: int = 16) -> tuple:
    """Arguments of `attention` for `rows` rows that each bring `new` tokens."""
    per_row = -(-kv_len // page)
    k = torch.randn(1 + rows * per_row, page, groups, width)
    table = (1 + torch.randperm(rows * per_row)).int().reshape(rows, per_row)
    q_start = torch.arange(0, rows * new + 1, new, dtype=torch.int32)
    lengths = torch.full((rows,), kv_len, dtype=torch.int32)
    return torch.randn(rows * new, heads, width), k, torch.randn_like(k), q_start, lengths, table, width**-0.5


def bench_attention(budget: float) -> None:
    print(f"\n{'attention':44}{'µs':>10}{'GFLOP/s':>9}{'KV GB/s':>9} | {'torch sdpa µs (dense KV)':>24}")
    for heads, groups, width, label in ((14, 2, 64, "Qwen2.5-0.5B"), (4, 2, 64, "tiny"), (8, 8, 64, "8/8 heads")):
        for rows, new, kv_len in ((1, 1, 300), (16, 1, 300), (64, 1, 300), (1, 1, 8192), (1, 512, 512), (4, 128, 640)):
            args = paged(rows, new, kv_len, heads, groups, width)
            dense_q = torch.randn(rows, heads, new, width)
            dense_k = torch.randn(rows, groups, kv_len, width)
            causal = torch.ones(new, kv_len, dtype=torch.bool).tril(kv_len - new)

            def theirs(q=dense_q, k=dense_k, mask=causal, new=new) -> torch.Tensor:
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, k, attn_mask=None if new == 1 else mask, enable_gqa=True
                )

            a, b = seconds([lambda args=args: attention.on_cpu(*args), theirs], budget)
            pairs = rows * sum(range(kv_len - new + 1, kv_len + 1))
            flops = 4 * pairs * heads * width
            what = f"{label}: {rows} rows x {new} new, {kv_len} keys"
            kv_bytes = rows * kv_len * groups * width * 8
            print(f"{what:44}{a * 1e6:10.1f}{flops / a / 1e9:9.1f}{kv_bytes / a / 1e9:9.1f} | {b * 1e6:24.1f}")


def bench_draw(budget: float) -> None:
    print(f"\n{'draw':44}{'µs':>10}{'µs/row':>9}")
    settings = {"greedy": (1, 1.0), "sampled": (1 << 30, 1.0), "top_k 50": (50, 1.0), "top_p 0.9": (1 << 30, 0.9)}
    for vocab in (2048, 151936):
        for rows in (1, 16):
            for spread in (1.0, 4.0):
                logits = torch.randn(rows, vocab) * spread
                for label, (k, p) in settings.items():
                    args = (logits, torch.ones(rows), torch.full((rows,), k, dtype=torch.int32), torch.full((rows,), p),
                            torch.zeros(rows), torch.arange(rows), torch.arange(rows, dtype=torch.int32))  # fmt: skip
                    (a,) = seconds([lambda args=args: sampling.draw(*args)], budget)
                    what = f"V {vocab}, {rows} rows, {label}, logits x {spread:g}"
                    print(f"{what:44}{a * 1e6:10.1f}{a * 1e6 / rows:9.1f}")


def bench_rest(budget: float) -> None:
    print(f"\n{'others':44}{'µs':>10}")
    for label, d, f, heads, groups, width in (("Qwen2.5-0.5B", 896, 4864, 14, 2, 64), ("tiny", 256, 768, 4, 2, 64)):
        for tokens in (1, 16, 512):
            x, gate_up = torch.randn(tokens, d), torch.randn(tokens, 2 * f)
            qkv, weight = torch.randn(tokens, (heads + 2 * groups) * width), torch.ones(d).bfloat16()
            pages, table = torch.zeros(64, 16, groups, width), torch.randn(1024, width)
            index = torch.arange(tokens, dtype=torch.int32)
            rope_arguments = (qkv, table, index, index, pages, pages, heads, None, None, 0.0)
            calls = {
                "rms_norm": partial(rms_norm.on_cpu, x, weight, 1e-6),
                "add_rms_norm": partial(rms_norm.add_on_cpu, x, x, weight, 1e-6),
                "rope_kv_write_": partial(rope.on_cpu, *rope_arguments),
                "silu_mul": partial(activations.on_cpu, gate_up),
            }
            for name, time_of in zip(calls, seconds(list(calls.values()), budget), strict=True):
                print(f"{f'{label}: {name}, {tokens} tokens':44}{time_of * 1e6:10.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=["linear", "attention", "draw", "rest"])
    parser.add_argument("--quick", action="store_true", help="shorter rounds")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {args.threads} threads\n")
    benches = {"linear": bench_linear, "attention": bench_attention, "draw": bench_draw, "rest": bench_rest}
    for name, bench in benches.items():
        if args.only in (None, name):
            bench(0.002 if args.quick else 0.01)


if __name__ == "__main__":
    main()
