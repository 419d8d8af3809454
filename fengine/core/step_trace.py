"""`StepRecord`: what one step of the scheduler was, as plain data that changes no more. No torch."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fengine.core.request import Request, Status
from fengine.core.scheduler import Scheduler
from fengine.core.scheduler_output import Plan


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


class StepTeller:
    """A `Watcher` that tells `tell` of every step when it has landed. What `tell` raises ends the telling: see `fault`.

    Modifies: itself.
    """

    def __init__(self, scheduler: Scheduler, tell: Callable[[StepRecord], None]) -> None:
        self.fault: Exception | None = None
        self._scheduler, self._tell = scheduler, tell
        self._planned: dict[int, dict[str, Any]] = {}  # by step, the fields that are known at launch
        self._holding: dict[str, Request] = {}  # those that had pages when last seen
        self._told: dict[str, int] = {}  # and how many

    def planned(self, plan: Plan) -> None:
        page_size, requests = self._scheduler._rows.page_size, plan.requests
        counters = self._scheduler.counters()
        released = tuple(rid for rid, request in self._holding.items() if request.status is not Status.RUNNING)
        for rid in released:
            del self._holding[rid], self._told[rid]
        drafted = {i: len(draft) for i, draft in plan.drafts}
        starts = {id(r): start for r, start in zip(requests, plan.starts, strict=True)}
        self._planned[plan.step] = {
            "step": plan.step,
            "launched": time.perf_counter(),
            "rids": tuple(r.rid for r in requests),
            "starts": tuple(plan.starts),
            "counts": tuple(plan.counts),
            "decodes": tuple(map(_decodes, requests, plan.starts, plan.counts)),
            "new_pages": tuple(
                NewPages(r.rid, first, 0 if first else starts[id(r)] // page_size, tuple(r.pages[first:]))
                for r, first in plan.new_pages
            ),
            "drafted": tuple(drafted.get(i, 0) for i in range(len(requests))) if drafted else (),
            "shrunk": self._shrunk({r.rid: first for r, first in plan.new_pages}),
            "preempted": tuple(r.rid for r in plan.preempted),
            "released": released,
            "running": counters["running"],
            "waiting": counters["waiting"],
            "held": counters["used_pages"],
            "cached": counters["pages"] - counters["used_pages"] - counters["free_pages"],
            "pages": counters["pages"],
        }
        self._holding.update((r.rid, r) for r, _ in plan.new_pages)
        self._told.update((rid, len(r.pages)) for rid, r in self._holding.items())

    def _shrunk(self, first_new: dict[str, int]) -> tuple[tuple[str, int], ...]:
        """Who has fewer pages than was told, and keeps how many, before new ones came."""
        kept = {rid: first_new.get(rid, len(r.pages)) for rid, r in self._holding.items()}
        return tuple((rid, count) for rid, count in kept.items() if count < self._told[rid])

    def landed(self, plan: Plan) -> None:
        fields = self._planned.pop(plan.step, None)
        if fields is None or self.fault is not None:  # the step was under way when the telling began, or it has ended
            return
        try:
            self._tell(StepRecord(**fields, landed=time.perf_counter()))
        except Exception as error:  # the loop must go on
            self.fault = error


def _decodes(request: Request, start: int, count: int) -> bool:
    """Whether a chunk begins behind the prompt and reaches the newest token that is known."""
    return start >= request.prompt_len and start + count >= len(request.token_ids)
