"""Whether the books of the host column balance: pages, prefix cache, adapter slots, rows, queues. O(pool).

Each check walks everything, privates included, and raises InvariantError with what is off.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

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
    rows, waiting = scheduler._rows, scheduler._waiting.requests()
    if len(scheduler._requests) != rows.num_running + len(waiting):
        raise InvariantError(f"{len(scheduler._requests)} requests, {rows.num_running} run, {len(waiting)} wait")
    if (decoding := len(rows.decoding)) > scheduler.max_step_tokens:
        raise InvariantError(f"{decoding} rows decode, more than max_step_tokens={scheduler.max_step_tokens}")
    check_rows(rows)
    ranked = sum(request.priority != 0 for request in waiting)
    if scheduler._waiting._ranked != ranked:
        raise InvariantError(f"{ranked} requests with a priority wait, counted otherwise")
    if scheduler.images is not None:
        check_images(scheduler.images, set(scheduler._requests))
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
    nodes = [] if rows.cache is None else nodes_of(rows.cache)
    check_pool(rows.pool, [request.pages for request in running], [node.page for node in nodes])
    if isinstance(rows.pool, WindowPages):
        check_windows(rows.pool, [request.pages[request.window_start :] for request in running], rows.cache)
    if rows.cache is not None:
        check_cache(rows.cache, nodes)


def check_running(rows: Rows, request: Request) -> None:
    held = request.num_computed + (0 if request.drafting is None else request.drafting.in_flight)
    if len(request.pages) != rows.pages_for(held) or request.status is not Status.RUNNING:
        raise InvariantError(f"request {request.rid!r}: {request.num_computed} tokens in pages {request.pages}")


def check_images(images: ImageRows, rids: set[str]) -> None:
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
    kept = [0] * pool.num_pages
    for page in pages_cached:
        kept[page] += 1
    count = kept.copy()
    for pages in holders:
        if len(set(pages)) != len(pages):
            raise InvariantError(f"a request holds a page twice: {pages}")
        if pages and not 0 < min(pages) <= max(pages) < pool.num_pages:
            raise InvariantError(f"a request holds the null page, or one that does not exist: {pages}")
        for page in pages:
            count[page] += 1
    if pages_cached and not 0 < min(pages_cached):
        raise InvariantError("the prefix cache holds the null page")
    if pool._holders != count or list(pool._kept) != kept:
        pages = [
            page
            for page in range(pool.num_pages)
            if (pool._holders[page], pool._kept[page]) != (count[page], kept[page])
        ]
        told = [f"{p}: counted {pool._holders[p]} (cached {pool._kept[p]}), has {count[p]} ({kept[p]})" for p in pages]
        raise InvariantError("holders of pages are counted wrong:\n  " + "\n  ".join(told))
    if sorted(pool._free) != [page for page in range(1, pool.num_pages) if not count[page]]:
        raise InvariantError(f"the free list is {sorted(pool._free)}, holders are {count}")
    if (idle := sum(count[page] == 1 for page in pages_cached)) != pool.num_idle:
        raise InvariantError(f"idle pages: counted {pool.num_idle}, are {idle}")


def check_windows(pool: WindowPages, seen: Sequence[Sequence[int]], cache: PrefixCache | None) -> None:
    """Every one of the `seen` pages has a window page; others in the cache may. None is lost or given twice."""
    count = [0] * pool.num_pages
    for pages in seen:
        for page in pages:
            count[page] += 1
    if count != pool._seers:
        raise InvariantError(f"pages are seen by {count} requests, counted {pool._seers}")
    unseen = {page for page, window in enumerate(pool.window_of) if window and not count[page]}
    if not all(pool.window_of[page] for pages in seen for page in pages) or unseen != set(pool._idle):
        raise InvariantError(f"window pages of {pool.window_of}, seen by {count}, {list(pool._idle)} idle")
    if cache is None and unseen or not all(pool._kept[page] for page in unseen):
        raise InvariantError(f"of the idle pages {sorted(unseen)} some are not in the prefix cache")
    window_pages = [window for window in pool.window_of if window] + pool._unused
    if sorted(window_pages) != list(range(1, pool.windows.num_pages)):
        raise InvariantError(f"window pages are lost or given twice: {sorted(window_pages)}")


def check_cache(cache: PrefixCache, nodes: Sequence[Any] | None = None) -> None:
    """Links, counts, the heap, and that whoever holds a page holds all its ancestors."""
    nodes = nodes_of(cache) if nodes is None else nodes
    root, size, holders = cache._root, cache.page_size, cache.pool._holders
    queued = {id(node) for _, _, node in cache._heap if node.parent is not None}
    if len(queued) != len(cache._heap):
        raise InvariantError("prefix cache: the heap keeps a page that was taken out, or one twice")
    if any(cache._heap[(i - 1) // 2][:2] > entry[:2] for i, entry in enumerate(cache._heap) if i):
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
        if not node.children and not node.queued or node.queued != (id(node) in queued):
            raise InvariantError(f"prefix cache: leaf page {node.page} could never be evicted")
        if holders[node.page] > 1 and parent is not root and holders[parent.page] == 1:
            raise InvariantError(f"prefix cache: page {node.page} is held but its ancestor {parent.page} is not")


def nodes_of(cache: PrefixCache) -> list[Any]:
    """Every page in the cache, one node each."""
    found = list(cache._root.children.values())
    for node in found:  # which grows
        if node.children:
            found += node.children.values()
    return found
