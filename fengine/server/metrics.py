"""What `/metrics` tells, in Prometheus' text format 0.0.4, and the line of the log that tells what runs. Label values
come from fixed sets only, so that no client can make the page grow.
https://prometheus.io/docs/instrumenting/exposition_formats/"""

import asyncio
import json
import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any

from fengine.config import CacheConfig
from fengine.engine.request_state import RequestState
from fengine.errors import FengineError

logger = logging.getLogger("fengine.server")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0)
SINGLE = (  # name, kind, key of the values, help
    ("up", "gauge", "up", "1 while the engine answers."),
    ("http_open_rows", "gauge", "rows", "Rows of requests that the server has taken and not answered yet."),
    ("num_requests_running", "gauge", "running", "Requests that have a row."),
    ("num_requests_waiting", "gauge", "waiting", "Requests in the queue."),
    ("kv_cache_pages_used", "gauge", "pages_used", "Pages of the KV pool that requests hold."),
    ("kv_cache_pages_cached", "gauge", "pages_cached", "Pages of the KV pool that only the prefix cache holds."),
    ("kv_cache_pages", "gauge", "pages_total", "Pages of the KV pool."),
    ("kv_cache_usage_perc", "gauge", "usage", "Share of the KV pool that requests hold, 0 to 1."),
    ("prefix_cache_hit_tokens_total", "counter", "cached_tokens", "Prompt tokens that came from the prefix cache."),
    ("computed_tokens_total", "counter", "computed_tokens", "Tokens that steps have computed."),
    ("generation_tokens_total", "counter", "output_tokens", "Tokens drawn."),
    ("prompt_tokens_total", "counter", "prompt_tokens", "Tokens of the prompts of ended requests."),
    ("num_preemptions_total", "counter", "preemptions", "Requests sent back to the queue for want of pages."),
    ("steps_total", "counter", "steps", "Steps of the engine."),
    ("spec_decode_num_draft_tokens_total", "counter", "draft_tokens", "Guessed tokens that steps have computed."),
    ("spec_decode_num_accepted_tokens_total", "counter", "correct_draft_tokens",
     "Guessed tokens that were drawn, and kept."),
)  # fmt: skip
HISTOGRAMS = {  # name: (buckets, help, between which moments of a request it measures)
    "time_to_first_token_seconds": (SECONDS, "From arrival to the first token.", ("submitted", "first_token")),
    "time_per_output_token_seconds": (SECONDS, "Mean time between the tokens of a request, behind the first.", ()),
    "inter_token_latency_seconds": (SECONDS, "The same, once for each of these tokens.", ()),
    "request_queue_time_seconds": (SECONDS, "From arrival to the first step.", ("submitted", "started")),
    "request_inference_time_seconds": (SECONDS, "From the first step to the end.", ("started", "finished")),
    "request_prefill_time_seconds": (SECONDS, "From the first step to the first token.", ("started", "first_token")),
    "request_decode_time_seconds": (SECONDS, "From the first token to the end.", ("first_token", "finished")),
    "e2e_request_latency_seconds": (SECONDS, "From arrival to the end.", ("submitted", "finished")),
    "request_prompt_tokens": (TOKENS, "Tokens of a prompt.", ()),
    "request_generation_tokens": (TOKENS, "Tokens drawn for a request.", ()),
    "request_params_n": (TOKENS, "Samples that a row's request asked for.", ()),
    "request_params_max_tokens": (TOKENS, "The most tokens that a row might draw.", ()),
}
OWN = frozenset("up http_open_rows kv_cache_pages_used kv_cache_pages_cached kv_cache_pages computed_tokens_total "
                "steps_total http_requests_total".split())  # fmt: skip
SGLANG = {  # what its dashboards call those that it has
    "num_requests_running": "num_running_reqs", "num_requests_waiting": "num_queue_reqs",
    "kv_cache_usage_perc": "token_usage", "prefix_cache_hit_tokens_total": "cached_tokens_total",
    "num_preemptions_total": "num_retracted_requests_total", "request_queue_time_seconds": "queue_time_seconds",
    "request_success_total": "num_requests_total",
    **{name: name for name in ("generation_tokens_total", "prompt_tokens_total", "time_to_first_token_seconds",
                               "time_per_output_token_seconds", "inter_token_latency_seconds",
                               "e2e_request_latency_seconds")},
}  # fmt: skip
VLLM = {  # which has all but OWN, most of them by our name
    "prefix_cache_hit_tokens_total": ("prefix_cache_hits_total",),
    "prompt_tokens_total": ("prompt_tokens_total", "prefix_cache_queries_total"),
}


def others(name: str) -> list[str]:
    """What dashboards of SGLang and vLLM call the same. Pure."""
    sglang = [f"sglang:{SGLANG[name]}"] if name in SGLANG else []
    return [] if name in OWN else sglang + [f"vllm:{word}" for word in VLLM.get(name, (name,))]


