"""Where the time of a workload goes on one GPU: share of the floor, kernel time against wall, tables per op and of the
critical path.

    python scripts/profile_gpu.py --model llama-3.1-8b --workload latency_b1 --workload throughput_mixed

Each workload runs whole and unprofiled first: that gives wall, tokens/s and the share of the floor (floors.py), and the
wall of every step. Then it runs again with CUDA activity recorded in a short window in its middle, and is aborted
behind the window. Kernels inside replayed CUDA graphs are recorded one by one. Recording slows launches a little: the
table gives the window's own idle share, and the kernel time beside the wall that the same steps took unprofiled.
Random weights, as in bench_gpu.py. --budget ends in time, with fewer workloads. Ends with status 2 without a GPU.
"""

import argparse
import gc
import re
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from bench_gpu import figures, opened, options
from floors import floor, shape
from measure import Budget, add_budget, need_gpu, write
from workloads import Work, suite

from fengine import Engine

FIRST = ["latency_b1", "latency_b32", "prefill_4k"]  # what runs unless others are named
WINDOW = {"latency_b1": 0.25, "latency_b32": 0.25, "throughput_mixed": 2.0}  # seconds; 1 for the others
OPS = (  # the first that matches a kernel's name
    ("compiled glue", r"^triton_"),
    ("draw", r"^(block|level|candidate|row|gather)_kernel"),
    ("linear, ours", r"^(linear|narrow|hopper)_kernel"),
    ("linear, few bits", r"^(decode|product|few_bits|eights|unpack|w8a8|w8a8_hopper|quantize)_kernel"),
    ("exchange between ranks", r"nccl|^(exchange|ready|arrived)_kernel|PtoP"),
    ("linear, cuBLAS", r"nvjet|cublas|gemm|gemv|cutlass|splitk|xmma"),
    ("attention, few tokens a row", r"^(rows|few)_kernel"),
    ("attention, many", r"^(tiles|rest|table|persistent|whole|window)_kernel"),
    ("rope and KV write", r"rope|kv_write"),
    ("norm", r"norm"),
    ("activation", r"^(activate|soft_cap)_kernel"),
    ("feed, take, hand on", r"^(feed|take|hand_on|go_on|catch_up)_kernel"),
    ("adapters", r"^(shrink|expand)_kernel"),
    ("experts", r"^(grouped|combine|few_(gate|down)_hopper|route|members|lists|(w8a8_)?experts|\w+_tiles)_kernel"),
    ("logit edits and masks", r"^(edit|bitmask|penalize|add|count)_kernel"),
    ("likeliest tokens", r"^top_(block|row)_kernel"),
    ("copies", r"memcpy|memset|copy|catarray|fill"),
    ("other glue", r"elementwise|index|gather|where"),
)


class Kernel(NamedTuple):
    """One run of a kernel, or a copy, on the device; nanoseconds."""

    name: str
    start: int
    end: int


class Progress(NamedTuple):
    """How far the engine was at a time (time.time_ns)."""

    at: int
    steps: int


def op_of(name: str) -> str:
    return next((op for op, pattern in OPS if re.search(pattern, name, re.IGNORECASE)), "other")


def busy(kernels: Iterable[Kernel]) -> int:
    """Nanoseconds in which at least one kernel ran. Pure."""
    total = last = 0
    for kernel in sorted(kernels, key=lambda k: k.start):
        total += max(0, kernel.end - max(kernel.start, last))
        last = max(last, kernel.end)
    return total


def table(kernels: list[Kernel], label: Callable[[str], str], steps: float) -> list[dict[str, Any]]:
    """Count, total µs, µs per step and share of the summed kernel time, per label, longest first. Pure."""
    rows: dict[str, list[int]] = {}
    for kernel in kernels:
        rows.setdefault(label(kernel.name), []).append(kernel.end - kernel.start)
    whole = sum(map(sum, rows.values())) or 1
    return [
        {
            "name": name,
            "count": len(times),
            "us": sum(times) / 1e3,
            "us_per_step": sum(times) / 1e3 / steps if steps else None,
            "us_each": sum(times) / 1e3 / len(times),
            "share": sum(times) / whole,
        }
        for name, times in sorted(rows.items(), key=lambda item: -sum(item[1]))
    ]


