"""Weights in few bits against 16: on a GPU the schedules of their products, on a CPU decoding at batch 1.

    python scripts/bench_few_bits.py --out scripts/results/bench_few_bits.json            # a GPU, if there is one
    python scripts/bench_few_bits.py --kinds w8a8 --rows 1 8192
    python scripts/bench_few_bits.py --device cpu --shape qwen2.5-0.5b

GPU: every schedule below is compared bit for bit with the decoded matrix under linear.py's reference (w8a8: with its
own), then timed by replays of a CUDA graph over matrices that together exceed the cache; beside it the bfloat16 product
and what is there without that kernel: the scratch path, or for w8a8 the plain kernel. int4 takes the kernel of
int4_hopper.py, fp4 that of quantized_hopper.py, w8a8 that of w8a8_hopper.py, fp8 that of quantized_launch.py. CPU: an
engine of random weights in each form, in turns. Ends with status 1 if bits differ.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_gpu import opened
from measure import environment, graph_us
from quantize import config_of
from torch import Tensor

from fengine.ops import e4m3, linear_launch, quantized, quantized_launch, w8a8, w8a8_hopper, w8a8_launch
from fengine.ops.ahead import compiling
from fengine.ops.int4_hopper import Eights
from fengine.ops.linear_launch import REFERENCE, Schedule
from fengine.ops.quantized_hopper import Tiles
from fengine.ops.quantized_launch import Matrix

MATRICES = {  # name: (N, K)
    "llama-8b qkv": (6144, 4096), "llama-8b o": (4096, 4096), "llama-8b gate_up": (28672, 4096),
    "llama-8b down": (4096, 14336), "qwen-0.5b gate_up": (9728, 896), "qwen-0.5b down": (896, 4864),
}  # fmt: skip
LLAMA = [name for name in MATRICES if name.startswith("llama")]
KINDS = {"w8a8": 0, "int4": 128, "fp4": 32, "fp8": 0}  # group of columns
ROWS = (1, 16, 32, 64, 128, 256, 1024, 8192)
CACHE = 100 << 20  # bytes that are surely no longer in it
CALLS, REPEATS = 16, 7


SHARED = 225 << 10  # bytes of shared memory for rings
TILES = {  # largest m: rows, blocks of 64 outputs, chunks in a piece, programs, whether by mma.sync
    8: ((8, 1, 8, 1, True), (8, 1, 8, 2, True), (8, 1, 4, 3, True), (8, 1, 4, 2, True), (8, 2, 4, 1, True)),
    16: ((16, 1, 8, 1, True), (16, 1, 4, 2, True), (16, 1, 4, 3, True), (16, 2, 4, 1, True)),
    32: ((32, 1, 4, 1, True), (32, 1, 4, 2, True), (32, 2, 2, 2, True), (32, 2, 4, 1, True), (32, 1, 4, 1, False)),
    64: ((64, 1, 4, 1, True), (64, 1, 2, 2, True), (64, 2, 2, 1, True), (64, 1, 4, 1, False), (64, 2, 2, 1, False)),
    1 << 30: ((128, 1, 2, 1, True), (128, 2, 2, 1, True), (128, 1, 2, 1, False), (128, 2, 2, 1, False),
              (256, 2, 2, 1, False)),
}  # fmt: skip
EIGHTS = {  # largest m: rows, blocks of 32 outputs a group, groups, chunks in a piece, programs
    8: ((8, 1, 1, 4, 1), (8, 1, 1, 8, 1), (8, 2, 1, 4, 1), (8, 2, 1, 4, 2), (8, 2, 1, 2, 3), (8, 2, 1, 2, 4)),
    16: ((16, 1, 1, 4, 1), (16, 2, 1, 4, 1), (16, 2, 1, 2, 2), (16, 2, 1, 2, 3)),
    32: ((32, 1, 1, 4, 1), (32, 2, 1, 4, 1), (32, 2, 1, 2, 2), (32, 2, 1, 2, 3)),
    64: ((64, 1, 1, 2, 1), (64, 2, 1, 2, 1), (64, 2, 1, 1, 2), (64, 2, 2, 2, 1)),
}  # fmt: skip
W8A8 = {  # largest m: rows, groups of 64 outputs, programs
    8: ((8, 1, 1), (8, 1, 2), (8, 2, 1)),
    16: ((16, 1, 1), (16, 1, 2), (16, 2, 1)),
    32: ((32, 1, 1), (32, 1, 2), (32, 2, 1)),
    64: ((64, 1, 1), (64, 1, 2), (64, 2, 1), (32, 2, 1)),
    128: ((64, 1, 2), (64, 2, 1), (128, 1, 1), (128, 1, 2), (128, 2, 1)),
    256: ((64, 2, 1), (128, 1, 1), (128, 1, 2), (128, 2, 1)),
    1 << 30: ((64, 2, 1), (128, 2, 1), (128, 3, 1), (256, 2, 1)),
}  # fmt: skip


def of_w8a8(m: int) -> list[w8a8_hopper.Tiles]:
    """Tiles worth a try for m rows, with rings as large as fit, and half of that where it is deep. Pure."""
    found = []
    for rows, groups, programs in next(tiles for most, tiles in W8A8.items() if m <= most):
        stages = min(24, (SHARED // programs - 4096) // (128 * (rows + 64 * groups)))
        sizes = (stages, stages // 2) if stages > 12 else (stages,)
        together = 4 if rows <= 32 else 2
        found += [w8a8_hopper.Tiles(rows, groups, size, programs, together=together) for size in sizes]
    return found


def of_fragments(m: int) -> list[Tiles]:
    """The same for the kernel that decodes fragments; none where scratch is faster. Pure."""
    found = []
    for rows, blocks, chunks, programs, sync in next(tiles for most, tiles in TILES.items() if m <= most):
        room, piece = SHARED // programs - rows * 192, chunks * (rows * 128 + blocks * 2304)
        found.append(Tiles(rows, blocks, chunks, min(8, room // piece), programs, sync))
    return found if m <= 1024 else []


def of_words(m: int) -> list[Eights]:
    """The same for int4's kernel: of more than 64 rows tiles of equal heights, sums of up to three powers of two."""
    if m > 1024:
        return []
    if m > 64:
        heights = {256, *(-(-m // (16 * tiles)) * 16 for tiles in range(1, 17))}
        known = [h for h in sorted(heights) if 48 <= h <= 256 and h.bit_count() <= 3 and h < m + 64]
        return [tile for h, groups in itertools.product(known, (1, 2)) for tile in tall(h, groups)]
    found = []
    for rows, blocks, groups, chunks, programs in next(tiles for most, tiles in EIGHTS.items() if m <= most):
        room = SHARED // programs - 2048 - rows * blocks * groups * 64
        stages = min(8, room // (chunks * (rows * 256 + blocks * groups * 2176)))
        found.append(Eights(rows, blocks, groups, chunks, stages, programs))
    return [s for s in found if s.stages >= 3]


def tall(rows: int, groups: int) -> list[Eights]:
    """Tiles of so many rows, with one ring, or where that would be short one for x and one for weights. Pure."""
    room = SHARED - 10240
    stages, halves = min(6, room // (rows * 256 + groups * 4352)), min(8, (room - groups * 4 * 4352) // (rows * 128))
    one = [Eights(rows, 2, groups, 1, stages, 1)] if stages >= 4 else []
    return one or [Eights(rows, 2, groups, 1, 4, 1, halves)]


def of_rows(m: int) -> list[Schedule]:
    """The same for the kernel of quantized_launch.py. Pure."""
    rows = 16 if m <= 16 else 32 if m <= 32 else 64
    return [Schedule(rows, 64, k, True, 4, s) for k, s in itertools.product((64, 128), (3, 4, 6))] if m <= 256 else []


def timed(call: Any, count: int) -> float:
    """Median µs of a call, which takes one of `count` matrices; of so many that a graph's own start does not count."""
    return statistics.median(graph_us(lambda i: call(i % count), max(count, CALLS), REPEATS))


class Case(NamedTuple):
    """One matrix shape with inputs: enough matrices in few bits to exceed the cache, some of them whole."""

    x_MK: Tensor
    dense: list[Tensor]
    few: list[Matrix]

    def whole(self, i: int) -> Tensor:
        return linear_launch.launch(self.x_MK, self.dense[i % len(self.dense)], self.few[0].n, None, None)

    def other(self, i: int) -> Tensor:
        """What computes without the kernels that are compared."""
        w_NK = quantized_launch.decode(self.few[i], self.x_MK.shape[1], self.x_MK.dtype)
        return linear_launch.launch(self.x_MK, w_NK, self.few[0].n, None, None)

    def reference(self) -> Tensor:
        w_NK = quantized_launch.decode(self.few[0], self.x_MK.shape[1], self.x_MK.dtype)
        return linear_launch.run(self.x_MK, w_NK, self.few[0].n, None, None, REFERENCE)

    def candidates(self) -> Sequence[Any]:
        return {2: of_rows, 3: of_words, 4: of_fragments}[self.few[0].packed.dim()](len(self.x_MK))

    def under(self, s: Any, i: int) -> Tensor:
        return quantized_launch.run(self.x_MK, self.few[i], None, None, s)


class InFp8(NamedTuple):
    """The same of a product in FP8."""

    x_MK: Tensor
    q: tuple[Tensor, Tensor]
    dense: list[Tensor]
    few: list[w8a8_launch.Matrix]

    def whole(self, i: int) -> Tensor:
        return linear_launch.launch(self.x_MK, self.dense[i % len(self.dense)], self.few[0].n, None, None)

    def other(self, i: int) -> Tensor:
        return self.under(w8a8_launch.plain_schedule(len(self.x_MK), self.few[0].n), i)

    def rows(self, i: int) -> Any:
        """Quantizing the activations."""
        return e4m3.launch(self.x_MK, self.x_MK.shape[1])

    def reference(self) -> Tensor:
        return self.under(w8a8_launch.REFERENCE, 0)

    def candidates(self) -> Sequence[Any]:
        return of_w8a8(len(self.x_MK))

    def under(self, s: Any, i: int) -> Tensor:
        return w8a8_launch.run(*self.q, self.few[i], None, self.x_MK.dtype, s)


def made(n: int, k: int, kind: str, sizes: list[int]) -> list[Case] | list[InFp8]:
    """Random matrices, whole and in few bits, and rows."""
    group, count = KINDS[kind] if k % (KINDS[kind] or k) == 0 else 32, max(2, -(-CACHE // (n * k // 2)))
    dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(min(count, 4))]
    codes = (quantized.encoded(dense[i % len(dense)], kind, group) for i in range(count))
    x_XMK = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for m in sizes]
    if kind == "w8a8":
        leaves = (w8a8.pack(one) for one in codes)
        eights = [w8a8_launch.Matrix(*leaf) for leaf in leaves if isinstance(leaf, w8a8.W8A8)]
        return [InFp8(x_MK, e4m3.launch(x_MK, k), dense, eights) for x_MK in x_XMK]
    few = [Matrix(*quantized.packed_rows(one, torch.bfloat16)[:7]) for one in codes]
    return [Case(x_MK, dense, few) for x_MK in x_XMK]


def tried(case: Case | InFp8, label: str) -> tuple[dict[Any, float], int]:
    """(µs of the schedules that compile and give the reference's bits, how many do not give them)."""
    want, times, wrong = case.reference(), {}, 0
    for s in case.candidates():
        try:
            equal = torch.equal(case.under(s, 0), want)
            if equal:
                times[s] = timed(partial(case.under, s), len(case.few))
        except Exception as error:  # too much shared memory, or a compiler that does not know the tile
            print(f"{label} {tuple(s)}: {type(error).__name__} {str(error)[:200]}", flush=True)
            continue
        if not equal:
            wrong += 1
            print(f"DIFFERS: {label} {tuple(s)}", flush=True)
    return times, wrong


def ask_for(cases: Sequence[Case | InFp8]) -> None:
    """Compiles what `cases` will launch, all at once."""
    with compiling():
        for case in cases:
            for call in (case.reference, partial(case.whole, 0), partial(case.other, 0)):
                call()
            for s in case.candidates():
                with suppress(Exception):  # said when it is launched
                    case.under(s, 0)


def on_gpu(names: list[str], kinds: list[str], sizes: list[int]) -> tuple[list[dict[str, Any]], int]:
    """(rows of the table, schedules whose bits differ)."""
    rows, wrong = [], 0
    for kind, name in itertools.product(kinds, names):
        start = time.perf_counter()
        n, k = MATRICES[name]
        cases = made(n, k, kind, sizes)
        few = cases[0].few
        floor = (few[0].packed.nbytes + few[0].scale.nbytes) / 4.3e6
        ask_for(cases)
        for case in cases:
            m = len(case.x_MK)
            label = f"{kind:4} {name:18} {m:4}"
            whole, other = timed(case.whole, len(few)), timed(case.other, len(few))
            quantize = f" rows {timed(case.rows, len(few)):5.1f}" if isinstance(case, InFp8) else ""
            times, differ = tried(case, label)
            wrong += differ
            best = [(tuple(s), times[s]) for s in sorted(times, key=times.__getitem__)]
            rows.append({"matrix": name, "kind": kind, "m": m, "bf16_us": whole, "other_us": other, "bytes_us": floor,
                         "best": best})  # fmt: skip
            shown = "  ".join(f"{s} {us:.1f}" for s, us in best[:4]).replace(", ", ",")
            rate = f" {2e-6 * m * n * k / best[0][1]:.0f} TFLOP/s" if best and m >= 1024 else ""
            print(
                f"{label} bf16 {whole:6.1f} other {other:6.1f} bytes {floor:5.1f}{quantize} | {shown}{rate}", flush=True
            )
        print(f"# {time.perf_counter() - start:.1f} s", flush=True)
    return rows, wrong


def on_cpu(shape: str, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Milliseconds a token, of the best of several rounds in which the forms take turns."""
    forms = {"bf16": None, "int4": config_of("w4a16", 128, ["lm_head"]), "fp8": config_of("fp8", 0, ["lm_head"])}
    found: dict[str, list[float]] = {name: [] for name in forms}
    options: dict[str, Any] = {"device": "cpu", "context_length": None, "max_total_tokens": 512}
    with ExitStack() as stack:
        engines = {}
        for name, form in forms.items():
            told = {"quantization_config": form} if form else {}
            engines[name] = stack.enter_context(opened(shape, **options, json_model_override_args=told))
        asked = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
        for _, (name, engine) in itertools.product(range(rounds), engines.items()):
            engine.generate(input_ids=[3, 4, 5], sampling_params=asked | {"max_new_tokens": 2})
            start = time.perf_counter()
            engine.generate(input_ids=[3, 4, 5], sampling_params=asked)
            found[name].append((time.perf_counter() - start) * 1000 / tokens)
    rows = [{"form": name, "ms_per_token": min(times), "rounds": times} for name, times in found.items()]
    for row in rows:
        times = min(found["bf16"]) / row["ms_per_token"]
        print(f"{row['form']:5} {row['ms_per_token']:7.2f} ms a token, {times:.2f}x bf16")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--matrices", nargs="+", choices=MATRICES, default=LLAMA)
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="of scripts/shapes, on a CPU")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows, wrong = (
        (on_cpu(args.shape, args.tokens, args.rounds), 0)
        if args.device == "cpu"
        else on_gpu(args.matrices, args.kinds, args.rows)
    )
    if args.out:
        args.out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=2))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
