"""This checkout against another one on a CPU, in output tokens/s: did a change cost speed?

    git worktree add /tmp/before COMMIT && python scripts/bench_commits.py /tmp/before

Both engines live in processes of their own, with `PYTHONPATH` on their checkout, and take turns, so that a drift of the
machine falls on both: each pair of runs gives one ratio. Each pair has new processes, as where its memory lies makes
one process up to a tenth faster than the next. The ratio of the best runs is told, too: other work on the machine
disturbs it least. The cases are those of bench_cpu.py; one request to the box is asked eight times a run, as
it takes a tenth of a second.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from bench_cpu import SHAPE, batches, mixed
from bench_gpu import opened
from floors import shape
from measure import Beside, parser, save, summary
from workloads import Work, generate

from fengine import Engine
from fengine.worker.hub import resolve_model

MODELS = ("box", "qwen2.5-0.5b")
HERE = Path(__file__).resolve().parent.parent


def cases(model: str) -> dict[str, list[Work]]:
    """Name -> the calls of one run. Pure."""
    if model == "box":
        vocab = json.loads((Path(resolve_model("box", None)) / "config.json").read_text())["vocab_size"]
        return {"64 mixed requests": [mixed(64, vocab)], "one request": [[([5] * 32, 128)]] * 8}
    return {name: [work] for name, work in batches(shape(model)["vocab_size"]).items()}


def rate(engine: Engine, calls: list[Work]) -> float:
    return sum(n for call in calls for _, n in call) / sum(generate(engine, call)[0] for call in calls)


def serve(model: str) -> None:
    """What a checkout's process does: a case's name comes in, its tokens/s go out."""
    works = cases(model)
    with opened(model, disable_radix_cache=True, **({} if model == "box" else SHAPE)) as engine:
        print(f"ready {sys.modules['fengine'].__file__}", flush=True)
        for line in sys.stdin:
            print(rate(engine, works[line.strip()]), flush=True)


def started(root: Path, model: str) -> Beside:
    """A checkout's process."""
    process = Beside(__file__, str(root), "--serve", model, PYTHONPATH=str(root))
    if not (ready := process.hear()).startswith(f"ready {root}"):
        raise SystemExit(f"the process of {root} says {ready!r}")
    return process


def measured(roots: tuple[Path, Path], model: str, names: list[str], first: int) -> dict[str, tuple[float, float]]:
    """By case a run of each, of which roots[first] goes first, behind a run that warms up."""
    pair = [started(root, model) for root in roots]
    found = {}
    for case in names:
        rates = [{i: float(pair[i].ask(case)) for i in (first, 1 - first)} for _ in range(2)][1]
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
