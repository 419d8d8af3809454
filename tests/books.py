"""Whether the books of the host column balance: pages, prefix cache, adapter slots, rows, queues. O(pool).

Each check walks everything, privates included, and raises InvariantError with what is off.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fengine.core.kv_pages import PagePool
from fengine.core.lora_slots import AdapterSlots
from fengine.core.prefix_cache import PrefixCache
from fengine.core.request import Adapter, Request, Status
from fengine.core.running import Rows, is_lockstep
from fengine.core.scheduler import Scheduler
from fengine.core.window_pages import WindowPages
from fengine.errors import InvariantError


def check_scheduler(scheduler: Scheduler) -> None:
    rows, waiting = scheduler._rows, scheduler._waiting.requests()
    if len(scheduler._requests) != rows.num_running + len(waiting):
        raise InvariantError(f"{len(scheduler._requests)} requests, {rows.num_running} run, {len(waiting)} wait")
    if (decoding := len(rows.decoding)) > scheduler.max_step_tokens:
        raise InvariantError(f"{decoding} rows decode, more than max_step_tokens={scheduler.max_step_tokens}")
    check_rows(rows)
    for request in waiting:
        if request.row is not None or request.pages or request.num_computed or request.status is not Status.WAITING:
            raise InvariantError(f"request {request.rid!r} waits, with row {request.row}, pages {request.pages}")


def check_rows(rows: Rows) -> None:
    """Page identity over running requests, cache and pool; row slots; lists."""
    running = rows.prompting + rows.decoding + list(rows.draining.values())
    if rows.num_lockstep != sum(map(is_lockstep, running)):
        raise InvariantError(f"{rows.num_lockstep} lockstep rows are counted, not those that run")
    slots = [request.row for request in running if request.row is not None] + rows._free
    if sorted(slots) != list(range(rows.capacity)) or len({r.rid for r in running}) != rows.num_running:
        raise InvariantError(f"row slots are taken twice or lost: {slots}")
    for request in running:
        check_running(rows, request)
    for ordered in (rows.prompting, rows.decoding):
        if any(a.arrival >= b.arrival for a, b in zip(ordered, ordered[1:], strict=False)):
            raise InvariantError("running requests are out of order")
    check_slots(rows.adapters, [(request.adapter_slot, request.adapter) for request in running])
    check_pool(rows.pool, [request.pages for request in running], rows.cache)
    if isinstance(rows.pool, WindowPages):
        check_windows(rows.pool, [request.pages[request.window_start :] for request in running], rows.cache)
    if rows.cache is not None:
        check_cache(rows.cache)


def check_running(rows: Rows, request: Request) -> None:
    held = request.num_computed + (0 if request.drafting is None else request.drafting.in_flight)
    if len(request.pages) != rows.pages_for(held) or request.status is not Status.RUNNING:
        raise InvariantError(f"request {request.rid!r}: {request.num_computed} tokens in pages {request.pages}")


def check_slots(slots: AdapterSlots, in_use: Iterable[tuple[int | None, Adapter | None]]) -> None:
    """`in_use`: slot and adapter of each running request."""
    users = [0] * len(slots._slots)
    for index, adapter in in_use:
        if (index is None) != (adapter is None) or (index is not None and slots._slots[index].adapter is not adapter):
            raise InvariantError(f"adapter slot {index} does not hold the adapter of a request that runs with it")
        if index is not None:
            users[index] += 1
    if users != [slot.users for slot in slots._slots]:
        raise InvariantError(f"adapter slots have {users} running requests, counted otherwise")


def check_pool(
    pool: PagePool, holders: Sequence[Sequence[int]], cached: PrefixCache | Iterable[int] | None = None
) -> None:
    """Page identity: `holders` are the page lists of all requests, `cached` the pages of the prefix cache.

    Every page's count must be the number of its holders, the free list exactly the pages without one, and the idle
    count exactly the pages that the cache alone holds.
    """
    cached_count = Counter([node.page for node in nodes_of(cached)] if isinstance(cached, PrefixCache) else cached)
    count = Counter(page for pages in holders for page in pages)
    for pages in holders:
        if len(set(pages)) != len(pages):
            raise InvariantError(f"a request holds a page twice: {pages}")
    count.update(cached_count)
    free = Counter(pool._free)
    wrong: list[str] = []
    for page in range(pool.num_pages):
        seen, kept = count[page], cached_count[page]
        counted, flag = pool._holders[page], pool._kept[page]
        if counted != seen or flag != kept:
            wrong.append(f"page {page}: counted {counted} holders (cached {flag}), has {seen} ({kept})")
        if free[page] != (seen == 0 and page != 0):
            wrong.append(f"page {page}: {free[page]} times in the free list with {seen} holders")
    idle = sum(count[page] == 1 for page in cached_count)
    if idle != pool.num_idle:
        wrong.append(f"idle pages: counted {pool.num_idle}, are {idle}")
    if count[0] or set(count) - set(range(pool.num_pages)):
        wrong.append("the null page, or a page that does not exist, has a holder")
    if wrong:
        raise InvariantError("page accounting is broken (a bug in fengine):\n  " + "\n  ".join(wrong))


def check_windows(pool: WindowPages, seen: Sequence[Sequence[int]], cache: PrefixCache | None) -> None:
    """Every one of the `seen` pages has a window page; others in the cache may. None is lost or given twice."""
    count = Counter(page for pages in seen for page in pages)
    having = [page for page in range(pool.num_pages) if pool.window_of[page]]
    kept = set() if cache is None else {node.page for node in nodes_of(cache)}
    if dict(count) != {page: n for page, n in enumerate(pool._seers) if n}:
        raise InvariantError(f"pages are seen by {dict(count)} requests, counted otherwise")
    if set(count) - set(having) or set(pool._idle) != set(having) - set(count) or set(pool._idle) - kept:
        raise InvariantError(f"pages {having} have window pages, {sorted(count)} are seen, {list(pool._idle)} idle")
    window_pages = [pool.window_of[page] for page in having] + pool._unused
    if sorted(window_pages) != list(range(1, pool.windows.num_pages)):
        raise InvariantError(f"window pages are lost or given twice: {sorted(window_pages)}")


def check_cache(cache: PrefixCache) -> None:
    """Links, counts, the heap, and that whoever holds a page holds all its ancestors."""
    nodes = list(nodes_of(cache))
    queued = [node for _, _, node in cache._heap]
    if any(node.parent is None for node in queued):
        raise InvariantError("prefix cache: the heap keeps a page that was taken out")
    if len(nodes) != cache.num_pages or len({id(node) for node in queued}) != len(queued):
        raise InvariantError(f"prefix cache: {len(nodes)} pages, {cache.num_pages} counted; or one queued twice")
    for node in nodes:
        parent = node.parent
        size = sum(type(token) is int for token in node.tokens)
        if parent is None or parent.children.get(node.tokens) is not node or size != cache.page_size:
            raise InvariantError(f"prefix cache: the node of page {node.page} is not linked to its parent")
        if not node.children and not node.queued:
            raise InvariantError(f"prefix cache: leaf page {node.page} could never be evicted")
        held, above = cache.pool.num_holders(node.page), cache.pool.num_holders(parent.page)
        if parent is not cache._root and held > 1 and above == 1:
            raise InvariantError(f"prefix cache: page {node.page} is held but its ancestor {parent.page} is not")


def nodes_of(cache: PrefixCache) -> Iterator[Any]:
    """Every page in the cache, one node each."""
    stack = list(cache._root.children.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node
