"""Every step that can come finds its bucket among those that warm-up compiles and captures."""

import pytest

from fengine.buckets import decode_buckets, token_buckets
from fengine.runner import CudaRunner


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
