"""The workloads of workloads.py on one GPU, with random weights: tokens/s, share of the floor, what `exact` costs.

    python scripts/bench_gpu.py --model qwen2.5-0.5b --model llama-3.1-8b --numerics exact,fast --start

Engines of the named numerics run one after the other on the same GPU, so that each has the whole memory; --rounds
repeats the sequence, so that a drift of the machine falls on both. `exact+compile` is exact with torch.compile over the
step, which is off by default where CUDA graphs hold the step. With --page-size 16,64 there is one of each for every
page size. The prefix cache is flushed between runs, and of use in shared_prefix only. --start measures, in processes of
their own, the seconds from `Engine(...)` to ready with an empty and with a filled cache directory. --budget ends in
time with what has been measured by then. The figures of another engine on the same workloads can be set beside ours
with --beside FILE (JSON: {"runs": [{"model", <workload>: {"out_tok_s"}}]}).
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from floors import floor, shape
from measure import Budget, add_budget, need_gpu, parser, summary, write
from workloads import Work, generate, suite

from fengine import Engine
from fengine.config import QUANTIZATIONS

CONTEXT = 17408  # holds the longest workload
BY_TOTAL = {"prefill_4k"}  # workloads whose figure counts prompt tokens too

START = """
import time
begin = time.perf_counter()
from fengine import Engine
imported = time.perf_counter()
engine = Engine(model_path={path!r}, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True,
                context_length={context}, **{options!r})
ready = time.perf_counter()
engine.generate(input_ids=[[5, 6, 7]], sampling_params={{"max_new_tokens": 1}})
print("seconds", imported - begin, ready - imported, time.perf_counter() - ready)
engine.shutdown()
"""


@contextmanager
def opened(model: str, processor: dict[str, Any] | None = None, **options: Any) -> Iterator[Engine]:
    """An engine over random weights in a shape of scripts/shapes, or over the box; `processor` is that of images."""
    gc.collect()  # what is left of an engine before
    with tempfile.TemporaryDirectory() as folder:
        base: dict[str, Any] = {"model_path": "box", "skip_tokenizer_init": True}
        if model != "box":
            (Path(folder) / "config.json").write_text(json.dumps(shape(model)))
            base |= {"model_path": folder, "load_format": "dummy", "dtype": "bfloat16", "context_length": CONTEXT}
        if processor is not None:
            (Path(folder) / "preprocessor_config.json").write_text(json.dumps(processor))
        with Engine(**(base | options)) as engine:
            engine.freeze_gc()  # as the commands and the server do
            try:
                yield engine
            finally:
                gc.unfreeze()


def run(engine: Engine, work: Work) -> float:
    """Seconds of one run on an empty prefix cache."""
    engine.flush_cache()
    return generate(engine, work)[0]


def one_round(
    model: str, numerics: str, runs: int, works: dict[str, Work], walls: dict[str, list[float]], budget: Budget
) -> dict:
    """Adds `runs` walls of every workload to `walls`, after a warm-up of the short ones; the engine's own figures."""
    begin = budget.clock()
    settings = options(numerics)
    with opened(model, **settings) as engine:
        facts = {"start_s": budget.clock() - begin, "engine": engine.stats()}
        for name, one in works.items():
            work = several(one, settings.get("dp_size", 1))
            if name.startswith("latency"):
                run(engine, work)
            for i in range(runs):
                if not budget.allows(f"{model} {numerics} {name}, run {i + 1}", max(walls.get(name, [0.0]))):
                    break
                walls.setdefault(name, []).append(run(engine, work))
                print(model, numerics, name, f"{walls[name][-1]:.3f} s", flush=True)
        stats = engine.stats()
    facts["compiles_after_start"] = stats["compiles"] - facts["engine"]["compiles"]
    facts["preemptions"] = stats["preemptions"]
    return facts


def several(work: Work, replicas: int) -> Work:
    """So many times the work, of prompts that share nothing. Pure."""
    return [(ids[i:] + ids[:i], n) for i in range(replicas) for ids, n in work]


def figures(config: dict[str, Any], work: Work, walls: list[float]) -> dict[str, Any]:
    """Pure."""
    wall, least = summary(walls), floor(config, work)
    out, total = sum(n for _, n in work), sum(len(p) + n for p, n in work)
    return {
        "wall_s": wall,
        "spread": (wall["max"] - wall["min"]) / wall["median"],
        "out_tok_s": out / wall["median"],
        "total_tok_s": total / wall["median"],
        "floor_s": {**least._asdict(), "total": least.total},
        "floor_out_tok_s": out / least.total,
        "floor_total_tok_s": total / least.total,
        "share_of_floor": least.total / wall["median"],
    }


def bench(
    model: str, kinds: list[str], runs: int, rounds: int, only: list[str] | None, budget: Budget
) -> dict[str, Any]:
    """Numerics -> {"rounds": facts per engine, workload: figures}; exact rows tell their cost against fast."""
    config = shape(model)
    works = {name: work for name, work in suite(model, config["vocab_size"]).items() if not only or name in only}
    walls: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds}
    tables: dict[str, Any] = {kind: {"rounds": []} for kind in kinds}
    start = 0.0
    for _ in range(rounds):
        for kind in kinds:
            if budget.allows(f"{model} {kind}", start):
                tables[kind]["rounds"].append(one_round(model, kind, runs, works, walls[kind], budget))
                start = tables[kind]["rounds"][-1]["start_s"]
    for kind in kinds:
        measured = walls[kind]
        replicas = options(kind).get("dp_size", 1)
        tables[kind] |= {
            name: figures(config, several(work, replicas), measured[name])
            for name, work in works.items()
            if name in measured
        }
    for kind in [kind for kind in kinds if kind.startswith("exact")]:
        rival = tables.get(kind.replace("exact", "fast"), {})
        for name in tables[kind].keys() & rival.keys() & works.keys():
            exact, fast = tables[kind][name], rival[name]
            exact["cost_against_fast"] = exact["wall_s"]["median"] / fast["wall_s"]["median"] - 1
    return tables


