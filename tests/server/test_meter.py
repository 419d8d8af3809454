"""What the server counts of one request, by hand-made moments: each histogram measures between two of them."""

import asyncio
import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from fengine.errors import EngineDeadError
from fengine.server import service
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


def test_a_probe_that_fails_behind_its_time_is_no_fault_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a replica that stands still until it is taken for dead."""
    late, faults = threading.Event(), list[Any]()

    def ping() -> None:
        assert late.wait(30)
        raise EngineDeadError("it gave no sign of life")

    async def ask() -> str | None:
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        server: Any = SimpleNamespace(_probe=None, engine=SimpleNamespace(ping=ping))
        told = await service.Service.healthy(server)
        late.set()
        await asyncio.wait({server._probe})
        return told

    monkeypatch.setattr(service, "PROBE_SECONDS", 0.0)
    assert "has not answered" in str(asyncio.run(ask()))
    gc.collect()
    assert faults == []
