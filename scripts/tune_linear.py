"""Which ways to cut products of few rows (ops/linear_few_hopper.py) are fastest on this GPU.

    python scripts/tune_linear.py [--budget 35] [--out FILE]

Each product is timed in a captured graph, with a norm behind it as in a model, over weights that do not fit into the L2
cache; its bits are compared with the reference schedule's. Processes compile all kernels before. Told are, for each
product and number of rows, the usual schedule's microseconds and the five best ones' (and whose bits differ).
"""

import json
import os
import subprocess
import sys
import time
from typing import Any

import torch
from measure import graph_us, need_gpu, parser, save
from torch import Tensor

from fengine.ops import activations, linear_launch, rms_norm
from fengine.ops.ahead import compiling
from fengine.ops.linear_few_hopper import Narrow
from fengine.ops.linear_launch import REFERENCE, AnySchedule
from fengine.ops.registration import multiprocessors

PLAIN = [  # outputs and inputs: of small models, of 2 and of 4 ranks of Llama-3.1-8B and Qwen3-32B, of Llama-3.1-8B
    (1152, 6912), (1536, 1152), (896, 4864), (5120, 2048), (128, 2048),
    (2048, 14336), (2560, 25600), (2048, 4096), (2560, 8192), (3072, 4096), (5120, 5120), (1024, 14336), (1024, 4096),
    (1280, 25600), (1280, 8192), (1536, 4096), (2560, 5120), (4096, 4096), (6144, 4096), (4096, 14336),
]  # fmt: skip
GATED = [(6912, 1152), (4864, 896), (7168, 4096), (12800, 5120), (3584, 4096), (6400, 5120), (14336, 4096)]
ROWS = (1, 32, 16, 64)
RINGS = ((4, 6), (4, 5), (4, 4), (4, 3), (2, 12), (2, 10), (2, 6), (2, 5), (1, 20), (1, 10))  # chunks, pieces
ROOM = 228_000  # bytes of shared memory
COLD = 160 << 20  # bytes of weights that no cache holds


def candidates(rows: int, gated: bool) -> list[Narrow]:
    block_m = max(8, 1 << (rows - 1).bit_length())
    return [
        Narrow(block_m, outputs, chunks, stages)
        for outputs in ((16, 32) if gated else (16, 32, 64))
        for chunks, stages in RINGS
        if chunks * stages * 128 * (64 + block_m) < ROOM
    ]


def compute(x_TK: Tensor, w_NK: Tensor, n: int, s: AnySchedule, gated: bool) -> Tensor:
    return linear_launch.run(x_TK, w_NK, n, None, None, s, gated)


def compile_part(part: int, parts: int) -> None:
    """Compiles each `parts`-th kernel into Triton's cache."""
    kinds = [(m, gated, s) for gated in (False, True) for m in ROWS for s in candidates(m, gated)]
    w_NK = torch.empty(512, 4096, device="cuda", dtype=torch.bfloat16)
    with compiling():
        for m, gated, s in kinds[part::parts]:
            compute(w_NK[:m], w_NK, 256 if gated else 512, s, gated)


def compile_all() -> None:
    parts = max(1, min(14, (os.cpu_count() or 2) - 2))
    made = [subprocess.Popen([sys.executable, __file__, "--compile", f"{part}/{parts}"]) for part in range(parts)]
    for process in made:
        process.wait()  # what it has left out is compiled when it is launched


def measured(rows: int, n: int, k: int, gated: bool, weights: list[Tensor]) -> dict[str, Any]:
    """Of each schedule with the reference's bits, the time of a product and a norm."""
    x_TK = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    norm_N, count = torch.ones(n, device="cuda", dtype=torch.bfloat16), max(6, len(weights))
    want = compute(x_TK, weights[0], n * (1 + gated), REFERENCE, False)
    want = activations.launch(want, 0) if gated else want
    schedules = linear_launch.gated_schedules if gated else linear_launch.schedules
    usual = schedules(rows, n, k, x_TK.dtype, multiprocessors(0))[0]
    times, other = {}, []
    for s in dict.fromkeys([usual, *candidates(rows, gated)]):
        try:
            equal = torch.equal(compute(x_TK, weights[0], n, s, gated), want)
        except Exception as error:  # a schedule that Triton refuses
            other.append((tuple(s), type(error).__name__))
            continue
        if not equal:
            other.append(tuple(s))
            continue

        def one(number: int, s: AnySchedule = s) -> None:
            y_TN = compute(x_TK, weights[number % len(weights)], n, s, gated)
            rms_norm.rms_norm(y_TN, norm_N, 1e-5)

        times[s] = min(graph_us(one, count, 3))
    best = sorted(times, key=lambda s: times[s])[:5]
    floor = weights[0].nbytes / 4.3e6
    return {"n": n, "k": k, "rows": rows, "gated": gated, "floor_us": floor, "usual": tuple(usual),
            "usual_us": times.get(usual), "best": [(times[s], *s) for s in best], "other_bits": other}  # fmt: skip


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--budget", type=float, default=35, help="seconds in all, about")
    p.add_argument("--compile", help="this process only compiles a part")
    args = p.parse_args()
    need_gpu(p)
    if args.compile:
        compile_part(*map(int, args.compile.split("/")))
        return
    begin, found = time.perf_counter(), list[dict[str, Any]]()
    compile_all()
    print(f"compiled in {time.perf_counter() - begin:.1f} s", flush=True)
    for gated, (n, k) in [(False, shape) for shape in PLAIN] + [(True, shape) for shape in GATED]:
        nbytes = n * k * 2 * (1 + gated)
        weights = [torch.randn(n * (1 + gated), k, device="cuda", dtype=torch.bfloat16) * k**-0.5
                   for _ in range(max(3, -(-COLD // nbytes)))]  # fmt: skip
        for rows in ROWS:
            if time.perf_counter() - begin < args.budget:
                found.append(measured(rows, n, k, gated, weights))
                print(json.dumps(found[-1]), flush=True)
    save("tune_linear", {"products": found}, args.out)


if __name__ == "__main__":
    main()
