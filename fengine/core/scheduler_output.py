"""`SchedulerOutput`: what one step computes, as plain data; `StepOutput`: what it found, on the host. No torch.

A `SchedulerOutput` is all that a worker learns of requests. It keeps for each row slot what `NewRow` told when the row
was admitted, and the page table that `new_pages` adds up to, until the slot is released or given to another request.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from fengine.core.images import Encode, Placed, RopePositions
from fengine.core.sampling_params import SamplingParams
from fengine.errors import FengineError


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request that was admitted, or admitted again after a preemption, to row slot `row`."""

    row: int
    rid: str
    prompt_len: int
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]  # ids that end the request
    early_ids: frozenset[int]  # banned beside them until min_new_tokens
    adapter_slot: int | None  # of its LoRA adapter
    token_ids: list[int]  # all that are known, the prompt first; empty where params are bare
    first_scored: int  # prompt position of the next input logprob; prompt_len: none is lacking
    first_seen: int  # prompt position of the next hidden state
    images: tuple[Placed, ...] = ()  # where the embeddings of prompt tokens lie that are no rows of the vocabulary
    rope: RopePositions | None = None

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]


class AddedPages(NamedTuple):
    """Entry `first` and on of a row's page table. With `first` 0 the row is new; its prefix hits are included.

    `windows`: of the table of windowed layers, where these have pages of their own; 0 where no token sees the page.
    """

    row: int
    first: int
    pages: list[int]
    windows: tuple[int, ...] = ()


class Drafts(NamedTuple):
    """Guessed tokens: the last of row `index` of the step. It draws in front of them and behind each."""

    index: int
    token_ids: list[int]


@dataclass(slots=True)
class SchedulerOutput:
    """Row i of the step, in slot rows[i], computes positions starts[i] : starts[i] + counts[i] of its request.

    Steps are executed in order, each once. Slots in `released` end before `new_rows` begin.
    """

    step: int  # counts from 0
    rows: list[int]
    starts: list[int]
    counts: list[int]
    samples: list[bool]  # the row reaches its last token, so one is drawn
    token_ids: list[int]  # of all rows, one behind the other; 0 where it is fed
    fed: list[int]  # indexes into token_ids of tokens that the same slot drew in the step before
    drafts: list[Drafts] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    new_pages: list[AddedPages] = field(default_factory=list)
    adapters: list[tuple[int, int]] = field(default_factory=list)  # (slot, number of the load) to be written before it
    released: list[int] = field(default_factory=list)  # slots given back since the step before
    preempted: list[str] = field(default_factory=list)  # rids
    encodes: list[Encode] = field(default_factory=list)  # images to be encoded before it

    @property
    def num_draws(self) -> int:
        """One for each row, then those behind drafts, in the order of `drafts`."""
        return len(self.rows) + sum(len(draft.token_ids) for draft in self.drafts)


class Scores(NamedTuple):
    """Logprobs of rows: of the ids that were asked, and of the likeliest, best first. float32, ids int32."""

    logprob_PK: np.ndarray
    top_logprob_PX: np.ndarray
    top_id_PX: np.ndarray


class Span(NamedTuple):
    """Consecutive positions of one row of the step, and where they begin in the arrays that rows share."""

    row: int
    first: int
    count: int
    at: int


@dataclass(slots=True)
class StepOutput:
    """A token and its logprob for each draw: NaN where the row has an error, or its logits were not finite.

    Of `outputs` row r is that of the step's row r. `prompts`: in column 0 of logprob_PK the token behind the position.
    `hidden_HD` float32. `pooled`: rows of which the last hidden state is here now.
    """

    tokens: list[int]
    logprobs: list[float]
    errors: dict[int, FengineError] = field(default_factory=dict)
    outputs: Scores | None = None
    prompts: list[tuple[list[Span], Scores]] = field(default_factory=list)
    hidden: list[Span] = field(default_factory=list)
    hidden_HD: np.ndarray | None = None
    pooled: list[int] = field(default_factory=list)

    @property
    def more(self) -> bool:
        """Whether there is more than tokens and logprobs."""
        return bool(self.errors or self.outputs or self.prompts or self.hidden or self.pooled)


class Watcher(Protocol):
    """Told of every step in the loop's thread, so it is quick and raises nothing."""

    def scheduled(self, output: SchedulerOutput) -> None:
        """The step is about to be launched."""
        ...

    def launched(self, output: SchedulerOutput) -> None:
        """The device has it."""
        ...

    def landed(self, output: SchedulerOutput) -> None:
        """Its results have been read; the scheduler has not been told yet."""
        ...