def kinds_of(numerics: str, page_sizes: str | None) -> list[str]:
    """The engines to measure, in order. Pure."""
    kinds = numerics.split(",")
    return [f"{kind}+page{size}" for size in page_sizes.split(",") for kind in kinds] if page_sizes else kinds


def options(kind: str) -> dict[str, Any]:
    """Settings of an engine: "exact" or "fast"; behind it "+compile", "+page16", "+tp2", "+dp2", "+w8a8_fp8", "+kv8".
    Pure."""
    numerics, *rest = kind.split("+")
    found: dict[str, Any] = {"numerics": numerics}
    for word in rest:
        if word == "compile":
            found["enable_torch_compile"] = True
        elif word.startswith("page") and word[4:].isdigit():
            found["page_size"] = int(word[4:])
        elif word in QUANTIZATIONS:
            found["quantization"] = word
        elif word == "kv8":
            found["kv_cache_dtype"] = "fp8_e4m3"
        elif word[:2] in ("tp", "dp") and word[2:].isdigit():
            found[f"{word[:2]}_size"] = int(word[2:])
        else:
            raise SystemExit(
                f"--numerics knows exact, fast, and +compile, +tp2, +dp2, +kv8, +{', +'.join(QUANTIZATIONS)} behind; "
                f"--page-size whole numbers; got {kind!r}"
            )
    return found


def start_seconds(model: str, numerics: str, budget: Budget) -> dict[str, Any]:
    """Import, `Engine(...)` and first request in fresh processes: an empty cache directory, then the same, filled."""
    found = {}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        (Path(folder) / "config.json").write_text(json.dumps(shape(model)))
        code = START.format(path=folder, context=CONTEXT, options=options(numerics))
        kept = {k: v for k, v in os.environ.items() if k not in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        for turn in ("cold", "warm", "warm again"):
            if not budget.allows(f"{model} start {turn}"):
                break
            try:
                done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                                      env=kept | {"XDG_CACHE_HOME": cache}, timeout=budget.left())  # fmt: skip
            except subprocess.TimeoutExpired:
                budget.allows(f"{model} start {turn}")
                break
            line = next((line for line in done.stdout.splitlines() if line.startswith("seconds ")), None)
            if line is None:
                found[turn] = {"error": done.stderr[-1000:]}
            else:
                names = ("import_s", "engine_s", "first_request_s")
                found[turn] = dict(zip(names, map(float, line.split()[1:]), strict=True))
            print(model, numerics, "start", turn, found[turn], flush=True)
    return found


def show(model: str, tables: dict[str, Any], others: list[dict[str, Any]]) -> None:
    for kind, table in tables.items():
        for name, row in table.items():
            if not isinstance(row, dict) or "out_tok_s" not in row:
                continue
            what = "total_tok_s" if name in BY_TOTAL else "out_tok_s"
            theirs = "".join(f" {r[name][what]:>10.1f}" for r in others if what in r.get(name, {}))
            cost = f"  costs {100 * row['cost_against_fast']:+.1f} %" if "cost_against_fast" in row else ""
            print(f"{model:13} {kind:12} {name:17} {row[what]:>10.1f} {what.removesuffix('_tok_s'):5} "
                  f"±{50 * row['spread']:4.1f} %  {100 * row['share_of_floor']:5.1f} % of {row['floor_' + what]:>9.0f}"
                  f"{cost}{'  beside' + theirs if theirs else ''}")  # fmt: skip


def main() -> None:
    p = parser(__doc__)
    p.set_defaults(runs=3)
    p.add_argument("--model", action="append", help="a file of scripts/shapes, without .json; default both")
    p.add_argument("--only", action="append", help="a workload")
    p.add_argument(
        "--numerics", default="exact", help="of exact, fast, exact+compile, exact+tp2; measured in this order"
    )
    p.add_argument("--page-size", help="one or several, such as 16,32,64,128; default the engine's own")
    p.add_argument("--rounds", type=int, default=1, help="how often the sequence of engines is repeated")
    p.add_argument("--start", action="store_true", help="also measure start-up in processes of their own")
    p.add_argument("--beside")
    add_budget(p)
    args = p.parse_args()
    need_gpu(p)
    kinds, budget = kinds_of(args.numerics, args.page_size), Budget(args.budget)
    beside = json.loads(Path(args.beside).read_text())["runs"] if args.beside else []
    models: dict[str, Any] = {}
    for model in args.model or ["qwen2.5-0.5b", "llama-3.1-8b"]:
        start = start_seconds(model, kinds[0], budget) if args.start else None
        tables = bench(model, kinds, args.runs, args.rounds, args.only, budget)
        models[model] = tables | ({"start": start} if start else {})
        write("bench_gpu", {"models": models, "left_out": budget.left_out}, args.out)
        show(model, tables, [r for r in beside if r["model"] == model])
    for part in budget.left_out:
        print(f"left out for want of time: {part}")


if __name__ == "__main__":
    main()