class Meter:
    """Counts requests as they end. `model` is a label of the names that others have. Used in the event loop's thread
    only."""

    def __init__(self, model: str = "", cache: CacheConfig | None = None) -> None:
        self.label = "model_name=" + json.dumps(model, ensure_ascii=False)
        self.cache = cache or CacheConfig()
        self.counts = {name: [0] * (len(bounds) + 1) for name, (bounds, *_) in HISTOGRAMS.items()}  # of each alone
        self.sums: dict[str, float] = dict.fromkeys(HISTOGRAMS, 0)
        self.finished: Counter[str] = Counter()
        self.answers: Counter[tuple[str, int]] = Counter()

    def _add(self, name: str, value: float, times: int = 1) -> None:
        self.counts[name][bisect_left(HISTOGRAMS[name][0], value)] += times
        self.sums[name] += value * times

    def ended(self, state: RequestState) -> None:
        """Counts one row of a request, however it ended."""
        finish, drawn = state.output.finish, state.output.num_tokens
        self.finished["error" if state.error is not None else "abort" if finish is None else finish["type"]] += 1
        self._add("request_prompt_tokens", state.request.prompt_len)
        self._add("request_generation_tokens", drawn)
        self._add("request_params_n", state.request.params.n)
        self._add("request_params_max_tokens", state.request.max_new_tokens)
        for name, (_, _, span) in HISTOGRAMS.items():
            moments = [getattr(state, moment) for moment in span]
            if moments and None not in moments:
                self._add(name, moments[1] - moments[0])
        if drawn > 1 and state.finished is not None and state.first_token is not None:
            each = (state.finished - state.first_token) / (drawn - 1)
            self._add("time_per_output_token_seconds", each)
            self._add("inter_token_latency_seconds", each, drawn - 1)

    def _labelled(self, sample: str) -> str:
        """A sample with the model's label, too. Pure."""
        name, brace, rest = sample.partition("{")
        head, space, value = sample.rpartition(" ")
        return f"{name}{{{self.label},{rest}" if brace else f"{head}{{{self.label}}}{space}{value}"

    def page(self, stats: Mapping[str, Any], up: bool, rows: int) -> str:
        """The whole page. `stats` are `Engine.stats()`, `rows` those that are open at the server. Pure."""
        lines: list[str] = []

        def family(name: str, kind: str, help_: str, samples: list[str]) -> None:
            for other in (f"fengine:{name}", *others(name)):
                lines.extend([f"# HELP {other} {help_}", f"# TYPE {other} {kind}"])
                lines.extend(other + (sample if other[0] == "f" else self._labelled(sample)) for sample in samples)

        more = {"up": int(up), "rows": rows, "usage": stats["pages_used"] / max(1, stats["pages_total"])}
        values = {**stats, **more, "prompt_tokens": self.sums["request_prompt_tokens"]}
        for name, kind, key, help_ in SINGLE:
            family(name, kind, help_, [f" {values[key]}"])
        ends = [f'{{finished_reason="{reason}"}} {n}' for reason, n in sorted(self.finished.items())]
        family("request_success_total", "counter", "Requests that have ended, by reason.", ends)
        facts = {"block_size": self.cache.page_size, "cache_dtype": self.cache.kv_cache_dtype,
                 "enable_prefix_caching": self.cache.prefix_cache, "num_gpu_blocks": stats["pages_total"]}  # fmt: skip
        told = ",".join(f'{name}="{value}"' for name, value in facts.items())
        family("cache_config_info", "gauge", "Of the KV pool.", [f"{{{told}}} 1"])
        steps, tokens = stats["steps"], values["prompt_tokens"] + stats["output_tokens"]
        of_steps = [f'_bucket{{le="+Inf"}} {steps}', f"_sum {tokens}", f"_count {steps}"]
        family("iteration_tokens_total", "histogram", "Tokens of ended prompts and drawn tokens, by step.", of_steps)
        answers = [f'{{path="{path}",status="{code}"}} {n}' for (path, code), n in sorted(self.answers.items())]
        family("http_requests_total", "counter", "HTTP requests answered.", answers)
        for name, (bounds, help_, _) in HISTOGRAMS.items():
            totals = list(accumulate(self.counts[name]))
            buckets = [f'_bucket{{le="{le}"}} {n}' for le, n in zip([*bounds, "+Inf"], totals, strict=True)]
            family(name, "histogram", help_, [*buckets, f"_sum {self.sums[name]!r}", f"_count {totals[-1]}"])
        return "\n".join(lines) + "\n"


def status_line(stats: Mapping[str, Any], before: Mapping[str, Any], seconds: float) -> str:
    """What runs and waits, and tokens a second since `before`. Pure."""
    words = {"computed_tokens": "computed", "output_tokens": "drawn"}
    rates = [f"{(stats[key] - before[key]) / seconds:.0f} tokens/s {word}" for key, word in words.items()]
    used, total = stats["pages_used"], stats["pages_total"]
    cache = f"{100 * used / max(1, total):.0f} % of {total} pages held, {stats['pages_cached']} cached"
    return f"{stats['running']} running, {stats['waiting']} waiting; {', '.join(rates)}; {cache}"


async def report(stats: Callable[[], Mapping[str, Any]], seconds: float) -> None:
    """Logs a line every `seconds` in which something was computed, until it is cancelled or the engine has ended."""
    with suppress(FengineError):
        before, then = await asyncio.to_thread(stats), time.monotonic()
        while True:
            await asyncio.sleep(seconds)
            now, moment = await asyncio.to_thread(stats), time.monotonic()
            if now["computed_tokens"] != before["computed_tokens"]:
                logger.info("%s", status_line(now, before, moment - then))
            before, then = now, moment
