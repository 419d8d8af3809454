"""`fengine bench latency|throughput|serve`: what one's own model takes on one's own machine. No torch before it loads.
Prompts are random token ids and the end of text is ignored, so that every engine does the same work. Exit codes: 0
measured, 1 the engine died, 2 usage or configuration."""

import asyncio
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fengine.config import EngineConfig
from fengine.errors import ConfigError
from fengine.eval.cli import command, compose
from fengine.eval.cli.engines import EngineCache, transformers_model
from fengine.eval.cli.view import duration, say
from fengine.eval.commands.inform import facts
from fengine.eval.commands.serve import SERVE, server_module
from fengine.eval.runs.folder import check_writable, write_file

USAGE = """
Usage:  fengine bench latency|throughput|serve [bench.KEY=VALUE] [group=option] [key=value] ...

latency     one request at a time: seconds to its first token, tokens a second after it
throughput  all requests at once, offline: output tokens a second
serve       the same requests as streams through HTTP, bench.streams of them open at any time

bench.requests=64  bench.input=128  bench.output=128 (tokens)  bench.rounds=3  bench.seed=0  bench.streams=64
bench.beside=transformers  the same work by Transformers' generate, in this process (not for serve)
bench.out=FILE.json        the figures of every round, with versions and hardware

    fengine bench latency model=qwen3-0.6b bench.beside=transformers
    fengine bench serve model.path=DIR scheduler.max_running_requests=64
"""
KINDS = ("latency", "throughput", "serve")
LIMITS = {"requests": (1, 100_000), "input": (1, 1_000_000), "output": (2, 1_000_000), "rounds": (1, 1000),
          "streams": (1, 8192), "seed": (0, 2**63 - 1)}  # fmt: skip
OPTIONS: dict[str, Callable[[str], Any]] = {f"bench.{name}": command.whole(*LIMITS[name]) for name in LIMITS}
OPTIONS |= {"bench.beside": command.names(["transformers"]), "bench.out": Path}
DEFAULTS = {"requests": 64, "input": 128, "output": 128, "rounds": 3, "streams": 64, "seed": 0}
Round = dict[str, float]  # seconds, tok_s; first_s: median seconds to the first token


class Work(NamedTuple):
    """The same for every engine: prompts of one length, each answered with `output` tokens."""

    prompts: list[list[int]]
    output: int

    @property
    def tokens(self) -> int:
        return len(self.prompts) * self.output


Measured = Callable[[Any, Work, int], Round]  # of an engine, and how many streams are open


def work(argv: Sequence[str]) -> int:
    """The exit code. Errors: FengineError."""
    words = command.parse(argv, OPTIONS, overrides=True)
    kind, given = _asked(words)
    (point,) = compose.points(compose.parse(words.overrides, SERVE), SERVE)
    config: EngineConfig = replace(point.config.engine, random_seed=point.config.seed)
    with EngineCache() as engines:
        engine = engines.get(config)
        work = work_of(given, engine._parts.spec.vocab_size)
        runs: dict[str, Measured] = {"fengine": {"latency": latency, "throughput": throughput, "serve": serve}[kind]}
        if "beside" in given:
            runs["transformers"] = beside(transformers_model(engine), kind)
        found: dict[str, list[Round]] = {name: [] for name in runs}
        for number in range(given["rounds"] + 1):  # the first warms up; then in turns, so that a drift falls on both
            for name, run in runs.items():
                one = run(engine, work, given["streams"])
                found[name] += [one] if number else []
        tell(kind, engine, work, found, given)
    return command.OK


def _asked(words: command.Arguments) -> tuple[str, dict[str, Any]]:
    """What is measured, and how. Errors: ConfigError."""
    kind = "".join(words.places)
    for word in words.overrides:
        if word.startswith("bench."):
            raise ConfigError(command.unknown(word, [*OPTIONS]))
        if word.lstrip("+").startswith("serve."):
            raise ConfigError(f"{word:.200}: the server of a bench has a configuration of its own; leave it out")
    given = DEFAULTS | {name.partition(".")[2]: value for name, value in words.options.items()}
    if kind not in KINDS:
        raise ConfigError(f"fengine bench takes one of {', '.join(KINDS)}, got {kind!r:.80}")
    if kind == "serve" and "beside" in given:
        raise ConfigError("bench.beside: Transformers' generate is no server; leave it out")
    if (out := words.options.get("bench.out")) is not None:
        check_writable(out)
    if kind == "latency":
        given["requests"] = words.options.get("bench.requests", 8)
    return kind, given


def work_of(given: dict[str, Any], vocab: int) -> Work:
    draw = random.Random(given["seed"])
    low = min(16, vocab - 1)  # special tokens tend to come first
    return Work([[draw.randrange(low, vocab) for _ in range(given["input"])] for _ in range(given["requests"])],
                given["output"])  # fmt: skip


