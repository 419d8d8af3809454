"""The prefix cache against a model that stores every cached prefix as a whole tuple."""

import random
from collections.abc import Hashable
from typing import Any

import pytest
from books import check_cache, check_pool, nodes_of

from fengine.core.kv_pages import PagePool
from fengine.core.prefix_cache import PrefixCache, Reached
from fengine.errors import InvariantError


def pages_of(cache: PrefixCache) -> list[int]:
    return [node.page for node in nodes_of(cache)]


def build(page_size: int = 2, pages: int = 20) -> tuple[PagePool, PrefixCache]:
    pool = PagePool(pages)
    return pool, PrefixCache(pool, page_size)


def store(cache: PrefixCache, tokens: list[int]) -> list[int]:
    """Computes and caches `tokens` as a request would that leaves at once. Returns the pages it used."""
    full = len(tokens) // cache.page_size
    pages = cache.match(tokens, len(tokens))
    pages += cache.pool.allocate(full - len(pages)) or []
    cache.insert(tokens, pages, leaving=True)
    cache.pool.release(pages)
    check_cache(cache)
    return pages


def peek(cache: PrefixCache, tokens: list[int]) -> int:
    return cache.match_length(tokens, len(tokens))


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_matches_whole_pages_within_the_limit(page_size: int) -> None:
    pool, cache = build(page_size, 40)
    tokens = list(range(3 * page_size + page_size // 2))
    pages = store(cache, tokens)
    assert cache.num_pages == pool.num_idle == cache.pool.num_idle == len(pages)
    for limit in range(len(tokens) + 1):
        hit = cache.match(tokens, limit)
        assert hit == pages[: limit // page_size] and cache.match_length(tokens, limit) == len(hit) * page_size
        assert all(pool.num_holders(page) == 2 for page in hit) and cache.pool.num_idle == len(pages) - len(hit)
        pool.release(hit)
    assert cache.match([99, *tokens[1:]], len(tokens)) == []
    assert cache.match([*tokens[:-page_size], 99], 10**9) == pages[: (len(tokens) - page_size) // page_size]


def test_equal_hashes_are_not_equal_tokens() -> None:
    _, cache = build(1)
    store(cache, [-1])
    assert hash((-1,)) == hash((-2,)) and peek(cache, [-2]) == 0 and peek(cache, [-1]) == 1


def test_insert_keeps_existing_nodes_and_frees_the_double() -> None:
    pool, cache = build()
    first, second = pool.allocate(2) or [], pool.allocate(2) or []
    cache.insert([1, 2, 3, 4], first)
    cache.insert([1, 2, 3, 4], second, leaving=True)
    assert cache.match([1, 2, 3, 4], 4) == first and cache.num_pages == 2
    pool.release(second)
    assert pool.num_free == pool.capacity - 2


def test_a_running_request_does_not_insert_below_a_foreign_page() -> None:
    pool, cache = build()
    mine, theirs = pool.allocate(2) or [], pool.allocate(1) or []
    cache.insert([1, 2], theirs)
    pool.release(theirs)
    cache.insert([1, 2, 3, 4], mine)
    assert (
        cache.num_pages == 1 and cache.pool.num_idle == 1
    )  # had page [3, 4] gone in, page [1, 2] could not be evicted
    check_cache(cache)
    cache.insert([1, 2, 3, 4], mine, leaving=True)
    pool.release(mine)
    assert cache.num_pages == 2 == cache.pool.num_idle
    check_cache(cache)


def test_a_page_that_others_hold_does_not_go_below_a_foreign_page_either() -> None:
    pool, cache = build()
    store(cache, [1, 1, 2, 2])
    leaving, staying = cache.match([1, 1, 2, 2], 4), cache.match([1, 1, 2, 2], 4)
    cache.drop([1, 1])
    store(cache, [1, 1])  # computed again by a third
    cache.insert([1, 1, 2, 2], leaving, leaving=True)
    pool.release(leaving)
    check_cache(cache)
    assert cache.num_pages == cache.pool.num_idle == 1
    check_pool(pool, [staying], cache)


def test_evicts_the_least_recently_used_leaf_first() -> None:
    pool, cache = build()
    store(cache, [1, 1, 2, 2])  # a
    store(cache, [1, 1, 3, 3])  # b shares a's first page
    store(cache, [5, 5])  # c
    pool.release(cache.match([1, 1, 2, 2], 4))  # a again: order of leaves is now b, c, a
    assert cache.evict(1) == 1 and peek(cache, [1, 1, 3, 3]) == 2
    assert cache.evict(1) == 1 and peek(cache, [5, 5]) == 0
    assert cache.evict(1) == 1 and peek(cache, [1, 1, 2, 2]) == 2
    assert cache.evict(5) == 1 and cache.num_pages == 0 and pool.num_free == pool.capacity
    assert cache.evict(1) == 0


def test_never_evicts_what_a_request_holds() -> None:
    pool, cache = build()
    store(cache, [1, 1, 2, 2])
    store(cache, [1, 1, 3, 3])
    held = cache.match([1, 1, 2, 2], 4)
    assert cache.evict(10) == 1 and peek(cache, [1, 1, 2, 2]) == 4
    check_cache(cache)
    pool.release(held)
    assert cache.evict(10) == 2


def test_a_leaf_in_use_counts_as_used_when_eviction_meets_it() -> None:
    pool, cache = build()
    store(cache, [1, 1])
    held = cache.match([1, 1], 2)
    store(cache, [2, 2])
    store(cache, [3, 3])
    assert cache.evict(1) == 1 and peek(cache, [2, 2]) == 0
    pool.release(held)
    assert cache.evict(1) == 1 and peek(cache, [3, 3]) == 0 and peek(cache, [1, 1]) == 2


def test_drop_forgets_all_that_starts_with_the_first_page() -> None:
    pool, cache = build()
    store(cache, [1, 1, 2, 2])
    store(cache, [1, 1, 3, 3])
    store(cache, [4, 4])
    held = cache.match([1, 1, 2, 2], 4)
    cache.drop([1, 1, 2, 2, 9, 9])
    cache.drop([1])
    cache.drop([8, 8])
    assert cache.num_pages == 1 and peek(cache, [1, 1, 3, 3]) == 0 and peek(cache, [4, 4]) == 2
    assert pool.num_free == pool.capacity - 3  # two are held, one is cached
    check_cache(cache)
    check_pool(pool, [held], cache)
    assert cache.evict(9) == 1
    pool.release(held)
    assert pool.num_free == pool.capacity


def test_flush_forgets_everything_but_leaves_held_pages() -> None:
    pool, cache = build()
    store(cache, [1, 1, 2, 2])
    held = cache.match([1, 1], 2)
    cache.flush()
    assert cache.num_pages == 0 and peek(cache, [1, 1, 2, 2]) == 0 and cache.evict(3) == 0
    check_pool(pool, [held])
    pool.release(held)
    check_pool(pool, [])
    store(cache, [1, 1])
    assert cache.evict(1) == 1


@pytest.mark.parametrize("spoil", ["lost", "unlinked", "unqueued", "held below idle"])
def test_check_sees_damage(spoil: str) -> None:
    pool, cache = build()
    pages = store(cache, [1, 1, 2, 2])
    node = next(iter(cache._root.children.values()))
    match spoil:
        case "lost":
            cache.num_pages += 1
        case "unlinked":
            node.parent = node
        case "unqueued":
            node.children[(2, 2)].queued = False
        case "held below idle":
            pool.retain(pages[1:])
    with pytest.raises(InvariantError):
        check_cache(cache)


class Model:
    """Every cached prefix as a tuple, with its page and the time when it or a longer one was last used."""

    def __init__(self, size: int) -> None:
        self.size, self.pages, self.used, self.now = size, {}, {}, 0  # type: ignore[var-annotated]

    def prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[:end]) for end in range(self.size, len(tokens) + 1, self.size)]

    def match(self, tokens: list[int]) -> list[int]:
        hit = []
        for prefix in self.prefixes(tokens):
            if prefix not in self.pages:
                break
            hit.append(prefix)
        self.touch(hit)
        return [self.pages[prefix] for prefix in hit]

    def insert(self, tokens: list[int], pages: list[int]) -> None:
        for prefix, page in zip(self.prefixes(tokens), pages, strict=True):
            self.pages.setdefault(prefix, page)
        self.touch(self.prefixes(tokens))

    def touch(self, prefixes: list[tuple[int, ...]]) -> None:
        self.now += 1
        self.used.update(dict.fromkeys(prefixes, self.now))

    def evict(self, count: int) -> None:
        for _ in range(count):
            inner = {prefix[: -self.size] for prefix in self.pages}
            leaves = [prefix for prefix in self.pages if prefix not in inner]
            if leaves:
                del self.pages[min(leaves, key=self.used.__getitem__)]


@pytest.mark.parametrize("seed", range(40))
def test_random_use_agrees_with_the_model(seed: int) -> None:
    rng = random.Random(seed)
    size, pool = rng.choice([1, 2, 4]), PagePool(40)
    cache, model = PrefixCache(pool, size), Model(size)
    for _ in range(150):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(5 * size))]
        if rng.random() < 0.2:
            count = rng.randrange(4)
            cache.evict(count)
            model.evict(count)
        else:
            pages = cache.match(tokens, len(tokens))
            assert pages == model.match(tokens)
            more = pool.allocate(len(tokens) // size - len(pages))
            if more is not None:
                pages += more
                full = tokens[: len(pages) * size]
                if full:
                    cache.insert(full, pages, leaving=rng.random() < 0.5)
                    model.insert(full, pages)
            pool.release(pages)
        assert sorted(pages_of(cache)) == sorted(model.pages.values())
        check_cache(cache)
        check_pool(pool, [], cache)


@pytest.mark.parametrize("seed", range(30))
def test_an_insertion_goes_on_where_the_last_one_ended(seed: int) -> None:
    """Two caches, the same use: one is told where the holder's last insertion ended, one walks from the root."""
    rng = random.Random(seed)
    pairs = [build(2, 60), build(2, 60)]
    holders: list[tuple[list[int], dict[int, Hashable] | None, list[list[int]], list[Reached | None]]] = []
    for _ in range(120):
        kind, n = rng.random(), rng.randrange(3)
        if kind < 0.1:
            drop = [rng.randrange(2), rng.randrange(2)]
            for _, cache in pairs:
                cache.drop(drop) if n == 0 else cache.evict(n)
        elif kind < 0.13:
            for _, cache in pairs:
                cache.flush()
        elif kind < 0.3 or not holders:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(12))]
            salt: Any = rng.choice([None, {0: "a"}, {1: "b"}, {0: "a", 2: b"c"}])
            hits = [cache.match(tokens, len(tokens), salt) for _, cache in pairs]
            holders.append((tokens[: 2 * len(hits[0])], salt, hits, [None, None]))
        else:
            at = rng.randrange(len(holders))
            tokens, salt, pages, reached = holders[at]
            more = [pool.allocate(n) for pool, _ in pairs]
            assert (more[0] is None) == (more[1] is None)
            leaving = more[0] is None or rng.random() < 0.3
            if not leaving:
                tokens += [rng.randrange(2) for _ in range(2 * n)]
            for i, (pool, cache) in enumerate(pairs):
                pages[i] += more[i] or []
                whole = pages[i][: len(tokens) // 2]
                reached[i] = cache.insert(tokens, whole, leaving, salt, after=reached[i] if i else None)
                if leaving:
                    pool.release(pages[i])
            if leaving:
                del holders[at]
        for pool, cache in pairs:
            check_cache(cache)
            check_pool(pool, [pages[pool is pairs[1][0]] for _, _, pages, _ in holders], cache)
        assert pages_of(pairs[0][1]) == pages_of(pairs[1][1])
    while pairs[0][1].num_pages and pairs[0][1].pool.num_idle:
        assert pairs[0][1].evict(1) == pairs[1][1].evict(1)
        assert pages_of(pairs[0][1]) == pages_of(pairs[1][1])
