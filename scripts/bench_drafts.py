"""Drafts of a model on a GPU: what a guess costs, what verifying costs, what a draft brings that is right as often.

    python scripts/bench_drafts.py                              # Llama-3.1-8B's shape, an EAGLE-3 head in public shapes
    python scripts/bench_drafts.py --model qwen2.5-0.5b --tokens 64

Weights are random, so acceptance is forced: the head computes every guess, and a guess is then put in its place that is
right with such a chance that a try of five has the published length, 3.3 tokens with its own (vllm #20780); the answers
are those of a run without drafts. `unpredictable` keeps the head's own guesses, which are never right. Tokens and bits
of logprobs that differ from the run without drafts are counted, and must be 0. `step by step`: no guesses before the
step in front of them is read.
"""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_gpu import opened
from bench_speculation import differing
from floors import shape
from measure import Budget, add_budget, need_gpu, parser, save

from fengine import Engine
from fengine.core.speculation import Ask, Late, Speculation
from fengine.worker.warm_up import warm_step

sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "tests"))

import eagle_heads  # type: ignore[import-not-found]

CHANCE = 0.75  # of a guess behind right ones: 0.75 + ... + 0.75 ** 5 = 2.29 right ones in a try of five
HEAD_IDS = 32000


class Forced:
    """The model's proposals, with guesses that are right with CHANCE in place of its own; or `count` wrong ones and no
    model. Modifies: `tried`, `right`."""

    def __init__(self, model: Any, truth: dict[tuple[int, ...], list[int]], count: int | None = None) -> None:
        self.model, self.truth, self.count = model, truth, count

    def __call__(self, asks: Sequence[Ask]) -> list[list[int]]:
        if self.count is not None:
            return [[1] * min(self.count, ask.most) if ask.skip == 0 else [] for ask in asks]
        found = self.model(asks)
        forced = [self.instead(ask, guess) for ask, guess in zip(asks, found, strict=True)]
        return self.fed(asks, forced) if any(isinstance(guess, Late) for guess in found) else forced

    def fed(self, asks: Sequence[Ask], forced: list[list[int]]) -> list[Late]:
        """Puts them where the step is fed with the model's."""
        chain, chained = self.model.chain, self.model.chained
        by_request = {ask.request: guess for ask, guess in zip(asks, forced, strict=True)}
        found = [by_request[ask.request] for ask, _, _ in chained.rows]
        rows = [[*guess, *[1] * (chain.most - len(guess))] for guess in found]
        slots = [ask.request.slot for ask, _, _ in chained.rows]
        slot_R, guess_RK = (torch.tensor(x).pin_memory().to(chain.device, non_blocking=True) for x in (slots, rows))
        chain.guess_token_S.view(-1, chain.most)[slot_R] = guess_RK.int()
        self.model.chained = chained._replace(guesses=lambda: (chained.guesses(), np.array(rows))[1])
        return [Late([0] * len(guess)) for guess in forced]

    def instead(self, ask: Ask, guess: list[int]) -> list[int]:
        request = ask.request
        ids, drawn = self.truth[tuple(request.token_ids[: request.prompt_len])], request.num_output
        chance = random.Random(request.seed * 4099 + drawn)
        return [ids[drawn + k] if drawn + k < len(ids) and chance.random() < CHANCE else 1 for k in range(len(guess))]


def calls(rows: int, tokens: int, vocab: int) -> dict[str, Any]:
    draw = random.Random(rows)
    prompts = [[draw.randrange(10, vocab) for _ in range(128)] for _ in range(rows)]
    params = [{"max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": i} for i in range(rows)]
    return {"input_ids": prompts, "sampling_params": params, "return_logprob": True}


def timed(llm: Engine, call: dict[str, Any], speculation: Speculation | None) -> tuple[float, list[Any]]:
    """(output tokens per second from the first one on, the outputs)."""
    llm._parts.core.stepper.scheduler.speculation = speculation  # the engine is idle
    start = time.perf_counter()
    outputs: Any = llm.generate(**call)
    seconds = time.perf_counter() - start
    return sum(o["meta_info"]["completion_tokens"] for o in outputs) / seconds, outputs