def latency(engine: Any, work: Work, streams: int) -> Round:
    """Each request alone."""
    engine.flush_cache()
    firsts, walls = [], []
    for ids in work.prompts:
        start = time.perf_counter()
        outputs = engine.generate(input_ids=ids, sampling_params=drawn(work), stream=True)
        moments = [time.perf_counter() for _ in outputs]
        firsts.append(moments[0] - start)
        walls.append(moments[-1] - start)
    return alone(firsts, walls, work)


def alone(firsts: list[float], walls: list[float], work: Work) -> Round:
    """Of seconds to each request's first token, and to its last."""
    first, wall = statistics.median(firsts), statistics.median(walls)
    return {"seconds": wall, "tok_s": (work.output - 1) / max(wall - first, 1e-9), "first_s": first}


def throughput(engine: Any, work: Work, streams: int) -> Round:
    """All at once."""
    engine.flush_cache()
    start = time.perf_counter()
    outputs = engine.generate(input_ids=work.prompts, sampling_params=drawn(work))
    took = time.perf_counter() - start
    firsts = [out["meta_info"]["first_token_latency"] for out in outputs if "first_token_latency" in out["meta_info"]]
    return timed(took, work) | ({"first_s": statistics.median(firsts)} if firsts else {})


def drawn(work: Work) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": work.output, "ignore_eos": True}


def timed(seconds: float, work: Work) -> Round:
    return {"seconds": seconds, "tok_s": work.tokens / seconds}


def beside(draw: Callable[[list[list[int]], int], None], kind: str) -> Measured:
    """A round of Transformers' generate: one by one, or in batches as large as the engine's."""

    def took(prompts: list[list[int]], count: int) -> float:
        start = time.perf_counter()
        draw(prompts, count)
        return time.perf_counter() - start

    def run(engine: Any, work: Work, streams: int) -> Round:
        if kind == "latency":
            firsts, walls = ([took([ids], count) for ids in work.prompts] for count in (1, work.output))
            return alone(firsts, walls, work)
        size = engine.config.scheduler.max_running_requests
        parts = [work.prompts[i : i + size] for i in range(0, len(work.prompts), size)]
        return timed(sum(took(part, work.output) for part in parts), work)

    return run


def serve(engine: Any, work: Work, streams: int) -> Round:
    """All as streams through a server in this process, and a client in its main thread."""
    engine.flush_cache()
    module = server_module()
    config = module.ServerConfig(port=0, log="none")
    with module.listen(config) as bound:
        ready = threading.Event()
        server = module.server_of(module.make_app(engine, config), config, ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        ready.wait()
        try:
            start = time.perf_counter()
            firsts = asyncio.run(asked(bound.getsockname()[1], work, streams))
            took = time.perf_counter() - start
        finally:
            server.should_exit = True
            thread.join()
    return timed(took, work) | {"first_s": statistics.median(firsts)}


async def asked(port: int, work: Work, streams: int) -> list[float]:
    """Seconds to the first token of each request; so many streams are open at any time."""
    left, firsts = list(reversed(work.prompts)), []

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while left:
            body = {"prompt": left.pop(), "max_tokens": work.output, "temperature": 0, "ignore_eos": True}
            data = json.dumps(body | {"stream": True}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
            start = time.perf_counter()
            writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
            seen = await reader.readuntil(b"data: ")
            if b" 200 " not in seen.partition(b"\r\n")[0]:
                raise ConfigError(f"the server refused a request: {(seen + await reader.read(500))!r:.500}")
            firsts.append(time.perf_counter() - start)
            await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
        writer.close()

    await asyncio.gather(*(client() for _ in range(min(streams, len(work.prompts)))))
    return firsts


def tell(kind: str, engine: Any, work: Work, found: dict[str, list[Round]], given: dict[str, Any]) -> None:
    """A line for each engine: medians over the rounds, and their range. Errors: StorageError."""
    model = engine.config.model
    say(f"{model.path} on {model.device}: {len(work.prompts)} requests, {len(work.prompts[0])} tokens in, "
          f"{work.output} out, {len(found['fengine'])} rounds")  # fmt: skip
    for name, rounds in found.items():
        speeds = sorted(one["tok_s"] for one in rounds)
        first = [one["first_s"] for one in rounds if "first_s" in one]
        told = f"{statistics.median(speeds):>10,.1f} tok/s ({speeds[0]:,.1f} to {speeds[-1]:,.1f})"
        told += f"   {duration(statistics.median(one['seconds'] for one in rounds))}"
        told += f"   first token {duration(statistics.median(first))}" if first else ""
        say(f"{name:<14}{told}")
    if "transformers" in found:
        ours, theirs = (statistics.median(one["tok_s"] for one in found[name]) for name in ("fengine", "transformers"))
        say(f"fengine draws {ours / theirs:.2f} times as many tokens a second")
    if "out" in given:
        info = {"kind": kind, "model": str(model.path), "device": model.device, "environment": facts()}
        write_file(given["out"], info | {"work": {**given, "out": str(given["out"])}, "rounds": found})
