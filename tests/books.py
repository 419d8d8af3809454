"""Whether the books of the host column balance: pages, prefix cache, adapter slots, rows, queues. O(pool).

Each check walks everything, privates included, and raises InvariantError with what is off.
"""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from operator import gt
from typing import Any, NamedTuple

from fengine.core.images import ImageRows
from fengine.core.kv_pages import PagePool
from fengine.core.lora_slots import AdapterSlots
from fengine.core.prefix_cache import PrefixCache
from fengine.core.request import Adapter, Request, Status
from fengine.core.running import Rows, is_lockstep
from fengine.core.scheduler import Scheduler
from fengine.core.window_pages import WindowPages
from fengine.errors import InvariantError


def check_scheduler(scheduler: Scheduler) -> None:
    rows, waiting = scheduler._rows, scheduler._waiting._requests.values()
    if len(scheduler._requests) != rows.num_running + len(waiting):
        raise InvariantError(f"{len(scheduler._requests)} requests, {rows.num_running} run, {len(waiting)} wait")
    if (decoding := len(rows.decoding)) > scheduler.max_step_tokens:
        raise InvariantError(f"{decoding} rows decode, more than max_step_tokens={scheduler.max_step_tokens}")
    check_rows(rows)
    if scheduler.images is not None:
        check_images(scheduler.images, scheduler._requests.keys())
    ranked, idle = 0, Status.WAITING
    for request in waiting:
        ranked += request.priority != 0
        if request.row is not None or request.pages or request.num_computed or request.status is not idle:
            raise InvariantError(f"request {request.rid!r} waits, with row {request.row}, pages {request.pages}")
    if scheduler._waiting._ranked != ranked:
        raise InvariantError(f"{ranked} requests with a priority wait, counted otherwise")


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
    arrivals = [request.arrival for request in rows.prompting]
    if arrivals != sorted(arrivals):
        raise InvariantError("running prompts are out of order")
    check_slots(rows.adapters, [(request.adapter_slot, request.adapter) for request in running])
    seen = None if rows.cache is None else look(rows.cache)
    check_pool(rows.pool, [request.pages for request in running], () if seen is None else seen.pages)
    if isinstance(rows.pool, WindowPages):
        check_windows(rows.pool, [request.pages[request.window_start :] for request in running], rows.cache)
    if seen is not None:
        check_ancestors(rows.pool, seen)


def check_running(rows: Rows, request: Request) -> None:
    held = request.num_computed + (0 if request.drafting is None else request.drafting.in_flight)
    if len(request.pages) != rows.pages_for(held) or request.status is not Status.RUNNING:
        raise InvariantError(f"request {request.rid!r}: {request.num_computed} tokens in pages {request.pages}")


def check_images(images: ImageRows, rids: Set[str]) -> None:
    """Rows of the table of images: each is free or of one image, and each image has as many users as it is said."""
    rows = images._free + [row for entry in images._entries.values() for row in entry.rows]
    if sorted(rows) != list(range(images.capacity)):
        raise InvariantError(f"rows of images are lost or taken twice: {sorted(rows)}")
    users = Counter(key for keys in images._holders.values() for key in keys)
    if {key: entry.users for key, entry in images._entries.items() if entry.users} != dict(users):
        raise InvariantError("images are counted to have other users than they have")
    if gone := images._holders.keys() - rids:
        raise InvariantError(f"requests have ended and keep images: {gone}")


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
    pages_cached = [node.page for node in nodes_of(cached)] if isinstance(cached, PrefixCache) else list(cached or ())
    kept = bytearray(pool.num_pages)
    for page in pages_cached:
        kept[page] += 1
    count = [*kept]
    for pages in holders:
        if len(found := set(pages)) != len(pages):
            raise InvariantError(f"a request holds a page twice: {pages}")
        if pages and not 0 < min(found) <= max(found) < pool.num_pages:
            raise InvariantError(f"a request holds the null page, or one that does not exist: {pages}")
        for page in pages:
            count[page] += 1
    if kept[0]:
        raise InvariantError("the prefix cache holds the null page")
    if pool._holders != count or pool._kept != kept:
        pages = [
            page
            for page in range(pool.num_pages)
            if (pool._holders[page], pool._kept[page]) != (count[page], kept[page])
        ]
        told = [f"{p}: counted {pool._holders[p]} (cached {pool._kept[p]}), has {count[p]} ({kept[p]})" for p in pages]
        raise InvariantError("holders of pages are counted wrong:\n  " + "\n  ".join(told))
    free = set(pool._free)
    if (
        len(pool._free) != len(free)
        or len(free) != count.count(0) - 1  # all but the null page
        or (free and not 0 < min(free) <= max(free) < pool.num_pages)
        or any(map(count.__getitem__, free))
    ):
        raise InvariantError(f"the free list is {sorted(pool._free)}, holders are {count}")
    if (idle := [count[page] for page in pages_cached].count(1)) != pool.num_idle:
        raise InvariantError(f"idle pages: counted {pool.num_idle}, are {idle}")


