"""The workloads of workloads.py on one GPU, with random weights: output and total tokens/s per workload.

    python scripts/bench_gpu.py --model qwen2.5-0.5b --model llama-3.1-8b

The prefix cache is flushed between runs, and on only in shared_prefix. The figures of another engine on the same
workloads can be set beside ours with --beside FILE (JSON: {"runs": [{"model", <workload>: {"out_tok_s"}}]}).
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import parser, save, summary
from workloads import Work, suite

from fengine import Engine

SHAPES = Path(__file__).resolve().parent / "shapes"
CONTEXT = 17408  # holds the longest workload


def run(engine: Engine, work: Work) -> float:
    params = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for _, n in work]
    start = time.perf_counter()
    engine.generate(input_ids=[ids for ids, _ in work], sampling_params=params)
    return time.perf_counter() - start


def bench(model: str, runs: int, only: list[str] | None) -> dict[str, Any]:
    config = json.loads((SHAPES / f"{model}.json").read_text())
    table: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        start = time.perf_counter()
        engine = Engine(
            model_path=folder, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, context_length=CONTEXT
        )
        table["start_s"] = time.perf_counter() - start
        table["engine"] = engine.stats()
        for name, work in suite(model, config["vocab_size"]).items():
            if only and name not in only:
                continue
            walls = []
            for turn in range(runs + 1 if name.startswith("latency") else runs):
                engine.flush_cache()
                walls.append(run(engine, work))
                print(model, name, f"{walls[-1]:.3f} s", flush=True)
                if turn == 0 and name.startswith("latency"):
                    walls.pop()  # warm-up
            wall = summary(walls)
            out, total = sum(n for _, n in work), sum(len(p) + n for p, n in work)
            table[name] = {
                "wall_s": wall,
                "out_tok_s": out / wall["median"],
                "total_tok_s": total / wall["median"],
            }
        table["compiles_after_start"] = engine.stats()["compiles"] - table["engine"]["compiles"]
        engine.shutdown()
    return table


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--model", action="append", help="a file of scripts/shapes, without .json")
    p.add_argument("--only", action="append", help="a workload")
    p.add_argument("--beside")
    args = p.parse_args()
    beside = json.loads(Path(args.beside).read_text())["runs"] if args.beside else []
    tables: dict[str, Any] = {}
    for model in args.model or ["qwen2.5-0.5b", "llama-3.1-8b"]:
        tables[model] = bench(model, args.runs, args.only)
        save("bench_gpu", {"models": tables}, args.out)
    for model, table in tables.items():
        others = [r for r in beside if r["model"] == model]
        for name, row in table.items():
            if isinstance(row, dict) and "out_tok_s" in row:
                theirs = "  ".join(f"{r[name]['out_tok_s']:>10.1f}" for r in others if name in r)
                ours = f"{row['out_tok_s']:>10.1f} out tok/s {row['total_tok_s']:>10.1f} total"
                print(f"{model:14} {name:18} {ours}  {theirs}")


if __name__ == "__main__":
    main()
