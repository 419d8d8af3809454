"""Numbers that a request adds to the logits of single ids: `logit_bias`."""

import numpy as np
import torch
from torch import Tensor

from fengine.errors import FengineError
from fengine.ops.edit_logits import add_at
from fengine.worker.fields import Arrays, Field, Tensors
from fengine.worker.logits.stage import DrawRows, RowState, Table, rounded


class LogitBias:
    """Modifies: itself, its tables."""

    fields = (Field("bias_slot_R", torch.int32, -1),)
    host = False

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.vocab = vocab
        self.id_SK, self.value_SK = Table(rows, -1, torch.int32, device), Table(rows, 0, torch.float32, device)
        self.biased_S = np.zeros(rows, np.bool_)

    @property
    def version(self) -> int:
        return self.id_SK.version

    def admit(self, slot: int, state: RowState | None) -> None:
        self.biased_S[slot] = False
        if state is not None and state.params.logit_bias:
            ids, values = zip(*state.params.logit_bias, strict=True)
            width, known = rounded(len(ids)), np.array(ids) < self.vocab
            self.id_SK.write(slot, np.array(ids, np.int32)[known], width)
            self.value_SK.write(slot, np.clip(np.array(values), -1e30, 1e30).astype(np.float32)[known], width)
            self.biased_S[slot] = True

    def stage(self, rows: DrawRows, into: Arrays) -> bool:
        biased_R = self.biased_S[rows.slot_R] & rows.draws_R
        into["bias_slot_R"] = np.where(biased_R, rows.slot_R, -1)
        return bool(biased_R.any())

    def apply(self, logits_RV: Tensor, tensors: Tensors) -> Tensor:
        id_SK, value_SK = self.id_SK.lines, self.value_SK.lines
        if id_SK is None or value_SK is None:
            return logits_RV
        return add_at(logits_RV, tensors["bias_slot_R"], id_SK, value_SK)

    def drawn(self, logits_RV: Tensor, token_R: Tensor, tensors: Tensors) -> None: ...

    def errors(self) -> dict[int, FengineError]:
        return {}
