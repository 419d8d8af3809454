"""`WaitingQueue`: requests that wait to be admitted, and the order in which they are. No torch.

FCFS admits by arrival. LPM admits the longest cached prefix first, arrival breaking ties, among the LPM_WINDOW oldest;
it starves nobody: after LPM_PATIENCE admissions in front of the oldest new request, that one goes first.
Preempted requests come before new ones under both. Priorities go before either policy: the highest first, and a low one
waits as long as there are higher ones.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import nsmallest
from itertools import islice

from fengine.config import Policy
from fengine.core.prefix_cache import PrefixCache
from fengine.core.request import Request
from fengine.errors import QueueFullError

LPM_WINDOW = 32
LPM_PATIENCE = 32


class WaitingQueue:
    """Preempted requests, then new ones, each in order of arrival. Modifies: only itself."""

    __slots__ = ("policy", "cache", "most", "_requests", "_overtaken", "_ranked")

    def __init__(self, policy: Policy, cache: PrefixCache | None, most: int | None = None) -> None:
        """`most`: so many may wait beyond those that have a row to come to; None: all."""
        self.policy, self.cache, self.most = policy, cache, most
        self._requests: OrderedDict[str, Request] = OrderedDict()
        self._overtaken = 0  # admissions in front of the oldest new request
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
        """A preempted request goes to the front. Victims are the latest that run, so the front stays in order."""
        self.add(request)
        self._requests.move_to_end(request.rid, last=False)

    def remove(self, request: Request) -> None:
        """The request has ended."""
        self._ranked -= request.priority != 0
        del self._requests[request.rid]

    def admit(self, request: Request) -> None:
        """Removes a request that starts to run."""
        if request.num_preempted == 0:
            self._overtaken = 0 if request is next(iter(self._requests.values())) else self._overtaken + 1
        self.remove(request)

    def admissible(self, count: int, fits: Callable[[Request], bool]) -> Iterator[Request]:
        """`candidates`, without those that do not fit when it is their turn: a LoRA adapter has no slot, or an image is
        not encoded.

        After LPM_PATIENCE admissions in front of the oldest new request nobody goes before one that does not fit: the
        slot that becomes idle next is for it.
        """
        for request in self.candidates(count):
            if fits(request):
                yield request
            elif self._overtaken >= LPM_PATIENCE:
                return

    def candidates(self, count: int) -> list[Request]:
        """Up to `count` requests (LPM: and up to LPM_WINDOW) in the order in which they should be admitted now."""
        cache, waiting = self.cache, self._requests.values()
        if self._ranked:
            return self._by_priority(count)
        if self.policy is Policy.fcfs or cache is None:
            return list(islice(waiting, count))
        window = list(islice(waiting, LPM_WINDOW))
        first = next((i for i, request in enumerate(window) if request.num_preempted == 0), len(window))
        if self._overtaken >= LPM_PATIENCE:
            first += 1
        hits = {r.rid: cache.match_length(r.token_ids, len(r.token_ids) - 1, r.salts) for r in window[first:]}
        ranked = sorted(window[first:], key=lambda request: hits[request.rid], reverse=True)  # stable: ties by arrival
        return (window[:first] + ranked)[:count]

    def _by_priority(self, count: int) -> list[Request]:
        """Preempted requests, then the new ones by priority; arrival breaks ties, whatever the policy."""
        return nsmallest(
            count, self._requests.values(), key=lambda r: (False, 0) if r.num_preempted else (True, -r.priority)
        )
