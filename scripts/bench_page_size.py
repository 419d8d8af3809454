"""Which page size suits a CPU: engines that differ in it alone take turns, in output tokens/s and prefix hits.

Mixed requests and one request to the model in the box (bench_cpu_box.py), one with a context of 1,000 tokens, 32
conversations of four turns over one system prompt (where pages decide how much of a prefix is found again: only whole
ones are), and a batch of 16 of the 0.5B shape. On a GPU: bench_gpu.py --page-size.
"""

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_cpu_box import requests
from bench_cpu_qwen import CONFIG
from measure import parser, save, summary

from fengine import Engine

Run = Callable[[Engine], int]  # -> output tokens


def ask(engine: Engine, work: list[tuple[list[int], int]]) -> list[list[int]]:
    params: Any = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for _, n in work]
    outputs: Any = engine.generate(input_ids=[ids for ids, _ in work], sampling_params=params)
    return [output["output_ids"] for output in outputs]


def plain(work: list[tuple[list[int], int]], times: int = 1) -> Run:
    def run(engine: Engine) -> int:
        for _ in range(times):
            engine.flush_cache()
            ask(engine, work)
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
        answers = ask(engine, [(past, 24) for past in pasts])
        for past, answer in zip(pasts, answers, strict=True):
            past += answer
        count += 24 * len(pasts)
    return count


def measured(engines: dict[int, Engine], cases: dict[str, Run], runs: int) -> dict[str, Any]:
    """Case -> page size -> tokens/s and prompt tokens from the cache; the engines take turns, each first once."""
    table: dict[str, Any] = {}
    sizes = list(engines)
    for name, run in cases.items():
        rates: dict[int, list[float]] = {size: [] for size in sizes}
        hits = dict.fromkeys(sizes, 0)
        for turn in range(runs + 1):  # the first warms up
            for size in sizes[turn % len(sizes) :] + sizes[: turn % len(sizes)]:
                before, start = engines[size].stats()["cached_tokens"], time.perf_counter()
                tokens = run(engines[size])
                rates[size] += [tokens / (time.perf_counter() - start)] if turn else []
                hits[size] = engines[size].stats()["cached_tokens"] - before
        table[name] = {str(size): summary(rates[size]) | {"cached_tokens": hits[size]} for size in sizes}
        print(
            name,
            {
                size: (round(row["median"], 1), round(row["max"], 1), row["cached_tokens"])
                for size, row in table[name].items()
            },
        )
    return table


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--sizes", default="8,16,32,64,128")
    p.add_argument("--models", default="box,qwen2.5-0.5b", help="of box, qwen2.5-0.5b")
    args = p.parse_args()
    sizes = [int(size) for size in args.sizes.split(",")]
    long = [random.Random(3).randrange(10, 2000) for _ in range(900)]
    box: dict[str, Run] = {
        "box: 64 mixed requests": plain(requests(64, 2048)),
        "box: one request": plain([([5] * 32, 128)], 4),
        "box: one request behind 900 tokens": plain([(long, 100)], 4),
        "box: 32 conversations": conversations,
    }
    qwen: dict[str, Run] = {"0.5B: batch 16, 64 in, 32 out": plain([([9 + i, *long[:63]], 32) for i in range(16)])}
    table: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(CONFIG.read_text())
        dummy: dict[str, Any] = {"model_path": folder, "load_format": "dummy", "dtype": "bfloat16"}
        models = {"box": ({"model_path": "box"}, box), "qwen2.5-0.5b": (dummy | {"max_total_tokens": 8192}, qwen)}
        if unknown := set(args.models.split(",")) - set(models):
            p.error(f"--models knows {', '.join(models)}, got {', '.join(sorted(unknown))}")
        for options, cases in map(models.__getitem__, args.models.split(",")):
            engines = {n: Engine(**options, page_size=n, device="cpu", skip_tokenizer_init=True) for n in sizes}
            table |= measured(engines, cases, args.runs)
            for engine in engines.values():
                engine.shutdown()
    save("bench_page_size", {"unit": "output tokens/s by page size", "table": table}, args.out)


if __name__ == "__main__":
    main()
