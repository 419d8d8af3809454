"""This checkout against another one on a CPU, in output tokens/s: did a change cost speed?

    git worktree add /tmp/before COMMIT && python scripts/bench_commits.py /tmp/before

Both engines live in processes of their own, with `PYTHONPATH` on their checkout, and take turns, so that a drift of the
machine falls on both: each pair of runs gives one ratio. Each pair has new processes, as where its memory lies makes
one process up to a tenth faster than the next. The ratio of the best runs is told, too: other work on the machine
disturbs it least. The cases are those of bench_cpu_box.py and bench_cpu_qwen.py; one request to the box is asked eight
times a run, as it takes a tenth of a second.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench_cpu_box import requests
from bench_cpu_qwen import CONFIG
from measure import parser, save, summary

from fengine import Engine
from fengine.worker.hub import resolve_model

MODELS = ("box", "qwen2.5-0.5b")
HERE = Path(__file__).resolve().parent.parent
Call = list[tuple[list[int], int]]  # prompts, and how many tokens each is to get


def cases(model: str) -> dict[str, list[Call]]:
    """Name -> the calls of one run. Pure."""
    if model == "box":
        vocab = json.loads((Path(resolve_model("box", None)) / "config.json").read_text())["vocab_size"]
        return {"64 mixed requests": [requests(64, vocab)], "one request": [[([5] * 32, 128)]] * 8}
    vocab = json.loads(CONFIG.read_text())["vocab_size"]
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(1000, vocab - 1000, (16, 64), generator=draw).tolist()
    sizes = [(batch, width, count) for batch in (1, 16) for width, count in ((16, 64), (64, 32))]
    return {f"batch {b}, {w} in, {n} out": [[(p[:w], n) for p in prompts[:b]]] for b, w, n in sizes}


def rate(engine: Engine, calls: list[Call]) -> float:
    start = time.perf_counter()
    for call in calls:
        params: Any = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for _, n in call]
        engine.generate(input_ids=[ids for ids, _ in call], sampling_params=params)
    return sum(n for call in calls for _, n in call) / (time.perf_counter() - start)


def serve(model: str) -> None:
    """What a checkout's process does: a case's name comes in, its tokens/s go out."""
    works, options = cases(model), {"skip_tokenizer_init": True, "disable_radix_cache": True}
    with tempfile.TemporaryDirectory() as folder:
        if model != "box":
            (Path(folder) / "config.json").write_text(CONFIG.read_text())
            options |= {"load_format": "dummy", "dtype": "bfloat16", "max_total_tokens": 8192}
        with Engine(model_path="box" if model == "box" else folder, **options) as engine:
            print(f"ready {sys.modules['fengine'].__file__}", flush=True)
            for line in sys.stdin:
                print(rate(engine, works[line.strip()]), flush=True)


class Checkout:
    """One checkout's process."""

    def __init__(self, root: Path, model: str) -> None:
        command = [sys.executable, __file__, str(root), "--serve", model]
        environ = os.environ | {"PYTHONPATH": str(root)}
        self.process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ready = self._line()
        if not ready.startswith(f"ready {root}"):
            raise SystemExit(f"the process of {root} says {ready!r}")

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def run(self, case: str) -> float:
        print(case, file=self.process.stdin, flush=True)
        return float(self._line())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measured(roots: tuple[Path, Path], model: str, names: list[str], first: int) -> dict[str, tuple[float, float]]:
    """By case a run of each, of which roots[first] goes first, behind a run that warms up."""
    pair = [Checkout(root, model) for root in roots]
    found = {}
    for case in names:
        rates = [{i: pair[i].run(case) for i in (first, 1 - first)} for _ in range(2)][1]
        found[case] = (rates[0], rates[1])
    for one in pair:
        one.close()
    return found


def commit(root: Path) -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
    return found.stdout.strip()


def main() -> None:
    p = parser(__doc__)
    p.add_argument("other", type=Path, help="the root of the other checkout")
    p.add_argument("--models", default=",".join(MODELS), help="one or both")
    p.add_argument("--only", help="cases whose name holds this")
    p.add_argument("--serve", help=argparse.SUPPRESS)  # what this script calls itself with
    args = p.parse_args()
    if args.serve:
        return serve(args.serve)
    if unknown := set(args.models.split(",")) - set(MODELS):
        p.error(f"--models knows {', '.join(MODELS)}, got {', '.join(sorted(unknown))}")
    other, table = args.other.resolve(), {}
    if not (other / "fengine").is_dir():
        p.error(f"{other} is not a checkout: it has no folder fengine")
    for model in args.models.split(","):
        names = [name for name in cases(model) if (args.only or "") in name]
        turns = [measured((HERE, other), model, names, first=turn % 2) for turn in range(args.runs)]
        for case in names:
            mine, its = zip(*(turn[case] for turn in turns), strict=True)
            ratios = [a / b for a, b in zip(mine, its, strict=True)]
            table[f"{model}: {case}"] = {"ratio": statistics.median(ratios), "ratios": ratios,
                                         "ratio_of_best": max(mine) / max(its),
                                         "this": summary(mine), "other": summary(its)}  # fmt: skip
    figures = {"unit": "output tokens/s", "other_commit": commit(other), "table": table}
    save("bench_commits", figures, args.out)


if __name__ == "__main__":
    main()
