"""Parts of a scheduler that know by themselves what they should answer, more slowly: order, patience, slots, pages."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from fengine.config import Policy
from fengine.core import admission
from fengine.core.admission import WaitingQueue
from fengine.core.images import ImageRows, ImageSpan
from fengine.core.kv_pages import PagePool
from fengine.core.lora_slots import AdapterSlots
from fengine.core.prefix_cache import PrefixCache, Reached, Salts
from fengine.core.request import Adapter, Request
from fengine.core.running import Rows
from fengine.core.scheduler_output import SchedulerOutput
from fengine.core.window_pages import WindowPages
from fengine.errors import InvariantError


def path_of(cache: PrefixCache, token_ids: Sequence[int], salts: Salts | None, pages: int) -> list[Any]:
    """The nodes of the first pages of some tokens, as far as there are any."""
    nodes, node, size = [], cache._root, cache.page_size
    for page in range(min(pages, len(token_ids) // size)):
        tokens: tuple[Hashable, ...] = tuple(token_ids[page * size : page * size + size])
        if salts and page in salts:
            tokens = (salts[page], *tokens)
        if (node := node.children.get(tokens)) is None:
            break
        nodes.append(node)
    return nodes


def usable(pool: PagePool, pages: Sequence[int], page_size: int) -> int:
    """The most pages behind which a token finds all that its window reaches."""
    if not isinstance(pool, WindowPages):
        return len(pages)
    counts = range(len(pages), 0, -1)
    held = (n for n in counts if all(pool.window_of[page] for page in pages[pool.window_start(n * page_size) : n]))
    return next(held, 0)


def check_shared(cache: PrefixCache, request: Request, pages: Sequence[int], full: int) -> None:
    """The first `full` pages can be hit, unless behind a page of the same tokens that another request computed."""
    nodes = path_of(cache, request.token_ids, request.salts, full)
    mine = all(node.page == page for node, page in zip(nodes, pages, strict=False))
    if len(nodes) < full and (mine or not cache.pool.num_holders(pages[len(nodes)])):
        raise InvariantError(f"{len(nodes)} pages of {request.rid!r} are cached, not {full}")


class CheckedCache(PrefixCache):
    """Evicts the pages that were used longest ago, and finds what it has said that it would."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.known: Any = None  # what was seen of it last
        self.moments: dict[Any, int] = {}  # when each node was last the end of a path that was used
        self.clock = 0

    def match(self, token_ids: Sequence[int], limit: int, salts: Salts | None = None) -> list[int]:
        nodes = path_of(self, token_ids, salts, limit // self.page_size)
        nodes = nodes[: usable(self.pool, [node.page for node in nodes], self.page_size)]
        pages = super().match(token_ids, limit, salts)
        if pages != [node.page for node in nodes]:
            raise InvariantError(f"{pages} are hit, not {[node.page for node in nodes]}")
        self._note(nodes[-1:])
        return pages

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[int], leaving: bool = False, salts: Salts | None = None,
        after: Reached | None = None,
    ) -> Reached:  # fmt: skip
        known = 0 if after is None or after[0].parent is None else after[1]
        reached = super().insert(token_ids, pages, leaving, salts, after)
        self._note([reached[0]])
        pool, node = self.pool, reached[0]
        if isinstance(pool, WindowPages) and reached[1] > known:
            own, above = pages[reached[1] - 1], path_of(self, token_ids, salts, reached[1] - 1)
            mine = all(node.page == page for node, page in zip(above, pages, strict=False))
            if mine and pool.window_of[own] and not pool.window_of[node.page] and pool.num_holders(node.page) == 1:
                raise InvariantError(f"the cache keeps page {node.page}, whose window is gone, and not {own}")
        return reached

    def _note(self, nodes: Sequence[Any]) -> None:
        for node in nodes:
            self.clock += 1
            self.moments[node] = self.clock

    def evict(self, count: int) -> int:
        leaves = [node for *_, node in self._heap if node.parent is not None and not node.children]  # all of them
        idle, nodes = self.pool.num_idle, self.num_pages
        evicted = super().evict(count)
        if evicted != min(count, idle) or self.num_pages != nodes - evicted:
            raise InvariantError(f"{evicted} pages are evicted of {idle} idle ones, asked for {count}")
        used = {node: self.moments.get(node, 0) for node in leaves}
        gone = max((used[node] for node in leaves if node.parent is None), default=0)
        if any(node.parent is not None and self.pool.num_holders(node.page) == 1 and used[node] < gone
               for node in leaves):  # fmt: skip
            raise InvariantError("a page was evicted that was used later than one that stays")
        self._note([node for node in leaves if self.pool.num_holders(node.page) > 1])
        return evicted


