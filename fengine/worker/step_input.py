"""`StepInput`: one step on the host, from the batch that gathers it to the runner. `LogitsStage`: an edit of logits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from fengine.core.request import Request
from fengine.core.scheduler_output import Drafts, Span
from fengine.errors import FengineError
from fengine.models.kv_state import Tensors
from fengine.worker.fields import Arrays, Field

Write = Callable[[], object]


@dataclass(slots=True)
class StepInput:
    """One step on the host, unpadded: T tokens and R draws, and what it is to bring besides.

    R counts draws: behind the step's rows comes one without tokens for each draft, which draws behind that draft.
    `arrays` by field; those of adapters and stages only where there is something. `stages` edit this step's logits.
    `drafts` are those of the rows behind the step's own. `chunks`, each a `Chunk`, are rows that draw and want more
    than a token; `prompts` are `PromptRows`. `top`: likeliest ids wanted of every draw; None: the draws' own logprobs
    are all. `hidden_H`: tokens whose hidden states are wanted."""

    arrays: Arrays
    slot_R: np.ndarray  # int32, the row slot of each draw
    draws: bool = True  # some row draws a token
    drafts: Sequence[Drafts] = ()
    chunks: Sequence[Any] = ()
    stages: "tuple[LogitsStage, ...]" = ()
    writes: Sequence[Write] = ()  # to the stages' tables on the device, in front of its sampler
    top: int | None = None
    prompts: list[Any] = field(default_factory=list)
    hidden_H: np.ndarray | None = None
    hidden: list[Span] = field(default_factory=list)
    pooled: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return len(self.arrays["token_T"])

    @property
    def rows(self) -> int:
        return len(self.arrays["kv_len_R"])

    @property
    def adapters(self) -> bool:
        return "token_A" in self.arrays

    @property
    def late(self) -> bool:
        """Whether some fields come only from `begin`."""
        return any(stage.late for stage in self.stages)

    @property
    def waits(self) -> bool:
        """Whether these need the tokens of the step before."""
        return any(stage.waits for stage in self.stages)

    def begin(self, drawn: Callable[[], Sequence[int]]) -> Callable[[], Arrays]:
        """As `LogitsStage.begin`, of all stages; `drawn` is called if one needs it."""
        tokens = drawn() if self.waits else ()
        begun = [stage.begin(tokens) for stage in self.stages if stage.late]
        return lambda: {name: array for arrays in begun for name, array in arrays().items()}

    def errors(self) -> dict[int, FengineError]:
        """Rows for which nothing could be drawn, once it is launched; of several stages the first's tells."""
        return {row: error for stage in reversed(self.stages) for row, error in stage.errors().items()}


class LogitsStage:
    """One edit of logits, by default none. `name` is how `SamplingParams.asks` calls it. `host`: it runs Python on
    logits, so it stands in no graph. `late`: some of its fields come only from `begin`; `waits`: and these need the
    tokens that the step before has drawn."""

    name = ""
    fields: tuple[Field, ...] = ()
    host = late = waits = False

    @property
    def version(self) -> int:
        """Changes where the stage's tables are at another place: graphs that hold them are dead."""
        return 0

    def admit(self, slot: int, new: Request) -> Sequence[Write]:
        """A request that asks for it gets the row slot. Returns what writes the device's tables, to be called behind
        the samplers of all steps before. Modifies: the stage's tables on the host."""
        return ()

    def release(self, slot: int) -> None:
        """It leaves the slot. Modifies: the stage's tables on the host."""

    def stage(self, step: StepInput, draws_R: np.ndarray) -> "LogitsStage | None":
        """What edits the logits of this step: itself, or one that keeps what is the step's own; None: there is nothing
        to do. `draws_R`: whose draw is used. Modifies: step.arrays, where it fills in its fields."""
        return None

    def begin(self, drawn: Sequence[int]) -> Callable[[], Arrays]:
        """Begins to compute the fields that come late; what it returns gives them. `drawn`: the tokens of the step
        before, if it waits for them."""
        return dict

    def apply(self, logits_RV: Tensor, tensors: Tensors) -> Tensor:
        """The edited logits. Modifies: the storage of logits_RV."""
        return logits_RV

    def drawn(self, logits_RV: Tensor, token_R: Tensor, tensors: Tensors) -> None:
        """Tells what the rows have drawn. Modifies: the stage's tables."""

    def errors(self) -> dict[int, FengineError]:
        """Rows of the step for which nothing could be drawn, once it is launched."""
        return {}
