"""What a grammar costs: tokens per second of the model in the box with and without one; the pauses of compiling one.

Both sides draw as many tokens from the same prompts in as many steps, greedily with eos ignored: `anything` is a regex
that admits all texts, `counted` one that counts their characters, `json` a schema for prompts that the model answers
with such JSON; each row up to its last token. So the draws are the same (`equal` is the share that is). Rates are of
the steps behind the prompts. `without`, `with` and `again` (without once more) take turns, forth and back; `with /
without` is the median over all turns against the mean of the two beside it, and `fastest` compares the fastest turns;
`again / without` is the noise. `mask_us` is what the matchers take for the masks of a step. On CUDA the same.

`pauses` is the longest time between two steps of four running rows while a grammar is compiled that is large, or that
has no end, and `compile_s` how long it took until it was there or refused.
"""

import json
import statistics
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from measure import parser, save, summary, turns

from fengine import Engine
from fengine.core.step_trace import StepRecord
from fengine.errors import GrammarError
from fengine.structured_output import masks

BATCH, TOKENS = 32, 128
SIDES = ("without", "with", "again")
DATA = Path(__file__).parents[1] / "conf" / "task" / "data" / "json_filling.jsonl"
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer"},
          "city": {"type": "string"}, "job": {"type": "string"}},
          "required": ["name", "age", "city", "job"]}  # fmt: skip
NAMES = [f"p{i}" for i in range(10_000)]
LARGE: dict[str, dict[str, Any]] = {
    "16,000 letters": {"regex": "ab" * 8000},
    "2,000 words": {"regex": "|".join(f"w{i}x" for i in range(2000))},
    "1,500 properties": {"json_schema": {"properties": {name: {"type": "string"} for name in NAMES[:1500]}}},
    "8,000 properties": {"json_schema": {"properties": {name: {} for name in NAMES[:8000]}}},
    "800 patternProperties": {"json_schema": {"patternProperties": {f"^{name}(a|b)*$": {} for name in NAMES[:800]},
                                              "additionalProperties": False}},
    "a multiple of five primes": {"json_schema": {"allOf": [{"multipleOf": n} for n in (997, 991, 983, 977, 971)]}},
}  # fmt: skip


def lengths(engine: Engine, prompts: list[str], grammar: dict[str, Any]) -> list[int]:
    """How many tokens each answer has in front of its end."""
    outputs: Any = engine.generate(prompts, {"temperature": 0, "max_new_tokens": TOKENS, **grammar})
    return [max(output["meta_info"]["completion_tokens"] - 1, 2) for output in outputs]


def run(engine: Engine, prompts: list[str], counts: list[int], grammar: dict[str, Any]) -> tuple[float, list[Any]]:
    """Tokens per second of the steps in which no prompt is computed, and the drawn tokens."""
    steps: list[StepRecord] = []
    params = [{"temperature": 0, "max_new_tokens": count, "ignore_eos": True, **grammar} for count in counts]
    with engine.steps_told(steps.append):
        outputs: Any = engine.generate(prompts, params)
    first = max(i for i, step in enumerate(steps) if step.kind != "decode") + 1
    drawn = sum(len(step.rids) for step in steps[first:])
    return drawn / (steps[-1].landed - steps[first - 1].landed), [output["output_ids"] for output in outputs]


def compared(engine: Engine, prompts: list[str], counts: list[int], grammar: dict[str, Any], runs: int) -> Any:
    """All sides in turn."""
    sides = {name: partial(run, engine, prompts, counts, grammar if name == "with" else {}) for name in SIDES}
    found = turns(sides, runs)
    rates = {name: [rate for rate, _ in each] for name, each in found.items()}
    drawn = (found[name][-1][1] for name in ("without", "with"))
    pairs = [(a, b) for x, y in zip(*drawn, strict=True) for a, b in zip(x, y, strict=True)]
    rounds = list(zip(*rates.values(), strict=True))
    fastest = {name: max(values) for name, values in rates.items()}
    return {
        "with / without": summary([b * (1 / a + 1 / c) / 2 for a, b, c in rounds]),
        "again / without": summary([c / a for a, _, c in rounds]),
        "fastest": {name: fastest[name] / fastest["without"] for name in ("with", "again")},
        "equal": sum(a == b for a, b in pairs) / len(pairs),
        "tokens": len(pairs),
        **{name: summary(values) for name, values in rates.items()},
    }


def timed_matchers(spent: list[float]) -> None:
    """Has the matchers note how long they take for the masks of a step."""
    allowed = masks._allowed

    def timed(cursors: Any) -> Any:
        start = time.perf_counter()
        found = allowed(cursors)
        spent.append((time.perf_counter() - start) * 1e6)
        return found

    masks._allowed = timed


def pauses(engine: Engine) -> dict[str, Any]:
    """Four rows run while each of LARGE is compiled; first for two seconds nothing is."""
    landed: list[float] = []
    ended = threading.Event()

    def rows() -> None:
        while not ended.is_set():
            engine.generate(["Once upon a time"] * 4, {"max_new_tokens": 256, "ignore_eos": True})

    def during(work: Any) -> dict[str, float]:
        start, told = time.perf_counter(), len(landed)
        work()
        seconds = time.perf_counter() - start
        time.sleep(0.1)
        gaps = [b - a for a, b in zip(landed[told:], landed[told + 1 :], strict=False)]
        return {"pause_ms": max(gaps) * 1e3, "median_ms": statistics.median(gaps) * 1e3, "compile_s": seconds}

    def compiled(grammar: dict[str, Any]) -> None:
        try:
            engine.generate("a", {"max_new_tokens": 1, **grammar})
        except GrammarError as error:
            print(f"refused: {error}")

    runner = threading.Thread(target=rows)
    with engine.steps_told(lambda step: landed.append(step.landed)):
        runner.start()
        time.sleep(1)
        found = {"nothing": during(lambda: time.sleep(2))}
        found |= {name: during(lambda grammar=grammar: compiled(grammar)) for name, grammar in LARGE.items()}
        ended.set()
        runner.join()
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device")
    args = options.parse_args()
    spent: list[float] = []
    timed_matchers(spent)
    filling = [json.loads(line)["prompt"] for line in DATA.read_text().splitlines()[:BATCH]]
    stories = [
        f"{head} {i}" for i in range(BATCH // 4) for head in ("Once upon a time", "One day", "The cat", "Long ago")
    ]
    with Engine(model_path="box", max_running_requests=BATCH, device=args.device, disable_radix_cache=True) as engine:
        cases = {
            "anything": (stories, lengths(engine, stories, {}), {"regex": r"[\s\S]*"}),
            "counted": (stories, lengths(engine, stories, {}), {"regex": r"[\s\S]{0,4000}"}),
            "json": (filling, lengths(engine, filling, {"json_schema": PERSON}), {"json_schema": PERSON}),
        }
        figures: dict[str, Any] = {}
        for name, (prompts, counts, grammar) in cases.items():
            spent.clear()
            figures[name] = compared(engine, prompts, counts, grammar, args.runs)
            figures[name]["mask_us"] = statistics.median(spent)
        figures["pauses"] = pauses(engine)
    save("bench_grammar", {"batch": BATCH, **figures}, args.out)
    for name in cases:
        row = figures[name]
        medians = {key: round(row[key]["median"], 3) for key in ("with / without", "again / without")}
        print(name, medians, *(f"{key} {row[key]}" for key in ("fastest", "equal", "mask_us")))


if __name__ == "__main__":
    main()
