"""`Batch`: the requests of one step, as the scheduler puts it together and takes its result. No torch."""

from dataclasses import dataclass, field

from fengine.core.images import Encode
from fengine.core.request import Request
from fengine.core.scheduler_output import AddedPages, Drafts, NewRow, SchedulerOutput


@dataclass(slots=True, eq=False)
class Batch:
    """Row i of the step is tokens starts[i] : starts[i] + counts[i] of requests[i]; see `SchedulerOutput`.

    A token at index `len(token_ids)` is the one that the row drew in the step before. `new_pages` has (request, first)
    for each request whose page table grew: `request.pages[first:]` is new. Modifies: itself.
    """

    step: int
    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    new_pages: list[tuple[Request, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    drafts: list[Drafts] = field(default_factory=list)
    adapters: list[tuple[int, int]] = field(default_factory=list)
    encodes: list[Encode] = field(default_factory=list)

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
        self.new_pages = [entry for entry in self.new_pages if entry[0] is not request]

    def take(self, tokens: list[int], logprobs: list[float]) -> list[Request]:
        """Appends what its rows have drawn. Returns the requests that end by it. Modifies: the requests."""
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

    def output(self, released: list[int], before: "Batch | None") -> SchedulerOutput:
        """The step as plain data. `before`: the last step in flight; None: every token is known. Pure."""
        token_ids, fed = self._tokens(before)
        return SchedulerOutput(
            self.step,
            [request.row for request in self.requests],  # pyright: ignore[reportArgumentType]  # every one runs
            self.starts,
            self.counts,
            self.samples,
            token_ids,
            fed,
            self.drafts,
            [new_row(request) for request, first in self.new_pages if first == 0],
            [AddedPages(row_of(request), first, request.pages[first:]) for request, first in self.new_pages],
            self.adapters,
            released,
            [request.rid for request in self.preempted],
            self.encodes,
        )

    def _tokens(self, before: "Batch | None") -> tuple[list[int], list[int]]:
        """Tokens of all rows, and where those stand that the host does not know yet. As little per row as can be."""
        requests, count = self.requests, len(self.requests)
        if sum(self.counts) == count:  # one token a row
            rows = zip(requests, self.starts, strict=True)
            if before is None:
                return [request.token_ids[start] for request, start in rows], []
            if before.requests == requests and not before.drafts and all(before.samples):
                return [0] * count, list(range(count))
            token_ids = [ids[start] if start < len(ids := request.token_ids) else -1 for request, start in rows]
            fed = [i for i, token in enumerate(token_ids) if token < 0] if -1 in token_ids else []
            for i in fed:
                token_ids[i] = 0
            return token_ids, fed
        token_ids, fed = [], []
        drafts: dict[int, list[int]] = dict(self.drafts)
        for i, (request, start, count) in enumerate(zip(requests, self.starts, self.counts, strict=True)):
            ids, draft = request.token_ids, drafts.get(i, [])
            known = ids[start : start + count - len(draft)]
            if len(known) + len(draft) < count:
                fed.append(len(token_ids) + len(known))
                known.append(0)
            token_ids += known
            token_ids += draft
        return token_ids, fed


def row_of(request: Request) -> int:
    """The slot of a request that runs. Pure."""
    assert request.row is not None
    return request.row


def new_row(request: Request) -> NewRow:
    """What a worker is told of a request that has just got its row. Pure."""
    return NewRow(
        row_of(request),
        request.rid,
        request.prompt_len,
        request.params,
        request.seed,
        request.stop_ids,
        request.early_ids,
        request.adapter_slot,
        [] if request.params.bare else list(request.token_ids),
        request.first_scored,
        request.num_seen,
        request.placed,
        request.rope,
    )
