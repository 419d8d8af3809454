"""Counts what a job does: rows and tokens written, and the engine's own counters since the job began."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from fengine.eval.cli.view import Progress, Shown, count, duration

RATE_SECONDS = 2.0  # over which the live rates are taken
MIN_SECONDS = 0.25  # shorter spans give no rate
MAX_LATENCIES = 100_000
MIN_ROWS = 8  # from which on it is told how long the rest takes


class Meter:
    """Modified by `count` and `count_failure`, once for every row that is written."""

    def __init__(self, stats: Callable[[], dict[str, Any]]) -> None:
        self.stats = stats
        self.before = stats()
        self.started = time.perf_counter()
        self.rows = 0
        self.failed = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.cached_tokens = 0
        self.latencies: deque[float] = deque(maxlen=MAX_LATENCIES)
        self.moments: deque[tuple[float, int, int]] = deque()

    def count(self, meta: dict[str, Any]) -> None:
        """One row that finished, by its `meta_info`."""
        self.rows += 1
        self.prompt_tokens += meta["prompt_tokens"]
        self.output_tokens += meta["completion_tokens"]
        self.cached_tokens += meta["cached_tokens"]
        if "first_token_latency" in meta:
            self.latencies.append(meta["first_token_latency"])

    def count_failure(self) -> None:
        self.rows += 1
        self.failed += 1

    def progress(self, done: int, total: int | None, growing: tuple[Shown, ...]) -> Progress:
        """This moment. `done` rows have finished but wait for an earlier one to be written."""
        stats, now = self.stats(), time.perf_counter()
        computed = stats["computed_tokens"] - stats["output_tokens"]  # of prompts, but for a row's first token
        self.moments.append((now, computed, stats["output_tokens"]))
        while now - self.moments[0][0] > RATE_SECONDS:
            self.moments.popleft()
        then, tokens_in, tokens_out = self.moments[0]
        span = max(now - then, MIN_SECONDS)
        return Progress(
            done=self.rows + done,
            total=total,
            failed=self.failed,
            running=stats["running"],
            waiting=stats["waiting"],
            in_rate=max(0, computed - tokens_in) / span,
            out_rate=(stats["output_tokens"] - tokens_out) / span,
            pages_used=stats["pages_used"],
            pages_total=stats["pages_total"],
            seconds=self.seconds,
            growing=growing,
            remaining=self._remaining(done, total),
        )

    def _remaining(self, before: int, total: int | None) -> float | None:
        """Seconds, at the pace of the rows so far; None before there are enough of them to tell."""
        if total is None or self.rows < MIN_ROWS or self.seconds < RATE_SECONDS:
            return None
        return self.seconds * (total - before - self.rows) / self.rows

    def lines(self, reused: bool) -> list[tuple[str, str]]:
        """(label, figures) of what was computed, for readers."""
        stats, before, seconds = self.stats(), self.before, self.seconds
        rates = [count / seconds if seconds else 0.0 for count in (self.prompt_tokens, self.output_tokens)]
        compiles = stats["compiles"] - before["compiles"]
        engine = f"start {duration(stats['start_seconds'])}, of it compile {duration(stats['compile_seconds'])}"
        if reused:
            engine = "reused, nothing loaded or compiled" + (f" ({compiles} compiles!)" if compiles else "")
        steps, again = (count(stats[name] - before[name], name[:-1]) for name in ("steps", "preemptions"))
        first = f"median {duration(statistics.median(self.latencies))}" if self.latencies else "-"
        cached = f" ({self.cached_tokens:,} from the prefix cache)"
        return [
            ("tokens", f"{self.prompt_tokens:,} in{cached}, {self.output_tokens:,} out"),
            ("speed", f"{rates[0]:,.0f} tok/s in, {rates[1]:,.0f} tok/s out"),
            ("first token", first),
            ("engine", f"{engine}; {steps}, {again}"),
        ]

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started