def critical(kernels: list[Kernel], steps: float) -> list[dict[str, Any]]:
    """Count and µs per step by which kernels end behind all before them, per kernel and the one that ended before it,
    longest first: durations count twice what overlaps, these add up to the window. Pure."""
    rows: dict[str, list[int]] = {}
    last = None
    for kernel in sorted(kernels, key=lambda k: k.end):
        if last is not None:
            rows.setdefault(f"{kernel.name[:40]} < {last.name[:40]}", []).append(kernel.end - last.end)
        last = kernel
    return [
        {"name": name, "count": len(times), "us_each": sum(times) / 1e3 / len(times),
         "us_per_step": sum(times) / 1e3 / steps if steps else None}
        for name, times in sorted(rows.items(), key=lambda item: -sum(item[1]))
    ]  # fmt: skip


def time_of_step(history: list[Progress], step: float) -> float:
    """When a run reached `step`, in ns, between its samples. Pure."""
    i = min(max(bisect_left([p.steps for p in history], step), 1), len(history) - 1)
    a, b = history[i - 1], history[i]
    return a.at if a.steps == b.steps else a.at + (step - a.steps) / (b.steps - a.steps) * (b.at - a.at)


def steps_at(history: list[Progress], at: float) -> float:
    """How many steps a run had made at a time, between its samples. Pure."""
    i = min(max(bisect_left([p.at for p in history], at), 1), len(history) - 1)
    a, b = history[i - 1], history[i]
    return a.steps + min(max((at - a.at) / max(b.at - a.at, 1), 0), 1) * (b.steps - a.steps)


