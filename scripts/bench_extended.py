"""What a decode step costs that does more than draw, and what prompt logprobs cost beside the prefill alone.

    python scripts/bench_extended.py --model qwen2.5-0.5b     one GPU, random weights
    python scripts/bench_extended.py --model box              the model in the box, on a GPU or a CPU

Milliseconds in which a batch decodes one token a row, all rows wanting the same: nothing, a logit bias, penalties, the
5 likeliest ids, all three, or a grammar (JSON of strings without end), for which a step waits for masks. `ratio`: the
median over that of `plain`. Kinds take turns. `prompts`: tokens/s of prompts of --prompt-tokens, prefilled only and
with the logprob of every token. --budget ends in time, with less.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from bench_gpu import opened
from measure import Budget, add_budget, parser, save, summary, turns

from fengine import Engine
from fengine.api import input_processor
from fengine.core.step_trace import StepRecord
from fengine.structured_output.backend import Vocabulary

TOKENS = 128
LIST = '{"type": "array", "items": {"type": "string"}, "minItems": 1000}'
KINDS: dict[str, tuple[int, dict[str, Any]]] = {  # likeliest ids wanted, sampling parameters
    "plain": (0, {}),
    "bias": (0, {"logit_bias": {str(17 + i): 0.5 for i in range(100)}}),
    "penalties": (0, {"frequency_penalty": 0.2, "presence_penalty": 0.1, "repetition_penalty": 1.1}),
    "top 5": (5, {}),
    "grammar": (0, {"json_schema": LIST}),
    "bias, penalties, top 5": (5, {"logit_bias": {"17": 0.5}, "frequency_penalty": 0.2}),
}


def run(engine: Engine, prompts: list[list[int]], kind: str) -> float:
    """Milliseconds for a token of each row when no prompt is left."""
    top, params = KINDS[kind]
    steps: list[StepRecord] = []
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True, "stop_token_ids": [0], **params}
    with engine.steps_told(steps.append):
        engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True, top_logprobs_num=top)
    first = max(i for i, step in enumerate(steps) if step.kind != "decode") + 4  # its graph is made by then
    tokens = sum(len(step.rids) for step in steps[first:])
    return (steps[-1].landed - steps[first - 1].landed) * len(prompts) / tokens * 1e3


def compared(engine: Engine, batch: int, runs: int, kinds: list[str]) -> dict[str, Any]:
    """Every kind in turn, after a warm-up."""
    draw = torch.Generator().manual_seed(batch)
    vocab = engine._parts.spec.vocab_size
    prompts = torch.randint(10, vocab - 10, (batch, 32), generator=draw).tolist()
    times = turns({kind: partial(run, engine, prompts, kind) for kind in kinds}, runs)
    plain = statistics.median(times["plain"])
    return {
        "ms": {kind: summary(values) for kind, values in times.items()},
        "ratio": {kind: statistics.median(values) / plain for kind, values in times.items()},
    }


def prompt_logprobs(engine: Engine, count: int, length: int, runs: int) -> dict[str, Any]:
    """Tokens/s of prompts in one batch, without logprobs of their tokens and with, in turn."""
    draw = torch.Generator().manual_seed(length)
    vocab = engine._parts.spec.vocab_size
    prompts = torch.randint(10, vocab - 10, (count, length), generator=draw).tolist()
    params: Any = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}

    def rate(**asked: Any) -> float:
        start = time.perf_counter()
        engine.generate(input_ids=prompts, sampling_params=params, **asked)
        return count * length / (time.perf_counter() - start)

    rates = turns({"prefill": rate, "logprobs": partial(rate, return_logprob=True, logprob_start_len=0)}, runs)
    ratio = statistics.median(rates["logprobs"]) / statistics.median(rates["prefill"])
    return {"count": count, "length": length, "logprobs / prefill": ratio,
            **{side: summary(values) for side, values in rates.items()}}  # fmt: skip


def letters(size: int) -> list[bytes]:
    """Texts for a vocabulary that has none: single bytes, then words of lower-case letters."""
    words = [bytes(97 + i // 26**k % 26 for k in range(4)) for i in range(size)]
    return [bytes([i]) if i < 256 else words[i] for i in range(size)]


@contextmanager
def engine_of(model: str, **options: Any) -> Iterator[Engine]:
    with opened(model, skip_tokenizer_init=model != "box", **options) as engine:
        if model != "box":
            input_processor._refuse_without_text = lambda *_: None  # grammars have a vocabulary of their own here
            engine._context.grammars.__dict__["vocabulary"] = Vocabulary(letters(engine._parts.spec.vocab_size), False)
        yield engine


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--model", default="qwen2.5-0.5b", help="box, or a file of scripts/shapes without .json")
    p.add_argument("--batches", type=int, nargs="*", default=[1, 32])
    p.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    p.add_argument("--prompts", type=int, default=16)
    p.add_argument("--prompt-tokens", type=int, default=4096, help="0: prompts are left out")
    add_budget(p)
    args = p.parse_args()
    budget, kinds = Budget(args.budget), ["plain", *(kind for kind in args.kinds if kind != "plain")]
    options: dict[str, Any] = {"max_running_requests": 64, "disable_radix_cache": True}
    figures, seconds, prompts = {}, 0.0, None
    with engine_of(args.model, **options) as engine:
        for batch in args.batches:
            if budget.allows(f"batch {batch}", seconds):
                begin = budget.clock()
                figures[batch] = compared(engine, batch, args.runs, kinds)
                seconds = budget.clock() - begin
                print(batch, {kind: round(x, 3) for kind, x in figures[batch]["ratio"].items()}, flush=True)
        if args.prompt_tokens and budget.allows("prompts", seconds):
            prompts = prompt_logprobs(engine, args.prompts, args.prompt_tokens, args.runs)
    settings = {"model": args.model, "tokens": TOKENS, "left_out": budget.left_out}
    save(f"bench_extended_{args.model}", {"settings": settings, "batches": figures, "prompts": prompts}, args.out)


if __name__ == "__main__":
    main()
