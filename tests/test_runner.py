"""Every step that can come finds its bucket among those that warm-up compiles and captures."""

from typing import Any

import pytest
import torch
from fake_cuda import Cuda, Torch

from fengine.buckets import decode_buckets, token_buckets
from fengine.runner import CudaRunner
from fengine.state import KVState, StepOut, layer_kinds


@pytest.mark.parametrize(
    ("rows", "tokens"), [(1, 1), (16, 64), (33, 33), (48, 100), (64, 512), (128, 128), (512, 8192), (1000, 1000)]
)
def test_no_step_needs_a_bucket_that_warm_up_left_out(rows: int, tokens: int) -> None:
    runner = CudaRunner.__new__(CudaRunner)  # its tables only; no device
    runner.graphs, runner.decode, runner.mixed_rows = True, decode_buckets(rows), sorted({min(32, rows), rows})
    runner.adapter_slots = 4
    runner.tokens = token_buckets(max(tokens, rows))
    known = set(runner.all_buckets())
    for count in range(1, rows + 1):
        for total in range(count, min(tokens, 1200) + 1):
            for adapters in (False, True):
                assert runner.bucket(total, count, adapters) in known, (total, count)


@pytest.mark.parametrize("rows", [1, 5, 48, 64, 65, 100, 512])
def test_decode_buckets_hold_every_step_and_waste_no_tile(rows: int) -> None:
    sizes = decode_buckets(rows)
    assert sizes == sorted(set(sizes)) and sizes[-1] == rows
    for step in range(1, rows + 1):
        size = next(s for s in sizes if s >= step)
        assert size - step < (64 if step > 64 else 8)


@pytest.mark.parametrize("slots", [0, 2])
def test_steps_with_adapters_and_without_run_before_any_is_captured(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile cannot compile inside a capture, and these are two graphs to it."""
    monkeypatch.setattr("fengine.runner.torch", Torch())
    seen: list[tuple[bool, bool]] = []  # whether with adapters, whether in a capture

    def step(params: Any, kv: Any, batch: Any, sampling: Any, feed: Any) -> Any:
        seen.append((batch.adapters is not None, Cuda.is_current_stream_capturing()))
        rows = len(batch.kv_len_R)
        return kv, StepOut(torch.zeros(rows, dtype=torch.int32), torch.zeros(rows))

    def never(*arguments: Any) -> Any:
        raise AssertionError("an extended step")

    made = CudaRunner(step, {"final_norm_D": torch.ones(4)}, rows=3, tokens=40, width=2, graphs=True, device="cpu",
                      forward=never, extended=never, adapter_slots=slots)  # fmt: skip
    made.warm_up(KVState((), ()), 4)
    kinds = {adapters for adapters, _ in seen}
    assert kinds == {False, slots > 0} and {(kind, True) for kind in kinds} <= set(seen)
    assert sorted(seen[: len(kinds)]) == [(kind, False) for kind in sorted(kinds)]


def test_one_layer_of_each_kind_stands_for_all() -> None:
    def layer(width: int = 8, dtype: torch.dtype = torch.float32, **more: Any) -> dict[str, Any]:
        return {"wo": torch.zeros(width, 4, dtype=dtype), "norm_D": torch.ones(4), **more}

    assert layer_kinds([layer()]) == [0] and layer_kinds([layer() for _ in range(5)]) == [0]
    bias, adapters = {"bo_D": torch.zeros(4)}, {"lora": {"wo": ()}}
    kinds = [layer(), layer(**bias), layer(), layer(16), layer(dtype=torch.float16), layer(**adapters), layer(**bias)]
    assert layer_kinds(kinds) == [0, 1, 3, 4, 5]
