"""The page pool against a model that stores every holder by name."""

import random
from collections import Counter

import pytest
from books import check_pool

from fengine.core.kv_pages import PagePool
from fengine.errors import ConfigError, InvariantError


def test_hands_out_every_page_but_the_null_page_once() -> None:
    pool = PagePool(6)
    assert pool.capacity == pool.num_free == 5
    first, second = pool.allocate(2), pool.allocate(3)
    assert first is not None and second is not None and sorted(first + second) == [1, 2, 3, 4, 5]
    assert pool.allocate(0) == [] and pool.allocate(1) is None and pool.num_free == 0
    check_pool(pool, [first, second])


def test_too_few_pages_changes_nothing() -> None:
    pool = PagePool(4)
    assert pool.allocate(4) is None
    assert pool.num_free == 3 and pool.allocate(3) == [1, 2, 3]


def test_a_page_is_free_when_its_last_holder_releases_it() -> None:
    pool = PagePool(3)
    pages = pool.allocate(2)
    assert pages is not None
    pool.retain(pages[:1])
    pool.release(pages)
    assert pool.num_free == 1 and pool.num_holders(pages[0]) == 1
    pool.release(pages[:1])
    assert pool.num_free == 2
    check_pool(pool, [])


def test_idle_pages_are_those_that_only_the_cache_holds() -> None:
    pool = PagePool(3)
    (page,) = pool.allocate(1) or []
    pool.keep(page)
    assert (pool.num_idle, pool.num_available) == (0, 1)
    pool.release([page])
    assert (pool.num_idle, pool.num_available, pool.num_free) == (1, 2, 1)
    pool.retain([page])
    assert pool.num_idle == 0
    pool.unkeep(page)
    assert (pool.num_idle, pool.num_free) == (0, 1)
    pool.keep(page)
    pool.release([page])
    pool.unkeep(page)
    assert (pool.num_idle, pool.num_free) == (0, 2)


def test_what_a_caller_may_not_do() -> None:
    pool = PagePool(4)
    kept, plain, free = pool.allocate(3) or []
    pool.release([free])
    pool.keep(kept)
    for wrong in (
        lambda: pool.release([free]),  # double free
        lambda: pool.release([0]),
        lambda: pool.retain([free]),
        lambda: pool.keep(free),
        lambda: pool.keep(kept),
        lambda: pool.unkeep(plain),
    ):
        with pytest.raises(InvariantError):
            wrong()
    pool.release([kept])
    with pytest.raises(InvariantError):
        pool.release([kept])  # the cache's reference is not the caller's
    check_pool(pool, [[plain]], [kept])
    with pytest.raises(ConfigError):
        PagePool(1)


@pytest.mark.parametrize(
    ("holders", "cached"),
    [([[1], [3]], [2]), ([[1], [2]], [2]), ([[1, 1]], [2]), ([[1, 2]], [2]), ([[1], [0]], [2]), ([[1], [9]], [2]),
     ([[1]], []), ([[1]], [2, 2])],
)  # fmt: skip
def test_check_sees_every_difference(holders: list[list[int]], cached: list[int]) -> None:
    pool = PagePool(4)
    first, second = pool.allocate(2) or []
    pool.keep(second)
    pool.release([second])
    check_pool(pool, [[first]], [second])
    with pytest.raises(InvariantError):
        check_pool(pool, holders, cached)


def test_check_sees_a_spoilt_free_list_and_idle_count() -> None:
    for spoil in (lambda p: p._free.append(1), lambda p: p._free.pop(), lambda p: setattr(p, "num_idle", 1)):
        pool = PagePool(4)
        pages = pool.allocate(1) or []
        spoil(pool)
        with pytest.raises(InvariantError):
            check_pool(pool, [pages])


@pytest.mark.parametrize("seed", range(20))
def test_random_calls_agree_with_a_model(seed: int) -> None:
    rng, pool = random.Random(seed), PagePool(9)
    lists: list[list[int]] = []
    cached: set[int] = set()
    for _ in range(300):
        match rng.randrange(5):
            case 0:
                pages = pool.allocate(rng.randrange(4))
                if pages is not None:
                    assert not set(pages) & (cached | {p for held in lists for p in held})
                    lists.append(pages)
            case 1 if lists:
                pool.retain(again := list(rng.choice(lists)))
                lists.append(again)
            case 2 if lists:
                pool.release(lists.pop(rng.randrange(len(lists))))
            case 3 if lists:
                for page in set(rng.choice(lists)) - cached:
                    pool.keep(page)
                    cached.add(page)
            case 4 if cached:
                pool.unkeep(page := rng.choice(sorted(cached)))
                cached.discard(page)
        held = Counter(page for pages in lists for page in pages)
        assert pool.num_idle == sum(not held[page] for page in cached)
        assert pool.num_free == pool.capacity - len(set(held) | cached)
        check_pool(pool, lists, cached)
