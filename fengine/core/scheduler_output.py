"""`Plan`: what one step computes, as plain parallel lists; `Watcher`: who is told of steps. No torch."""

from dataclasses import dataclass, field
from typing import Protocol

from fengine.core.request import Adapter, Request


@dataclass(slots=True, eq=False)
class Plan:
    """Row i of the step is tokens starts[i] : starts[i] + counts[i] of requests[i].

    `samples[i]`: the chunk reaches the row's last token, so a token is drawn. A token at index `len(token_ids)` is the
    one that the row drew in the step before. `new_pages` has (request, first) for each request whose page table grew:
    `request.pages[first:]` is new, and first == 0 means newly admitted, prefix hits included.
    `drafts` has (row, guessed tokens): the last of the row's `counts`. The row draws in front of them and behind each.
    """

    step: int  # counts from 0
    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    new_pages: list[tuple[Request, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    drafts: list[tuple[int, list[int]]] = field(default_factory=list)
    adapters: list[tuple[int, Adapter]] = field(default_factory=list)  # to be written to these slots before the step

    @property
    def num_draws(self) -> int:
        """One for each row, then those behind drafts, in the order of `drafts`."""
        return len(self.requests) + sum(len(draft) for _, draft in self.drafts)

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


class Watcher(Protocol):
    """Told of every step in the loop's thread, so it is quick and raises nothing."""

    def planned(self, plan: Plan) -> None:
        """The step is about to be launched. Its requests go on changing."""
        ...

    def landed(self, plan: Plan) -> None:
        """Its results have been read, and the scheduler knows them."""
        ...