def check_windows(pool: WindowPages, seen: Sequence[Sequence[int]], cache: PrefixCache | None) -> None:
    """Every one of the `seen` pages has a window page; others in the cache may. None is lost or given twice."""
    count = [0] * pool.num_pages
    for pages in seen:
        for page in pages:
            count[page] += 1
    if count != pool._seers:
        raise InvariantError(f"pages are seen by {count} requests, counted {pool._seers}")
    window_of = pool.window_of
    unseen = {page for page, window in enumerate(window_of) if window and not count[page]}
    if unseen != pool._idle.keys() or any(held and not window_of[page] for page, held in enumerate(count)):
        raise InvariantError(f"window pages of {pool.window_of}, seen by {count}, {list(pool._idle)} idle")
    if unseen and (cache is None or not all(pool._kept[page] for page in unseen)):
        raise InvariantError(f"of the idle pages {sorted(unseen)} some are not in the prefix cache")
    window_pages = [window for window in pool.window_of if window] + pool._unused
    if sorted(window_pages) != list(range(1, pool.windows.num_pages)):
        raise InvariantError(f"window pages are lost or given twice: {sorted(window_pages)}")


class Look(NamedTuple):
    """What a prefix cache is made of, whose links and heap are right."""

    moment: tuple[int, int]
    pages: list[int]
    pairs: list[tuple[int, int]]  # pages of a node and of its parent


def look(cache: PrefixCache) -> Look:
    """Looks at every page, unless nothing has changed since: what changes counts a use, or another number of pages."""
    moment, known = (cache._clock, cache.num_pages), getattr(cache, "known", None)
    if known is None or known.moment != moment:
        nodes = nodes_of(cache)
        check_links(cache, nodes)
        pairs = [(node.page, node.parent.page) for node in nodes if node.parent is not cache._root]
        known = Look(moment, [node.page for node in nodes], pairs)
        if hasattr(cache, "known"):
            cache.known = known  # type: ignore[attr-defined]
    return known


def check_cache(cache: PrefixCache) -> None:
    """Links, counts, the heap, and that whoever holds a page holds all its ancestors."""
    check_ancestors(cache.pool, look(cache))


def check_ancestors(pool: PagePool, seen: Look) -> None:
    holders = pool._holders
    for page, above in seen.pairs:
        if holders[above] == 1 < holders[page]:
            raise InvariantError(f"prefix cache: page {page} is held but its ancestor {above} is not")


def check_links(cache: PrefixCache, nodes: Sequence[Any]) -> None:
    size = cache.page_size
    queued = {node for _, _, node in cache._heap if node.parent is not None}
    if len(queued) != len(cache._heap):
        raise InvariantError("prefix cache: the heap keeps a page that was taken out, or one twice")
    order = [entry[:2] for entry in cache._heap]
    if any(map(gt, (above for above in order for _ in "lr"), order[1:])):
        raise InvariantError("prefix cache: the heap is out of order")
    if len(nodes) != cache.num_pages:
        raise InvariantError(f"prefix cache: {len(nodes)} pages, {cache.num_pages} counted")
    for node in nodes:
        parent, tokens = node.parent, node.tokens
        if (
            parent is None
            or parent.children.get(tokens) is not node
            or len(tokens) - (type(tokens[0]) is not int) != size
        ):
            raise InvariantError(f"prefix cache: the node of page {node.page} is not linked to its parent")
        if not node.children and not node.queued or node.queued != (node in queued):
            raise InvariantError(f"prefix cache: leaf page {node.page} could never be evicted")


def nodes_of(cache: PrefixCache) -> list[Any]:
    """Every page in the cache, one node each."""
    found = list(cache._root.children.values())
    for node in found:  # which grows
        if node.children:
            found += node.children.values()
    return found
