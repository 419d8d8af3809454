"""N-gram speculation on and off, in output tokens/s: where an answer copies from its prompt, and where nothing repeats.

    python scripts/bench_speculation.py                    # the model in the box, on a GPU where there is one
    python scripts/bench_speculation.py --device cpu

Engines in one process take turns, with few requests each time: a machine that is slower for a second is so for all. A
ratio is the median over all turns of on / off, with its quartiles, by the clock and by the processor's time (on a CPU
the steadier one); `again / off` is a second engine without speculation, and so the noise. `bits` counts tokens and
logprob bits that differ between on and off, which must be 0.
"""

import random
import statistics
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from measure import parser, save, summary

from fengine import Engine

WORDS = "x q seven 4 river blue 7 cat dog one two six stone green 9 lamp sun k 3 tree door red eight mouse".split()
VOCAB = 2048


class Work(NamedTuple):
    """Requests that are sent `at_once` at a time."""

    prompts: list[Any]
    params: dict[str, Any]
    at_once: int


def copying(count: int, tokens: int) -> Work:
    """Strings of 12 words to be copied, as the model in the box has learnt it, one request after the other."""
    draw = random.Random(1)
    prompts = [f"Copy: {' '.join(draw.sample(WORDS, 12))} ->" for _ in range(count)]
    return Work(prompts, {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}, 1)


def telling(count: int, tokens: int) -> Work:
    """Stories, greedily: text that repeats a phrase now and then."""
    heads = ["Once upon a time", "One day the", "In a small town", "Long ago, a", "Every morning the", "When the snow"]
    prompts = [heads[i % len(heads)] + " " * (i // len(heads)) for i in range(count)]
    return Work(prompts, {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}, 1)


def unpredictable(count: int, tokens: int, at_once: int) -> Work:
    """Random ids, continued at temperature 1."""
    draw = random.Random(3)
    prompts = [[draw.randrange(10, VOCAB) for _ in range(draw.randint(16, 128))] for _ in range(count)]
    params = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    return Work(prompts, params, at_once)


def groups(work: Work) -> list[dict[str, Any]]:
    """The arguments of one call for each group of requests."""
    named = "prompt" if isinstance(work.prompts[0], str) else "input_ids"
    calls = []
    for first in range(0, len(work.prompts), work.at_once):
        some = range(first, min(first + work.at_once, len(work.prompts)))
        params = [work.params | {"sampling_seed": i} for i in some]
        calls.append({named: [work.prompts[i] for i in some], "sampling_params": params})
    return calls


def run(llm: Engine, call: dict[str, Any]) -> tuple[float, float, list[Any]]:
    """Output tokens per second, also of the processor's time, and the outputs."""
    start, busy = time.perf_counter(), time.process_time()
    outputs: Any = llm.generate(return_logprob=True, **call)
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    tokens = sum(output["meta_info"]["completion_tokens"] for output in outputs)
    return tokens / seconds, tokens / busy, outputs


def bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def differing(a: list[Any], b: list[Any]) -> int:
    """Tokens and logprob bits that differ."""
    count = 0
    for x, y in zip(a, b, strict=True):
        pairs = [o["meta_info"]["output_token_logprobs"] for o in (x, y)]
        count += abs(len(pairs[0]) - len(pairs[1]))
        for (p, i, _), (q, j, _) in zip(*pairs, strict=False):
            count += (i != j) + (bits(p) ^ bits(q)).bit_count()
    return count


def accepted(outputs: list[Any]) -> dict[str, float]:
    """Means over all requests."""
    metas = [output["meta_info"] for output in outputs]
    steps = sum(meta.get("spec_verify_ct", 0) for meta in metas)
    drafts = sum(meta.get("spec_num_proposed_drafts", 0) for meta in metas)
    correct = sum(meta.get("spec_num_correct_drafts", 0) for meta in metas)
    return {
        "tokens per step": sum(meta["completion_tokens"] for meta in metas) / max(steps, 1),
        "drafts": drafts,
        "of them drawn": correct / max(drafts, 1),
    }


def compared(engines: dict[str, Engine], work: Work, runs: int) -> dict[str, Any]:
    """The engines "off", "on" and "again" in turn for every group, in the reverse order every other turn."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    busy: dict[str, list[float]] = {name: [] for name in engines}
    wrong, last = 0, []
    for turn in range(runs + 1):
        last = []
        for call in groups(work):
            found = {}
            for name in sorted(engines, reverse=turn % 2 == 0):
                rate, by_processor, found[name] = run(engines[name], call)
                if turn:  # the first turn warms up
                    rates[name].append(rate)
                    busy[name].append(by_processor)
            wrong += differing(found["off"], found["on"])
            last += found["on"]

    def ratio(of: dict[str, list[float]], name: str) -> dict[str, Any]:
        return spread([b / a for a, b in zip(of["off"], of[name], strict=True)])

    return {
        "on / off": ratio(rates, "on"),
        "again / off": ratio(rates, "again"),
        "on / off by processor time": ratio(busy, "on"),
        "again / off by processor time": ratio(busy, "again"),
        **{name: spread(values) for name, values in rates.items()},
        "bits": wrong,
        "accepted": accepted(last),
    }


def spread(values: list[float]) -> dict[str, Any]:
    low, _, high = statistics.quantiles(values, n=4)
    return summary(values) | {"quartiles": [low, high]}


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--model", default="box")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--num-draft-tokens", type=int, default=None)
    p.add_argument("--only", default="", help="cases whose name contains this")
    args = p.parse_args()
    scale = 4 if args.device.startswith("cuda") else 1
    cases: dict[str, Callable[[], Work]] = {
        "copy 12 words, batch 1": lambda: copying(16 * scale, 13),
        "stories, batch 1": lambda: telling(6 * scale, 200),
        "unpredictable, batch 1": lambda: unpredictable(6 * scale, 128, 1),
        "unpredictable, batch 4": lambda: unpredictable(16 * scale, 128, 4),
        "unpredictable, batch 32": lambda: unpredictable(64 * scale, 128, 32),
    }
    options: dict[str, Any] = {"model_path": args.model, "device": args.device, "disable_radix_cache": True}
    drafts = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": args.num_draft_tokens}
    with Engine(**options) as off, Engine(**options, **drafts) as on, Engine(**options) as again:
        engines = {"off": off, "on": on, "again": again}
        table = {n: compared(engines, make(), args.runs) for n, make in cases.items() if args.only in n}
    settings = {name: getattr(args, name) for name in ("model", "device", "num_draft_tokens", "runs")}
    kind = args.device.split(":")[0]
    if args.out is None and args.only:
        args.out = f"/tmp/bench_speculation_{kind}.json"
    save(f"bench_speculation_{kind}", {"settings": settings, "cases": table}, args.out)


if __name__ == "__main__":
    main()
