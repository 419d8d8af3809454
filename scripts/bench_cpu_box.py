"""The model in the box on a CPU: fengine against transformers, in useful tokens/s (only tokens that were asked for).

64 requests with prompts of 8-200 and outputs of 16-128 tokens, greedy, end-of-text ignored; and one request alone.
Baselines in the same process: `generate` on the padded batch (float32 and bfloat16), and transformers' own continuous
batching. Each figure is the median of the runs, the engines taking turns.
"""

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import parser, save, summary
from transformers import AutoModelForCausalLM, GenerationConfig

from fengine import Engine
from fengine.worker.hub import resolve_model

Request = tuple[list[int], int]


def requests(count: int, vocab: int, seed: int = 0) -> list[Request]:
    draw = random.Random(seed)
    return [
        ([draw.randrange(10, vocab - 10) for _ in range(draw.randint(8, 200))], draw.randint(16, 128))
        for _ in range(count)
    ]


def timed(run: Callable[[], None], tokens: int) -> float:
    start = time.perf_counter()
    run()
    return tokens / (time.perf_counter() - start)


def fengine_run(engine: Engine, work: list[Request]) -> None:
    params = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for _, n in work]
    outputs = engine.generate(input_ids=[ids for ids, _ in work], sampling_params=params)
    assert [o["meta_info"]["completion_tokens"] for o in outputs] == [n for _, n in work]  # type: ignore[index]


def generate_run(model: Any, work: list[Request]) -> None:
    """The padded batch runs until its longest row is done: that is what users get."""
    width, longest = max(len(ids) for ids, _ in work), max(n for _, n in work)
    ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in work])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in work])
    config = GenerationConfig(max_new_tokens=longest, min_new_tokens=longest, do_sample=False, pad_token_id=0)
    with torch.inference_mode():
        model.generate(input_ids=ids, attention_mask=mask, generation_config=config)


def continuous_run(model: Any, work: list[Request]) -> None:
    config = GenerationConfig(max_new_tokens=128, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(generation_config=config) as manager:
        for ids, count in work:
            manager.add_request(ids, max_new_tokens=count, eos_token_id=-1)
        for _ in work:
            manager.get_result()


def main() -> None:
    args = parser(__doc__).parse_args()
    torch.manual_seed(0)
    path = resolve_model("box", None)
    models = {
        name: AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    }
    engine = Engine(model_path="box", skip_tokenizer_init=True, disable_radix_cache=True)
    vocab = models["float32"].config.vocab_size
    batch = requests(64, vocab)
    alone = [([5] * 32, 128)]
    cases: dict[str, tuple[Callable[[], None], list[Request]]] = {}
    for label, work in (("batch64", batch), ("batch1", alone)):
        cases[f"{label}/fengine"] = (lambda w=work: fengine_run(engine, w), work)
        for name, model in models.items():
            cases[f"{label}/transformers generate {name}"] = (lambda w=work, m=model: generate_run(m, w), work)
    cases["batch64/transformers continuous float32"] = (lambda: continuous_run(models["float32"], batch), batch)
    figures: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(args.runs + 1):
        for name, (run, work) in cases.items():
            rate = timed(run, sum(n for _, n in work))
            if turn:  # the first turn warms up
                figures[name].append(rate)
    engine.shutdown()
    table = {name: summary(values) for name, values in figures.items()}
    ratios = {}
    for label in ("batch64", "batch1"):
        best = max(v["median"] for k, v in table.items() if k.startswith(f"{label}/transformers generate"))
        ratios[f"{label}: fengine / best transformers generate"] = table[f"{label}/fengine"]["median"] / best
    ratios["batch64: fengine / transformers continuous"] = (
        table["batch64/fengine"]["median"] / table["batch64/transformers continuous float32"]["median"]
    )
    save("bench_cpu_box", {"unit": "useful output tokens/s", "ratios": ratios, "table": table}, args.out)


if __name__ == "__main__":
    main()
