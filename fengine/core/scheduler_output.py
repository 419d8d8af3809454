"""`SchedulerOutput`: what one step computes, as plain data; `StepOutput`: what it found, on the host. No torch. A
`SchedulerOutput` is all that a worker learns of requests. It keeps for each row slot what `new_rows` told, and the page
table that `new_pages` adds up to, until the slot is released or given to another request."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fengine.core.images import Encode
from fengine.core.request import Request
from fengine.errors import FengineError

# (row, first, pages, windows): entry `first` and on of a row's page table. With `first` 0 the row is new; its prefix
# hits are included. `windows`: of the table of windowed layers, where these have pages of their own; 0 where no token
# sees the page.
AddedPages = tuple[int, int, list[int], tuple[int, ...]]


class Drafts(NamedTuple):
    """Guessed tokens: the last of row `index` of the step. It draws in front of them and behind each."""

    index: int
    token_ids: list[int]


@dataclass(slots=True)
class SchedulerOutput:
    """Row i of the step, in slot rows[i], computes positions starts[i] : starts[i] + counts[i] of its request.

    Steps are executed in order, each once. Slots in `released` end before `new_rows` begin: requests that were
    admitted, or admitted again after a preemption, each as `Request.as_told`. `requests` are those of the rows, the
    scheduler's own, which stay in its process. The methods are for the scheduler. Modifies: itself, its requests."""

    step: int  # counts from 0
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)  # the row reaches its last token, so one is drawn
    token_ids: list[int] = field(default_factory=list)  # of all rows, one behind the other; 0 where it is fed
    fed: list[int] = field(default_factory=list)  # indexes into token_ids of what the same slot drew the step before
    drafts: list[Drafts] = field(default_factory=list)
    guessed: bool = False  # the tokens of drafts are 0 here, and on the device
    new_rows: list[Request] = field(default_factory=list)
    new_pages: list[AddedPages] = field(default_factory=list)
    adapters: list[tuple[int, int]] = field(default_factory=list)  # (slot, number of the load) to be written before it
    released: list[int] = field(default_factory=list)  # slots given back since the step before
    preempted: list[str] = field(default_factory=list)  # rids
    encodes: list[Encode] = field(default_factory=list)  # images to be encoded before it
    requests: list[Request] = field(default_factory=list, compare=False, metadata={"local": True})

    @property
    def num_draws(self) -> int:
        """One for each row, then those behind drafts, in the order of `drafts`."""
        return len(self.rows) + sum(len(draft.token_ids) for draft in self.drafts)

    def put_in(self, request: Request, start: int, count: int, sample: bool) -> None:
        """A row behind those that are in."""
        self.requests.append(request)
        self.starts.append(start)
        self.counts.append(count)
        self.samples.append(sample)

    def take_out(self, request: Request) -> None:
        """Takes a decoding row out, if it is in, and sets the request back; its pages stay with it."""
        if request not in self.requests:
            return
        i = self.requests.index(request)
        request.num_computed = self.starts[i]
        request.num_pending -= 1
        del self.requests[i], self.starts[i], self.counts[i], self.samples[i]

    def fill_in(self, before: "SchedulerOutput | None") -> None:
        """Row slots, tokens of all rows, and where those stand that the host does not know yet. As little per row as
        can be. `before`: the last step in flight; None: every token is known."""
        requests, count = self.requests, len(self.requests)
        self.rows = [request.row for request in requests]  # pyright: ignore[reportAttributeAccessIssue]  # every one runs
        token_ids: list[int] = []
        if sum(self.counts) == count:  # one token a row
            if before is not None and before.requests == requests and all(before.samples):  # none waits for drafts
                self.token_ids, self.fed = [0] * count, list(range(count))
                return
            rows = zip(requests, self.starts, strict=True)
            token_ids = [ids[start] if start < len(ids := request.token_ids) else -1 for request, start in rows]
            self.fed = [i for i, token in enumerate(token_ids) if token < 0] if -1 in token_ids else []
            for i in self.fed:
                token_ids[i] = 0
            self.token_ids = token_ids
            return
        drafts: dict[int, list[int]] = dict(self.drafts)
        for i, (request, start, count) in enumerate(zip(requests, self.starts, self.counts, strict=True)):
            draft = drafts.get(i, [])
            known = request.token_ids[start : start + count - len(draft)]
            if len(known) + len(draft) < count:
                self.fed.append(len(token_ids) + len(known))
                known.append(0)
            token_ids += known
            token_ids += draft
        self.token_ids = token_ids

    def take(self, tokens: list[int], logprobs: list[float]) -> list[Request]:
        """Appends what its rows have drawn. Returns the requests that end by it."""
        ended = []
        for request, sample, token, logprob in zip(self.requests, self.samples, tokens, logprobs, strict=False):
            if not sample or request.finish is not None:
                continue  # nothing was drawn, or the request has ended since: discarded
            request.num_pending -= 1
            ids = request.token_ids
            ids.append(token)
            request.logprobs.append(logprob)
            if len(ids) >= request.full or token in request.stop_ids or logprob != logprob:
                ended.append(request)
        return ended


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
    """A token and its logprob for each draw: NaN where the row has an error, or its logits were not finite. Of
    `outputs` row r is that of the step's row r. `prompts`: in column 0 of logprob_PK the token behind the position.
    `hidden_HD` float32. `pooled`: rows of which the last hidden state is here now."""

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


class Watcher:
    """Told of every step in the loop's thread, so it is quick and raises nothing."""

    def scheduled(self, output: SchedulerOutput) -> None:
        """The step is about to be launched."""

    def launched(self, output: SchedulerOutput) -> None:
        """The device has it."""

    def landed(self, output: SchedulerOutput) -> None:
        """Its results have been read; the scheduler has not been told yet."""
