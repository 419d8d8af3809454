"""`LogitsStage`: what edits logits, and what it may know of a step; `Table`: what a row slot keeps on the device."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fengine.core.scheduler_output import NewRow
from fengine.errors import FengineError
from fengine.worker.fields import Arrays, Field, Tensors


class RowState:
    """What the worker keeps of a running request that wants more than a drawn token. Modifies: itself.

    `tokens` are prompt and drawn tokens, as far as none was fed on the device.
    """

    __slots__ = ("new", "params", "prompt_len", "tokens", "cursor", "asks_draws", "asks_hidden")

    def __init__(self, new: NewRow) -> None:
        self.new, self.params, self.prompt_len, self.tokens = new, new.params, new.prompt_len, list(new.token_ids)
        self.cursor: Any = None  # where the output stands in its grammar
        self.asks_draws = bool(new.params.top_logprobs or new.params.logprob_ids)  # logprobs of other ids
        self.asks_hidden = bool(new.params.hidden or new.params.pool)

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class Chunk(NamedTuple):
    """Row `row` of a step, which wants more than a drawn token, computes positions start : end; the first of them is
    token `at` of the step. Its last token is `token`, or what row `fed` drew in the step before."""

    row: int
    state: RowState
    start: int
    end: int
    at: int
    draws: bool
    token: int
    fed: int | None


class DrawRows(NamedTuple):
    """The rows of a step's logits: their row slots, the positions of what they draw, whether that is used."""

    slot_R: np.ndarray  # int32
    pos_R: np.ndarray  # int32
    draws_R: np.ndarray  # bool
    chunks: list[Chunk]  # of those that want more


class LogitsStage:
    """One edit of logits, by default none. `host`: it runs Python on logits, so it stands in no graph."""

    fields: tuple[Field, ...] = ()
    host = False

    @property
    def version(self) -> int:
        """Changes where the stage's tables are at another place: graphs that hold them are dead."""
        return 0

    def admit(self, slot: int, state: RowState | None) -> None:
        """A request gets the row slot, or (None) leaves it. Modifies: the stage's tables."""

    def stage(self, rows: DrawRows, into: Arrays) -> bool:
        """Fills in the stage's fields; False: there is nothing to do in this step. Modifies: into."""
        return False

    def apply(self, logits_RV: Tensor, tensors: Tensors) -> Tensor:
        """The edited logits. Modifies: the storage of logits_RV."""
        return logits_RV

    def drawn(self, logits_RV: Tensor, token_R: Tensor, tensors: Tensors) -> None:
        """Tells what the rows have drawn. Modifies: the stage's tables."""

    def errors(self) -> dict[int, FengineError]:
        """Rows of the step for which nothing could be drawn, once it is launched."""
        return {}


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