def compared(llm: Engine, rows: int, tokens: int, vocab: int, runs: int) -> dict[str, Any]:
    """Off, forced, unpredictable, and steps with wrong guesses that nobody made."""
    on: Any = llm._parts.core.stepper.scheduler.speculation
    call = calls(rows, tokens, vocab)
    _, want = timed(llm, call, None)
    truth = {tuple(ids): o["output_ids"] for ids, o in zip(call["input_ids"], want, strict=True)}
    forced = replace(on, propose=Forced(on.propose, truth))
    sides: dict[str, Speculation | None] = {
        "off": None, "forced": forced, "forced, step by step": replace(forced, go_ahead=lambda output: None),
        "unpredictable": on,
    }  # fmt: skip
    sides |= {f"wrong {k}": replace(on, propose=Forced(None, truth, k)) for k in (1, 5)}
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    wrong, accepted = 0, {}
    for counted in [False] + [True] * runs:  # the first round captures what is captured late
        for name, speculation in sides.items():
            speed, outputs = timed(llm, call, speculation)
            speeds[name] += [speed] * counted
            wrong += differing(want, outputs)
            steps = sum(o["meta_info"].get("spec_verify_ct", 0) for o in outputs)
            drafts = sum(o["meta_info"].get("spec_num_proposed_drafts", 0) for o in outputs)
            accepted[name] = {"tokens per step": round(rows * tokens / max(steps, 1), 3), "drafts": drafts}
    llm._parts.core.stepper.scheduler.speculation = on
    median = {name: statistics.median(found) for name, found in speeds.items()}
    return {
        "tokens per second": {name: round(speed, 1) for name, speed in median.items()},
        "to off": {name: round(speed / median["off"], 4) for name, speed in median.items()},
        "all": {name: [round(x, 1) for x in found] for name, found in speeds.items()},
        "bits": wrong,
        "accepted": accepted,
    }


def guess_ms(llm: Engine, rows: int) -> dict[str, float]:
    """Milliseconds of a chain of guesses, the wait for them included, and of one more guess."""
    speculation: Any = llm._parts.core.stepper.scheduler.speculation
    chain, found = speculation.propose.chain, {}
    sizes = chain._sizes(rows, rows * chain.seen)
    for count in (1, chain.most):
        arrays, times = warm_step(sizes["T"], sizes).arrays, []
        for _ in range(30):
            start = time.perf_counter()
            chain.run(arrays, (), count)()
            times.append(time.perf_counter() - start)
        found[f"chain of {count}"] = statistics.median(times[5:]) * 1e3
    first, last = found.values()
    return {name: round(ms, 4) for name, ms in (found | {"guess": (last - first) / (chain.most - 1)}).items()}


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--model", default="llama-3.1-8b")
    p.add_argument("--tokens", type=int, default=256)
    p.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    p.set_defaults(runs=3)
    add_budget(p)
    args = p.parse_args()
    need_gpu(p)
    budget, cases, costs = Budget(args.budget), {}, {}
    target = shape(args.model)
    with tempfile.TemporaryDirectory() as folder:
        eagle_heads.write(Path(folder), target, head=min(HEAD_IDS, target["vocab_size"]))
        options: dict[str, Any] = {
            "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": folder, "max_running_requests": 64,
            "disable_radix_cache": True, "chunked_prefill_size": 4096,
        }  # fmt: skip
        begin = time.perf_counter()
        with opened(args.model, **options) as llm:
            started = time.perf_counter() - begin
            for rows in args.rows:
                if budget.allows(f"rows {rows}", 8.0):
                    costs[str(rows)] = guess_ms(llm, rows)
                    cases[str(rows)] = compared(llm, rows, args.tokens, target["vocab_size"], args.runs)
                    print(rows, costs[str(rows)], cases[str(rows)], flush=True)
    figures = {"model": args.model, "tokens": args.tokens, "start_s": round(started, 2), "milliseconds": costs}
    save("bench_drafts_gpu", figures | {"rows": cases, "left_out": budget.left_out}, args.out)


if __name__ == "__main__":
    main()
