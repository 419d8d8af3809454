"""`WaitingQueue`: requests that wait, and their order; `Admission`: which of them begin to run in a step. No torch.

FCFS admits by arrival. The others rank the LPM_WINDOW oldest, arrival breaking ties: LPM by the longest cached prefix,
shortest_prefill_first by the fewest tokens that are not cached, LOF by the longest output that may come, and random by
a number that only the arrival decides. They starve nobody: after LPM_PATIENCE admissions in front of the oldest new
request, that one goes first. Preempted requests come before new ones under all. Priorities go before any policy: the
highest first, and a low one waits as long as there are higher ones."""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import nsmallest
from itertools import islice, takewhile

from fengine.config import Policy
from fengine.core.images import ImageRows, uncut
from fengine.core.prefix_cache import PrefixCache
from fengine.core.request import Request
from fengine.core.running import Rows
from fengine.core.scheduler_output import SchedulerOutput
from fengine.errors import QueueFullError

LPM_WINDOW = 32
LPM_PATIENCE = 32


class WaitingQueue:
    """Preempted requests, then new ones, each in order of arrival. Modifies: only itself."""

    __slots__ = ("policy", "cache", "most", "_requests", "overtaken", "_ranked")

    def __init__(self, policy: Policy, cache: PrefixCache | None, most: int | None = None) -> None:
        """`most`: so many may wait beyond those that have a row to come to; None: all."""
        self.policy, self.cache, self.most = policy, cache, most
        self._requests: OrderedDict[str, Request] = OrderedDict()
        self.overtaken = 0  # admissions in front of the oldest new request
        self._ranked = 0  # waiting requests with a priority

    def __len__(self) -> int:
        return len(self._requests)

    def requests(self) -> list[Request]:
        return list(self._requests.values())

    def check_room(self, free_rows: int) -> None:
        """Errors: QueueFullError if no request more may wait."""
        if self.most is not None and len(self) >= self.most + free_rows:
            raise QueueFullError(
                f"The request queue is full: {len(self)} requests wait, and max_queued_requests is {self.most}. "
                "Try again later."
            )

    def add(self, request: Request) -> None:
        self._requests[request.rid] = request
        self._ranked += request.priority != 0

    def put_back(self, request: Request) -> None:
        """A preempted request goes to the front, in order of arrival. Victims are the latest that run: before them come
        only those that wait for the slot of an adapter."""
        waiting = self._requests.values()
        earlier = list(takewhile(lambda r: r.num_preempted > 0 and r.arrival < request.arrival, waiting))
        self.add(request)
        for first in (request, *reversed(earlier)):
            self._requests.move_to_end(first.rid, last=False)

    def remove(self, request: Request) -> None:
        """The request has ended."""
        self._ranked -= request.priority != 0
        del self._requests[request.rid]

    def admit(self, request: Request) -> None:
        """Removes a request that starts to run."""
        if request.num_preempted == 0:
            self.overtaken = 0 if request is next(iter(self._requests.values())) else self.overtaken + 1
        self.remove(request)

    def candidates(self, count: int) -> list[Request]:
        """Up to `count` requests in the order in which they should be admitted now. Without priorities, policies beyond
        fcfs look at the LPM_WINDOW oldest only. Pure."""
        waiting = self._requests.values()
        if self._ranked:  # preempted requests, then the new ones by priority; arrival breaks ties, whatever the policy
            return nsmallest(count, waiting, key=lambda r: (False, 0) if r.num_preempted else (True, -r.priority))
        if self.policy is Policy.fcfs:
            return list(islice(waiting, count))
        window = list(islice(waiting, LPM_WINDOW))
        first = next((i for i, request in enumerate(window) if request.num_preempted == 0), len(window))
        if self.overtaken >= LPM_PATIENCE:
            first += 1
        return (window[:first] + sorted(window[first:], key=self._rank))[:count]  # stable: ties by arrival

    def _rank(self, request: Request) -> int:
        """Under a policy beyond fcfs the least goes first."""
        if self.policy is Policy.random:
            return hash((0x9E3779B9, request.arrival))  # of whole numbers: the same in every process
        if self.policy is Policy.lof:
            return -request.max_new_tokens
        known = len(request.token_ids)
        hit = 0 if self.cache is None else self.cache.match_length(request.token_ids, known - 1, request.salts)
        return -hit if self.policy is Policy.lpm else known - hit


class Admission:
    """Modifies: itself, rows and queue with their requests, `images`."""

    def __init__(self, rows: Rows, waiting: WaitingQueue, images: ImageRows | None, whole_prompts: bool) -> None:
        """`whole_prompts`: each takes one step. `images`: of a model that takes images."""
        self.rows, self.waiting, self.images, self.whole_prompts = rows, waiting, images, whole_prompts
        self.blocked = False  # the next to admit found too few pages, and nothing has changed since

    def admit(self, output: SchedulerOutput, left: int) -> None:
        """Starts waiting requests until budget, row slots or pages run out. Never preempts."""
        if self.blocked or not self.waiting or not self.rows.num_free:
            return
        if self.images is not None:
            candidates = self.waiting.candidates(self.rows.num_free)
            self.images.plan(candidates, self.waiting.requests(), not self.rows.num_running)
        for request in self._admissible():
            if not left or (self.whole_prompts and len(request.token_ids) > left):
                return
            if not (count := self._start(output, request, left)):
                return
            left -= count

    def _admissible(self) -> Iterator[Request]:
        """Without those that do not fit when it is their turn: a LoRA adapter has no slot, or an image is not encoded.
        After LPM_PATIENCE admissions in front of the oldest new request nobody goes before one that does not fit: the
        slot that becomes idle next is for it."""
        passed = False  # somebody who does not fit
        for request in self.waiting.candidates(self.rows.num_free):
            ready = not request.images or (self.images is not None and self.images.ready(request.rid))
            fits = ready and (request.adapter is None or self.rows.adapters.fits(request.adapter))
            passed = passed or not fits
            if passed and self.waiting.overtaken >= LPM_PATIENCE:
                return
            if fits:
                yield request

    def _start(self, output: SchedulerOutput, request: Request, left: int) -> int:
        """Admits a request with its first chunk. Returns the tokens of the chunk, 0 if there are too few pages, or too
        little is left of the step for the image that it begins with. Modifies: `blocked`.

        Pages must suffice for all its known tokens and for the reserve of those that run, or it might be preempted at
        once. When nothing runs, every page is free or idle, and `add` has made sure that it fits."""
        rows, pool, known = self.rows, self.rows.pool, len(request.token_ids)
        pages = rows.hit(request)
        start = len(pages) * rows.page_size
        self.blocked = not rows.admits(rows.pages_for(known) - len(pages))  # none goes in its place, or pages might
        cut = bool(request.images) and not uncut(request.images, start, min(known - start, left))
        if self.blocked or cut:  # never suffice for a large one
            pool.release(pages, pool.window_start(start))
            return 0
        self.waiting.admit(request)
        output.adapters += rows.enter(request, pages)
        count = min(known - start, left, pool.room * rows.page_size)
        if request.images and self.images is not None:
            request.placed = self.images.placed(request.images)
            count = uncut(request.images, start, count)
        rows.compute(output, request, count)
        return count
