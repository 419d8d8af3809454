"""The workloads every engine is measured on: token-id prompts, greedy, end-of-text ignored, seeded, so that each engine
does the same work."""

import random
import time
from typing import Any

from fengine import Engine

Work = list[tuple[list[int], int]]  # prompt token ids, number of output tokens


def uniform(n: int, lo: int, hi: int, out_lo: int, out_hi: int, vocab: int, seed: int, edge: int = 1000) -> Work:
    """n requests with prompt lengths in [lo, hi] and output lengths in [out_lo, out_hi]; of the vocabulary without its
    `edge` on both sides, where special tokens are."""
    r = random.Random(seed)
    return [
        ([r.randrange(edge, vocab - edge) for _ in range(r.randint(lo, hi))], r.randint(out_lo, out_hi))
        for _ in range(n)
    ]


def generate(engine: Engine, work: Work) -> tuple[float, list[list[int]]]:
    """Seconds of one call with all of it, and the drawn tokens."""
    params: Any = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for _, n in work]
    start = time.perf_counter()
    outputs: Any = engine.generate(input_ids=[ids for ids, _ in work], sampling_params=params)
    seconds, drawn = time.perf_counter() - start, [output["output_ids"] for output in outputs]
    assert [len(ids) for ids in drawn] == [n for _, n in work]
    return seconds, drawn


def shared_prefix(groups: int, per_group: int, prefix: int, suffix: int, out: int, vocab: int, seed: int) -> Work:
    """Groups of requests that share a prefix, shuffled."""
    r = random.Random(seed)

    def tokens(n: int) -> list[int]:
        return [r.randrange(1000, vocab - 1000) for _ in range(n)]

    heads = [tokens(prefix) for _ in range(groups)]
    requests = [(head + tokens(suffix), out) for head in heads for _ in range(per_group)]
    r.shuffle(requests)
    return requests


def suite(model: str, vocab: int) -> dict[str, Work]:
    """Workload name -> requests."""
    mixed = 1024 if model.startswith("qwen2.5") else 512
    return {
        "latency_b1": uniform(1, 128, 128, 256, 256, vocab, 1),
        "latency_b32": uniform(32, 128, 128, 256, 256, vocab, 2),
        "throughput_mixed": uniform(mixed, 100, 1024, 100, 1024, vocab, 3),
        "prefill_4k": uniform(64, 4096, 4096, 1, 1, vocab, 4),
        "shared_prefix": shared_prefix(16, 32, 2048, 128, 32, vocab, 5),
        "long_decode_16k": uniform(16, 16384, 16384, 128, 128, vocab, 6),
    }
