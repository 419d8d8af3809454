"""What a decode step costs that does more than draw, with its forward pass in a CUDA graph and without.

    python scripts/bench_extended.py --model qwen2.5-0.5b     one GPU, random weights
    python scripts/bench_extended.py --model box              the model in the box

Milliseconds in which a batch decodes one token a row, all rows wanting the same: nothing (the whole step is one graph),
a logit bias, the 5 likeliest ids, or a frequency penalty, for which a step waits for the draws of the one before.
`graphs` and `eager` (the graphs of forward passes put aside) take turns in one engine. `differing` counts tokens and
logprobs that differ between them, which must be 0. `graph_mib` is what the memory in use grew by meanwhile, for each
graph that was captured. --budget ends in time, with fewer batch sizes.
"""

from contextlib import nullcontext
from typing import Any

import torch
from bench_gpu import dummy_engine
from measure import Budget, add_budget, need_gpu, parser, save, summary

from fengine import Engine
from fengine.core.step_trace import StepRecord

TOKENS = 128
KINDS: dict[str, tuple[int, dict[str, Any]]] = {  # likeliest ids wanted, sampling parameters
    "plain": (0, {}),
    "bias": (0, {"logit_bias": {"17": 0.5}}),
    "top 5": (5, {}),
    "penalty": (0, {"frequency_penalty": 0.2}),
}
SIDES = ("graphs", "eager")


def choose(runner: Any, graphs: bool, aside: dict[Any, Any]) -> None:
    """Lets an idle engine's extended steps use graphs, or not. Modifies: the runner, `aside`."""
    runner.room = graphs
    if graphs:
        runner.captured |= aside
    else:
        aside |= {key: graph for key, graph in runner.captured.items() if key[2]}
        for key in aside:
            runner.captured.pop(key, None)


def run(engine: Engine, prompts: list[list[int]], kind: str) -> tuple[float, list[Any]]:
    """Milliseconds for a token of each row when no prompt is left, and (logprob, token, None) of every draw."""
    top, params = KINDS[kind]
    steps: list[StepRecord] = []
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True, **params}
    with engine.steps_told(steps.append):
        outputs: Any = engine.generate(
            input_ids=prompts, sampling_params=params, return_logprob=True, top_logprobs_num=top
        )
    first = max(i for i, step in enumerate(steps) if step.kind != "decode") + 1
    tokens = sum(len(step.rids) for step in steps[first:])
    seconds = (steps[-1].landed - steps[first - 1].landed) * len(prompts) / tokens
    return seconds * 1e3, [output["meta_info"]["output_token_logprobs"] for output in outputs]


def compared(engine: Engine, batch: int, runs: int) -> dict[str, Any]:
    """Every kind on both sides in turn, after a warm-up."""
    draw = torch.Generator().manual_seed(batch)
    vocab = engine._parts.spec.vocab_size
    prompts = torch.randint(10, vocab - 10, (batch, 32), generator=draw).tolist()
    times: dict[str, dict[str, list[float]]] = {kind: {side: [] for side in SIDES} for kind in KINDS}
    aside: dict[Any, Any] = {}
    differing = 0
    for turn in range(-1, runs):
        for kind in KINDS:
            drawn = {}
            for side in SIDES if turn % 2 else SIDES[::-1]:
                choose(engine._parts.driver.runner, side == "graphs", aside)
                time, drawn[side] = run(engine, prompts, kind)
                if turn >= 0:
                    times[kind][side].append(time)
            pairs = zip(drawn["graphs"], drawn["eager"], strict=True)
            differing += sum(a != b for x, y in pairs for a, b in zip(x, y, strict=True))
    choose(engine._parts.driver.runner, True, aside)
    return {
        "ms": {kind: {side: summary(values) for side, values in sides.items()} for kind, sides in times.items()},
        "differing": differing,
    }


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--model", default="qwen2.5-0.5b", help="box, or a file of scripts/shapes without .json")
    p.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    add_budget(p)
    args = p.parse_args()
    need_gpu(p)
    budget = Budget(args.budget)
    options: dict[str, Any] = {"max_running_requests": 64, "disable_radix_cache": True, "context_length": 512}
    if args.model == "box":
        context: Any = nullcontext(Engine(model_path="box", device="cuda", **options))
    else:
        context = dummy_engine(args.model, **options)
    with context as engine:
        runner, figures, seconds = engine._parts.driver.runner, {}, 0.0
        torch.cuda.synchronize()
        free, before = torch.cuda.mem_get_info()[0], len(runner.captured)
        for batch in args.batches:
            if budget.allows(f"batch {batch}", seconds):
                begin = budget.clock()
                figures[batch] = compared(engine, batch, args.runs)
                seconds = budget.clock() - begin
                for kind, sides in figures[batch]["ms"].items():
                    print(batch, kind, {side: round(sides[side]["median"], 3) for side in SIDES}, flush=True)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        more = len(runner.captured) - before
        taken = {"graphs": more, "graph_mib": (free - torch.cuda.mem_get_info()[0]) / 2**20 / max(more, 1)}
        if args.model == "box":
            engine.shutdown()
    settings = {"model": args.model, "tokens": TOKENS, "left_out": budget.left_out}
    save(f"bench_extended_{args.model}", {"settings": settings, **taken, "batches": figures}, args.out)


if __name__ == "__main__":
    main()
