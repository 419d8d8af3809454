"""Host work per decode step: microseconds of `schedule` and `update` at 64, 256 and 1024 decoding rows.

    python scripts/bench_host.py [--page-size 16] [--steps 400] [--overlap]

Every row decodes with its own prompt and gets a page each `page_size` steps; nothing finishes while it is measured.
Also shown: matching and inserting a prefix of 2,048 tokens; and, of a call of 512 prompts of 2,176 ids that share
prefixes, how long it takes to its first step and to its end with a device that answers at once.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from workloads import shared_prefix

from fengine import Engine
from fengine.config import Policy
from fengine.core.kv_pages import PagePool
from fengine.core.prefix_cache import PrefixCache
from fengine.core.request import Request, SamplingParams
from fengine.core.scheduler import Scheduler
from fengine.core.scheduler_output import StepOutput
from fengine.worker.step import Result
from fengine.worker.step_input import StepInput

VOCAB = 32_000
TINY = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 8192, "torch_dtype": "float32",
}  # fmt: skip


def make_request(index: int, rng: random.Random, prompt_len: int, max_new_tokens: int) -> Request:
    prompt = [rng.randrange(VOCAB) for _ in range(prompt_len)]
    return Request(f"r{index}", prompt_len, prompt, SamplingParams(), index, max_new_tokens, frozenset({VOCAB}))


def spread(seconds: list[float]) -> str:
    """Median and the 10th and 90th percentile in microseconds."""
    ordered = sorted(seconds)
    low, high = ordered[len(ordered) // 10], ordered[len(ordered) * 9 // 10]
    return f"{statistics.median(ordered) * 1e6:8.1f} ({low * 1e6:.1f} .. {high * 1e6:.1f})"


def decode(rows: int, steps: int, page_size: int, overlap: bool) -> tuple[list[float], list[float], list[float]]:
    """Seconds of schedule, update and their sum, one entry a step."""
    rng = random.Random(0)
    pool = PagePool(rows * (200 + steps) // page_size + 2 * rows + 2)
    scheduler = Scheduler(pool, PrefixCache(pool, page_size), page_size=page_size, max_running_requests=rows,
                          max_step_tokens=max(8192, rows), policy=Policy.fcfs)  # fmt: skip
    for index in range(rows):
        scheduler.add(make_request(index, rng, rng.randrange(8, 200), steps + 1000))
    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    waiting = []
    while len(times[0]) < steps:
        drawn = [rng.randrange(VOCAB) for _ in range(rows)]
        logprobs = [-1.0] * rows
        begin = time.perf_counter()
        plan = scheduler.schedule()
        middle = time.perf_counter()
        assert plan is not None
        waiting.append(plan)
        before = time.perf_counter()
        if len(waiting) > overlap:
            scheduler.update(waiting.pop(0), drawn, logprobs)
        end = time.perf_counter()
        if plan.counts == [1] * rows:
            for into, value in zip(times, (middle - begin, end - before, middle - begin + end - before), strict=True):
                into.append(value)
    return times


def prefix(page_size: int, tokens: int = 2048, rounds: int = 300) -> tuple[list[float], list[float]]:
    """Seconds to match, and to insert again, a cached prefix whose token ids are other int objects of equal value."""
    rng = random.Random(0)
    pool = PagePool(tokens // page_size + 2)
    cache = PrefixCache(pool, page_size)
    ids = [rng.randrange(VOCAB) for _ in range(tokens + 1)]
    pages = pool.allocate(tokens // page_size)
    assert pages is not None
    cache.insert(ids, pages)
    match, insert = [], []
    for _ in range(rounds):
        other = [int(str(i)) for i in ids]
        begin = time.perf_counter()
        hit = cache.match(other, tokens)
        middle = time.perf_counter()
        cache.insert(other, hit)
        insert.append(time.perf_counter() - middle)
        match.append(middle - begin)
        assert hit == pages
        pool.release(hit)
    return match, insert


class Instant:
    """A device that answers at once."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.params: Any = {}

    def launch(self, kv: Any, step: StepInput) -> tuple[Any, Result]:
        self.first = self.first or time.perf_counter()
        rows = step.rows
        return kv, lambda: StepOutput([7] * rows, [-1.0] * rows)


def call(rounds: int = 7) -> tuple[list[float], list[float]]:
    """Seconds from a call of 1.1 million prompt ids to its first step, and to its end."""
    work = shared_prefix(16, 32, 2048, 128, 32, VOCAB, 5)
    params: Any = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for _, n in work]
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "page_size": 64}
    options |= {"max_total_tokens": 1 << 20, "chunked_prefill_size": 8192, "max_running_requests": 512}
    first, whole = [], []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY))
        with Engine(model_path=folder, enable_torch_compile=False, **options) as engine:
            for _ in range(rounds + 1):
                engine.flush_cache()
                engine._parts.core.stepper.runner = runner = Instant()
                begin = time.perf_counter()
                engine.generate(input_ids=[ids for ids, _ in work], sampling_params=params)
                whole.append(time.perf_counter() - begin)
                assert runner.first is not None
                first.append(runner.first - begin)
    return first[1:], whole[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--overlap", action="store_true", help="schedule step n+1 before update of step n")
    args = parser.parse_args()
    print("decoding rows: microseconds a step, median (10th .. 90th percentile)")
    for rows in (64, 256, 1024):
        schedule, update, both = decode(rows, args.steps, args.page_size, args.overlap)
        print(f"{rows:5} rows   schedule {spread(schedule)}   update {spread(update)}   both {spread(both)}")
    match, insert = prefix(args.page_size)
    print(f"prefix of 2048 tokens   match {spread(match)}   insert {spread(insert)}")
    first, whole = call()
    print(f"512 prompts of 2176 ids   first step after {spread(first)}   whole {spread(whole)}")


if __name__ == "__main__":
    main()
