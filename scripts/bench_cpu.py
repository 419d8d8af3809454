"""A model on a CPU: fengine against transformers, in useful tokens/s (only tokens that were asked for).

    python scripts/bench_cpu.py                            # the model in the box
    python scripts/bench_cpu.py --model qwen2.5-0.5b       # a file of scripts/shapes, with random weights

The box: 64 requests with prompts of 8-200 and outputs of 16-128 tokens, and one request alone. A shape: batches of 1
and 16, with 16-token prompts and 64 new tokens (decoding decides) and 64-token prompts and 32 (the prompt costs as
much). All is greedy, end-of-text ignored, prompts included. Baselines in the same process: `generate` on the padded
batch in float32 and bfloat16, and for the box transformers' own continuous batching. The engines take turns. Where the
CPU has bf16 dot products, bfloat16 transformers has twice the arithmetic of float32; fengine computes in float32.
--cpu-time counts CPU seconds, which other work on the machine hardly changes; for one thread (OMP_NUM_THREADS=1).
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bench_gpu import opened
from floors import shape
from measure import parser, save, summary, turns
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from workloads import Work, generate, uniform

from fengine.worker.hub import resolve_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPE: dict[str, Any] = {"context_length": None, "max_total_tokens": 8192}


def mixed(count: int, vocab: int) -> Work:
    """So many requests of all sizes to the box."""
    return uniform(count, 8, 200, 16, 128, vocab, 0, edge=10)


def batches(vocab: int, sizes: tuple[int, ...] = (1, 16)) -> dict[str, Work]:
    """What a shape is asked for."""
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(1000, vocab - 1000, (16, 64), generator=draw).tolist()
    cases = [(batch, width, count) for batch in sizes for width, count in ((16, 64), (64, 32))]
    return {f"batch {b}, {w} in, {n} out": [(p[:w], n) for p in prompts[:b]] for b, w, n in cases}


def padded(model: Any, work: Work) -> None:
    """The padded batch runs until its longest row is done: that is what users get."""
    width, longest = max(len(ids) for ids, _ in work), max(n for _, n in work)
    ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in work])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in work])
    config = GenerationConfig(max_new_tokens=longest, min_new_tokens=longest, do_sample=False, pad_token_id=0)
    with torch.inference_mode():
        model.generate(input_ids=ids, attention_mask=mask, generation_config=config)


def continuous(model: Any, work: Work) -> None:
    config = GenerationConfig(max_new_tokens=128, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(generation_config=config) as manager:
        for ids, count in work:
            manager.add_request(ids, max_new_tokens=count, eos_token_id=-1)
        for _ in work:
            manager.get_result()


def models(name: str) -> dict[str, Any]:
    """transformers' by dtype."""
    if name == "box":
        return {d: AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=t).eval() for d, t in DTYPES.items()}
    given = {k: v for k, v in shape(name).items() if k not in ("architectures", "torch_dtype")}
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    return {d: AutoModelForCausalLM.from_config(config).to(t).eval() for d, t in DTYPES.items()}


def rate(clock: Callable[[], float], run: Callable[[Work], object], work: Work) -> float:
    start = clock()
    run(work)
    return sum(n for _, n in work) / (clock() - start)


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--model", default="box", help="box, or a file of scripts/shapes without .json")
    p.add_argument("--batch", type=int, action="append", help="of a shape; default 1 and 16")
    p.add_argument("--cpu-time", action="store_true", help="by CPU seconds of the process")
    args = p.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    torch.manual_seed(0)
    theirs, table, box = models(args.model), {}, args.model == "box"
    vocab = theirs["float32"].config.vocab_size
    cases = {"batch64": mixed(64, vocab), "batch1": [([5] * 32, 128)]} if box else {}
    cases = cases or batches(vocab, tuple(args.batch or (1, 16)))
    with opened(args.model, disable_radix_cache=True, **({} if box else SHAPE)) as engine:
        for case, work in cases.items():
            sides = {"fengine": partial(generate, engine)}
            sides |= {f"transformers generate {name}": partial(padded, model) for name, model in theirs.items()}
            if case == "batch64":
                sides["transformers continuous float32"] = partial(continuous, theirs["float32"])
            rates = turns({name: partial(rate, clock, run, work) for name, run in sides.items()}, args.runs)
            table |= {f"{case}/{name}": summary(found) for name, found in rates.items()}
    medians = {name: row["median"] for name, row in table.items()}
    ours = {name: medians[f"{name.partition('/')[0]}/fengine"] for name in medians if not name.endswith("/fengine")}
    ratios = {name.replace("/", ": fengine / "): value / medians[name] for name, value in ours.items()}
    figures = {"unit": f"useful output tokens/{'CPU ' * args.cpu_time}s", "model": args.model, "ratios": ratios}
    save(f"bench_cpu_{args.model}", figures | {"table": table}, args.out)


if __name__ == "__main__":
    main()
