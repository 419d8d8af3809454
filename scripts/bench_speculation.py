"""N-gram speculation on and off, in output tokens/s: where an answer copies from its prompt, and where nothing repeats.

    python scripts/bench_speculation.py                    # the model in the box, on a GPU where there is one
    python scripts/bench_speculation.py --device cpu

Two engines in one process take turns. Each ratio is the median over the turns of on / off, with the extremes; `bits`
counts tokens and logprob bits that differ between the two, which must be 0.
"""

import random
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
    """Strings of 12 words to be copied, one request after the other, with the task shown thrice before."""
    draw = random.Random(1)

    def shot() -> tuple[str, str]:
        words = " ".join(draw.sample(WORDS, 12))
        return f"Copy: {words} ->", f" {words}\n"

    prompts = ["".join(q + a for q, a in (shot() for _ in range(3))) + shot()[0] for _ in range(count)]
    return Work(prompts, {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}, 1)


def reciting(count: int, tokens: int) -> Work:
    """One string again and again: the answer goes on with it."""
    draw = random.Random(2)
    prompts = [f"Copy: {(words := ' '.join(draw.sample(WORDS, 12)))} -> {words}\n" * 4 for _ in range(count)]
    return Work(prompts, {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}, 1)


def unpredictable(count: int, tokens: int, at_once: int) -> Work:
    """Random ids, continued at temperature 1."""
    draw = random.Random(3)
    prompts = [[draw.randrange(10, VOCAB) for _ in range(draw.randint(16, 128))] for _ in range(count)]
    params = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    return Work(prompts, params, at_once)


def run(llm: Engine, work: Work) -> tuple[float, list[Any]]:
    """Output tokens per second, and the outputs."""
    outputs: list[Any] = []
    named = "prompt" if isinstance(work.prompts[0], str) else "input_ids"
    start = time.perf_counter()
    for first in range(0, len(work.prompts), work.at_once):
        some = range(first, min(first + work.at_once, len(work.prompts)))
        params = [work.params | {"sampling_seed": i} for i in some]
        asked: Any = {named: [work.prompts[i] for i in some]}
        outputs += llm.generate(sampling_params=params, return_logprob=True, **asked)  # type: ignore[arg-type]
    seconds = time.perf_counter() - start
    return sum(output["meta_info"]["completion_tokens"] for output in outputs) / seconds, outputs


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


def compared(off: Engine, on: Engine, work: Work, runs: int) -> dict[str, Any]:
    """The engines in turn, each first in every other turn."""
    rates: dict[str, list[float]] = {"off": [], "on": []}
    wrong, last = 0, []
    for turn in range(runs + 1):
        found = {}
        for name, llm in sorted({"off": off, "on": on}.items(), reverse=turn % 2 == 0):
            rate, found[name] = run(llm, work)
            if turn:  # the first turn warms up
                rates[name].append(rate)
        wrong += differing(found["off"], found["on"])
        last = found["on"]
    ratios = [b / a for a, b in zip(rates["off"], rates["on"], strict=True)]
    return {
        "on / off": summary(ratios),
        **{name: summary(values) for name, values in rates.items()},
        "bits": wrong,
        "accepted": accepted(last),
    }


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--model", default="box")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--num-draft-tokens", type=int, default=None)
    p.add_argument("--only", default="", help="cases whose name contains this")
    args = p.parse_args()
    scale = 4 if args.device.startswith("cuda") else 1
    cases: dict[str, Callable[[], Work]] = {
        "copy 12 words, batch 1": lambda: copying(12 * scale, 13),
        "recite, batch 1": lambda: reciting(3 * scale, 120),
        "unpredictable, batch 1": lambda: unpredictable(4 * scale, 128, 1),
        "unpredictable, batch 4": lambda: unpredictable(8 * scale, 128, 4),
        "unpredictable, batch 32": lambda: unpredictable(32 * scale, 128, 32),
    }
    options: dict[str, Any] = {"model_path": args.model, "device": args.device, "disable_radix_cache": True}
    drafts = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": args.num_draft_tokens}
    with Engine(**options) as off, Engine(**options, **drafts) as on:
        table = {n: compared(off, on, make(), args.runs) for n, make in cases.items() if args.only in n}
    settings = {name: getattr(args, name) for name in ("model", "device", "num_draft_tokens", "runs")}
    kind = args.device.split(":")[0]
    if args.out is None and args.only:
        args.out = f"/tmp/bench_speculation_{kind}.json"
    save(f"bench_speculation_{kind}", {"settings": settings, "cases": table}, args.out)


if __name__ == "__main__":
    main()
