"""LoRA: tokens/s of a batch whose rows have eight adapters of rank 16 in turn, against the same batch without.

    python scripts/bench_lora.py --model llama-3.1-8b     one GPU, random weights
    python scripts/bench_lora.py                          the model in the box, on a CPU

Three ways take turns in one process: `plain`, an engine without LoRA; `none`, an engine with LoRA while no row has an
adapter; `mixed`, the same engine, row i with adapter i mod 8. Before, while a batch decodes, an adapter is loaded and
used: the longest pause between two tokens of a running row is told in steps. --budget ends in time, with fewer turns.
"""

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_gpu import opened
from measure import Budget, add_budget, parser, save, summary

from fengine import Engine
from fengine.lora.layout import all_sites

WAYS = ("plain", "none", "mixed")
CPU_MODEL = "box"


def peft_tensors(engine: Engine, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """A random adapter of every linear layer."""
    torch.manual_seed(seed)
    found = {}
    for site in all_sites(engine._parts.spec):
        for module in site.modules:
            name = f"base_model.model.{module.name}.lora_"
            found[f"{name}A.weight"] = torch.randn(rank, module.inputs, dtype=torch.bfloat16) * module.inputs**-0.5
            found[f"{name}B.weight"] = torch.randn(module.outputs, rank, dtype=torch.bfloat16) * rank**-0.5
    return found


def load(engine: Engine, name: str, tensors: dict[str, torch.Tensor], rank: int) -> None:
    kinds = sorted({key.split(".")[-3] for key in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": kinds}
    answer = engine.load_lora_adapter_from_tensors(name, tensors, config)
    if not answer.success:
        raise SystemExit(answer.error_message)


def run(engine: Engine, prompts: list[list[int]], count: int, names: list[str | None] | None) -> float:
    """Output tokens/s of the whole batch, prompts included."""
    engine.flush_cache()
    params: Any = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    start = time.perf_counter()
    engine.generate(input_ids=prompts, sampling_params=params, lora_path=names)
    return len(prompts) * count / (time.perf_counter() - start)


def pauses(engine: Engine, prompts: list[list[int]], count: int, tensors: dict[str, torch.Tensor], rank: int) -> dict:
    """Seconds between tokens of one row of a batch, while an adapter is loaded and first used."""
    times: list[float] = []
    decoding = threading.Event()  # the prompts of the batch are behind us
    marks: dict[str, float] = {}
    params: Any = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}

    def background() -> None:
        engine.generate(input_ids=prompts[1:], sampling_params=params, lora_path="a0")

    def newcomer() -> None:
        decoding.wait()
        marks["load"] = time.perf_counter()
        load(engine, "late", tensors, rank)
        marks["use"] = time.perf_counter()
        engine.generate(input_ids=[prompts[0][:8]], sampling_params={"max_new_tokens": 1}, lora_path="late")
        marks["end"] = time.perf_counter()

    threads = [threading.Thread(target=work) for work in (background, newcomer)]
    for thread in threads:
        thread.start()
    try:
        for _ in engine.generate(input_ids=prompts[0], sampling_params=params, lora_path="a1", stream=True):
            times.append(time.perf_counter())
            if len(times) >= count // 4:
                decoding.set()
    finally:
        decoding.set()
    for thread in threads:
        thread.join()
    engine.unload_lora_adapter("late")
    gaps = [(b - a, b) for a, b in zip(times, times[1:], strict=False)]
    usual = median(gap for gap, _ in gaps)
    inside, outside = [], []
    for gap, at in gaps:
        (inside if marks["load"] <= at <= marks["end"] + usual else outside).append(gap)
    return {
        "step_s": usual,
        "load_s": marks["use"] - marks["load"],
        "first_use_s": marks["end"] - marks["use"],
        "tokens_meanwhile": len(inside),
        "longest_pause_s": max(inside, default=None),
        "longest_pause_steps": max(inside, default=0) / usual,
        "longest_pause_elsewhere_s": max(outside, default=None),
    }


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--model", default=CPU_MODEL, help="box, or a file of scripts/shapes without .json")
    p.add_argument("--adapters", type=int, default=8)
    p.add_argument("--rank", type=int, default=16)
    p.add_argument("--max-rank", type=int, help="the engine's max_lora_rank; default: the rank")
    p.add_argument("--quantization", help="of both engines: fp8 or w8a8_fp8 at load")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--prompt", type=int, default=None, help="tokens; default 128, of the box 32")
    p.add_argument("--output", type=int, default=None, help="tokens; default 256, of the box 64")
    add_budget(p)
    args = p.parse_args()
    budget = Budget(args.budget)
    box = args.model == CPU_MODEL
    length, count = args.prompt or (32 if box else 128), args.output or (64 if box else 256)
    tokens = args.batch * (length + count + 64) + 4096
    options: dict[str, Any] = {"max_running_requests": args.batch + 8, "max_total_tokens": tokens}
    options["quantization"] = args.quantization
    lora = {"enable_lora": True, "max_loras_per_batch": args.adapters + 1, "max_lora_rank": args.max_rank or args.rank}
    with ExitStack() as stack:
        starts = []
        engines = []
        for more in ({}, lora):
            begin = time.perf_counter()
            own = {} if box else {"context_length": 8192}
            engines.append(stack.enter_context(opened(args.model, **own, **options, **more)))
            starts.append(time.perf_counter() - begin)
        plain, adapted = engines
        tensors = peft_tensors(adapted, args.rank, 0)
        for i in range(args.adapters):
            load(adapted, f"a{i}", tensors, args.rank)
        vocab = plain._parts.spec.vocab_size
        draw = torch.Generator().manual_seed(1)
        prompts = torch.randint(10, vocab - 10, (args.batch, length), generator=draw).tolist()
        names: list[str | None] = [f"a{i % args.adapters}" for i in range(args.batch)]
        ways = {"plain": (plain, None), "none": (adapted, None), "mixed": (adapted, names)}
        speeds: dict[str, list[float]] = {way: [] for way in WAYS}
        stall: list[dict] = []
        last = 0.0
        for turn in range(args.runs + 1):
            if turn > 1 and not budget.allows(f"turn {turn}", last):  # the first is a warm-up, one more is needed
                break
            begin = time.perf_counter()
            for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
                speed = run(ways[way][0], prompts, count, ways[way][1])
                if turn:
                    speeds[way].append(speed)
                    print(f"{way:6} {speed:10.1f} tokens/s", flush=True)
            last = time.perf_counter() - begin
            while turn == 0 and len(stall) < 3 and (not stall or budget.allows("a load", last)):
                stall.append(pauses(adapted, prompts, count, tensors, args.rank))
                print("load", stall[-1], flush=True)
        figures = {way: summary(values) for way, values in speeds.items()}
        middle = {way: figure["median"] for way, figure in figures.items()}
        facts = {"start_s": dict(zip(("plain", "lora"), starts, strict=True)), "settings": vars(args)}
        facts["left_out"] = budget.left_out
        shares = {"none_of_plain": middle["none"] / middle["plain"], "mixed_of_none": middle["mixed"] / middle["none"]}
        save(
            f"bench_lora_{Path(args.model).name}",
            facts | {"tokens_per_s": figures} | shares | {"load": stall},
            args.out,
        )


if __name__ == "__main__":
    main()