class Run:
    """One run of a workload in a thread of its own, watched from the caller's."""

    def __init__(self, engine: Engine, work: Work) -> None:
        engine.flush_cache()
        self.core, self.history = engine._parts.core, [Progress(time.time_ns(), engine._parts.core.stepper.steps)]
        params = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for _, n in work]
        self.wall = 0.0

        def generate() -> None:
            start = time.perf_counter()
            engine.generate(input_ids=[ids for ids, _ in work], sampling_params=params)  # type: ignore[arg-type]
            self.wall = time.perf_counter() - start

        self.thread = threading.Thread(target=generate)
        self.thread.start()

    def watch(self, seconds: float) -> None:
        """Notes the progress every two milliseconds until the time is over or the run is."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until and self.thread.is_alive():
            time.sleep(0.002)
            self.history.append(Progress(time.time_ns(), self.core.stepper.steps))

    def stop(self) -> None:
        """Aborts what still runs and waits for the end."""
        self.core.abort(list(self.core.requests.states.values()))
        self.thread.join()


def record(during: Callable[[], Any]) -> list[Kernel]:
    """Device activity of the whole process while `during` runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorder:
        during()
    results: Any = recorder.profiler.kineto_results  # type: ignore[union-attr]
    events = (e for e in results.events() if e.device_type().name == "CUDA")
    return [Kernel(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in events]


def window_of(engine: Engine, work: Work, history: list[Progress], wall: float, seconds: float) -> dict[str, Any]:
    """Runs the workload again with a recorded window in its middle. `history`, `wall`: of the unprofiled run."""
    seconds = min(seconds, 0.4 * wall)
    run = Run(engine, work)
    bounds: list[int] = []

    def during() -> None:
        bounds.append(time.time_ns())
        run.watch(seconds)
        bounds.append(time.time_ns())

    run.watch((wall - seconds) / 2)
    kernels = record(during)
    run.watch(0.01)
    run.stop()
    inside = [k for k in kernels if bounds[0] <= k.start and k.end <= bounds[1]]
    if not kernels:
        return {"note": "no kernel was recorded"}
    note = "" if inside else "the recorder's clock is not the host's: all that was recorded, with the host's bounds"
    first, last = (min(k.start for k in inside), max(k.end for k in inside)) if inside else (bounds[0], bounds[1])
    inside = inside or kernels
    steps = steps_at(run.history, last) - steps_at(run.history, first)
    lag = run.history[0].steps - history[0].steps  # the engine counts on from run to run
    begin = time_of_step(history, steps_at(run.history, first) - lag)
    unprofiled = time_of_step(history, steps_at(run.history, last) - lag) - begin
    used = busy(inside)
    return {
        "note": note,
        "seconds": (last - first) / 1e9,
        "steps": steps,
        "step_ms": (last - first) / 1e6 / steps if steps else None,
        "step_ms_unprofiled": unprofiled / 1e6 / steps if steps else None,
        "kernels_per_step": len(inside) / steps if steps else None,
        "kernel_ms_per_step": used / 1e6 / steps if steps else None,
        "idle_share": 1 - used / (last - first),
        "kernel_time_over_unprofiled_wall": used / unprofiled if unprofiled else None,
        "ops": table(inside, op_of, steps),
        "kernels": table(inside, lambda name: name[:120], steps)[:25],
        "critical": critical(inside, steps)[:40],
    }


def profile(engine: Engine, config: dict[str, Any], name: str, work: Work, seconds: float) -> dict[str, Any]:
    if name.startswith("latency"):
        Run(engine, work[:1]).thread.join()  # clocks up
    run = Run(engine, work)
    run.watch(3600)
    run.thread.join()
    return figures(config, work, [run.wall]) | {
        "requests": len(work),
        "wall_s": run.wall,
        "steps": run.core.stepper.steps - run.history[0].steps,
        "window": window_of(engine, work, run.history, run.wall, seconds),
    }


def profile_model(model: str, args: argparse.Namespace, budget: Budget) -> dict[str, Any]:
    config = shape(model)
    works = suite(model, config["vocab_size"])
    names = list(works) if args.workload == ["all"] else args.workload or FIRST
    with opened(model, **options(args.numerics)) as engine:
        rows: dict[str, Any] = {"numerics": args.numerics, "engine": engine.stats()}
        for name in names:
            if not budget.allows(f"{model} {name}", 3 * floor(config, works[name]).total + 3):
                continue
            rows[name] = profile(
                engine, config, name, works[name][: args.requests], args.window or WINDOW.get(name, 1.0)
            )
            show(model, name, rows[name])
            sys.stdout.flush()
    return rows


def show(model: str, name: str, row: dict[str, Any]) -> None:
    f, w = row["floor_s"], row["window"]
    print(f"\n{model} {name}: {row['wall_s']:.3f} s, {row['steps']} steps, {row['out_tok_s']:.1f} out tok/s, "
          f"{row['total_tok_s']:.0f} total; {100 * row['share_of_floor']:.1f} % of the floor of {f['total']:.3f} s "
          f"(prefill {f['prefill']:.3f}, weights {f['weights']:.3f}, KV {f['kv']:.3f})")  # fmt: skip
    if not w.get("steps"):
        print(f"  the window held no whole step {w.get('note', '')}")
        return
    print(f"  window {w['seconds']:.3f} s, {w['steps']:.1f} steps of {w['step_ms']:.3f} ms (unprofiled "
          f"{w['step_ms_unprofiled']:.3f}): kernels {w['kernel_ms_per_step']:.3f} ms a step, GPU idle "
          f"{100 * w['idle_share']:.1f} %; kernel time over unprofiled wall "
          f"{100 * w['kernel_time_over_unprofiled_wall']:.1f} %")  # fmt: skip
    for kind, limit in (("ops", 12), ("kernels", 14)):
        print(f"  {kind:>44} {'count':>7} {'per step':>8} {'µs each':>9} {'µs/step':>10} {'share':>6}")
        for r in w[kind][:limit]:
            print(f"  {r['name'][:44]:>44} {r['count']:>7} {r['count'] / w['steps']:>8.1f} {r['us_each']:>9.2f} "
                  f"{r['us_per_step']:>10.1f} {100 * r['share']:>5.1f}%")  # fmt: skip
    print(f"  {'ends behind the one before < that one':>84} {'count':>7} {'µs each':>9} {'µs/step':>10}")
    for r in w["critical"][:20]:
        print(f"  {r['name']:>84} {r['count']:>7} {r['us_each']:>9.2f} {r['us_per_step']:>10.1f}")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", action="append", help="a file of scripts/shapes, without .json; default both")
    p.add_argument("--out", help="JSON file; default scripts/results/profile_gpu.json")
    p.add_argument("--workload", action="append", help=f"of workloads.py, or all; default {' '.join(FIRST)}")
    p.add_argument("--requests", type=int, help="at most so many requests of each workload")
    p.add_argument("--window", type=float, help="seconds recorded")
    p.add_argument("--numerics", default="exact", help="one of those of bench_gpu.py, such as exact+tp2")
    add_budget(p)
    args = p.parse_args()
    need_gpu(p)
    budget = Budget(args.budget)
    record(lambda: torch.zeros(1, device="cuda").add_(1))  # its own start-up, before any graph is captured
    tables: dict[str, Any] = {}
    for model in args.model or ["llama-3.1-8b", "qwen2.5-0.5b"]:
        tables[model] = profile_model(model, args, budget)
        write("profile_gpu", {"models": tables, "left_out": budget.left_out}, args.out)
        gc.collect()


if __name__ == "__main__":
    main()