class CheckedRows(Rows):
    """What it computes, and what it leaves, can be hit."""

    __slots__ = ()

    def enter(self, request: Request, pages: list[int]) -> list[tuple[int, int]]:
        lowest = min(self._free)
        found = super().enter(request, pages)
        if request.row != lowest:
            raise InvariantError(f"{request.rid!r} gets row slot {request.row} while {lowest} is free")
        return found

    def hit(self, request: Request) -> list[int]:
        pages = super().hit(request)
        if self.cache is not None and request.params.bare:  # nothing but the last token must be computed
            most = (len(request.token_ids) - 1) // self.page_size
            nodes = path_of(self.cache, request.token_ids, request.salts, most)
            if len(pages) != usable(self.pool, [node.page for node in nodes], self.page_size):
                raise InvariantError(f"{request.rid!r} hits {len(pages)} pages where {len(nodes)} are cached")
        return pages

    def compute(self, output: SchedulerOutput, request: Request, count: int) -> None:
        start = request.num_computed
        super().compute(output, request, count)
        if self.cache is not None and (full := request.num_computed // self.page_size) > start // self.page_size:
            check_shared(self.cache, request, request.pages, full)

    def leave(self, request: Request) -> None:
        pages, memo = request.pages, request.drafting
        full = min(request.num_computed, len(request.token_ids)) // self.page_size
        super().leave(request)
        if self.cache is not None:
            check_shared(self.cache, request, pages, full)
        if memo is not None and memo.memo is not None:
            raise InvariantError(f"what proposers know of {request.rid!r} is kept")


class CheckedQueue(WaitingQueue):
    """Who goes first under a policy, and for how long others may go before somebody."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.before = 0  # admissions in front of who waits longest
        self.told: list[Request] = []

    def candidates(self, count: int) -> list[Request]:
        self.told = super().candidates(count)
        if self.told != (expected := self.expected(count)):
            raise InvariantError(f"{[r.rid for r in self.told]} are to be admitted, not {[r.rid for r in expected]}")
        return self.told

    def expected(self, count: int) -> list[Request]:
        """Who is to be admitted now. Pure."""
        waiting = self.requests()
        again = sorted((r for r in waiting if r.num_preempted), key=lambda r: r.arrival)
        new = sorted((r for r in waiting if not r.num_preempted), key=lambda r: r.arrival)
        if any(request.priority for request in waiting):
            new.sort(key=lambda r: -r.priority)
        elif self.policy is not Policy.fcfs:
            window = max(admission.LPM_WINDOW - len(again), 0)
            oldest = 1 if self.before >= admission.LPM_PATIENCE else 0
            ranks = {
                Policy.lpm: lambda r: -self._hit(r),
                Policy.lof: lambda r: -r.max_new_tokens,
                Policy.random: lambda r: hash((0x9E3779B9, r.arrival)),
                Policy.shortest_prefill_first: lambda r: len(r.token_ids) - self._hit(r),
            }
            new = new[:oldest] + sorted(new[oldest:window], key=ranks[self.policy])
            new, again = new[:window], again[: admission.LPM_WINDOW]
        return (again + new)[:count]

    def _hit(self, request: Request) -> int:
        if self.cache is None:
            return 0
        cache, size = self.cache, self.cache.page_size
        nodes = path_of(cache, request.token_ids, request.salts, (len(request.token_ids) - 1) // size)
        return usable(cache.pool, [node.page for node in nodes], size) * size

    def admit(self, request: Request) -> None:
        at = self.told.index(request)
        unfit = [other.rid for other in self.told[:at] if other.rid in self._requests]
        if unfit and self.before >= admission.LPM_PATIENCE:
            raise InvariantError(f"{request.rid!r} goes before {unfit}, which have waited long enough")
        if not request.num_preempted:
            self.before = 0 if request is next(iter(self._requests.values())) else self.before + 1
        super().admit(request)


class CheckedSlots(AdapterSlots):
    """Which adapter lies where: the slot that was used longest ago is given away, a pinned one never."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.held: list[tuple[Adapter | None, int, int]] = [(None, 0, 0)] * count  # adapter, users, last use
        self.clock = 0

    def _use(self, index: int, adapter: Adapter | None, users: int) -> None:
        self.clock += 1
        self.held[index] = adapter, users, self.clock

    def _possible(self, adapter: Adapter) -> list[int]:
        own = [i for i, held in enumerate(self.held) if held[0] is adapter]
        free = [i for i, (other, users, _) in enumerate(self.held) if not users and not (other and other.pinned)]
        return own or sorted(free, key=lambda i: self.held[i][2])[:1]

    def fits(self, adapter: Adapter) -> bool:
        found = super().fits(adapter)
        if found != bool(self._possible(adapter)):
            raise InvariantError(f"adapter {adapter.name!r} is said to fit: {found}")
        return found

    def enter(self, adapter: Adapter) -> tuple[int, bool]:
        expected = self._possible(adapter)
        index, new = super().enter(adapter)
        if [index] != expected or new != (self.held[index][0] is not adapter):
            raise InvariantError(f"adapter {adapter.name!r} gets slot {index}, not {expected}")
        self._use(index, adapter, self.held[index][1] + 1)
        return index, new

    def leave(self, index: int) -> None:
        super().leave(index)
        self._use(index, self.held[index][0], self.held[index][1] - 1)


class CheckedWindows(WindowPages):
    """The window page that nobody has seen for longest is given up first."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.moments: dict[int, int] = {}  # when nobody saw a page any more
        self.clock = 0

    def unsee(self, pages: Iterable[int]) -> None:
        pages = list(pages)
        super().unsee(pages)
        for page in pages:
            if not self._seers[page]:
                self.clock += 1
                self.moments[page] = self.clock

    def allocate(self, count: int) -> list[int] | None:
        idle = [page for page in range(self.num_pages) if self.window_of[page] and not self._seers[page]]
        found = super().allocate(count)
        gone = max((self.moments[page] for page in idle if not self.window_of[page]), default=0)
        if any(self.window_of[page] and not self._seers[page] and self.moments[page] < gone for page in idle):
            raise InvariantError("a window page is given up before one that was left behind earlier")
        return found


class CheckedImages(ImageRows):
    """What is encoded stays as long as there is room, that used longest ago goes first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.moments: dict[bytes, int] = {}
        self.clock = 0

    def leave(self, rid: str) -> None:
        keys = self._holders.get(rid, ())
        super().leave(rid)
        for key in keys:
            self.clock += 1
            self.moments[key] = self.clock if self._entries[key].encoded else 0

    def enter(self, rid: str, spans: Any) -> bool:
        spans = tuple(spans)
        before = {key: entry.users for key, entry in self._entries.items()}
        own = {image.key: image.tokens for _, image in spans}
        need = sum(tokens for key, tokens in own.items() if key not in before)
        room = len(self._free) + sum(
            len(entry.rows) for key, entry in self._entries.items() if not entry.users and key not in own
        )
        known = rid in self._holders
        entered = super().enter(rid, spans)
        if entered != (known or need <= room):
            raise InvariantError(f"{rid!r} enters with {need} rows where there are {room}: {entered}")
        gone = [self.moments.get(key, 0) for key in before if key not in self._entries]
        idle = [key for key, users in before.items() if not users and key not in own and key in self._entries]
        if gone and any(self.moments.get(key, 0) < max(gone) for key in idle):
            raise InvariantError("the embeddings of an image go before those of one used longer ago")
        return entered

    def plan(self, candidates: Any, waiting: Any, whole: bool) -> None:
        before, candidates = sum(encode.image.patches for encode in self.planned), list(candidates)
        first = next((r for r in candidates if r.images and not self.ready(r.rid)), None)
        together = self._of(first.images) if whole and first is not None else 0
        super().plan(candidates, waiting, whole)
        patches = [encode.image.patches for encode in self.planned]
        if sum(patches) > max(self.budget, *patches[:1], before + together) and len(patches) > 1:
            raise InvariantError(f"images of {patches} patches are encoded at once, more than {self.budget}")
        self._check_stop(candidates, list(waiting), self.budget - sum(patches))

    def _check_stop(self, candidates: list[Request], waiting: list[Request], left: int) -> None:
        """It ends where the budget does, or where there are no rows though nobody later has any."""
        served: set[str] = set()
        for request in candidates:
            served.add(request.rid)
            if request.images and request.rid not in self._holders:
                if any(other.rid in self._holders for other in waiting if other.rid not in served):
                    raise InvariantError(f"{request.rid!r} waits for rows that a later request has")
                return
            if lacking := self.lacking(request.images) if request.images else []:
                if left >= lacking[0].patches:
                    raise InvariantError(f"an image of {request.rid!r} is not encoded though {left} patches are left")
                return

    @staticmethod
    def _of(spans: Sequence[ImageSpan]) -> int:
        return sum({span.image.key: span.image.patches for span in spans}.values())


def checked(scheduler: Any, slots: int) -> CheckedQueue:
    """Puts them in their places."""
    rows = scheduler._rows
    rows.__class__ = CheckedRows
    rows.adapters = CheckedSlots(slots)
    queue = CheckedQueue(scheduler._waiting.policy, scheduler.cache, scheduler._waiting.most)
    scheduler._waiting = scheduler._admission.waiting = queue
    return queue
