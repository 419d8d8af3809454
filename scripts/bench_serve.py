"""What HTTP costs on a CPU: output tokens/s of the model in the box, offline and through the server, in one process.

64 connections ask at once for a streamed completion each (prompts of 8-200 token ids, 256-512 new tokens, greedy,
end-of-text ignored); a client in another process on the same cores reads them. Offline is `Engine.generate` of the same
requests. The two take turns; the share is the ratio of the medians. Beside it the seconds between the reads of a
stream, and the seconds that each of the process's threads had a core. `--chunks` lists values of
serve.chunks_per_second.

    python scripts/bench_serve.py --runs 5 --chunks 250,inf
"""

import json
import os
import random
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import parser, save, summary

from fengine import Engine
from fengine.serve.app import make_app
from fengine.serve.config import ServeConfig
from fengine.serve.server import listen, server_of

STREAMS = 64
Work = list[tuple[list[int], int]]


def requests(count: int, vocab: int, seed: int = 0) -> Work:
    draw = random.Random(seed)
    return [
        ([draw.randrange(10, vocab - 10) for _ in range(draw.randint(8, 200))], draw.randint(256, 512))
        for _ in range(count)
    ]


def offline(engine: Engine, work: Work) -> float:
    """Output tokens/s."""
    params = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for _, n in work]
    start = time.perf_counter()
    outputs: Any = engine.generate(input_ids=[ids for ids, _ in work], sampling_params=params)
    took = time.perf_counter() - start
    assert [o["meta_info"]["completion_tokens"] for o in outputs] == [n for _, n in work]
    return sum(n for _, n in work) / took


# -- the client, in a process of its own -------------------------------------------------------------------------------


@dataclass
class Stream:
    """One connection."""

    link: socket.socket
    tail: bytes = b""
    times: list[float] = field(default_factory=list)

    def read(self) -> int | None:
        """Takes what has come; how many tokens there were, when the answer is complete."""
        data = self.link.recv(1 << 16)
        assert data, "the server closed the connection"
        self.times.append(time.perf_counter())
        self.tail = (self.tail + data)[-4096:]
        if not self.tail.endswith(b"\r\n0\r\n\r\n"):
            return None
        return int(self.tail.rpartition(b'"completion_tokens": ')[2].partition(b",")[0])


def client(port: int, work: Work) -> dict[str, Any]:
    """Runs the work, a connection each. {"seconds", "tokens", "gap": median seconds between reads}."""
    bodies = [body(ids, n) for ids, n in work]
    streams = [Stream(socket.create_connection(("127.0.0.1", port))) for _ in work]
    tokens = 0
    with selectors.DefaultSelector() as ready:
        start = time.perf_counter()
        for stream, data in zip(streams, bodies, strict=True):
            stream.link.sendall(data)
            ready.register(stream.link, selectors.EVENT_READ, stream)
        while ready.get_map():
            for key, _ in ready.select():
                count = key.data.read()
                if count is not None:
                    tokens += count
                    ready.unregister(key.fileobj)
        took = time.perf_counter() - start
    for stream in streams:
        stream.link.close()
    gaps = [b - a for stream in streams for a, b in zip(stream.times, stream.times[1:], strict=False)]
    return {"seconds": took, "tokens": tokens, "gap": statistics.median(gaps)}


def body(ids: list[int], count: int) -> bytes:
    asked = {"model": "box", "prompt": ids, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True,
             "stream_options": {"include_usage": True}}  # fmt: skip
    data = json.dumps(asked).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


class Client:
    """A client process that is kept, so that no run pays for its start."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--client"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, port: int, work: Work) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([port, work]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def answer_client() -> None:
    for line in sys.stdin:
        print(json.dumps(client(*json.loads(line))), flush=True)


# -- the comparison ----------------------------------------------------------------------------------------------------


def cores_had(before: dict[str, float] | None = None) -> dict[str, float]:
    """Seconds that each named thread of this process has run, less those `before`; "others" are those of OpenMP."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    had: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        spent = sum(map(int, (task / "stat").read_text().rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")
        name = names.get(int(task.name), "others")
        had[name] = had.get(name, 0.0) + spent
    return {name: spent - (before or {}).get(name, 0.0) for name, spent in had.items()}


def start(engine: Engine, chunks: float) -> tuple[int, Callable[[], None]]:
    """A server on a free port in a thread; and how to stop it."""
    config = ServeConfig(port=0, chunks_per_second=chunks)
    bound = listen(config)
    server = server_of(make_app(engine, config), config)
    thread = threading.Thread(target=server.run, name=f"http {chunks:g}", kwargs={"sockets": [bound]})
    thread.start()
    while not server.started:
        time.sleep(0.01)

    def stop() -> None:
        server.should_exit = True
        thread.join()

    return bound.getsockname()[1], stop


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--chunks", default="250,inf")
    args = options.parse_args()
    budgets = [float(word) for word in args.chunks.split(",")]
    names = ["offline", *(f"server, {budget:g} chunks/s" for budget in budgets)]
    figures: dict[str, list[float]] = {name: [] for name in names}
    gaps: dict[str, list[float]] = {name: [] for name in names[1:]}
    threads: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    reader = Client()
    with Engine(model_path="box", disable_radix_cache=True) as engine:
        assert engine.tokenizer is not None
        work = requests(STREAMS, engine.tokenizer.vocab_size)
        servers = [start(engine, budget) for budget in budgets]
        for turn in range(args.runs + 1):
            before = cores_had()
            found = {"offline": offline(engine, work)}
            spent = {"offline": cores_had(before)}
            for name, (port, _) in zip(names[1:], servers, strict=True):
                before = cores_had()
                told = reader.run(port, work)
                spent[name] = cores_had(before)
                assert told["tokens"] == sum(n for _, n in work)
                found[name] = told["tokens"] / told["seconds"]
                gaps[name].append(told["gap"])
            for name, rate in found.items():
                if turn:  # the first turn warms up
                    figures[name].append(rate)
                    threads[name].append(spent[name])
        for _, stop in servers:
            stop()
    reader.close()
    base = statistics.median(figures["offline"])
    table = {name: summary(rates) | {"share": statistics.median(rates) / base} for name, rates in figures.items()}
    for name, values in gaps.items():
        table[name]["seconds_between_reads"] = statistics.median(values[1:])
    for name, runs in threads.items():
        table[name]["core_seconds"] = {
            k: statistics.median(run[k] for run in runs) for k in runs[0] if runs[0][k] > 0.005
        }
    save(
        "bench_serve", {"unit": "output tokens/s", "streams": STREAMS, "requests": len(work), "table": table}, args.out
    )


if __name__ == "__main__":
    answer_client() if sys.argv[1:] == ["--client"] else main()
