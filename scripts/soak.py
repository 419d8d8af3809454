"""A server under mixed traffic for as long as asked: does anything grow? Clients that vanish included.

    python scripts/soak.py --minutes 360 --clients 16 --json scripts/results/soak.json
    python scripts/soak.py --clients 64 --answers 16 model.device=cuda scheduler.max_running_requests=512

`fengine serve` with the model in the box runs in a process of its own. Each client in turn asks for a completion or a
chat, streamed or not, some with logprobs, a stop string, a penalty or a grammar, some with a body that is refused; of
the streams a third is cut off by closing the socket in the middle. Every five seconds the server's resident memory,
threads, descriptors and held pages are read from /proc and /metrics. Told are slopes over the time behind the first
`--settle` share, and what is held when all clients have gone: pages and open requests must be 0. A step's time is that
between two readings by the steps that ran.
"""

import argparse
import http.client
import json
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from measure import environment

HELD = ("rss_mib", "threads", "descriptors")  # by the process
GAUGES = ("kv_cache_pages_used", "num_requests_running", "num_requests_waiting", "steps_total")
WORDS = "the of and a to in is you that it he was for on are as with his they at be this have from or one had".split()


def body(draw: random.Random, answers: int) -> tuple[str, dict[str, Any]]:
    """Path and JSON body of one request, for so many answers."""
    text = " ".join(draw.choices(WORDS, k=draw.randrange(1, 60)))
    more: dict[str, Any] = {"model": "box", "max_tokens": draw.randrange(1, 80), "stream": draw.random() < 0.7}
    kind = draw.random()
    if kind < 0.15:
        more |= {"frequency_penalty": 0.5, "seed": draw.randrange(9)}
    elif kind < 0.3:
        more |= {"stop": ["e", ". "]}
    elif kind < 0.4:
        more |= {"regex": "[a-z]{1,9}"}
    elif kind < 0.45:
        more |= {"max_tokens": -1}  # refused
    if answers > 1:
        more["n"] = answers
    if draw.random() < 0.5:
        return "/v1/completions", {"prompt": text} | more
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]} | more


class Clients:
    """Threads that ask until they are told to stop. Counts what came of it."""

    def __init__(self, port: int, count: int, answers: int, seed: int) -> None:
        self.port, self.answers, self.stop, self.outcomes = port, answers, threading.Event(), Counter[str]()
        self.threads = [threading.Thread(target=self._run, args=(random.Random(seed + i),)) for i in range(count)]
        for thread in self.threads:
            thread.start()

    def end(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()

    def _run(self, draw: random.Random) -> None:
        while not self.stop.is_set():
            path, what = body(draw, self.answers)
            try:
                self.outcomes[self._ask(path, what, cut=what["stream"] and draw.random() < 0.33)] += 1
            except (OSError, http.client.HTTPException) as error:
                self.outcomes[type(error).__name__] += 1
                time.sleep(0.1)

    def _ask(self, path: str, what: dict[str, Any], cut: bool) -> str:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            link.request("POST", path, json.dumps(what), {"Content-Type": "application/json"})
            answer = link.getresponse()
            if cut and answer.status == 200:
                answer.read1(64)
                if link.sock is not None:
                    link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, no end
                return "cut off"
            answer.read()
            return f"status {answer.status}"
        finally:
            link.close()


def sample(pid: int, port: int) -> dict[str, float]:
    """What the server's process holds now."""
    status = Path(f"/proc/{pid}/status").read_text()
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    link.request("GET", "/metrics")
    told = link.getresponse().read().decode()
    link.close()
    found = {name: float(m[1]) for name in GAUGES if (m := re.search(rf"^\S*{name}(?:{{.*}})? (\S+)$", told, re.M))}
    return found | {
        "time": time.monotonic(),
        "rss_mib": int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024,  # type: ignore[index]
        "threads": int(re.search(r"Threads:\s+(\d+)", status)[1]),  # type: ignore[index]
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
    }


def slope(samples: list[dict[str, float]], name: str) -> float:
    """Of the least squares line, per hour."""
    return statistics.linear_regression([s["time"] / 3600 for s in samples], [s[name] for s in samples]).slope


def step_times(samples: list[dict[str, float]]) -> dict[str, float]:
    """Milliseconds of a step between two readings: the median and the most, of the first half and of the second."""
    pairs = [(a, b) for a, b in pairwise(samples) if b["steps_total"] > a["steps_total"]]
    ms = [1e3 * (b["time"] - a["time"]) / (b["steps_total"] - a["steps_total"]) for a, b in pairs]
    halves = {"first": ms[: len(ms) // 2], "second": ms[len(ms) // 2 :]}
    return {f"{what.__name__} of the {name} half": round(what(half), 3)
            for name, half in halves.items() if half for what in (statistics.median, max)}  # fmt: skip


def serve(overrides: list[str]) -> tuple[subprocess.Popen[str], int]:
    """The server and its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "fengine.run", "serve", "model.path=box", f"serve.port={port}"]
    command += overrides or ["model.device=cpu"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for _ in range(600):
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            threading.Thread(target=process.stderr.read, daemon=True).start()  # type: ignore[union-attr]
            return process, port
        if process.poll() is not None:
            break
        time.sleep(0.2)
    sys.exit(f"the server did not start: {process.stderr.read() if process.stderr else ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--answers", type=int, default=1, help="of each request")
    parser.add_argument("--settle", type=float, default=0.3, help="the share of the time that slopes leave out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", help="of the server's configuration; default model.device=cpu")
    options = parser.parse_args()
    process, port = serve(options.overrides)
    try:
        clients, samples = Clients(port, options.clients, options.answers, options.seed), []
        end = time.monotonic() + 60 * options.minutes
        while time.monotonic() < end:
            time.sleep(5)
            samples.append(sample(process.pid, port))
        clients.end()
        time.sleep(3)
        last = sample(process.pid, port)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)
    settled = [s for s in samples if s["time"] > samples[0]["time"] + options.settle * 60 * options.minutes]
    report = {
        "minutes": options.minutes, "clients": options.clients, "outcomes": dict(clients.outcomes.most_common()),
        "overrides": options.overrides, "steps": last["steps_total"],
        "running": statistics.median(s["num_requests_running"] for s in settled), "step_ms": step_times(settled),
        "slopes_per_hour": {name: round(slope(settled, name), 3) for name in HELD},
        "ranges": {name: [min(s[name] for s in settled), max(s[name] for s in settled)] for name in HELD},
        "held_at_the_end": {name: last[name] for name in GAUGES if name != "steps_total"},
        "exit": process.returncode,
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps({"environment": environment(), **report}, indent=1) + "\n")
    sys.exit(any(report["held_at_the_end"].values()))


if __name__ == "__main__":
    main()
