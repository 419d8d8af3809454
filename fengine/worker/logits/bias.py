"""`logit_bias`: numbers added to the logits of ids that a request names."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fengine.core.request import Request
from fengine.models.kv_state import Tensors
from fengine.ops.edit_logits import add_at
from fengine.worker.logits.penalties import Table, rounded
from fengine.worker.step_input import Field, LogitsStage, StepInput, Write


class LogitBias(LogitsStage):
    """Modifies: itself, its tables."""

    name = "bias"
    fields = (Field("bias_slot_R", torch.int32, -1),)

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.vocab = vocab
        self.id_SK, self.value_SK = Table(rows, -1, torch.int32, device), Table(rows, 0, torch.float32, device)
        self.biased_S = np.zeros(rows, np.bool_)

    @property
    def version(self) -> int:
        return self.id_SK.version

    def release(self, slot: int) -> None:
        self.biased_S[slot] = False

    def admit(self, slot: int, new: Request) -> Sequence[Write]:
        ids, values = zip(*new.params.logit_bias, strict=True)
        width, known = rounded(len(ids)), np.array(ids) < self.vocab
        id_K, value_K = np.array(ids, np.int32)[known], np.array(values)[known]
        self.biased_S[slot] = True
        return (
            partial(self.id_SK.write, slot, id_K, width),
            partial(self.value_SK.write, slot, value_K.astype(np.float32), width),
        )

    def stage(self, step: StepInput, draws_R: np.ndarray) -> LogitsStage | None:
        biased_R = self.biased_S[step.slot_R] & draws_R
        step.arrays["bias_slot_R"] = np.where(biased_R, step.slot_R, -1)
        return self if biased_R.any() else None

    def apply(self, logits_RV: Tensor, tensors: Tensors) -> Tensor:
        id_SK, value_SK = self.id_SK.lines, self.value_SK.lines
        if id_SK is None or value_SK is None:
            return logits_RV
        return add_at(logits_RV, tensors["bias_slot_R"], id_SK, value_SK)
