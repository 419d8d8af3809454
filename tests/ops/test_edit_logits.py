"""Edits of single logits, masks, logprobs of given ids, the likeliest ids: against references, and the bits of `draw`.

The Triton kernels run in Triton's interpreter, in a process of its own, where there is no CUDA device.
"""

import math
from functools import partial
from typing import Any

import pytest
import torch
from interpreted import INTERPRETED
from test_ops import draw_case, mixed_rows, normal
from torch import Tensor

from fengine.errors import UnsupportedFeatureError
from fengine.ops import edit_logits, logprobs, sampling, sampling_rows

DEVICE = "cpu" if INTERPRETED else "cuda"
on_device = [] if INTERPRETED else [pytest.mark.gpu]
kernel_test = pytest.mark.parametrize("kernel", [pytest.param("triton", marks=on_device)])


def penalty_case(rows: int = 6, vocab: int = 300) -> tuple[Tensor, ...]:
    """Logits with bad values among them; rows of slots in any order, one of none; counts of few ids, penalties of all
    signs."""
    generator = torch.Generator().manual_seed(3)
    logits = normal(rows, vocab) * 4
    count = torch.randint(0, 4, (rows + 2, vocab), generator=generator, dtype=torch.int32)
    count[:, ::2], count[0] = 0, 0
    logits.view(-1)[1::211] = torch.tensor(math.nan)
    logits.view(-1)[3::223] = torch.tensor(-math.inf)
    slot = torch.randperm(rows + 2, generator=generator)[:rows].int()
    slot[rows // 2] = -1
    frequency, presence = normal(rows, seed=1).double() / 3, normal(rows, seed=2).double()
    repetition = torch.where(torch.arange(rows) % 3 == 0, 1.0, torch.rand(rows, generator=generator) * 1.9 + 0.1)
    return logits, slot, frequency, presence, repetition, count


def penalised_by_hand(
    logits: Tensor, slot: Tensor, frequency: Tensor, presence: Tensor, repetition: Tensor, count: Tensor
) -> Tensor:
    """The rule, one logit after the other, in numpy's arithmetic."""
    out = logits.clone()
    for row, s in enumerate(slot.tolist()):
        for id in range(logits.shape[1]) if s >= 0 else ():
            if (n := int(count[s, id])) and math.isfinite(out[row, id]):
                b = out[row, id] + torch.tensor(-(n * frequency[row].item() + presence[row].item())).float()
                y = b * repetition[row] if b < 0 else b / repetition[row]
                out[row, id] = min(max(y, -1e30), 1e30)
    return out


def addition_case(rows: int = 6, vocab: int = 300, width: int = 1100) -> tuple[Tensor, ...]:
    """Lines that are partly empty; values up to bans, of which some meet a ban."""
    generator = torch.Generator().manual_seed(5)
    logits = normal(rows, vocab) * 4
    logits.view(-1)[1::211] = torch.tensor(math.nan)
    logits.view(-1)[7::41] = -1e30
    id = torch.full((rows + 2, width), -1, dtype=torch.int32)
    for line in id:
        line[torch.randperm(width, generator=generator)[:vocab]] = torch.randperm(vocab, generator=generator).int()
    value = torch.randn(rows + 2, width, generator=generator) * 5
    value[:, ::7], value[:, ::11], value[:, 5::11] = -math.inf, 1e30, -1e30
    slot = torch.randperm(rows + 2, generator=generator)[:rows].int()
    slot[0] = -1
    return logits, slot, id, value


def added_by_hand(logits: Tensor, slot: Tensor, id: Tensor, value: Tensor) -> Tensor:
    out = logits.clone()
    for row, s in enumerate(slot.tolist()):
        for i, v in zip(id[s].tolist(), value[s], strict=True) if s >= 0 else ():
            if i >= 0 and math.isfinite(out[row, i]) and out[row, i] > -1e30:
                out[row, i] = min(max(out[row, i] + v, -1e30), 1e30)
    return out


def mask_case(rows: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with bad values among them; masks of all rows but one, among them an empty and a full one."""
    generator = torch.Generator().manual_seed(rows * vocab)
    logits = normal(rows, vocab) * 5
    logits.view(-1)[:: vocab // 3 + 1] = torch.tensor(math.nan)
    logits.view(-1)[1 :: vocab // 3 + 2] = torch.tensor(-math.inf)
    row = torch.randperm(rows, generator=generator)[: max(1, rows - 1)].int()
    size = (len(row), edit_logits.words(vocab))
    mask = torch.randint(-(2**31), 2**31, size, generator=generator, dtype=torch.int64).int()
    mask[0], mask[-1] = -1, 0
    if len(row) > 3:
        row[1] = -1  # no row
    return logits, row, mask


def masked_by_hand(logits: Tensor, row: Tensor, mask: Tensor) -> Tensor:
    out = logits.clone()
    for k, r in enumerate(row.tolist()):
        for id in range(logits.shape[1]) if r >= 0 else ():
            if not mask[k, id // 32].item() >> id % 32 & 1 and math.isfinite(out[r, id]):
                out[r, id] = -1e30
    return out


RULES: dict[str, Any] = {
    "penalize": (penalty_case, penalised_by_hand, edit_logits.penalize, edit_logits.reference, edit_logits.launch),
    "add_at": (addition_case, added_by_hand, edit_logits.add_at, edit_logits.add_reference, edit_logits.add_launch),
} | {
    f"mask {rows} of {vocab}": (
        partial(mask_case, rows, vocab), masked_by_hand, edit_logits.apply_bitmask, edit_logits.mask_reference,
        edit_logits.mask_launch,
    )
    for rows, vocab in [(5, 300), (3, 31), (2, 32), (2, 33), (1, 5), (9, 4097)]
}  # fmt: skip


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("rule", RULES)
def test_edits_follow_the_rule_bit_for_bit(rule: str) -> None:
    make, by_hand, op, math_of, _ = RULES[rule]
    logits, *edits = make()
    want, reference = by_hand(logits, *edits), logits.clone()
    math_of(reference, *edits)
    before = logits.clone()
    got = op(logits, *edits)
    assert got is logits and same_bits(got, want) and same_bits(reference, want)
    assert not same_bits(got, before)
    assert not got.isfinite().all() and (got[got.isfinite()].abs() <= 1e30).all()


def test_counts() -> None:
    table = torch.zeros(4, 10, dtype=torch.int32)
    for tokens in ([3, 9, 5], [3, 9, 6]):
        edit_logits.count(table, torch.tensor([2, -1, 0]).int(), torch.tensor(tokens).int())
    assert table.nonzero().tolist() == [[0, 5], [0, 6], [2, 3]] and table[2, 3] == 2


def test_a_banned_id_is_never_drawn_and_leaves_the_row_well() -> None:
    """Also where a number is added to it, and where a penalty is below 0."""
    for temperature in (1e-6, 0.7, 1e20):
        logits = normal(64, 50) * 10
        best, slot = logits.argmax(-1).int(), torch.arange(64).int()
        edit_logits.add_at(logits, slot, best[:, None], torch.full((64, 1), -math.inf))
        edit_logits.add_at(logits, slot, best[:, None], torch.full((64, 1), 1e30))
        case = draw_case(64, 50, logits_RV=logits, temperature_R=torch.full((64,), temperature))
        token, logprob = sampling.draw(**case)
        assert not (token == best).any() and logprob.isfinite().all()


@pytest.mark.parametrize("filters", [{}, {"top_k_R": 20}, {"top_k_R": 1}, {"top_p_R": 0.7}, {"min_p_R": 0.1}])
def test_only_allowed_ids_are_drawn(filters: dict[str, float]) -> None:
    """Also where fewer are allowed than top_k asks for, and where the allowed ones are the least likely."""
    for temperature in (1e-6, 0.7, 1e20):
        logits = normal(64, 50) * 10
        least = logits.topk(3, largest=False).indices
        mask = torch.zeros(64, 2, dtype=torch.int64)
        for i in range(3):
            mask.scatter_add_(1, least[:, i : i + 1] // 32, 1 << least[:, i : i + 1] % 32)
        mask = torch.where(mask >= 2**31, mask - 2**32, mask).int()
        edit_logits.apply_bitmask(logits, torch.arange(64).int(), mask)
        fields = draw_case(64, 50, logits_RV=logits, temperature_R=torch.full((64,), temperature))
        for name, value in filters.items():
            fields[name] = torch.full((64,), value).to(fields[name].dtype)
        token, logprob = sampling.draw(**fields)
        assert (token[:, None] == least).any(1).all() and logprob.isfinite().all()


@pytest.mark.parametrize("rule", RULES)
def test_edits_want_logits_that_they_can_write_to(rule: str) -> None:
    make, _, op, _, _ = RULES[rule]
    logits, *edits = make()
    with pytest.raises(UnsupportedFeatureError, match="contiguous float32"):
        op(logits.double(), *edits)


@pytest.mark.parametrize("name", ["penalize_", "add_at_", "count_", "apply_bitmask_", "logprobs", "top_ids"])
def test_registrations(name: str) -> None:
    args: dict[str, Any] = {
        "penalize_": penalty_case(3, 40),
        "add_at_": addition_case(3, 40, 50),
        "count_": (torch.zeros(4, 10).int(), torch.tensor([2, -1]).int(), torch.tensor([3, 4]).int()),
        "apply_bitmask_": (normal(4, 70), *mask_case(4, 70)[1:]),
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


def test_logprobs_of_banned_ids_are_no_numbers() -> None:
    logits = normal(2, 70)
    logits[0, 3], logits[1, 4] = -1e30, 1e30
    ids = torch.tensor([[3, 4], [3, 4]]).int()
    for temperature in (torch.full((2,), 1e20), torch.full((2,), 0.5)):
        got = logprobs.logprobs(logits, temperature, ids)
        assert got[0, 0] == -math.inf and got[1, 1] == 0 and got[0, 1].isfinite() and got[1, 0].isfinite()
        torch.testing.assert_close(got, logprobs.reference(logits, temperature, ids))


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
def test_edits(kernel: str) -> None:
    for make, by_hand, *_, launch in RULES.values():
        logits, *edits = (x.to(DEVICE) for x in make())
        want = by_hand(logits.cpu(), *(x.cpu() for x in edits))
        launch(logits, *edits)
        assert same_bits(logits.cpu(), want)


@kernel_test
def test_counting(kernel: str) -> None:
    table, slot = torch.zeros(300, 40, dtype=torch.int32).to(DEVICE), torch.randperm(300).int().to(DEVICE)
    slot[::3] = -1
    token = torch.randint(40, (300,), dtype=torch.int32).to(DEVICE)
    for _ in range(2):
        edit_logits.count_launch(table, slot, token)
    want = torch.zeros(300, 40, dtype=torch.int32)
    for s, t in zip(slot.tolist(), token.tolist(), strict=True):
        want[s, t] += 2 * (s >= 0)
    assert torch.equal(table.cpu(), want)


@kernel_test
def test_the_likeliest(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ties everywhere, zeros of both signs, blocks that hold fewer ids than are wanted."""
    monkeypatch.setattr(logprobs, "BLOCK", 64)
    logits = (normal(3, 197) * 3).round()
    logits[0, :197:2] *= -0.0
    want = logits.sort(dim=-1, descending=True, stable=True).indices.int()
    for count in (1, 5, 64, 70):
        assert torch.equal(logprobs.top_launch(logits.to(DEVICE), count).cpu(), want[:, :count])


@kernel_test
def test_logprobs_have_the_bits_of_the_draw(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sampling_rows, logprobs):
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
