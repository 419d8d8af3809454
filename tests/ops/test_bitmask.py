"""The bitmask op against its reference, bit for bit; its Triton kernel in the interpreter where there is no device."""

import math

import pytest
import torch
from interpreted import INTERPRETED, run_interpreted, starts_interpreter
from test_ops import draw_case, normal
from torch import Tensor

from fengine.errors import UnsupportedFeatureError
from fengine.ops import edit_logits, sampling

DEVICE = "cpu" if INTERPRETED else "cuda"
on_device = [] if INTERPRETED else [pytest.mark.gpu]
SHAPES = [(5, 300), (3, 31), (2, 32), (2, 33), (1, 1), (9, 4097)]


@starts_interpreter
def test_kernel_in_the_interpreter() -> None:
    run_interpreted(__file__, "-m", "not gpu", "-k", "triton")


def case(rows: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
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


def by_hand(logits: Tensor, row: Tensor, mask: Tensor) -> Tensor:
    out = logits.clone()
    for k, r in enumerate(row.tolist()):
        for id in range(logits.shape[1]) if r >= 0 else ():
            if not mask[k, id // 32].item() >> id % 32 & 1 and math.isfinite(out[r, id]):
                out[r, id] = -1e30
    return out


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("shape", SHAPES)
def test_masks_follow_the_rule_bit_for_bit(shape: tuple[int, int]) -> None:
    logits, row, mask = case(*shape)
    want, reference = by_hand(logits, row, mask), logits.clone()
    edit_logits.mask_reference(reference, row, mask)
    assert edit_logits.apply_bitmask(logits, row, mask) is logits
    assert same_bits(logits, want) and same_bits(reference, want)


@pytest.mark.parametrize("shape", [pytest.param(shape, marks=on_device, id=f"triton-{shape}") for shape in SHAPES])
def test_the_kernel_follows_the_rule_bit_for_bit(shape: tuple[int, int]) -> None:
    on_device = [x.to(DEVICE) for x in case(*shape)]
    edit_logits.mask_launch(*on_device)
    assert same_bits(on_device[0].cpu(), by_hand(*case(*shape)))


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


def test_registration_and_what_it_takes() -> None:
    logits, row, mask = case(4, 70)
    torch.library.opcheck(torch.ops.fengine.apply_bitmask_.default, (normal(4, 70), row, mask))
    with pytest.raises(UnsupportedFeatureError, match="contiguous float32"):
        edit_logits.apply_bitmask(logits.double(), row, mask)
