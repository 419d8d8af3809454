"""What the server counts of one request, by hand-made moments: each histogram measures between two of them."""

from types import SimpleNamespace
from typing import Any

import pytest

from fengine.server.metrics import HISTOGRAMS, Meter

SIZES = {"request_prompt_tokens": 7, "request_generation_tokens": 5, "request_params_n": 2,
         "request_params_max_tokens": 9}  # fmt: skip
TIMES = {  # of a request that was submitted at 1, started at 3, had its first token at 8 and its last at 20
    "request_queue_time_seconds": 2, "request_prefill_time_seconds": 5, "time_to_first_token_seconds": 7,
    "e2e_request_latency_seconds": 19, "request_inference_time_seconds": 17, "request_decode_time_seconds": 12,
    "time_per_output_token_seconds": 3, "inter_token_latency_seconds": 12,
}  # fmt: skip


QUEUE, PREFILL, FIRST, WHOLE, INFERENCE, *_ = TIMES


@pytest.mark.parametrize(
    "lacks, told",
    [
        ((), tuple(TIMES)),
        (("finished",), (QUEUE, PREFILL, FIRST)),
        (("first_token",), (QUEUE, WHOLE, INFERENCE)),
        (("started", "first_token"), (WHOLE,)),
    ],
)
def test_histograms_measure_between_the_moments_that_there_are(lacks: Any, told: Any) -> None:
    moments = {"submitted": 1.0, "started": 3.0, "first_token": 8.0, "finished": 20.0} | dict.fromkeys(lacks)
    request = SimpleNamespace(prompt_len=7, params=SimpleNamespace(n=2), max_new_tokens=9)
    output: Any = SimpleNamespace(finish={"type": "length"}, num_tokens=5)
    meter, state = Meter(), SimpleNamespace(output=output, request=request, error=None, **moments)
    meter.ended(state)  # type: ignore[arg-type]
    wanted = SIZES | {name: value if name in told else 0 for name, value in TIMES.items()}
    assert meter.sums == {name: wanted[name] for name in HISTOGRAMS}
    assert sum(meter.counts["inter_token_latency_seconds"]) == (0 if set(lacks) & {"first_token", "finished"} else 4)
    assert meter.finished == {"length": 1}
