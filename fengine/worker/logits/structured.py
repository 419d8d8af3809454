"""Structured output: a mask for each row that draws under a grammar. What computes it plugs in with the request. The
masks of a step depend on the tokens of the one before: they are computed while the forward pass runs, and reach the
device as late as the logits are there, the only inputs that do not come with the step's others."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fengine.core.masks import Grammar, MaskRow
from fengine.core.request import Request
from fengine.errors import FengineError
from fengine.models.kv_state import Tensors
from fengine.ops.edit_logits import apply_bitmask, words
from fengine.worker.chunks import Chunk
from fengine.worker.step_input import Arrays, Field, LogitsStage, Pad, StepInput, Write


class StructuredOutput(LogitsStage):
    """Where each row slot's output stands in its grammar. Modifies: itself, the cursors."""

    name = "mask"
    fields = (Field("mask_row_M", torch.int32, -1), Field("mask_MW", torch.int32, Pad.NONE))

    def __init__(self, vocab: int) -> None:
        self.words = words(vocab)
        self.cursors: dict[int, Any] = {}  # by row slot

    def admit(self, slot: int, new: Request) -> Sequence[Write]:
        self.cursors[slot] = cursor_of(new)
        return ()

    def release(self, slot: int) -> None:
        del self.cursors[slot]

    def stage(self, step: StepInput, draws_R: np.ndarray) -> LogitsStage | None:
        chunks = [chunk for chunk in step.chunks if chunk.draws and chunk.new.params.grammar is not None]
        rows = [_mask_row(chunk, self.cursors[chunk.new.slot]) for chunk in chunks]
        return Masks(chunks[0].new.params.grammar, rows) if chunks else None


class Masks(LogitsStage):
    """The masks of one step. Modifies: itself, the cursors."""

    name, fields, late = StructuredOutput.name, StructuredOutput.fields, True

    def __init__(self, grammar: Grammar, rows: list[MaskRow]) -> None:
        self.grammar, self.rows = grammar, rows
        self.failed: dict[int, FengineError] = {}
        self.waits = any(row.fed is not None for row in rows)

    def late_fields(self, drawn: Sequence[int]) -> Arrays:
        filled = self.grammar.masks(self.rows, drawn)
        self.failed = dict(filled.errors)
        return {"mask_row_M": filled.row_M, "mask_MW": filled.mask_MW}

    def apply(self, logits_RV: Tensor, tensors: Tensors) -> Tensor:
        return apply_bitmask(logits_RV, tensors["mask_row_M"], tensors["mask_MW"])

    def errors(self) -> dict[int, FengineError]:
        return self.failed


def cursor_of(request: Request) -> Any:
    """Where the output of a request with a grammar begins."""
    params = request.params
    never = [id for id, bias in params.logit_bias if np.float32(bias) <= np.float32(-1e30)]  # nothing lifts it
    return params.grammar.cursor(request.stop_ids, never, request.early_ids, not params.ignore_eos)


def _mask_row(chunk: Chunk, cursor: Any) -> MaskRow:
    new = chunk.new
    known = new.token_ids[new.prompt_len + len(cursor.tokens) :]
    least = max(new.params.min_new_tokens - (chunk.end - new.prompt_len), 0)
    if chunk.fed is None and chunk.end > len(new.token_ids):  # tokens before were fed: the cursor has taken them then
        known = [*chunk.kept, chunk.token]
    return MaskRow(chunk.row, cursor, known, chunk.fed, new.stop_ids, least, chunk.draft, chunk.draft_row)
