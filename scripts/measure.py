"""Shared by the benchmark scripts: where a figure came from, and the spread of repeated runs."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

RESULTS = Path(__file__).resolve().parent / "results"
T = TypeVar("T")


def environment() -> dict[str, Any]:
    """Hardware, versions and commit of this run."""
    versions = {}
    for name in ("torch", "triton", "transformers"):
        try:
            versions[name] = __import__(name).__version__
        except ImportError:
            versions[name] = None
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    return {
        "cpu": cpu or platform.processor(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "commit": commit,
        **versions,
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, extremes and every run."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": list(values)}


def graph_us(
    run: Callable[[int], object], calls: int, times: int, before: Callable[[], object] = lambda: None
) -> list[float]:
    """Microseconds of one of the calls 0, 1, … in a CUDA graph, for each of so many replays behind one that warms up;
    `before` each one."""
    graph, side, found = torch.cuda.CUDAGraph(), torch.cuda.Stream(), []
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # `torch.cuda.graph` would collect garbage each time
        run(0)
        torch.cuda.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for number in range(calls):
                run(number)
        finally:
            graph.capture_end()
        for _ in range(times + 1):
            before()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) * 1e3 / calls)
    return found[1:]


def of_this_checkout(**more: str) -> dict[str, str]:
    """The environment of a process that is to run the same code."""
    paths = filter(None, (str(RESULTS.parents[1]), os.environ.get("PYTHONPATH")))
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | more


class Beside:
    """A process of Python that is kept, so that no run pays for its start; it answers each line with one."""

    def __init__(self, *command: str, **env: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command], env=os.environ | env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def ask(self, line: str) -> str:
        print(line, file=self.process.stdin, flush=True)
        return self.hear()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Budget:
    """The seconds that a script may take. A part that would not end in time is left out, and named in `left_out`."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.perf_counter) -> None:
        """`seconds` None: whatever it takes."""
        self.seconds, self.clock, self.begin = seconds, clock, clock()
        self.left_out: list[str] = []

    def left(self) -> float | None:
        return None if self.seconds is None else max(0.0, self.seconds - (self.clock() - self.begin))

    def allows(self, part: str, seconds: float = 0.0) -> bool:
        """Whether `part` may begin, which is expected to take `seconds`; if not, it is left out."""
        left = self.left()
        if left is None or left > seconds:
            return True
        self.left_out.append(part)
        return False


def turns(sides: Mapping[str, Callable[[], T]], times: int) -> dict[str, list[T]]:
    """What each side gives, in so many turns behind one that warms up; every other one goes backwards."""
    found: dict[str, list[T]] = {name: [] for name in sides}
    for turn in range(-1, times):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            one = sides[name]()
            found[name] += [one] if turn >= 0 else []
    return found


def write(name: str, figures: dict[str, Any], out: str | Path | None) -> Path:
    """The figures with their origin as JSON in `out` or scripts/results/<name>.json."""
    path = Path(out) if out else RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), **figures}, indent=1) + "\n")
    return path


def save(name: str, figures: dict[str, Any], out: str | None) -> None:
    """Prints the figures and writes them."""
    path = write(name, figures, out)
    print(json.dumps(figures, indent=1))
    print(f"written to {path}")


def parser(doc: str | None) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--runs", type=int, default=5)
    p.add_argument("--out", help="JSON file; default scripts/results/<script>.json")
    return p


def need_gpu(p: argparse.ArgumentParser) -> None:
    """Ends the script where torch sees no CUDA device."""
    if not torch.cuda.is_available():
        p.error("this script measures a CUDA device, and torch sees none here")


def add_budget(p: argparse.ArgumentParser) -> None:
    p.add_argument("--budget", type=float, help="seconds: what would not end in them is left out, the rest is written")
