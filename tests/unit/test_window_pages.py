"""Pages of windowed layers go back while a request runs; hits, forks, preemption and drafts stay what they were."""

import random
from dataclasses import replace
from typing import Any

import pytest
from books import check_pool, check_scheduler, check_windows
from simulation import Case, HashDevice, Job, make_request, make_scheduler, random_case, random_windows, simulate

from fengine.core.kv_pages import PagePool
from fengine.core.prefix_cache import PrefixCache
from fengine.core.window_pages import WindowPages, Windows
from fengine.errors import ConfigError, InvariantError

SMALL = Windows(window=4, grain=2, page_size=2, num_pages=12, step_tokens=8, alone=False)


@pytest.mark.parametrize("guess", [None, "mixed"])
def test_random_schedules(guess: str | None) -> None:
    """Against the hash device, which reads whatever a token's kernels may; books balance after every step."""
    preempted = hits = 0
    for seed in range(36, 86):  # tests/slow has more
        rng = random.Random(f"{seed} {guess}")
        run = simulate(random_windows(rng, random_case(rng, guess=guess)))
        preempted += run.scheduler.counters()["preemptions"]
        hits += run.scheduler.counters()["hit_tokens"]
    assert preempted > 5 and hits > 200


def test_a_window_changes_no_schedule_where_pages_abound() -> None:
    """The same steps as without, down to the row slots and chunks, if no window page is ever lacking."""
    for seed in range(8):
        case = replace(random_case(random.Random(seed), cached=False), num_pages=900)
        windows = Windows(5, 4, case.page_size, 900, case.budget, False)
        assert simulate(replace(case, windows=windows)).log == simulate(case).log


@pytest.mark.parametrize("window", [1, 2, 4, 5, 9])
def test_attention_begins_at_the_page_of_the_first_key_that_it_reads(window: int) -> None:
    """Whole grains of the keys that a token sees."""
    for grain, page_size in ((1, 1), (2, 2), (4, 2), (2, 4), (3, 2)):
        windows = Windows(window, grain, page_size, 12, 8, False)
        for position in range(30):
            seen = min(key for key in range(position + 1) if position - key < window)
            assert windows.window_start(position) == (seen - seen % grain) // page_size


def _late(windows: Windows, position: int) -> int:
    return max(position + 3 - windows.window, 0) // windows.page_size


def test_mistakes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> bool:
        for seed in range(25):
            rng = random.Random(f"{seed} None")
            case = random_windows(rng, random_case(rng))
            device = HashDevice.__init__

            def exact(self: HashDevice, case: Case, jobs: dict[str, Job], device: Any = device) -> None:
                device(self, case, jobs)
                self.starts[-1] = lambda position: _start(case.windows, position)

            with monkeypatch.context() as patch:
                patch.setattr(HashDevice, "__init__", exact)
                try:
                    simulate(case)
                except (AssertionError, InvariantError):
                    return True
        return False

    assert not fails()
    with monkeypatch.context() as patch:
        patch.setattr(Windows, "window_start", _late)
        assert fails()
    with monkeypatch.context() as patch:
        patch.setattr(WindowPages, "usable", lambda self, pages: len(pages))
        assert fails()


def _start(windows: Any, position: int) -> int:
    return max(position + 1 - windows.window, 0) // windows.grain * windows.grain // windows.page_size


@pytest.mark.parametrize("alone", [True, False])
def test_a_long_row_holds_its_window_and_a_chunk(alone: bool) -> None:
    """32,768 tokens, a window of 4,096, chunks of 1,024: never more than those and what kernels read besides."""
    windows = Windows(4096, 128, 16, 8000, 1024, alone)
    job = Job([7] * 30_000, 2768)
    case = Case([job], 16, 2100, rows=2, budget=1024, windows=windows, cached=False)
    scheduler, request = make_scheduler(case), make_request(case, 0)
    scheduler.add(request)
    pool, most = scheduler.pool, 0
    assert isinstance(pool, WindowPages)
    while scheduler.has_work:
        step = scheduler.schedule()
        assert step is not None
        most = max(most, windows.num_pages - 1 - pool.num_windows)
        scheduler.update(step, [0] * step.num_draws, [0.0] * step.num_draws)
    assert (4096 + 1024) // 16 <= most <= (4096 + 1024 + 128) // 16 + 2
    assert pool.num_windows == windows.num_pages - 1


def test_rows_of_any_length_get_on_with_the_least() -> None:
    """Two rows of 300 tokens over the smallest pool there may be: the later one waits or is preempted."""
    windows = Windows(8, 4, 2, 0, 16, True)
    windows = windows._replace(num_pages=windows.least + 1)
    run = simulate(Case([Job([1] * 200, 100), Job([2] * 150, 150)], 2, 400, rows=2, windows=windows, vocab=50))
    assert all(request.finish is not None and request.finish["type"] == "length" for request in run.requests)
    with pytest.raises(ConfigError, match="window of 8 tokens needs 9 pages of 2 tokens, but the pool has 8"):
        WindowPages(400, windows._replace(num_pages=windows.least))
    WindowPages(6, windows._replace(num_pages=6))  # rows are as short as that


