"""Whole-engine schedules, as many as there is time for: how many hold, and what is wrong with the others?

    python scripts/simulate.py --count 100000 --processes 2 --json scripts/results/simulation.json
    python scripts/simulate.py --first 632 --count 1          # one seed again, with what it takes to fail

A seed decides settings, clients, faults and every interleaving, so it fails again; a schedule that fails is told with
as few events as still make it fail. `--size 8` has schedules of some 200 steps, `--ranks` those of several processes.
"""

import argparse
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
from simulated_plan import plan_of  # type: ignore[import-not-found]
from simulated_ranks import ranks_plan_of  # type: ignore[import-not-found]
from simulated_run import shrunk, violation, world_of  # type: ignore[import-not-found]

CHUNK = 500


def run(seeds: range, size: int, ranks: bool) -> dict[str, Any]:
    """Schedules of these seeds, and what they were made of."""
    began, counts, wrong = time.process_time(), dict.fromkeys(("steps", "requests", "preemptions", "turns"), 0), []
    for seed in seeds:
        world = world_of((ranks_plan_of if ranks else plan_of)(seed, size))
        try:
            world.run()
        except Exception as error:
            small = shrunk(world.plan)
            wrong.append({"seed": seed, "error": f"{type(error).__name__}: {error}", "plan": list(events_of(small)),
                          "again": violation(small)})  # fmt: skip
            continue
        counts["steps"] += world.core.stepper.steps
        counts["requests"] += len(world.jobs)
        counts["preemptions"] += world.scheduler.counters()["preemptions"]
        counts["turns"] += world.machine.turns
    return counts | {"schedules": len(seeds), "seconds": time.process_time() - began, "violations": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--ranks", action="store_true", help="of engines of several ranks, one of which may fail")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no more are begun after so long")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    end = options.first + options.count
    total: dict[str, Any] = {"first": options.first, "size": options.size, "ranks": options.ranks}
    with ProcessPoolExecutor(options.processes) as pool:
        waiting = iter(range(options.first, end, CHUNK))
        going = []
        while True:
            while len(going) < 2 * options.processes and time.monotonic() < until:
                if (first := next(waiting, None)) is None:
                    break
                going.append(pool.submit(run, range(first, min(first + CHUNK, end)), options.size, options.ranks))
            if not going:
                break
            for name, value in going.pop(0).result().items():
                total[name] = total[name] + value if name in total else value
            told = total | {"cpu_hours": round(total["seconds"] / 3600, 3)}
            if options.json:
                options.json.write_text(json.dumps({"environment": environment(), **told}, indent=1) + "\n")
            print(f"{told['schedules']:,} schedules, {told['steps']:,} steps, {told['cpu_hours']} CPU hours, "
                  f"{len(told['violations'])} violations", flush=True)  # fmt: skip
    for wrong in total["violations"]:
        print(wrong["error"], *wrong["plan"], f"  {wrong['again']}", sep="\n")
    sys.exit(bool(total["violations"]))


if __name__ == "__main__":
    main()
