"""Penalties of drawn tokens, and bans of ids before min_new_tokens. How often a row slot has drawn each id is counted
on the device, by the step that draws: no step waits for the host. Prompt tokens do not count, as in SGLang."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fengine.core.request import Request
from fengine.core.scheduler_output import Drafts
from fengine.models.kv_state import Tensors
from fengine.ops.edit_logits import add_at, count, penalize
from fengine.worker.step_input import Field, LogitsStage, StepInput, Write


class Table:
    """A line for each row slot in the device's memory, there from the first line on. Modifies: itself."""

    def __init__(self, rows: int, fill: float, dtype: torch.dtype, device: torch.device) -> None:
        self.rows, self.fill, self.dtype, self.device = rows, fill, dtype, device
        self.lines: Tensor | None = None  # [rows, width]
        self.version = 0

    def widen(self, width: int) -> Tensor:
        """The lines, with room for `width` numbers each; they stay the same if they have it."""
        old = self.lines
        if old is not None and old.shape[1] >= width:
            return old
        self.version += 1
        self.lines = torch.full((self.rows, width), self.fill, dtype=self.dtype, device=self.device)
        if old is not None:
            self.lines[:, : old.shape[1]] = old
        return self.lines

    def write(self, slot: int, line: np.ndarray, width: int) -> None:
        """Sets a line of `width` numbers: those of `line`, then `fill`."""
        lines = self.widen(width)
        if len(line):
            source = torch.from_numpy(np.ascontiguousarray(line)).to(self.dtype)
            source = source.pin_memory() if lines.is_cuda else source
            lines[slot, : len(line)].copy_(source, non_blocking=True)
        lines[slot, len(line) :] = self.fill


def rounded(count: int) -> int:
    """A width of lines: a power of two of at least 16, so that few different ones come. Pure."""
    return max(16, 1 << (count - 1).bit_length())


class Penalties(LogitsStage):
    """Modifies: itself, its tables."""

    name = "penalties"
    fields = (
        Field("count_slot_R", torch.int32, -1),
        Field("frequency_R", torch.float64),
        Field("presence_R", torch.float64),
        Field("repetition_R", torch.float32, 1),
        Field("ban_slot_R", torch.int32, -1),
        Field("guess_RK", torch.int32, -1),  # of `DraftedPenalties`
        Field("guessed_in_RK", torch.int32),
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

    def release(self, slot: int) -> None:
        self.penalised_S[slot], self.banned_until_S[slot] = False, 0

    def admit(self, slot: int, new: Request) -> Sequence[Write]:
        params, writes = new.params, list[Write]()
        if params.penalised:
            self.penalised_S[slot] = True
            self.frequency_S[slot], self.presence_S[slot] = params.frequency_penalty, params.presence_penalty
            self.repetition_S[slot] = params.repetition_penalty
            drawn = new.output_ids  # by a request that was preempted
            line = np.bincount(drawn, minlength=self.vocab) if drawn else np.zeros(0, np.int64)
            writes.append(partial(self.count_SV.write, slot, line, self.vocab))
        if params.min_new_tokens:
            banned = new.stop_ids | new.early_ids
            ids = [id for id in banned if 0 <= id < self.vocab]  # an eos id may lie behind the vocabulary
            self.banned_until_S[slot] = new.prompt_len + params.min_new_tokens
            width = rounded(len(ids))
            writes += [
                partial(self.ban_id_SK.write, slot, np.array(ids, np.int32), width),
                partial(self.ban_value_SK.widen, width),
            ]
        return writes

    def stage(self, step: StepInput, draws_R: np.ndarray) -> LogitsStage | None:
        slot_R, into = step.slot_R, step.arrays
        penalised_R = self.penalised_S[slot_R] & draws_R
        banned_R = (into["pos_R"] < self.banned_until_S[slot_R]) & draws_R
        if not (penalised_R.any() or banned_R.any()):
            return None
        into["count_slot_R"] = np.where(penalised_R, slot_R, -1)
        into["frequency_R"], into["presence_R"] = self.frequency_S[slot_R], self.presence_S[slot_R]
        into["repetition_R"] = self.repetition_S[slot_R]
        into["ban_slot_R"] = np.where(banned_R, slot_R, -1)
        return DraftedPenalties(self, step, penalised_R) if step.drafts else self

    def apply(self, logits_RV: Tensor, tensors: Tensors) -> Tensor:
        if (count_SV := self.count_SV.lines) is not None:
            logits_RV = self.penalised(logits_RV, tensors, tensors["count_slot_R"], count_SV)
        return self.banned(logits_RV, tensors)

    def penalised(self, logits_RV: Tensor, tensors: Tensors, line_R: Tensor, count_SV: Tensor) -> Tensor:
        """By the counts in these lines. Modifies: the storage of logits_RV."""
        penalties = (tensors["frequency_R"], tensors["presence_R"], tensors["repetition_R"])
        return penalize(logits_RV, line_R, *penalties, count_SV)

    def banned(self, logits_RV: Tensor, tensors: Tensors) -> Tensor:
        """Without the ids that end the row. Modifies: the storage of logits_RV."""
        id_SK, value_SK = self.ban_id_SK.lines, self.ban_value_SK.lines
        if id_SK is not None and value_SK is not None:
            logits_RV = add_at(logits_RV, tensors["ban_slot_R"], id_SK, value_SK)
        return logits_RV

    def drawn(self, logits_RV: Tensor, token_R: Tensor, tensors: Tensors) -> None:
        if (count_SV := self.count_SV.lines) is not None:
            count(count_SV, tensors["count_slot_R"], token_R)


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
