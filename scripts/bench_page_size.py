"""Which page size suits a CPU: engines that differ in it alone take turns, in output tokens/s and prefix hits.

Mixed requests and one request to the model in the box (bench_cpu.py), one with a context of 1,000 tokens, 32
conversations of four turns over one system prompt (where pages decide how much of a prefix is found again: only whole
ones are), and a batch of 16 of the 0.5B shape. On a GPU: bench_gpu.py --page-size.
"""

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from bench_cpu import SHAPE, mixed
from bench_gpu import opened
from measure import parser, save, summary, turns
from workloads import Work, generate

from fengine import Engine

Run = Callable[[Engine], int]  # -> output tokens


def plain(work: Work, times: int = 1) -> Run:
    def run(engine: Engine) -> int:
        for _ in range(times):
            engine.flush_cache()
            generate(engine, work)
        return times * sum(n for _, n in work)

    return run


def conversations(engine: Engine) -> int:
    engine.flush_cache()
    draw, count = random.Random(2), 0
    head = [draw.randrange(10, 2000) for _ in range(300)]
    pasts = [list(head) for _ in range(32)]
    for _ in range(4):
        for past in pasts:
            past += [draw.randrange(10, 2000) for _ in range(draw.randint(5, 60))]
        _, answers = generate(engine, [(past, 24) for past in pasts])
        for past, answer in zip(pasts, answers, strict=True):
            past += answer
        count += 24 * len(pasts)
    return count


def timed(engine: Engine, run: Run) -> tuple[float, int]:
    """Tokens/s, and prompt tokens from the cache."""
    before, start = engine.stats()["cached_tokens"], time.perf_counter()
    rate = run(engine) / (time.perf_counter() - start)
    return rate, engine.stats()["cached_tokens"] - before


def measured(engines: dict[str, Engine], cases: dict[str, Run], runs: int) -> dict[str, Any]:
    """Case -> page size -> figures; the engines take turns."""
    table: dict[str, Any] = {}
    for name, run in cases.items():
        found = turns({size: partial(timed, engine, run) for size, engine in engines.items()}, runs)
        table[name] = {
            size: summary([rate for rate, _ in each]) | {"cached_tokens": each[-1][1]} for size, each in found.items()
        }
        for size, row in table[name].items():
            print(f"{name}, pages of {size}: {row['median']:.1f}, {row['max']:.1f}, {row['cached_tokens']} cached")
    return table


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--sizes", default="8,16,32,64,128")
    p.add_argument("--models", default="box,qwen2.5-0.5b", help="of box, qwen2.5-0.5b")
    args = p.parse_args()
    long = [random.Random(3).randrange(10, 2000) for _ in range(900)]
    box: dict[str, Run] = {
        "box: 64 mixed requests": plain(mixed(64, 2048)),
        "box: one request": plain([([5] * 32, 128)], 4),
        "box: one request behind 900 tokens": plain([(long, 100)], 4),
        "box: 32 conversations": conversations,
    }
    qwen: dict[str, Run] = {"0.5B: batch 16, 64 in, 32 out": plain([([9 + i, *long[:63]], 32) for i in range(16)])}
    table, models = dict[str, Any](), {"box": box, "qwen2.5-0.5b": qwen}
    if unknown := set(args.models.split(",")) - set(models):
        p.error(f"--models knows {', '.join(models)}, got {', '.join(sorted(unknown))}")
    for model in args.models.split(","):
        with ExitStack() as stack:
            own: dict[str, Any] = {"device": "cpu"} | ({} if model == "box" else SHAPE)
            made = {size: opened(model, page_size=int(size), **own) for size in args.sizes.split(",")}
            engines = {size: stack.enter_context(one) for size, one in made.items()}
            table |= measured(engines, models[model], args.runs)
    save("bench_page_size", {"unit": "output tokens/s by page size", "table": table}, args.out)


if __name__ == "__main__":
    main()
