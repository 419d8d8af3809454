"""What `/metrics` tells, in Prometheus' text format 0.0.4: the engine's counters and gauges, and times of requests.

Label values come from fixed sets only, so that no client can make the page grow.
https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fengine.engine.request_state import RequestState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)

GAUGES = {  # name: (key of Engine.stats, help)
    "num_requests_running": ("running", "Requests that have a row."),
    "num_requests_waiting": ("waiting", "Requests in the queue."),
    "kv_cache_pages_used": ("pages_used", "Pages of the KV pool that requests hold."),
    "kv_cache_pages_cached": ("pages_cached", "Pages of the KV pool that only the prefix cache holds."),
    "kv_cache_pages": ("pages_total", "Pages of the KV pool."),
}
COUNTERS = {
    "prefix_cache_hit_tokens_total": ("cached_tokens", "Prompt tokens that came from the prefix cache."),
    "computed_tokens_total": ("computed_tokens", "Tokens that steps have computed."),
    "generation_tokens_total": ("output_tokens", "Tokens drawn."),
    "num_preemptions_total": ("preemptions", "Requests sent back to the queue for want of pages."),
    "steps_total": ("steps", "Steps of the engine."),
    "spec_decode_num_draft_tokens_total": ("draft_tokens", "Guessed tokens that steps have computed."),
    "spec_decode_num_accepted_tokens_total": ("correct_draft_tokens", "Guessed tokens that were drawn, and kept."),
}
HISTOGRAMS = {  # name: (buckets, help)
    "time_to_first_token_seconds": (SECONDS, "From arrival to the first token."),
    "time_per_output_token_seconds": (SECONDS, "Mean time between the tokens of a request, behind the first."),
    "request_queue_time_seconds": (SECONDS, "From arrival to the first step."),
    "e2e_request_latency_seconds": (SECONDS, "From arrival to the end."),
    "request_prompt_tokens": (TOKENS, "Tokens of a prompt."),
    "request_generation_tokens": (TOKENS, "Tokens drawn for a request."),
}


class Histogram:
    """Counts per bucket, each its own until it is shown. Modifies: itself."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str) -> list[str]:
        """Cumulative buckets, sum and count. Pure."""
        lines, total = [], 0
        for bound, count in zip([*map(repr, map(float, self.bounds)), "+Inf"], self.counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self.sum!r}", f"{name}_count {total}"]


class Meter:
    """Counts requests as they end. Used in the event loop's thread only."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}
        self.finished: Counter[str] = Counter()
        self.answers: Counter[tuple[str, int]] = Counter()
        self.prompt_tokens = 0

    def ended(self, state: RequestState) -> None:
        """Counts one row of a request, however it ended."""
        finish, request = state.output.finish, state.request
        reason = "error" if state.error is not None else "abort" if finish is None else finish["type"]
        self.finished[reason] += 1
        self.prompt_tokens += request.prompt_len
        drawn, add = state.output.num_tokens, self.histograms
        add["request_prompt_tokens"].add(request.prompt_len)
        add["request_generation_tokens"].add(drawn)
        if state.started is not None:
            add["request_queue_time_seconds"].add(state.started - state.submitted)
        if state.first_token is not None:
            add["time_to_first_token_seconds"].add(state.first_token - state.submitted)
        if state.finished is not None:
            add["e2e_request_latency_seconds"].add(state.finished - state.submitted)
            if state.first_token is not None and drawn > 1:
                between = (state.finished - state.first_token) / (drawn - 1)
                add["time_per_output_token_seconds"].add(between)

    def page(self, stats: Mapping[str, Any], up: bool, rows: int) -> str:
        """The whole page. `stats` are `Engine.stats()`, `rows` those that are open at the server. Pure."""
        lines: list[str] = []

        def family(name: str, kind: str, help_: str, samples: Sequence[str]) -> None:
            lines.extend([f"# HELP fengine:{name} {help_}", f"# TYPE fengine:{name} {kind}", *samples])

        def single(name: str, kind: str, help_: str, value: float) -> None:
            family(name, kind, help_, [f"fengine:{name} {value}"])

        single("up", "gauge", "1 while the engine answers.", int(up))
        single("http_open_rows", "gauge", "Rows of requests that the server has taken and not answered yet.", rows)
        for kind, table in (("gauge", GAUGES), ("counter", COUNTERS)):
            for name, (key, help_) in table.items():
                single(name, kind, help_, stats[key])
        share = stats["pages_used"] / max(1, stats["pages_total"])
        single("kv_cache_usage_perc", "gauge", "Share of the KV pool that requests hold, 0 to 1.", share)
        single("prompt_tokens_total", "counter", "Tokens of the prompts of ended requests.", self.prompt_tokens)
        ends = [f'fengine:request_success_total{{finished_reason="{k}"}} {n}' for k, n in sorted(self.finished.items())]
        family("request_success_total", "counter", "Requests that have ended, by reason.", ends)
        answers = [f'fengine:http_requests_total{{path="{path}",status="{status}"}} {n}'
                   for (path, status), n in sorted(self.answers.items())]  # fmt: skip
        family("http_requests_total", "counter", "HTTP requests answered.", answers)
        for name, (_, help_) in HISTOGRAMS.items():
            family(name, "histogram", help_, self.histograms[name].lines(f"fengine:{name}"))
        return "\n".join(lines) + "\n"
