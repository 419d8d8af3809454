"""Structured output: a mask for each row that draws under a grammar. What computes it plugs in with the request. The
masks of a step depend on the tokens of the one before: they are computed while the forward pass runs, and reach the
device as late as the logits are there, the only inputs that do not come with the step's others."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fengine.core.masks import MaskedDraft
from fengine.core.request import Request
from fengine.errors import FengineError
from fengine.models.kv_state import Tensors
from fengine.ops.edit_logits import apply_bitmask
from fengine.worker.step_input import Arrays, Field, LogitsStage, Pad, StepInput, Write


class StructuredOutput(LogitsStage):
    """Where each row slot's output stands in its grammar. Modifies: itself, the cursors."""

    name = "mask"
    fields = (Field("mask_row_M", torch.int32, -1), Field("mask_MW", torch.int32, Pad.NONE))

    def __init__(self, rows: int) -> None:
        self.cursors: dict[int, Any] = {}  # by row slot
        self.guided_S = np.zeros(rows, np.bool_)
        self.prompt_len_S = np.zeros(rows, np.int32)

    def admit(self, slot: int, new: Request) -> Sequence[Write]:
        self.cursors[slot] = cursor_of(new)
        self.guided_S[slot], self.prompt_len_S[slot] = True, new.prompt_len
        return ()

    def release(self, slot: int) -> None:
        del self.cursors[slot]
        self.guided_S[slot] = False

    def stage(self, step: StepInput, draws_R: np.ndarray) -> LogitsStage | None:
        own, arrays = step.rows - sum(len(draft) for _, draft in step.drafts), step.arrays
        row_M = np.flatnonzero(self.guided_S.take(step.slot_R[:own]) & draws_R[:own])
        if not len(row_M):
            return None
        last_M, slot_M = arrays["logit_index_R"].take(row_M), step.slot_R.take(row_M)
        count_M = arrays["pos_R"].take(row_M) - self.prompt_len_S.take(slot_M)
        lasts = [count_M, *(arrays[name].take(last_M) for name in ("token_T", "feed_from_T", "feed_index_T"))]
        rows, drafts, at = row_M.tolist(), list[MaskedDraft](), own
        for row, draft in step.drafts:
            if row in rows:
                drafts.append(MaskedDraft(rows.index(row), draft, at))
            at += len(draft)
        return Masks(row_M, [self.cursors[slot] for slot in slot_M.tolist()], lasts, drafts)


class Masks(LogitsStage):
    """The masks of one step. `lasts` [M] of each: how many tokens its row has drawn before, and of the last of these
    its id, whether the step before has drawn it, and in which row. Modifies: itself, the cursors."""

    name, fields, late = StructuredOutput.name, StructuredOutput.fields, True

    def __init__(
        self, row_M: np.ndarray, cursors: Sequence[Any], lasts: Sequence[np.ndarray], drafts: Sequence[MaskedDraft]
    ) -> None:
        self.row_M, self.cursors, self.drafts = row_M, cursors, drafts
        self.failed: dict[int, FengineError] = {}
        self.waits = bool(lasts[2].any())
        self.lasts = [array.tolist() for array in lasts]

    def late_fields(self, drawn: Sequence[int]) -> Arrays:
        for cursor, count, token, feeds, row in zip(self.cursors, *self.lasts, strict=True):
            cursor.catch_up(count, drawn[row] if feeds else token)
        filled = self.cursors[0].grammar.masks(self.row_M, self.cursors, self.drafts)
        self.failed = filled.errors
        return {"mask_row_M": filled.row_M, "mask_MW": filled.mask_MW}

    def apply(self, logits_RV: Tensor, tensors: Tensors) -> Tensor:
        return apply_bitmask(logits_RV, tensors["mask_row_M"], tensors["mask_MW"])

    def errors(self) -> dict[int, FengineError]:
        return self.failed


def cursor_of(request: Request) -> Any:
    """Where its output stands in its grammar, as far as it is known."""
    params = request.params
    never = [id for id, bias in params.logit_bias if np.float32(bias) <= np.float32(-1e30)]  # nothing lifts it
    return params.grammar.cursor(request, never)
