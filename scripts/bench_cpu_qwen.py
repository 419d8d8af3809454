"""A shape with random weights on a CPU: fengine (bf16 weights, fp32 arithmetic) against transformers.

Output tokens/s at batch 1 and 16, greedy, prompt included, for 16-token prompts with 64 new tokens (decoding decides)
and 64-token prompts with 32 (the prompt costs as much); baselines float32 and bfloat16 in the same run. Where the CPU
has bf16 dot products, bfloat16 transformers has twice the arithmetic of float32; fengine computes in float32.
--model: qwen2.5-0.5b, gemma-3-1b, qwen3-moe-tiny (8 experts, of which a token uses 2) or another of scripts/shapes.
--cpu-time counts CPU seconds, which other work on the machine hardly changes; for one thread (OMP_NUM_THREADS=1).
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import parser, save, summary
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from fengine import Engine

SHAPES = Path(__file__).resolve().parent / "shapes"
CONFIG = SHAPES / "qwen2.5-0.5b.json"
Clock = Callable[[], float]


def fengine_rate(engine: Engine, prompts: list[list[int]], count: int, clock: Clock) -> float:
    start = clock()
    engine.generate(input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": count, "ignore_eos": True})
    return len(prompts) * count / (clock() - start)


def transformers_rate(model: Any, prompts: list[list[int]], count: int, clock: Clock) -> float:
    config = GenerationConfig(max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
    ids = torch.tensor(prompts)
    start = clock()
    with torch.inference_mode():
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return len(prompts) * count / (clock() - start)


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--model", default="qwen2.5-0.5b", help="a file of scripts/shapes, without .json")
    p.add_argument("--batch", type=int, action="append", help="default 1 and 16")
    p.add_argument("--cpu-time", action="store_true", help="by CPU seconds of the process")
    args = p.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    torch.manual_seed(0)
    text = (SHAPES / f"{args.model}.json").read_text()
    shape = json.loads(text)
    table: dict[str, dict[str, Any]] = {}
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(1000, shape["vocab_size"] - 1000, (16, 64), generator=draw).tolist()
    cases = [(batch, width, count) for batch in args.batch or (1, 16) for width, count in ((16, 64), (64, 32))]
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        keys = ("architectures", "torch_dtype", "model_type")
        config = AutoConfig.for_model(shape["model_type"], **{k: v for k, v in shape.items() if k not in keys})
        model = AutoModelForCausalLM.from_config(config)
        model = model.to(dtype).eval()
        for batch, width, count in cases:
            work = [prompt[:width] for prompt in prompts[:batch]]
            rates = [transformers_rate(model, work, count, clock) for _ in range(args.runs + 1)][1:]
            table[f"batch {batch}, {width} in, {count} out/transformers {name}"] = summary(rates)
        del model
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(text)
        engine = Engine(
            model_path=folder, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, max_total_tokens=8192,
            disable_radix_cache=True,
        )  # fmt: skip
        for batch, width, count in cases:
            work = [prompt[:width] for prompt in prompts[:batch]]
            rates = [fengine_rate(engine, work, count, clock) for _ in range(args.runs + 1)][1:]
            table[f"batch {batch}, {width} in, {count} out/fengine"] = summary(rates)
        engine.shutdown()
    ratios = {}
    for batch, width, count in cases:
        case = f"batch {batch}, {width} in, {count} out"
        for name in ("float32", "bfloat16"):
            ours, theirs = table[f"{case}/fengine"]["median"], table[f"{case}/transformers {name}"]["median"]
            ratios[f"{case}: fengine / transformers {name}"] = ours / theirs
    name = "bench_cpu_qwen" if args.model == "qwen2.5-0.5b" else f"bench_cpu_{args.model}"
    save(
        name,
        {"unit": f"output tokens/{'CPU ' * args.cpu_time}s", "model": args.model, "ratios": ratios, "table": table},
        args.out,
    )


if __name__ == "__main__":
    main()
