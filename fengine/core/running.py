"""`Rows`: the requests that run, with their row slots and pages. No torch.

    prompting   known tokens are still to be computed: the prompt, or after a preemption everything
    decoding    one token is to be computed, the one drawn last (which may still be pending)
    draining    everything asked for is planned; ends at the next update

The first are in order of arrival. The second begin with the longest: a device attends to rows in their order, and long
ones at the end would leave it idle around them. As all grow alike, the order stays from step to step, and is made anew
behind drafts. Rows that wait for each of their tokens fall behind, and keep their places.

A row has exactly the pages for its `num_computed` tokens, no more: so a decoding row needs a page when
`num_computed % page_size == 0`. Drafts in flight have pages besides, until their step is read."""

from bisect import bisect_left, insort
from heapq import heappop, heappush
from operator import attrgetter

from fengine.core.images import ImageRows
from fengine.core.kv_pages import PagePool
from fengine.core.lora_slots import AdapterSlots
from fengine.core.prefix_cache import PrefixCache
from fengine.core.request import FinishReason, Request, Status
from fengine.core.scheduler_output import SchedulerOutput
from fengine.errors import CapacityError, InvariantError

arrival_of = attrgetter("arrival")


def shortness(request: Request) -> int:
    return -request.num_computed


class Rows:
    """Modifies: itself, its requests, `pool` and `cache`."""

    __slots__ = ("pool", "cache", "page_size", "capacity", "prompting", "decoding", "draining", "num_lockstep",
                 "num_drafts", "num_correct_drafts", "num_hit_tokens", "num_preemptions", "adapters", "released",
                 "grown", "_free")  # fmt: skip

    def __init__(
        self, pool: PagePool, cache: PrefixCache | None, page_size: int, capacity: int, adapter_slots: int = 0
    ) -> None:
        self.pool, self.cache, self.page_size, self.capacity = pool, cache, page_size, capacity
        self.prompting: list[Request] = []
        self.decoding: list[Request] = []
        self.draining: dict[str, Request] = {}
        self.num_lockstep = 0  # running rows that wait for each of their tokens
        self.num_drafts = self.num_correct_drafts = 0  # computed and read so far
        self.num_hit_tokens = self.num_preemptions = 0
        self.adapters = AdapterSlots(adapter_slots)
        self.released: list[int] = []  # row slots given back since the last step was scheduled
        self.grown: dict[Request, int] = {}  # those with new pages since then, and the first of these
        self._free = list(range(capacity))  # a heap: the lowest free row slot is given out

    @property
    def num_running(self) -> int:
        return self.capacity - len(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def counters(self) -> dict[str, int]:
        return self.pool.gauges() | {
            "running": self.num_running,
            "cached_pages": 0 if self.cache is None else self.cache.num_pages,
            "hit_tokens": self.num_hit_tokens,
            "preemptions": self.num_preemptions,
            "drafts": self.num_drafts,
            "correct_drafts": self.num_correct_drafts,
        }

    def hit(self, request: Request) -> list[int]:
        """The pages of the longest cached prefix that a waiting request may use; it becomes a holder of them."""
        if self.cache is None:
            return []
        most = min(len(request.token_ids) - 1, prefix_limit(request))  # the last token's logits are needed
        return self.cache.match(request.token_ids, most, request.salts)

    def share(self, request: Request, start: int) -> None:
        """Puts the pages that its tokens from `start` on have filled into the prefix cache."""
        full = request.num_computed // self.page_size
        if self.cache is not None and full > start // self.page_size:
            pages, salts = request.pages[:full], request.salts
            request.reached = self.cache.insert(request.token_ids, pages, salts=salts, after=request.reached)

    def check_fits(
        self, request: Request, step_tokens: int, whole_prompts: bool = False, images: ImageRows | None = None
    ) -> None:
        """Errors: CapacityError if it could never run. `whole_prompts`: a step computes all of a prompt."""
        if images is not None and (need := images.need(request.images)) > images.capacity:
            raise CapacityError(
                f"request {request.rid!r} has images of {need} tokens, but {images.capacity} embeddings of images fit "
                "at once: send fewer or smaller images, or raise multimodal.cache_mib"
            )
        need, capacity = self.pages_for(request.full), self.pool.capacity
        if need > capacity:
            raise CapacityError(
                f"request {request.rid!r} needs {need} pages of {self.page_size} tokens for {request.prompt_len} "
                f"prompt tokens and max_new_tokens={request.max_new_tokens}, but the pool has {capacity}: "
                "shorten it, or raise max_total_tokens"
            )
        together = [span.image.tokens for span in request.images if span.image.bidirectional]
        most = max([request.prompt_len] * whole_prompts + together, default=0)
        if most > step_tokens:
            raise CapacityError(
                f"request {request.rid!r} has {most} tokens, which see each other and so need one step, but "
                f"max_step_tokens is {step_tokens}: shorten it, or raise max_step_tokens"
            )

    def admits(self, need: int) -> bool:
        """Whether a newcomer that needs so many pages leaves what admitted prompts will take, and one to each row."""
        return not self.num_running or self.pool.fits(need, self._dues(), self.num_running)

    def spare(self) -> int:
        """Pages beyond those that a newcomer must leave."""
        return max(self.pool.spare(self._dues(), self.num_running), 0)

    def _dues(self) -> list[int]:
        return [self.pages_for(len(request.token_ids)) - len(request.pages) for request in self.prompting]

    def enter(self, request: Request, pages: list[int]) -> list[tuple[int, int]]:
        """Gives a waiting request a row slot, its adapter's slot, and the pages of its prefix hit, which it holds
        already. Returns the adapter's slot and number if it must be written there first."""
        request.status, request.row = Status.RUNNING, heappop(self._free)
        self.num_lockstep += is_lockstep(request)
        request.pages, request.num_computed = pages, len(pages) * self.page_size
        request.window_start = self.pool.window_start(request.num_computed)
        self.num_hit_tokens += request.num_computed
        if not request.num_preempted:
            request.num_cached = request.num_computed
        self.grown[request] = 0
        insort(self.prompting, request, key=arrival_of)
        if request.adapter is None:
            return []
        request.adapter_slot, new = self.adapters.enter(request.adapter)
        return [(request.adapter_slot, request.adapter.number)] if new else []

    def tell_new(self, output: SchedulerOutput) -> None:
        """The rows and pages that are new in a step. Modifies: itself, output."""
        for request, first in self.grown.items():
            if first == 0:
                output.new_rows.append(request.as_told())
            output.new_pages.append((request.slot, first, *self.pool.in_tables(request.pages[first:])))
        self.grown.clear()

    def leave_behind(self, request: Request) -> bool:
        """Gives up what the windows of a planned or later token do not reach. Returns whether there was any."""
        first = self.pool.window_start(request.num_computed - 1)
        if first <= request.window_start:
            return False
        self.pool.unsee(request.pages[request.window_start : first])
        request.window_start = first
        return True

    def grow(self, request: Request, tokens: int) -> None:
        """Pages for `tokens` in all, which must be available; evicts cached ones where free ones are missing."""
        count = self.pages_for(tokens) - len(request.pages)
        short = count - self.pool.num_free
        if short > 0 and self.cache is not None:
            self.cache.evict(short)
        pages = self.pool.allocate(count)
        if pages is None:
            raise InvariantError(f"{count} pages were promised, but {self.pool.num_free} are free after eviction")
        if pages:
            self.grown.setdefault(request, len(request.pages))
            request.pages += pages

    def compute(self, output: SchedulerOutput, request: Request, count: int) -> None:
        """Plans `count` tokens of a running prompt, for which pages are available."""
        start = request.num_computed
        end = start + count
        self.grow(request, end)
        sample = end == len(request.token_ids)
        output.put_in(request, start, count, sample)
        request.num_computed = end
        if sample:
            request.num_pending += 1
            self.move(request)
        self.share(request, start)

    def shrink(self, request: Request) -> None:
        """Gives the pages behind `num_computed` tokens back: those of drafts that were not drawn."""
        keep = self.pages_for(request.num_computed)
        self.pool.release(request.pages[keep:])
        del request.pages[keep:]

    def move(self, request: Request) -> None:
        """Puts a request that has planned its last known token where it belongs: decoding, or draining."""
        if draws_last(request):
            self._take_out(request)
            self.draining[request.rid] = request
        elif _remove(self.prompting, request):
            insort(self.decoding, request, key=shortness)

    def latest(self) -> Request:
        """The latest arrival among the rows that still need pages."""
        return max(self.prompting[-1:] + self.decoding, key=arrival_of)

    def leave(self, request: Request) -> None:
        """Gives row slot and pages back. The full pages of known tokens go to the prefix cache first."""
        if self.cache is not None:
            full = min(request.num_computed, len(request.token_ids)) // self.page_size
            self.cache.insert(request.token_ids, request.pages[:full], True, request.salts, request.reached)
        self.pool.release(request.pages, request.window_start)
        if request.row is not None:
            heappush(self._free, request.row)
            self.released.append(request.row)
            self.num_lockstep -= is_lockstep(request)
        if request.adapter_slot is not None:
            self.adapters.leave(request.adapter_slot)
        self._take_out(request)
        self.grown.pop(request, None)
        request.row, request.adapter_slot, request.pages, request.num_computed = None, None, [], 0
        request.reached = None
        if request.drafting is not None:
            request.drafting.memo = None  # as large as the tokens

    def preempt(self, request: Request) -> None:
        """As `leave`; it waits again, to be computed again from its tokens."""
        self.leave(request)
        request.status = Status.WAITING
        request.num_preempted += 1
        self.num_preemptions += 1

    def _take_out(self, request: Request) -> None:
        if self.draining.pop(request.rid, None) is None and not _remove(self.prompting, request):
            self.decoding.remove(request)


def draws_last(request: Request) -> bool:
    """Whether the token drawn after `num_computed` tokens is the last that was asked for."""
    return request.num_computed + 1 >= request.full


def is_lockstep(request: Request) -> bool:
    """Whether the row's next step needs on the host what its last one draws."""
    drafting = request.drafting
    return (drafting is not None and drafting.in_flight > 0) or request.params.lockstep


def prefix_limit(request: Request) -> int:
    """How many tokens may come from the prefix cache, for what it still needs to see computed. Pure."""
    due = request.first_needed
    return due if due < request.prompt_len else len(request.token_ids)


def verdict(request: Request, fault: str | None) -> tuple[FinishReason, bool]:
    """How a request ends by its last token, and whether the KV in its pages is sound. Modifies: the request. The token
    is taken back where it is none, or where only the prompt's KV was asked for. `fault`: what the request's own
    processor or grammar did wrong."""
    token, logprob = request.token_ids[-1], request.logprobs[-1]
    if logprob != logprob or request.max_new_tokens == 0:
        del request.token_ids[-1], request.logprobs[-1]
    if logprob != logprob:
        message = f"non-finite logits at position {len(request.token_ids)}; dtype=float32 may help"
        return {"type": "abort", "message": message if fault is None else fault}, fault is not None
    if request.max_new_tokens == 0:
        if request.params.pool is None:
            request.unasked = (logprob, token)
        return {"type": "length", "length": 0}, True
    if token in request.stop_ids:
        return {"type": "stop", "matched": token}, True
    return {"type": "length", "length": request.num_output}, True


def _remove(ordered: list[Request], request: Request) -> bool:
    """Removes a request from a list in order of arrival. False if it is not there."""
    i = bisect_left(ordered, request.arrival, key=arrival_of)
    if i == len(ordered) or ordered[i] is not request:
        return False
    del ordered[i]
    return True
