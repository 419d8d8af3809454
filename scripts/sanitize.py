"""NVIDIA's compute-sanitizer over our GPU kernels: reads and writes out of bounds (memcheck), races in shared memory
(racecheck). It must report nothing.

    python scripts/sanitize.py --out scripts/results/sanitize.json

The cases are those of `pytest -m gpu tests/ops`, one of each test, with bfloat16 where it has several; libraries'
kernels are left out. They run without the tool first, which compiles the kernels, and must pass. Several run side by
side, a few in each process; what is not done within --minutes is told. Ends with status 2 without a GPU, 1 where
anything is reported, or a case fails, 3 without the tool, or where cases are left out.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measure import need_gpu, save

ROOT = Path(__file__).resolve().parents[1]
OURS = "regex=^[a-z][a-z0-9_]*_kernel"  # libraries' names are mangled, or end otherwise
PYTEST = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--tb=line"]
TOOLS = ("memcheck", "racecheck")
FEW = 4  # cases of a process


def one_of_each(lines: list[str]) -> list[str]:
    """Of the cases of each test one. Pure."""
    found: dict[str, str] = {}
    for line in lines:
        if "::" in line:
            test = line.partition("[")[0]
            if test not in found or ("bfloat16" in line and "bfloat16" not in found[test]):
                found[test] = line
    return list(found.values())


def collected(paths: list[str]) -> list[str]:
    """Ends the script where pytest finds none, or fails."""
    told = subprocess.run([*PYTEST, "--collect-only", *paths], cwd=ROOT, capture_output=True, text=True, check=False)
    if told.returncode:  # none, or a file that cannot be imported
        sys.exit(f"the cases cannot be collected:\n{told.stdout[-1500:]}{told.stderr[-1500:]}")
    return told.stdout.splitlines()


def run(tool: str | None, ids: list[str], end: float) -> dict[str, Any]:
    """What became of these cases until `end` (monotonic): passed or not, and what the tool has reported."""
    left = end - time.monotonic()
    if left <= 0:
        return {"cases": ids, "left out": True}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        options = ["--tool", tool, "--kernel-name", OURS, "--log-file", str(log), "--show-backtrace", "no"]
        options += ["--target-processes", "application-only", "--launch-timeout", "0"]  # pytest takes a while to start
        watched = [] if tool is None else ["compute-sanitizer", *options]
        command = ["timeout", "-k", "5", str(int(left) + 1), *watched, *PYTEST, *ids]
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        text = log.read_text() if log.exists() else ""
    summary = re.findall(r"SUMMARY: (\d+) (?:error|hazard)", text)
    done, reports = told.returncode == 0 and (tool is None or bool(summary)), kinds(text)
    if sum(map(int, summary)) and not reports:
        reports = {"of an unknown kind": sum(map(int, summary))}
    if told.returncode in (124, 137):
        return {"cases": ids, "left out": True, "reports": reports}
    return {"cases": ids, "passed": done, "reports": reports} | ({} if done else {"output": told.stdout[-1500:]})


def kinds(log: str) -> dict[str, int]:
    """Reports by kind and place, counted. Pure."""
    found: dict[str, int] = {}
    lines = [line.removeprefix("=========").strip() for line in log.splitlines()]
    for line, behind in zip(lines, [*lines[1:], ""], strict=False):
        if re.match(r"Invalid|Error: |Warning: |Program hit|Barrier|Uninitialized|Misaligned", line):
            key = re.sub(r"0x[0-9a-f]+", "", f"{line[:160]} {behind[:120]}")
            found[key] = found.get(key, 0) + 1
    return found


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tool", action="append", choices=TOOLS, help="default: both")
    p.add_argument("--minutes", type=float, default=10.0, help="of each tool, and of the run without")
    p.add_argument("--processes", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)))
    p.add_argument("--paths", nargs="+", default=["tests/ops"])
    p.add_argument("--out", help="JSON file; default scripts/results/sanitize.json")
    args = p.parse_args()
    need_gpu(p)
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not in PATH: it comes with the CUDA toolkit", file=sys.stderr)
        sys.exit(3)
    ids = one_of_each(collected(args.paths))
    chunks = [ids[i :: -(-len(ids) // FEW)] for i in range(-(-len(ids) // FEW))]
    found: dict[str, Any] = {"cases": ids}
    for tool in (None, *(args.tool or TOOLS)):
        end = time.monotonic() + 60 * args.minutes
        with ThreadPoolExecutor(args.processes) as pool:
            parts = list(pool.map(lambda chunk, tool=tool, end=end: run(tool, chunk, end), chunks))
        reports: Counter[str] = sum((Counter(part.get("reports")) for part in parts), Counter())
        found[tool or "without"] = figures = {
            "passed": sum(len(part["cases"]) for part in parts if part.get("passed")),
            "left out": [case for part in parts if part.get("left out") for case in part["cases"]],
            "failed": [part for part in parts if part.get("passed") is False],
            "reports": reports,
        }
        print(tool or "without", {k: v if k == "passed" else len(v) for k, v in figures.items()}, flush=True)
    save("sanitize", found, args.out)
    ran = [found[tool] for tool in ("without", *(args.tool or TOOLS))]
    sys.exit(1 if any(each["reports"] or each["failed"] for each in ran) else 3 * any(each["left out"] for each in ran))


if __name__ == "__main__":
    main()