def make(windows: Windows = SMALL, pages: int = 40) -> tuple[WindowPages, PrefixCache]:
    pool = WindowPages(pages, windows)
    return pool, PrefixCache(pool, windows.page_size)


def test_a_hit_needs_the_window_in_front_of_its_end() -> None:
    pool, cache = make()
    ids = list(range(20))
    pages = pool.allocate(10)
    assert pages is not None
    cache.insert(ids, pages)
    pool.unsee(pages[:7])  # idle: still there
    assert cache.match_length(ids, 20) == 20
    others = pool.allocate(4)  # takes three of the idle ones, oldest first: of pages 0, 1, 2
    assert others is not None and [pool.window_of[page] > 0 for page in pages] == [False] * 3 + [True] * 7
    assert cache.match_length(ids, 20) == 20  # its last window is there
    assert cache.match_length(ids, 10) == 10  # tokens from 6 on, in pages 3 and 4
    assert cache.match_length(ids, 8) == 0  # would need page 2
    hit = cache.match(ids, 10)
    check_windows(pool, [pages[7:], others, hit[3:]], cache)
    pool.release(hit, 3)
    pool.release(pages, 7)
    pool.release(others)
    check_pool(pool, [], cache)
    check_windows(pool, [], cache)
    cache.flush()
    assert pool.num_free == 39 and len(pool._unused) == 11


def test_a_page_that_is_computed_again_takes_the_place_of_one_without_a_window() -> None:
    pool, cache = make()
    ids = list(range(8))
    old = pool.allocate(4)
    assert old is not None
    cache.insert(ids, old, leaving=True)
    pool.release(old)
    rest = pool.allocate(11)
    assert rest is not None and not any(pool.window_of[page] for page in old)
    pool.release(rest)
    assert cache.match_length(ids, 8) == 0
    new = pool.allocate(4)
    assert new is not None
    cache.insert(ids, new)
    check_pool(pool, [new], cache)
    check_windows(pool, [new], cache)
    assert cache.match_length(ids, 8) == 8 and cache.match(ids, 8) == new
    pool.release(new, 2)
    check_pool(pool, [new], cache)


def test_pages_that_somebody_holds_are_not_replaced() -> None:
    pool, cache = make()
    ids = list(range(8))
    old = pool.allocate(4)
    assert old is not None
    cache.insert(ids, old)
    pool.unsee(old)
    rest = pool.allocate(11)
    assert rest is not None
    pool.release(rest)
    new = pool.allocate(4)
    assert new is not None
    cache.insert(ids, new)
    check_pool(pool, [old, new], cache)
    assert cache.match_length(ids, 8) == 0
    check_windows(pool, [[], new], cache)


def test_a_long_prompt_is_due_no_more_windows_than_it_needs_at_once() -> None:
    pool, _ = make(SMALL._replace(num_pages=40), 400)
    assert pool.spare([4, 300], 2) == 39 - 2 - 4 - 10 and pool.spare([4, 394], 2) == 399 - 2 - 4 - 394
    assert pool.fits(300, [4], 1) and pool.fits(90, [4, 300], 2) and not pool.fits(10, [10, 10], 10)


def test_nobody_leaves_a_page_behind_twice() -> None:
    pool, _ = make()
    pages = pool.allocate(2)
    assert pages is not None
    pool.unsee(pages)
    with pytest.raises(InvariantError, match="does not see it"):
        pool.unsee(pages)


def test_a_pool_without_windows_has_one_table() -> None:
    pool = PagePool(4)
    added = [1, 2, 5]
    assert pool.in_tables(added) == (added, ()) and pool.window_start(1000) == 0 and pool.usable([1, 2]) == 2
    pool, _ = make()
    pages = pool.allocate(2)
    assert pages == [1, 2] and pool.in_tables(added) == (added, (1, 2, 0))
    pool, _ = make(SMALL._replace(alone=True))
    pool.allocate(2)
    assert pool.in_tables(added) == ([1, 2, 0], ())


def test_waiting_requests_are_let_in_when_a_row_leaves_pages_behind() -> None:
    """Nothing ends meanwhile: pages come back from a row that runs on."""
    windows = Windows(4, 2, 2, 0, 64, True)
    windows = windows._replace(num_pages=24)
    case = Case([Job([1] * 40, 60), Job([2] * 12, 4)], 2, 400, rows=2, budget=64, windows=windows, cached=False)
    scheduler = make_scheduler(case)
    for i in range(2):
        scheduler.add(make_request(case, i))
    together = 0
    for _ in range(30):
        step = scheduler.schedule()
        assert step is not None
        together = max(together, len(step.rows))
        scheduler.update(step, [0] * step.num_draws, [0.0] * step.num_draws)
        check_scheduler(scheduler)
    assert together == 2
