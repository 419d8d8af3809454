"""What a grammar costs: tokens per second of the model in the box with and without one, in turns, in one process.

Batch 32, one prompt, 128 tokens each, sampled at temperature 1 with eos ignored, so that both sides draw as many tokens
in as many steps. The grammars are long enough to go on for all of them. `mask_us` is what one fill of 32 masks takes
the thread that fills them, while the model runs. On CUDA the same.
"""

import statistics
import time
from typing import Any

from measure import parser, save, summary

from fengine import Engine
from fengine.grammar import masks

BATCH, TOKENS, PROMPT = 32, 128, "Once upon a time"
ITEM = {"type": "object", "properties": {"name": {"type": "string"}, "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}}}, "required": ["name", "count", "tags"]}  # fmt: skip
GRAMMARS: dict[str, dict[str, Any]] = {
    "json_schema": {"json_schema": {"type": "array", "items": ITEM, "minItems": 100}},
    "regex": {"regex": r"([A-Z][a-z]+ ){500}"},
    "ebnf, recursive": {"ebnf": 'root ::= e{400}\ne ::= "(" e ")" | [0-9]+ op\nop ::= [+*] | "-"'},
}


def run(engine: Engine, grammar: dict[str, Any]) -> float:
    """Tokens per second of one batch."""
    params = [{"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True, "sampling_seed": seed, **grammar}
              for seed in range(BATCH)]  # fmt: skip
    start = time.perf_counter()
    outputs = engine.generate([PROMPT] * BATCH, params)
    seconds = time.perf_counter() - start
    tokens = sum(output["meta_info"]["completion_tokens"] for output in outputs)
    assert tokens == BATCH * TOKENS, f"the grammar ended early: {tokens} tokens"
    return tokens / seconds


def timed_fills(spent: list[float]) -> None:
    """Has every fill note how long it took, the wait for the step before left out."""
    fill = masks.fill

    def timed(rows: Any, before: Any) -> Any:
        drawn = before() if any(row.fed is not None for row in rows) else []
        start = time.perf_counter()
        filled = fill(rows, lambda: drawn)
        spent.append((time.perf_counter() - start) * 1e6)
        return filled

    masks.fill = timed


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device")
    args = options.parse_args()
    spent: list[float] = []
    timed_fills(spent)
    with Engine(model_path="box", max_running_requests=BATCH, device=args.device) as engine:
        for grammar in ({}, *GRAMMARS.values()):
            run(engine, grammar)
        figures: dict[str, Any] = {}
        for name, grammar in GRAMMARS.items():
            spent.clear()
            rates = [(run(engine, {}), run(engine, grammar)) for _ in range(args.runs)]
            figures[name] = {
                "without": summary([a for a, _ in rates]),
                "with": summary([b for _, b in rates]),
                "ratio": summary([b / a for a, b in rates]),
                "mask_us": statistics.median(spent),
            }
            print(
                name,
                {key: value if isinstance(value, float) else value["median"] for key, value in figures[name].items()},
            )
    save("bench_grammar", {"batch": BATCH, "tokens": TOKENS, **figures}, args.out)


if __name__ == "__main__":
    main()
