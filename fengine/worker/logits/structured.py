"""Structured output: a mask for each row that draws under a grammar. What computes it plugs in with the request.

The masks of a step depend on the tokens of the one before, so a thread computes them while the forward pass runs. They
reach the device as late as the logits are there: the only inputs that do not come with the step's others.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fengine.errors import FengineError
from fengine.ops.bitmask import apply_bitmask, words
from fengine.worker.fields import Arrays, Field, Pad, Tensors
from fengine.worker.logits.masks import Drawn, Grammar, MaskRow
from fengine.worker.logits.stage import Chunk, DrawRows, LogitsStage, RowState


class StructuredOutput(LogitsStage):
    """Modifies: itself, the cursors."""

    fields = (Field("mask_row_M", torch.int32, -1), Field("mask_MW", torch.int32, Pad.NONE))

    def __init__(self, vocab: int) -> None:
        self.words = words(vocab)
        self.rows: list[MaskRow] = []
        self.grammar: Grammar | None = None
        self.failed: dict[int, FengineError] = {}

    def admit(self, slot: int, state: RowState | None) -> None:
        if state is not None and state.params.grammar is not None:
            params = state.params
            never = [id for id, bias in params.logit_bias if np.float32(bias) <= np.float32(-1e30)]  # nothing lifts it
            new = state.new
            state.cursor = params.grammar.cursor(new.stop_ids, never, new.early_ids, not params.ignore_eos)

    def stage(self, rows: DrawRows, into: Arrays) -> bool:
        chunks = [chunk for chunk in rows.chunks if chunk.draws and chunk.state.cursor is not None]
        self.rows, self.failed = [_mask_row(chunk) for chunk in chunks], {}
        self.grammar = chunks[0].state.params.grammar if chunks else None
        return bool(chunks)

    def start(self, drawn: Drawn, beside: bool) -> Callable[[], Arrays]:
        """What gives the fields of the staged step: computed from now on beside the caller, or when it is called."""
        assert self.grammar is not None, "no row of the step has a grammar"
        wait = self.grammar.masks(self.rows, drawn, beside)

        def late() -> Arrays:
            filled = wait()
            self.failed = dict(filled.errors)
            return {"mask_row_M": filled.row_M, "mask_MW": filled.mask_MW}

        return late

    def apply(self, logits_RV: Tensor, tensors: Tensors) -> Tensor:
        return apply_bitmask(logits_RV, tensors["mask_row_M"], tensors["mask_MW"])

    def errors(self) -> dict[int, FengineError]:
        return self.failed


def _mask_row(chunk: Chunk) -> MaskRow:
    state = chunk.state
    known = state.output_ids[len(state.cursor.tokens) :]
    early = chunk.end - state.prompt_len < state.params.min_new_tokens
    if chunk.fed is None and chunk.end > len(state.tokens):  # tokens before were fed: the cursor has taken them then
        known = [chunk.token]
    return MaskRow(chunk.row, state.cursor, known, chunk.fed, state.new.stop_ids, early)
