"""Whole-engine schedules, as many as there is time for: how many hold, and what is wrong with the others?

    python scripts/simulate.py --size 6 --count 100000 --processes 2 --json scripts/results/simulation.json
    python scripts/simulate.py --first 632 --count 1          # one seed again, with what it takes to fail
    python scripts/simulate.py --count 0 --add more.json --json scripts/results/simulation.json

A seed decides settings, clients, faults and every interleaving, so it fails again; with time left a schedule that fails
is told with as few events as still make it fail. `--size 6` has schedules of some 200 steps, `--ranks` those of several
processes. The JSON file keeps the runs that it has, and is written while this one goes on.
"""

import argparse
import gc
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from measure import environment
from simulated_engine import events_of  # type: ignore[import-not-found]
from simulated_plan import Plan, plan_of  # type: ignore[import-not-found]
from simulated_ranks import ranks_plan_of  # type: ignore[import-not-found]
from simulated_run import shrunk, violation, world_of  # type: ignore[import-not-found]

CHUNK = 100
COUNTED = ("schedules", "steps", "requests", "preemptions", "turns", "seconds", "violations")  # seconds: of processors


def plan(seed: int, size: int, ranks: bool) -> Plan:
    return (ranks_plan_of if ranks else plan_of)(seed, size)


def run(seeds: range, size: int, ranks: bool) -> dict[str, Any]:
    """Schedules of these seeds, and what they were made of."""
    gc.disable()  # what schedules leave is collected once, behind some of them
    began, counts, wrong = time.process_time(), dict.fromkeys(COUNTED, 0), []
    for seed in seeds:
        world = world_of(plan(seed, size, ranks))
        try:
            world.run()
        except Exception as error:
            wrong.append({"seed": seed, "error": f"{type(error).__name__}: {error}"})
            continue
        finally:
            if seed % 8 == 0:
                gc.collect()
        counts["steps"] += world.core.stepper.steps
        counts["requests"] += len(world.jobs)
        counts["preemptions"] += world.scheduler.counters()["preemptions"]
        counts["turns"] += world.machine.turns
    return counts | {"schedules": len(seeds), "seconds": time.process_time() - began, "violations": wrong}


def told(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What runs come to, by size of their schedules."""
    sums: dict[str, dict[str, Any]] = {}
    for one in runs:
        kind = sums.setdefault(f"size {one['size']}" + ", of several ranks" * one["ranks"], {})
        kind |= {name: kind.get(name, 0) + one[name] for name in ("schedules", "steps", "seconds")}
        kind["violations"] = kind.get("violations", 0) + len(one["violations"])
    for kind in sums.values():
        kind["cpu_hours"] = round(kind.pop("seconds") / 3600, 3)
    return {"sums": sums, "runs": runs}


def explain(wrong: dict[str, Any], options: argparse.Namespace, until: float) -> None:
    print(f"seed {wrong['seed']}: {wrong['error']}")
    if time.monotonic() < until:
        small = shrunk(plan(wrong["seed"], options.size, options.ranks))
        print(*events_of(small), f"  {violation(small)}", sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--ranks", action="store_true", help="of engines of several ranks, one of which may fail")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no more are begun after so long")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--add", type=Path, nargs="+", default=[], help="files of runs, which the JSON file takes in")
    options = parser.parse_args()
    until, end = time.monotonic() + 60 * options.minutes, options.first + options.count
    files = [file for file in (options.json, *options.add) if file is not None and file.exists()]
    runs = [one for file in files for one in json.loads(file.read_text())["runs"]]
    own: dict[str, Any] = {"first": options.first, "size": options.size, "ranks": options.ranks}
    own |= dict.fromkeys(COUNTED, 0) | {"violations": [], "environment": environment()}
    gc.collect()
    gc.freeze()
    with ProcessPoolExecutor(options.processes) as pool:
        waiting, going = iter(range(options.first, end, CHUNK)), []
        while True:
            while len(going) < 2 * options.processes and time.monotonic() < until:
                if (first := next(waiting, None)) is None:
                    break
                going.append(pool.submit(run, range(first, min(first + CHUNK, end)), options.size, options.ranks))
            if options.json:
                options.json.write_text(json.dumps(told(runs + [own] * bool(own["schedules"])), indent=1) + "\n")
            if not going:
                break
            own |= {name: own[name] + value for name, value in going.pop(0).result().items()}
            print(f"{own['schedules']:,} schedules, {own['steps']:,} steps, {own['seconds'] / 3600:.3f} CPU hours, "
                  f"{len(own['violations'])} violations", flush=True)  # fmt: skip
    for wrong in own["violations"]:
        explain(wrong, options, until)
    sys.exit(bool(own["violations"]))


if __name__ == "__main__":
    main()
