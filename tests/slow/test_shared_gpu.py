"""Bits on a GPU that another process uses, too: kernels are interrupted in their midst there, and go on later."""

import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from fengine.ops import attention_launch
from fengine.ops.attention_launch import Paged, Rows, Schedule, counters, reference_schedule, run

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from layouts import other_work  # noqa: E402  # pyright: ignore[reportMissingImports]

LAYERS, SLOTS, REPLAYS = 24, 64, 20_000


@pytest.mark.gpu
@pytest.mark.parametrize("heads, groups, width", [(14, 2, 64), (4, 1, 256), (32, 8, 128)])
@pytest.mark.parametrize("lengths", [[1032], [1032, 1742, 4100, 3000]], ids=len)
def test_attention_of_several_chunks_is_merged(heads: int, groups: int, width: int, lengths: list[int]) -> None:
    """The last program of a row merges all: each must know whether it is that. Many replays, none of which waits for
    the one before: only so a kernel is interrupted."""
    device, pages = torch.device("cuda"), [-(-length // SLOTS) for length in lengths]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).bfloat16()

    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32, device=device)
    order = torch.randperm(sum(pages), device=device).int() + 1
    for row, (end, count) in enumerate(zip(accumulate(pages), pages, strict=True)):
        table[row, :count] = order[end - count : end]
    start, kv_len = (torch.tensor(x, device=device).int() for x in (list(range(len(lengths) + 1)), lengths))
    pool = (sum(pages) + 1, SLOTS, groups, width)
    calls = [
        Paged(random(len(lengths), heads, width), random(*pool), random(*pool), start, kv_len, table)
        for _ in range(LAYERS)
    ]
    found = attention_launch.at_once(calls[0].q_THK, calls[0].k_PSGK, len(lengths), 5, attention_launch.CAUSAL)
    rows = found[0] if found else Rows(16, 4, 5, 5)

    def outputs(schedule: Schedule) -> torch.Tensor:
        return torch.stack([run(call, width**-0.5, schedule) for call in calls])

    want = outputs(reference_schedule(calls[0].q_THK, calls[0].k_PSGK))
    assert torch.equal(outputs(Schedule(rows, None)), want)  # which makes the counters, too: a capture does not
    wrong, graph, side = torch.zeros(1, dtype=torch.int64, device=device), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        wrong += (outputs(Schedule(rows, None)) != want).any()
        graph.capture_end()
    with other_work():
        for _ in range(REPLAYS // 400):
            for _ in range(400):
                graph.replay()
            torch.cuda.synchronize()
    assert wrong.item() == 0
    assert not any(bool(x.any()) for call in calls if (x := counters(call.k_PSGK)) is not None)
