"""Edits of single logits, logprobs of given ids, the likeliest ids: against references, and the bits of `draw`.

The Triton kernels run in Triton's interpreter, in a process of its own, where there is no CUDA device.
"""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ops import draw_case, mixed_rows, normal
from torch import Tensor

from fengine.errors import UnsupportedFeatureError
from fengine.ops import edit_logits, logprobs, sampling
from fengine.ops.registration import triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
on_device = [] if INTERPRETED else [pytest.mark.gpu]
kernel_test = pytest.mark.parametrize("kernel", [pytest.param("triton", marks=on_device)])


@pytest.mark.skipif(INTERPRETED or not hasattr(triton, "__version__"), reason="runs in the process that it starts")
def test_kernels_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu", "-k", "triton"]
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, __file__], capture_output=True, text=True, env=env, cwd=Path(__file__).parents[2], timeout=300
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


def edits_case(rows: int = 5, vocab: int = 300, count: int = 400) -> tuple[Tensor, ...]:
    """Logits with bad values among them, and edits of every kind."""
    generator = torch.Generator().manual_seed(3)
    at = torch.randperm(rows * vocab, generator=generator)[:count]
    logits = normal(rows, vocab) * 4
    logits.view(-1)[at[:4]] = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    before, after = normal(count, seed=1), normal(count, seed=2) * 5
    before[::7], after[::11], after[5::11] = -math.inf, 1e30, -1e30
    scale = torch.where(torch.arange(count) % 3 == 0, 1.0, torch.rand(count, generator=generator) * 1.9 + 0.1)
    return logits, (at // vocab).int(), (at % vocab).int(), before, scale, after


def by_hand(logits: Tensor, row: Tensor, id: Tensor, before: Tensor, scale: Tensor, after: Tensor) -> Tensor:
    """The rule, one edit after the other."""
    out = logits.clone()
    for r, i, *numbers in zip(row.tolist(), id.tolist(), before, scale, after, strict=True):
        x, (b, s, a) = out[r, i], numbers
        if math.isfinite(x):
            y = x + b
            y = y * s if y < 0 else y / s
            out[r, i] = min(max(y + a, -1e30), 1e30)
    return out


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_edits_follow_the_rule_bit_for_bit() -> None:
    logits, *edits = edits_case()
    want = by_hand(logits, *edits)
    reference = logits.clone()
    edit_logits.reference(reference, *edits)
    got = edit_logits.edit_logits(logits, *edits)
    assert got is logits and same_bits(got, want) and same_bits(reference, want)
    assert not got.isfinite().all() and (got[got.isfinite()].abs() <= 1e30).all()


def test_a_banned_id_is_never_drawn_and_leaves_the_row_well() -> None:
    for temperature in (1e-6, 0.7, 1e20):
        logits = normal(64, 50) * 10
        best = logits.argmax(-1).int()
        rows, edits = torch.arange(64).int(), (torch.full((64,), -math.inf), torch.ones(64), torch.zeros(64))
        edit_logits.edit_logits(logits, rows, best, *edits)
        case = draw_case(64, 50, logits_RV=logits, temperature_R=torch.full((64,), temperature))
        token, logprob = sampling.draw(**case)
        assert not (token == best).any() and logprob.isfinite().all()


def test_edit_wants_logits_that_it_can_write_to() -> None:
    logits, *edits = edits_case()
    with pytest.raises(UnsupportedFeatureError, match="contiguous float32"):
        edit_logits.edit_logits(logits.double(), *edits)


@pytest.mark.parametrize("name", ["edit_logits_", "logprobs", "top_ids"])
def test_registrations(name: str) -> None:
    logits, *edits = edits_case(2, 40, 20)
    args: dict[str, Any] = {
        "edit_logits_": (logits, *edits),
        "logprobs": (normal(3, 50), torch.ones(3), torch.zeros(3, 2).int()),
        "top_ids": (normal(3, 50), 4),
    }
    torch.library.opcheck(getattr(torch.ops.fengine, name).default, args[name])


@pytest.mark.parametrize("vocab", [1, 15, 97, 4096, 4097, 20000])
def test_logprobs_on_the_cpu_have_the_bits_of_the_draw(vocab: int) -> None:
    """Of the drawn token, for greedy, unfiltered and filtered rows; and every row as if it were alone."""
    rows = 9
    case = draw_case(rows, vocab, logits_RV=normal(rows, vocab) * 3)
    case["top_k_R"] = torch.tensor([1, vocab, min(3, vocab)] * 3).int()
    token, logprob = sampling.draw(**case)
    ids = torch.stack((token, torch.zeros_like(token), torch.full_like(token, vocab - 1)), 1)
    got = logprobs.logprobs(case["logits_RV"], case["temperature_R"], ids)
    assert same_bits(got[:, 0].contiguous(), logprob)
    torch.testing.assert_close(got, logprobs.reference(case["logits_RV"], case["temperature_R"], ids))
    for r in range(rows):
        own = slice(r, r + 1)
        assert same_bits(logprobs.logprobs(case["logits_RV"][own], case["temperature_R"][own], ids[own])[0], got[r])


def test_logprobs_of_a_bad_row_are_nan() -> None:
    logits = normal(3, 70)
    logits[1, 69] = math.inf
    got = logprobs.logprobs(logits, torch.ones(3), torch.zeros(3, 2).int())
    assert got[1].isnan().all() and got[[0, 2]].isfinite().all()
    assert logprobs.logprobs(logits, torch.ones(3), torch.zeros(3, 0).int()).shape == (3, 0)


@pytest.mark.parametrize("rows", [1, 40, 70])
def test_top_ids_are_those_of_a_stable_sort(rows: int) -> None:
    """With ties everywhere, zeros of both signs, and negative numbers."""
    logits = (normal(rows, 300) * 3).round()
    assert (logits == 0).any() and logits.unique().numel() < 30
    logits[0, :300:2] *= -0.0
    want = logits.sort(dim=-1, descending=True, stable=True).indices.int()
    for count in (0, 1, 7, 64, 65, 300, 400):
        assert torch.equal(logprobs.top_ids(logits, count), want[:, :count])
        assert torch.equal(logprobs.top_keys(logits, min(count, 300)), want[:, :count])
    assert torch.equal(logprobs.top_ids(logits[:, :37].contiguous(), 5), logprobs.top_keys(logits[:, :37], 5))


# -- Triton -----------------------------------------------------------------------------------------------------------


@kernel_test
def test_edit(kernel: str) -> None:
    case = [x.to(DEVICE) for x in edits_case()]
    want = by_hand(*(x.cpu() for x in case))
    edit_logits.launch(*case)  # type: ignore[arg-type]
    torch.testing.assert_close(case[0].cpu(), want, equal_nan=True, rtol=1e-6, atol=0)
    assert torch.equal(case[0].cpu().isfinite(), want.isfinite())


@kernel_test
def test_logprobs_have_the_bits_of_the_draw(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sampling, logprobs):
        monkeypatch.setattr(module, "BLOCK", 512)
    for vocab in (1100,) if INTERPRETED else (1100, 512, 151936):
        case = {name: value.to(DEVICE) for name, value in mixed_rows(7, vocab).items()}
        case["logits_RV"][6, vocab - 1] = torch.nan
        token, logprob = sampling.launch(**case)
        ids = torch.stack((token, token * 0 + vocab - 2), 1)
        got = logprobs.launch(case["logits_RV"], case["temperature_R"], ids)
        assert same_bits(got[:, 0].contiguous(), logprob) and got[6].isnan().all()
        want = logprobs.reference(case["logits_RV"], case["temperature_R"], ids)
        torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=1e-5)
