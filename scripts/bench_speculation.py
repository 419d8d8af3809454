"""N-gram speculation on and off, in output tokens/s: where an answer copies from its prompt, and where nothing repeats.

    python scripts/bench_speculation.py                    # the model in the box, on a GPU where there is one
    python scripts/bench_speculation.py --device cpu --seconds 12

One engine, whose speculation is switched off and on between calls of a few requests: same weights at the same
addresses, same graphs. `off`, `on` and `again` (off once more) take turns, forth and back, for `--seconds` in a case.
`on / off` compares the times of all calls, each its median over the rounds, that of off and again being the mean of the
two; `again / off` is the noise of the same measurement. Both also by each call's fastest round, which other work on the
machine disturbs least, and by the processor's time. `bits` counts tokens and logprob bits that differ between on and
off, which must be 0.
"""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from measure import parser, save
from proof import answers, difference

from fengine import Engine

WORDS = "x q seven 4 river blue 7 cat dog one two six stone green 9 lamp sun k 3 tree door red eight mouse".split()
VOCAB, ROUNDS = 2048, 5


class Work(NamedTuple):
    """Requests that are sent `at_once` at a time."""

    prompts: list[Any]
    params: dict[str, Any]
    at_once: int


def copying(count: int, tokens: int, shown: int = 0) -> Work:
    """Strings of 12 words to be copied, one request after the other, as the model in the box has learnt it or with the
    task shown so many times before."""
    draw = random.Random(1)

    def words() -> str:
        return " ".join(draw.sample(WORDS, 12))

    prompts = []
    for _ in range(count):
        examples = [f"Copy: {copy} -> {copy}\n" for copy in (words() for _ in range(shown))]
        prompts.append("".join(examples) + f"Copy: {words()} ->")
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
    """Seconds, those of the processor, and the outputs."""
    start, busy = time.perf_counter(), time.process_time()
    outputs: Any = llm.generate(return_logprob=True, **call)
    return time.perf_counter() - start, time.process_time() - busy, outputs


def differing(a: list[Any], b: list[Any]) -> int:
    """Tokens and logprob bits that differ."""
    found = difference(answers(a), answers(b))
    return found.tokens + found.bits


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


SIDES = ("off", "on", "again")
Times = dict[str, list[list[float]]]  # of each side, by round and call


def compared(llm: Engine, work: Work, seconds: float) -> dict[str, Any]:
    """All sides in turn for each group of requests, every other turn in the reverse order. At least ROUNDS rounds."""
    scheduler = llm._parts.core.stepper.scheduler
    speculation = scheduler.speculation
    clock: Times = {name: [] for name in SIDES}
    busy: Times = {name: [] for name in SIDES}
    wrong, outputs, calls = 0, [], groups(work)
    run(llm, calls[0])  # warms up
    start = time.perf_counter()
    while len(clock["on"]) < ROUNDS or time.perf_counter() - start < seconds:
        for times in (*clock.values(), *busy.values()):
            times.append([])
        outputs = []
        for turn, call in enumerate(calls, len(clock["on"])):
            found = {}
            for name in SIDES if turn % 2 else SIDES[::-1]:
                scheduler.speculation = speculation if name == "on" else None  # the engine is idle
                by_clock, by_processor, found[name] = run(llm, call)
                clock[name][-1].append(by_clock)
                busy[name][-1].append(by_processor)
            wrong += differing(found["off"], found["on"])
            outputs += found["on"]
    scheduler.speculation = speculation
    tokens = sum(output["meta_info"]["completion_tokens"] for output in outputs)
    return {
        "median": ratios(clock, statistics.median),
        "fastest": ratios(clock, min),
        "processor, median": ratios(busy, statistics.median),
        "processor, fastest": ratios(busy, min),
        "tokens per second": {name: round(tokens / total(times, min), 1) for name, times in clock.items()},
        "bits": wrong,
        "accepted": accepted(outputs),
        "rounds": {name: [round(sum(times), 4) for times in clock[name]] for name in SIDES},
        "rounds, processor": {name: [round(sum(times), 4) for times in busy[name]] for name in SIDES},
    }


def total(times: list[list[float]], of: Callable[[Any], float]) -> float:
    """Seconds of one round: for each call the median or minimum over the rounds."""
    return sum(map(of, zip(*times, strict=True)))


def ratios(times: Times, of: Callable[[Any], float]) -> dict[str, float]:
    """Of the speeds."""
    off, on, again = (total(times[name], of) for name in SIDES)
    return {"on / off": round((off + again) / 2 / on, 4), "again / off": round(off / again, 4)}


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--model", default="box")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--seconds", type=float, default=4.0, help="of each case, at least")
    p.add_argument("--num-draft-tokens", type=int, default=None)
    p.add_argument("--only", default="", help="cases whose name contains this")
    args = p.parse_args()
    cases: dict[str, Callable[[], Work]] = {
        "copy 12 words, batch 1": lambda: copying(16, 13),
        "copy 12 words, shown twice, batch 1": lambda: copying(16, 13, shown=2),
        "stories, batch 1": lambda: telling(6, 128),
        "unpredictable, batch 1": lambda: unpredictable(8, 96, 1),
        "unpredictable, batch 4": lambda: unpredictable(16, 96, 4),
        "unpredictable, batch 32": lambda: unpredictable(64, 48, 32),
    }
    options: dict[str, Any] = {"model_path": args.model, "device": args.device, "disable_radix_cache": True}
    drafts = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": args.num_draft_tokens}
    with Engine(**options, **drafts) as llm:
        table = {n: compared(llm, make(), args.seconds) for n, make in cases.items() if args.only in n}
    settings = {name: getattr(args, name) for name in ("model", "device", "num_draft_tokens", "seconds")}
    kind = args.device.split(":")[0]
    if args.out is None and args.only:
        args.out = f"/tmp/bench_speculation_{kind}.json"
    save(f"bench_speculation_{kind}", {"settings": settings, "cases": table}, args.out)
    for name, case in table.items():
        found = {key: list(case[key].values()) for key in case if key.endswith(("median", "fastest"))}
        print(name, found, "bits", case["bits"], case["accepted"])


if __name__ == "__main__":
    main()
