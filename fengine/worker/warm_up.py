"""Harmless work before the first request: steps of any size, and what stages and logprobs run."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fengine.ops.edit_logits import add_at, apply_bitmask, count, penalize, words
from fengine.worker.logits.logprobs import MOST_ASKED, TOPS, score
from fengine.worker.step_input import IMAGES, INPUTS, Sizes, StepInput, blank


def warm_step(tokens: int, sizes: Sizes) -> StepInput:
    """A harmless step for warm-up: rows of token 0 that write to the null page and see one key each. With "S" in
    `sizes` every token has an adapter, whatever lies in its slot."""
    rows = sizes["R"]
    per_row = np.full(rows, tokens // rows, np.int32)
    per_row[: tokens % rows] += 1
    present = sizes.keys() | set("0123456789")
    fields = [field for field in (*INPUTS, *IMAGES) if set(field.letters) <= present]
    arrays: dict[str, Any] = {field.name: blank(field, sizes) for field in fields}
    arrays["q_start_B"][1:] = np.cumsum(per_row)
    arrays |= {"kv_len_R": per_row, "pos_R": per_row, "logit_index_R": arrays["q_start_B"][1:] - 1}
    if "S" in sizes:
        arrays["token_A"] = np.arange(tokens, dtype=np.int32)
        arrays["start_S"] = np.linspace(0, tokens, sizes["S"]).astype(np.int32)
    return StepInput(arrays, np.zeros(rows, np.int32))


def warm_stages(logits_RV: Tensor) -> None:
    """Has the kernels compiled that stages and logprobs need, by what edits no row. Pure."""
    rows, vocab = logits_RV.shape

    def blank(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=logits_RV.device)

    slot_R, one_R = blank(rows) - 1, blank(rows, dtype=torch.float32) + 1
    double_R, count_SV = blank(rows, dtype=torch.float64), blank(1, vocab)
    logits_RV = penalize(logits_RV, slot_R, double_R, double_R, one_R, count_SV)
    logits_RV = add_at(logits_RV, slot_R, blank(1, 16), blank(1, 16, dtype=torch.float32))
    logits_RV = apply_bitmask(logits_RV, slot_R, blank(rows, words(vocab)))
    count(count_SV, slot_R, blank(rows))
    for top in {0, *TOPS}:
        score(logits_RV, one_R, blank(rows, MOST_ASKED), min(top, vocab))
