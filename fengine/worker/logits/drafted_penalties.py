"""Penalties of rows that draw behind guesses."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fengine.core.scheduler_output import Drafts
from fengine.models.kv_state import Tensors
from fengine.ops.edit_logits import count
from fengine.worker.logits.penalties import Penalties
from fengine.worker.step_input import LogitsStage, StepInput


class DraftedPenalties(LogitsStage):
    """`Penalties` of a step with drafts: a row that draws behind guesses is penalised for these, too, and what it draws
    counts where all of them were drawn. Modifies: the tables of `penalties`."""

    name = "drafted penalties"

    def __init__(self, penalties: Penalties, step: StepInput, penalised_R: np.ndarray) -> None:
        """Modifies: step.arrays. `penalised_R`: of each draw."""
        self.penalties, into = penalties, step.arrays
        into["guess_RK"], into["guessed_in_RK"] = guesses([d for d in step.drafts if penalised_R[d.index]], step)

    def apply(self, logits_RV: Tensor, tensors: Tensors) -> Tensor:
        penalties = self.penalties
        if (count_SV := penalties.count_SV.lines) is not None:
            slot_R, guess_RK = tensors["count_slot_R"], tensors["guess_RK"]
            line_R = torch.where(slot_R < 0, -1, torch.arange(len(slot_R), dtype=torch.int32, device=slot_R.device))
            count_RV = count_SV.index_select(0, slot_R.clamp(min=0))
            count(count_RV, torch.where(guess_RK < 0, -1, line_R[:, None]).flatten(), guess_RK.flatten())
            logits_RV = penalties.penalised(logits_RV, tensors, line_R, count_RV)
        return penalties.banned(logits_RV, tensors)

    def drawn(self, logits_RV: Tensor, token_R: Tensor, tensors: Tensors) -> None:
        if (count_SV := self.penalties.count_SV.lines) is not None:
            slot_R, guess_RK = tensors["count_slot_R"], tensors["guess_RK"]
            right_RK = (guess_RK < 0) | (token_R[tensors["guessed_in_RK"].long()] == guess_RK)
            count(count_SV, torch.where(right_RK.all(1), slot_R, -1), token_R)


def guesses(drafts: Sequence[Drafts], step: StepInput) -> tuple[np.ndarray, np.ndarray]:
    """Of the guesses in front of each draw, ids (-1: none) and the rows that are to draw them. Pure."""
    guess_RK = np.full((step.rows, max((len(draft) for _, draft in drafts), default=1)), -1, np.int32)
    row_RK, at = np.zeros_like(guess_RK), step.rows - sum(len(draft) for _, draft in step.drafts)
    for each in step.drafts:
        for k in range(len(each.token_ids) if each in drafts else 0):
            guess_RK[at + k, : k + 1] = each.token_ids[: k + 1]
            row_RK[at + k, : k + 1] = [each.index, *range(at, at + k)]
        at += len(each.token_ids)
    return guess_RK, row_RK
