"""`Field`: one array of a step, declared once by name. How fields lie in packed buffers (`static_buffers.py`), their
padding and warm-up derive from the declaration. A field's dimensions stand behind the last "_" of its name: letters of
the dimension key, or a number as it is.

`StepInput`: one step on the host, from the batch that gathers it to the runner. `LogitsStage`: an edit of logits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fengine.core.request import Request
from fengine.core.scheduler_output import Drafts, Span
from fengine.errors import FengineError
from fengine.models.kv_state import Tensors

Arrays = dict[str, np.ndarray]
Sizes = Mapping[str, int]


class Pad(Enum):
    """Paddings that are no constant."""

    LAST = "last"  # the last value again
    NONE = "none"  # whatever lies there: nothing reads it


class Field(NamedTuple):
    """One array of a step. `pad` stands behind what the step fills in, and everywhere if it fills in nothing."""

    name: str
    dtype: torch.dtype
    pad: float | Pad = 0

    @property
    def letters(self) -> str:
        return self.name.rpartition("_")[2]

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(int(letter) if letter.isdigit() else sizes[letter] for letter in self.letters)


def blank(field: Field, sizes: Sizes) -> np.ndarray:
    array: np.ndarray = torch.empty(0, dtype=field.dtype).numpy()
    return np.full(field.shape(sizes), blank_value(field), array.dtype)


def blank_value(field: Field) -> float:
    return 0 if isinstance(field.pad, Pad) else field.pad


INPUTS = (  # of a forward pass, fed tokens and the draw; those of rows first, so that their places depend on R alone
    Field("logit_index_R", torch.int32),
    Field("temperature_R", torch.float32, 1),  # > 0; of greedy rows 1
    Field("top_k_R", torch.int32, 1),  # >= V means off; 1 is greedy
    Field("top_p_R", torch.float32, 1),  # in (0, 1]; 1 means off
    Field("min_p_R", torch.float32),  # in [0, 1]; 0 means off
    Field("seed_R", torch.int64),  # the request's own
    Field("pos_R", torch.int32),  # of the token being drawn: noise is keyed by (seed, position, vocabulary id)
    Field("kv_len_R", torch.int32),
    Field("q_start_B", torch.int32, Pad.LAST),
    Field("page_table_RN", torch.int32, Pad.NONE),
    Field("token_T", torch.int32),
    Field("pos_T", torch.int32),
    Field("slot_T", torch.int32),
    Field("window_slot_U", torch.int32),  # of layers with a window, where these have pages of their own
    Field("window_table_RY", torch.int32, Pad.NONE),
    Field("feed_index_T", torch.int32),  # where feed_from_T is true, the token is what this row of the step before drew
    Field("feed_from_T", torch.bool),
)
IMAGES = (
    Field("image_row_I", torch.int32, -1),  # I: the T of models with images
    Field("rope_pos_3I", torch.int32),
    Field("last_key_J", torch.int32),  # J: the T of those in which the tokens of an image see each other
)
ADAPTERS = (Field("token_A", torch.int32), Field("start_S", torch.int32))


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
    def waits(self) -> bool:
        """Whether some late fields need the tokens of the step before."""
        return any(stage.waits for stage in self.stages)

    def late_fields(self, drawn: Callable[[], Sequence[int]]) -> Arrays:
        """As `LogitsStage.late_fields`, of all stages; `drawn` is called if one needs it."""
        tokens = drawn() if self.waits else ()
        late = [stage.late_fields(tokens) for stage in self.stages if stage.late]
        return {name: array for arrays in late for name, array in arrays.items()}

    def errors(self) -> dict[int, FengineError]:
        """Rows for which nothing could be drawn, once it is launched; of several stages the first's tells."""
        return {row: error for stage in reversed(self.stages) for row, error in stage.errors().items()}


class LogitsStage:
    """One edit of logits, by default none. `name` is how `SamplingParams.asks` calls it. `host`: it runs Python on
    logits, so it stands in no graph. `late`: some of its fields come only from `late_fields`; `waits`: and these need
    the tokens that the step before has drawn."""

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

    def late_fields(self, drawn: Sequence[int]) -> Arrays:
        """The fields that come late. `drawn`: the tokens of the step before, if it waits for them."""
        return {}

    def apply(self, logits_RV: Tensor, tensors: Tensors) -> Tensor:
        """The edited logits. Modifies: the storage of logits_RV."""
        return logits_RV

    def drawn(self, logits_RV: Tensor, token_R: Tensor, tensors: Tensors) -> None:
        """Tells what the rows have drawn. Modifies: the stage's tables."""

    def errors(self) -> dict[int, FengineError]:
        """Rows of the step for which nothing could be drawn, once it is launched."""
        return {}
