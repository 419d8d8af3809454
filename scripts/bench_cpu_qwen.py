"""A random-weight Qwen2.5-0.5B shape on a CPU: fengine (bf16 weights, fp32 arithmetic) against transformers.

Output tokens/s at batch 1 and 16, 64-token prompts, greedy; baselines float32 and bfloat16 in the same run.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import parser, save, summary
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config

from fengine import Engine

CONFIG = Path(__file__).resolve().parent / "shapes" / "qwen2.5-0.5b.json"


def fengine_rate(engine: Engine, prompts: list[list[int]], count: int) -> float:
    start = time.perf_counter()
    engine.generate(input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": count, "ignore_eos": True})
    return len(prompts) * count / (time.perf_counter() - start)


def transformers_rate(model: Any, prompts: list[list[int]], count: int) -> float:
    config = GenerationConfig(max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
    ids = torch.tensor(prompts)
    start = time.perf_counter()
    with torch.inference_mode():
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return len(prompts) * count / (time.perf_counter() - start)


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--tokens", type=int, default=32)
    args = p.parse_args()
    torch.manual_seed(0)
    shape = json.loads(CONFIG.read_text())
    table: dict[str, dict[str, Any]] = {}
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(1000, shape["vocab_size"] - 1000, (16, 64), generator=draw).tolist()
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        keys = ("architectures", "torch_dtype", "model_type")
        model = AutoModelForCausalLM.from_config(Qwen2Config(**{k: v for k, v in shape.items() if k not in keys}))
        model = model.to(dtype).eval()
        for batch in (1, 16):
            rates = [transformers_rate(model, prompts[:batch], args.tokens) for _ in range(args.runs + 1)][1:]
            table[f"batch{batch}/transformers {name}"] = summary(rates)
        del model
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(CONFIG.read_text())
        engine = Engine(
            model_path=folder, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, max_total_tokens=8192,
            disable_radix_cache=True,
        )  # fmt: skip
        for batch in (1, 16):
            rates = [fengine_rate(engine, prompts[:batch], args.tokens) for _ in range(args.runs + 1)][1:]
            table[f"batch{batch}/fengine"] = summary(rates)
        engine.shutdown()
    ratios = {
        f"batch{b}": table[f"batch{b}/fengine"]["median"]
        / max(table[f"batch{b}/transformers {d}"]["median"] for d in ("float32", "bfloat16"))
        for b in (1, 16)
    }
    save("bench_cpu_qwen", {"unit": "output tokens/s", "ratios": ratios, "table": table}, args.out)


if __name__ == "__main__":
    main()
