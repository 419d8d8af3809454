"""What HTTP costs on a CPU: output tokens/s of the model in the box, offline and through the server, in one process.

64 streams are open all the time: each of 64 connections asks for a streamed completion, and for the next one when that
has ended, until all `--requests` are answered (prompts of 8-200 token ids, 256-512 new tokens, greedy, end-of-text
ignored). Offline is one `Engine.generate` of the same requests in the same order, 64 rows at most at a time. The two
take turns, each first in every other pair; the share is the median of the pairs' ratios. The client is another process
on the same cores, which only reads: what it costs is part of the server's figure, and its core seconds are told beside
those of the engine's process; the share by core seconds depends less on what else the machine does. Beside it the
seconds between the reads of a stream. `--chunks` lists values of serve.chunks_per_second; with `--requests 64` all ask
at once, and the last rows run with ever fewer neighbours.

    python scripts/bench_serve.py --runs 5 --chunks 250,inf
"""

import json
import selectors
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from measure import Beside, parser, save, summary
from workloads import Work, generate, uniform

from fengine import Engine
from fengine.server.app import make_app
from fengine.server.config import ServerConfig
from fengine.server.server import listen, server_of

STREAMS = 64


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
        count = int(self.tail.rpartition(b'"completion_tokens": ')[2].partition(b",")[0])
        self.tail = b""
        return count

    def gaps(self) -> list[float]:
        """Seconds between the reads of the answer that has just ended."""
        times, self.times = self.times, []
        return [b - a for a, b in zip(times, times[1:], strict=False)]


def client(port: int, work: Work) -> dict[str, Any]:
    """Runs the work. {"seconds", "tokens", "cores": seconds that this process ran, "gap": median seconds between reads
    of one answer}."""
    waiting = [body(ids, n) for ids, n in reversed(work)]
    streams = [Stream(socket.create_connection(("127.0.0.1", port))) for _ in range(STREAMS)]
    tokens, gaps = 0, []
    with selectors.DefaultSelector() as ready:
        start, had = time.perf_counter(), time.process_time()
        for stream in streams:
            ready.register(stream.link, selectors.EVENT_READ, stream)
            stream.link.sendall(waiting.pop())
        while ready.get_map():
            for key, _ in ready.select():
                count = key.data.read()
                if count is None:
                    continue
                tokens += count
                gaps += key.data.gaps()
                if waiting:
                    key.data.link.sendall(waiting.pop())
                else:
                    ready.unregister(key.fileobj)
        took, cores = time.perf_counter() - start, time.process_time() - had
    for stream in streams:
        stream.link.close()
    return {"seconds": took, "tokens": tokens, "cores": cores, "gap": statistics.median(gaps)}


def body(ids: list[int], count: int) -> bytes:
    asked = {"model": "box", "prompt": ids, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True,
             "stream_options": {"include_usage": True}}  # fmt: skip
    data = json.dumps(asked).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def answer_client() -> None:
    for line in sys.stdin:
        print(json.dumps(client(*json.loads(line))), flush=True)


# -- the comparison ----------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One run of all requests, in seconds: by the clock, and of cores that the engine's process and the client had."""

    seconds: float
    engine: float
    client: float = 0.0
    gap: float = 0.0


def start(engine: Engine, chunks: float) -> tuple[int, Callable[[], None]]:
    """A server on a free port in a thread; and how to stop it."""
    config = ServerConfig(port=0, chunks_per_second=chunks)
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


def turn(engine: Engine, reader: Beside, ports: dict[str, int], work: Work, backwards: bool) -> dict[str, Run]:
    """One run of each."""
    found = {}
    for name in sorted(["offline", *ports], reverse=backwards):
        had = time.process_time()
        if name == "offline":
            took, _ = generate(engine, work)
            found[name] = Run(took, time.process_time() - had)
        else:
            told = json.loads(reader.ask(json.dumps([ports[name], work])))
            assert told["tokens"] == sum(n for _, n in work)
            found[name] = Run(told["seconds"], time.process_time() - had, told["cores"], told["gap"])
    return found


def row(name: str, turns: list[dict[str, Run]], tokens: int) -> dict[str, Any]:
    runs, pairs = [one[name] for one in turns], [one["offline"].seconds / one[name].seconds for one in turns]
    told = {"tokens_per_second": summary([tokens / run.seconds for run in runs]),
            "engine_core_seconds": summary([run.engine for run in runs])}  # fmt: skip
    if name == "offline":
        return told
    return told | {
        "share": summary(pairs),
        "share_by_core_seconds": summary([t["offline"].engine / (t[name].engine + t[name].client) for t in turns]),
        "client_core_seconds": summary([run.client for run in runs]),
        "seconds_between_reads": statistics.median(run.gap for run in runs),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--chunks", default="250")
    options.add_argument("--requests", type=int, default=2 * STREAMS)
    args = options.parse_args()
    assert args.requests >= STREAMS, "a request for each stream"
    reader = Beside(__file__, "--client")
    with Engine(model_path="box", disable_radix_cache=True, max_running_requests=STREAMS) as engine:
        assert engine.tokenizer is not None
        work = uniform(args.requests, 8, 200, 256, 512, engine.tokenizer.vocab_size, 0, edge=10)
        servers = {f"server, {float(word):g} chunks/s": start(engine, float(word)) for word in args.chunks.split(",")}
        ports = {name: port for name, (port, _) in servers.items()}
        engine.freeze_gc()  # as `fengine serve` does
        turn(engine, reader, ports, work, False)  # warms up
        turns = [turn(engine, reader, ports, work, i % 2 > 0) for i in range(args.runs)]
        for _, stop in servers.values():
            stop()
    reader.close()
    tokens = sum(n for _, n in work)
    table = {name: row(name, turns, tokens) for name in turns[0]}
    save("bench_serve", {"streams": STREAMS, "requests": len(work), "tokens": tokens, "table": table}, args.out)


if __name__ == "__main__":
    answer_client() if sys.argv[1:] == ["--client"] else main()
