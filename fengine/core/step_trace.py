"""`StepRecord`: what one step of the scheduler was, as plain data that changes no more. No torch."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from fengine.core.request import Request
from fengine.core.scheduler import Scheduler
from fengine.core.scheduler_output import SchedulerOutput, Watcher


@dataclass(frozen=True, slots=True)
class NewPages:
    """Page `first` and on of a request's page table are new in this step. With `first` 0 the request was admitted, and
    the first `hits` of them are prefix hits, which other requests may hold too."""

    rid: str
    first: int
    hits: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Row i computed the tokens starts[i] : starts[i] + counts[i] of request rids[i].

    `launched` and `landed` are of `time.perf_counter`; with overlap the next step is launched before this one lands.
    `released` gave their pages back since the step before was launched (finished, aborted, preempted by this one or
    any), and `shrunk` some of them, before `new_pages` were handed out. The gauges are those of the launch: requests
    that run and wait, pages that running requests hold, and pages that only the prefix cache holds, of `pages` in all.
    """

    step: int
    launched: float
    landed: float
    rids: tuple[str, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    decodes: tuple[bool, ...]  # the row feeds what it drew; else it computes tokens that were known
    new_pages: tuple[NewPages, ...]
    preempted: tuple[str, ...]
    released: tuple[str, ...]
    running: int
    waiting: int
    held: int
    cached: int
    pages: int
    drafted: tuple[int, ...] = ()  # with speculation: how many of each row's tokens, its last, are guesses
    shrunk: tuple[tuple[str, int], ...] = ()  # (rid, pages it still has): wrong guesses gave the others back

    @property
    def kind(self) -> str:
        """ "decode", "prefill" or "mixed"."""
        return "decode" if all(self.decodes) else "mixed" if any(self.decodes) else "prefill"


class StepTrace(Watcher):
    """Tells `tell` of every step when it has landed. What `tell` raises ends the telling: see `fault`.
    Modifies: itself."""

    def __init__(self, scheduler: Scheduler, tell: Callable[[StepRecord], None]) -> None:
        self.fault: Exception | None = None
        self._scheduler, self._tell, self._page_size = scheduler, tell, scheduler.page_size
        self._scheduled: dict[int, StepRecord] = {}  # by step, until it lands
        self._held: dict[str, int] = {}  # pages of the requests that had some when last seen

    def scheduled(self, output: SchedulerOutput) -> None:
        counters, held = self._scheduler.counters(), self._scheduler.held_pages()
        requests = output.requests
        drafted = {draft.index: len(draft.token_ids) for draft in output.drafts}
        new_pages = self._new_pages(output, {request.row: request for request in requests})
        first_new = {new.rid: new.first for new in new_pages}
        kept = {rid: min(first_new.get(rid, count), count) for rid, count in held.items()}
        samples = zip(requests, output.starts, output.samples, strict=True)
        pages, used, free = (counters[name] for name in ("pages", "used_pages", "free_pages"))
        self._scheduled[output.step] = StepRecord(
            step=output.step, launched=time.perf_counter(), landed=0.0,
            rids=tuple(request.rid for request in requests), starts=tuple(output.starts), counts=tuple(output.counts),
            decodes=tuple(sample and start >= request.prompt_len for request, start, sample in samples),
            new_pages=new_pages, preempted=tuple(output.preempted),
            released=tuple(rid for rid in self._held if rid not in held), running=counters["running"],
            waiting=counters["waiting"], held=used, cached=pages - used - free, pages=pages,
            drafted=tuple(drafted.get(i, 0) for i in range(len(requests))) if drafted else (),
            shrunk=tuple((rid, count) for rid, count in kept.items() if count < self._held.get(rid, 0)),
        )  # fmt: skip
        self._held = held

    def _new_pages(self, output: SchedulerOutput, request_of: dict[int | None, Request]) -> tuple[NewPages, ...]:
        hits = {row: start // self._page_size for row, start in zip(output.rows, output.starts, strict=True)}
        return tuple(
            NewPages(request.rid, first, 0 if first else hits[row], tuple(request.pages[first:]))
            for row, first, _, _ in output.new_pages
            for request in (request_of[row],)
        )

    def landed(self, output: SchedulerOutput) -> None:
        record = self._scheduled.pop(output.step, None)
        if record is None or self.fault is not None:  # the step was under way when the telling began, or it has ended
            return
        try:
            self._tell(replace(record, landed=time.perf_counter()))
        except Exception as error:  # the loop must go on
            self.fault = error
