"""What an engine costs besides arithmetic, on the model in the box: prefix sharing, compiles, memory, host work, start.

- 512 requests on a shared 2,048-token prefix (the checkpoint's context is extended for it): computed / unique tokens
- under torch.compile: compiles after warm-up over a mixed workload, RSS growth over 10,000 small requests, pages at the
  end; and Python's full garbage collections meanwhile: how many, their seconds, and the objects they go through
- host work per step (schedule + stage + update) at 64, 256 and 1024 decoding rows, in microseconds
- seconds of `--help`, and of a whole first run with a cold and with a warm compile cache
"""

import gc
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import parser, save, summary

from fengine import Engine
from fengine.core.kv_pages import PagePool
from fengine.core.prefix_cache import PrefixCache
from fengine.core.request import Request, SamplingParams
from fengine.core.scheduler import Scheduler
from fengine.worker.hub import resolve_model
from fengine.worker.input_batch import InputBatch


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def shared_prefix() -> dict[str, Any]:
    box, draw = resolve_model("box"), random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        longer = Path(folder) / "box"
        shutil.copytree(box, longer)
        config = json.loads((longer / "config.json").read_text()) | {"max_position_embeddings": 4096}
        (longer / "config.json").write_text(json.dumps(config))
        with Engine(model_path=str(longer), skip_tokenizer_init=True, max_total_tokens=65536) as engine:
            head = [draw.randrange(10, 1000) for _ in range(2048)]
            prompts = [head + [draw.randrange(10, 1000) for _ in range(16)] for _ in range(512)]
            engine.generate(input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": 1})
            computed = engine.stats()["computed_tokens"]
    unique = 2048 + 512 * 16
    return {"computed_tokens": computed, "unique_tokens": unique, "ratio": computed / unique}


def mixed_load() -> dict[str, Any]:
    draw = random.Random(1)

    def batch(engine: Engine, count: int, longest: int) -> None:
        prompts = [[draw.randrange(10, 1000) for _ in range(draw.randint(1, longest))] for _ in range(count)]
        params = [
            {"temperature": draw.choice((0, 0.8)), "top_p": draw.choice((1, 0.9)), "max_new_tokens": draw.randint(1, 9)}
            for _ in range(count)
        ]
        engine.generate(input_ids=prompts, sampling_params=params)

    begun, collections = 0.0, []

    def told(phase: str, info: dict[str, int]) -> None:
        nonlocal begun
        if info["generation"] == 2 and phase == "start":
            begun = time.perf_counter()
        elif info["generation"] == 2:
            collections.append(time.perf_counter() - begun)

    with Engine(model_path="box", skip_tokenizer_init=True, enable_torch_compile=True) as engine:
        objects = len(gc.get_objects())
        gc.callbacks.append(told)
        for size in (1, 2, 3, 64, 100, 1, 17):
            batch(engine, size, 500)
        at_start = engine.stats()["compiles"]
        growth = []
        for i in range(50):
            batch(engine, 200, 24)
            growth.append(rss_mib())
            if i == 4:
                before = growth[-1]
        for size in (1, 2, 64, 130):
            batch(engine, size, 500)
        stats = engine.stats()
        engine.flush_cache()
        after = engine.stats()
        gc.callbacks.remove(told)
    return {
        "compiles_while_serving": stats["compiles"] - at_start,
        "rss_growth_mib_over_9000_requests": growth[-1] - before,
        "pages_used_at_the_end": after["pages_used"],
        "full_collections": {"requests": stats["finished"], "objects": objects, "seconds": collections},
    }


def host_work(rows: int, steps: int = 300) -> dict[str, Any]:
    """A scheduler with `rows` decoding rows, no device: seconds of schedule + stage + update per step."""
    size, context = 16, 1024
    pool = PagePool(rows * context // size + 1)
    scheduler = Scheduler(
        pool, PrefixCache(pool, size), page_size=size, max_running_requests=rows, max_step_tokens=max(rows, 512)
    )
    tables = InputBatch(rows, context // size, size)
    draw = random.Random(2)
    params = SamplingParams.of({"max_new_tokens": 600})
    for i in range(rows):
        prompt = [draw.randrange(1000) for _ in range(draw.randint(8, 64))]
        scheduler.add(Request(f"r{i}", len(prompt), prompt, params, i, 600, frozenset({1001})))
    tokens, logprobs = [7] * rows, [-0.5] * rows
    spent: list[float] = []
    while len(spent) < steps:
        start = time.perf_counter()
        plan = scheduler.schedule()
        assert plan is not None
        tables.stage(plan)
        scheduler.update(plan, tokens, logprobs)
        elapsed = time.perf_counter() - start
        if len(plan.rows) == rows and len(plan.starts) == sum(plan.counts):
            spent.append(elapsed * 1e6)
    ordered = sorted(spent)
    return {"median": statistics.median(spent), "p10": ordered[len(spent) // 10], "p90": ordered[-len(spent) // 10]}


def start_times(runs: int) -> dict[str, Any]:
    def seconds(arguments: list[str], cache: str) -> float:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                [sys.executable, "-m", "fengine.run", *arguments], check=True, capture_output=True, cwd=folder,
                env=os.environ | {"XDG_CACHE_HOME": cache},
            )  # fmt: skip
        return time.perf_counter() - start

    with tempfile.TemporaryDirectory() as cache:
        job = ["model=llama", "sampling.temperature=0.8"]
        cold = seconds(job, cache)
        warm = [seconds(job, cache) for _ in range(runs)]
        usage = [seconds(["--help"], cache) for _ in range(runs)]
    return {"help_s": summary(usage), "first_run_cold_cache_s": cold, "run_warm_cache_s": summary(warm)}


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--only", action="append", choices=["prefix", "load", "host", "start"])
    args = p.parse_args()
    parts = {
        "prefix": lambda: {"shared_prefix_512x2048": shared_prefix()},
        "load": lambda: {"mixed_load": mixed_load()},
        "host": lambda: {"host_us_per_step": {str(n): host_work(n) for n in (64, 256, 1024)}},
        "start": lambda: {"start": start_times(args.runs)},
    }
    figures: dict[str, Any] = {}
    for name, run in parts.items():
        if not args.only or name in args.only:
            figures |= run()
    save("bench_engine", figures, args.out)


if __name__ == "__main__":
    main()
