"""lm-evaluation-harness with fengine and with its own backend for transformers: the model in the box.

python scripts/bench_harness.py            needs pip install 'fengine[lm-eval]' accelerate

They take turns on the same requests; every figure is requests per second. transformers runs in float32, once with
batches of 1, which is lm-eval's default, and once with those of `--batch`. `agree` is the share of equal answers;
fengine's own must have the same bits each time.
"""

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import measure

os.environ["HF_HUB_OFFLINE"] = "1"

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from fengine.eval.harness.lm_eval_model import FengineLM
from fengine.worker.hub import BOX

DATA = Path(__file__).resolve().parent.parent / "conf" / "task" / "data"
Work = dict[str, tuple[str, list[Any]]]  # name -> (method, requests)


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> tuple[str, list[Any]]:
    return kind, [Instance(request_type=kind, doc={}, arguments=args, idx=0) for args in arguments]  # type: ignore[arg-type]


def workload(size: int) -> Work:
    """Choices of several tokens and of one letter behind a context of examples, whole documents, and continuations."""
    capitals, letters, stories = (rows(name)[:size] for name in ("capitals", "multiple_choice", "stories"))
    cities = [row["answer"] for row in capitals]
    shots = [
        "".join(f"{row['prompt']} {row['answer']}\n\n" for row in examples[:5]) for examples in (capitals, letters)
    ]
    several = [(shots[0] + r["prompt"], f" {c}") for i, r in enumerate(capitals) for c in (cities * 2)[i : i + 4]]
    single = [(shots[1] + row["prompt"], f" {choice}") for row in letters for choice in row["choices"]]
    greedy = {"until": ["\n"], "max_gen_toks": 48, "do_sample": False}
    begun = [(" ".join(row["text"].split()[:8]), greedy) for row in stories]
    return {
        "choices": requests("loglikelihood", several),
        "letters": requests("loglikelihood", single),
        "documents": requests("loglikelihood_rolling", [(row["text"],) for row in stories]),
        "continuations": requests("generate_until", begun),
    }


def timed(model: Callable[[], Any], kind: str, asked: list[Any]) -> tuple[float, list[Any]]:
    run, start = getattr(model(), kind), time.perf_counter()
    found = run(asked, disable_tqdm=True)
    return len(asked) / (time.perf_counter() - start), found


def fresh(model: FengineLM) -> FengineLM:
    """Without what an earlier turn left in the prefix cache."""
    model.engine.flush_cache()
    return model


def compare(work: Work, models: dict[str, Callable[[], Any]], runs: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, (kind, asked) in work.items():
        found = measure.turns({key: partial(timed, model, kind, asked) for key, model in models.items()}, runs)
        answers = {key: each[-1][1] for key, each in found.items()}
        assert all(one == answers["fengine"] for _, one in found["fengine"]), "fengine's bits differ between turns"
        figures[name] = {key: measure.summary([speed for speed, _ in each]) for key, each in found.items()}
        figures[name] |= {
            "requests": len(asked),
            "agree": {key: agree(answers["fengine"], answers[key]) for key in models},
        }
        medians = {key: figures[name][key]["median"] for key in models}
        figures[name]["speedup"] = {key: medians["fengine"] / medians[key] for key in models if key != "fengine"}
        print(name, {key: round(value, 1) for key, value in medians.items()}, figures[name]["agree"], flush=True)
    return figures


def agree(ours: list[Any], theirs: list[Any]) -> float:
    """The share of equal answers: texts as they are, log-likelihoods to 1e-3 with equal verdicts."""

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, str):
            return a == b
        if isinstance(a, tuple):
            return a[1] == b[1] and same(a[0], b[0])
        return abs(a - b) <= 1e-3 + 1e-5 * abs(b)

    return sum(same(a, b) for a, b in zip(ours, theirs, strict=True)) / len(ours)


def main() -> None:
    parser = measure.parser(__doc__)
    parser.set_defaults(runs=3)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    ours = FengineLM("box", device="cpu")
    alone, batched = (HFLM(str(BOX), dtype="float32", device="cpu", batch_size=size) for size in (1, args.batch))
    models = {
        "fengine": lambda: fresh(ours),
        "transformers_1": lambda: alone,
        f"transformers_{args.batch}": lambda: batched,
    }
    figures = compare(workload(args.size), models, args.runs)
    measure.save("bench_harness", {"settings": vars(args), "requests_per_second": figures}, args.out)


if __name__ == "__main__":
    main()
