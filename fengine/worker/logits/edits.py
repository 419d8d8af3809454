"""Edits of logits by arithmetic: penalties of drawn tokens, bans of ids before min_new_tokens, `logit_bias`.

How often a row slot has drawn each id is counted on the device, by the step that draws: no step waits for the host.
Prompt tokens do not count, as in SGLang.
"""

import numpy as np
import torch
from torch import Tensor

from fengine.ops.edit_logits import add_at, count, penalize
from fengine.worker.fields import Arrays, Field, Tensors
from fengine.worker.logits.stage import DrawRows, LogitsStage, RowState, Table, rounded


class Penalties(LogitsStage):
    """Modifies: itself, its tables."""

    fields = (
        Field("count_slot_R", torch.int32, -1),
        Field("frequency_R", torch.float64),
        Field("presence_R", torch.float64),
        Field("repetition_R", torch.float32, 1),
        Field("ban_slot_R", torch.int32, -1),
    )

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.vocab = vocab
        self.count_SV = Table(rows, 0, torch.int32, device)
        self.ban_id_SK, self.ban_value_SK = (Table(rows, -1, torch.int32, device),
                                             Table(rows, -np.inf, torch.float32, device))  # fmt: skip
        self.penalised_S = np.zeros(rows, np.bool_)
        self.frequency_S, self.presence_S, self.repetition_S = np.zeros(rows), np.zeros(rows), np.ones(rows, np.float32)
        self.banned_until_S = np.zeros(rows, np.int32)  # the first position at which nothing is banned

    @property
    def version(self) -> int:
        return self.count_SV.version + self.ban_id_SK.version

    def admit(self, slot: int, state: RowState | None) -> None:
        self.penalised_S[slot], self.banned_until_S[slot] = False, 0
        if state is None:
            return
        params = state.params
        if params.penalised:
            self.penalised_S[slot] = True
            self.frequency_S[slot], self.presence_S[slot] = params.frequency_penalty, params.presence_penalty
            self.repetition_S[slot] = params.repetition_penalty
            drawn = state.output_ids  # by a request that was preempted
            line = np.bincount(drawn, minlength=self.vocab) if drawn else np.zeros(0, np.int64)
            self.count_SV.write(slot, line, self.vocab)
        if params.min_new_tokens:
            banned = state.new.stop_ids | state.new.early_ids
            ids = [id for id in banned if 0 <= id < self.vocab]  # an eos id may lie behind the vocabulary
            self.banned_until_S[slot] = state.prompt_len + params.min_new_tokens
            width = rounded(len(ids))
            self.ban_id_SK.write(slot, np.array(ids, np.int32), width)
            self.ban_value_SK.widen(width)

    def stage(self, rows: DrawRows, into: Arrays) -> bool:
        slot_R = rows.slot_R
        penalised_R = self.penalised_S[slot_R] & rows.draws_R
        banned_R = (rows.pos_R < self.banned_until_S[slot_R]) & rows.draws_R
        if not (penalised_R.any() or banned_R.any()):
            return False
        into["count_slot_R"] = np.where(penalised_R, slot_R, -1)
        into["frequency_R"], into["presence_R"] = self.frequency_S[slot_R], self.presence_S[slot_R]
        into["repetition_R"] = self.repetition_S[slot_R]
        into["ban_slot_R"] = np.where(banned_R, slot_R, -1)
        return True

    def apply(self, logits_RV: Tensor, tensors: Tensors) -> Tensor:
        if (count_SV := self.count_SV.lines) is not None:
            penalties = (tensors["frequency_R"], tensors["presence_R"], tensors["repetition_R"])
            logits_RV = penalize(logits_RV, tensors["count_slot_R"], *penalties, count_SV)
        id_SK, value_SK = self.ban_id_SK.lines, self.ban_value_SK.lines
        if id_SK is not None and value_SK is not None:
            logits_RV = add_at(logits_RV, tensors["ban_slot_R"], id_SK, value_SK)
        return logits_RV

    def drawn(self, logits_RV: Tensor, token_R: Tensor, tensors: Tensors) -> None:
        if (count_SV := self.count_SV.lines) is not None:
            count(count_SV, tensors["count_slot_R"], token_R)


class LogitBias(LogitsStage):
    """Modifies: itself, its tables."""

    fields = (Field("bias_slot_R", torch.int32, -1),)

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
