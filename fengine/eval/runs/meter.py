"""Counts what a job does: rows and tokens written, and the engine's own counters since the job began."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fengine.eval.cli.figures import Progress, Shown, Summary

RATE_SECONDS = 2.0  # over which the live rates are taken
MIN_SECONDS = 0.25  # shorter spans give no rate
MAX_LATENCIES = 100_000


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
            seconds=now - self.started,
            growing=growing,
        )

    def summary(self, *, reused: bool, ended: str, out: Path) -> Summary:
        stats, before = self.stats(), self.before
        return Summary(
            rows=self.rows,
            failed=self.failed,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            cached_tokens=self.cached_tokens,
            seconds=time.perf_counter() - self.started,
            first_token=statistics.median(self.latencies) if self.latencies else None,
            preemptions=stats["preemptions"] - before["preemptions"],
            steps=stats["steps"] - before["steps"],
            compiles=stats["compiles"] - before["compiles"],
            compile_seconds=stats["compile_seconds"],
            start_seconds=stats["start_seconds"],
            reused=reused,
            ended=ended,
            out=f"{out}.partial" if ended else str(out),
        )
