"""The scheduler: random schedules against the hash device, and each rule by itself."""

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import simulation
from books import check_scheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Case, Job, Run, entry, make_request, make_scheduler, random_case, simulate, solo

from fengine.config import Policy
from fengine.core import admission
from fengine.core.admission import LPM_PATIENCE, LPM_WINDOW, WaitingQueue
from fengine.core.kv_pages import PagePool
from fengine.core.prefix_cache import PrefixCache
from fengine.core.request import Adapter, Request, SamplingParams, Status
from fengine.core.scheduler import Scheduler
from fengine.core.scheduler_output import SchedulerOutput
from fengine.core.speculation import Ask, Late, Speculation
from fengine.errors import CapacityError, InvalidRequestError, InvariantError


def start(case: Case) -> tuple[Scheduler, list[Request]]:
    """A scheduler with all jobs of the case added."""
    scheduler, requests = make_scheduler(case), [make_request(case, i) for i in range(len(case.jobs))]
    for request in requests:
        scheduler.add(request)
    return scheduler, requests


def planned(scheduler: Scheduler) -> SchedulerOutput:
    plan = scheduler.schedule()
    check_scheduler(scheduler)
    assert plan is not None
    return plan


def land(scheduler: Scheduler, plan: SchedulerOutput, token: int = 1, logprob: float = -1.0) -> list[str]:
    """Gives every row the same token. Returns the rids that finished."""
    rows = len(plan.rows)
    finished = scheduler.update(plan, [token] * rows, [logprob] * rows)
    check_scheduler(scheduler)
    return [request.rid for request in finished]


def rows(scheduler: Scheduler, plan: SchedulerOutput) -> list[tuple[str, int, int, bool]]:
    rids = [request.rid for request in plan.requests]
    return list(zip(rids, plan.starts, plan.counts, plan.samples, strict=True))


def jobs(*sizes: tuple[int, int]) -> list[Job]:
    """Jobs of (prompt length, max_new_tokens) whose prompts share nothing."""
    return [Job([100 * i + j for j in range(n)], new) for i, (n, new) in enumerate(sizes)]


def finish_all(scheduler: Scheduler, lag: int = 0) -> int:
    """Runs until nothing is left, as the loop does. Returns the number of steps."""
    flights: list[SchedulerOutput] = []
    steps = 0
    while scheduler.has_work or flights:
        plan = scheduler.schedule()
        if plan is not None:
            flights.append(plan)
            steps += 1
        if len(flights) > lag or plan is None:
            done = flights.pop(0)
            scheduler.update(done, [7] * len(done.rows), [-1.0] * len(done.rows))
    check_scheduler(scheduler)
    return steps


# -- random schedules against the oracle ------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> Case:
    vocab = draw(st.sampled_from([2, 5, 50]))
    token = st.integers(0, vocab - 1)
    stems = draw(st.lists(st.lists(token, min_size=1, max_size=40), min_size=1, max_size=3))
    some = []
    for _ in range(draw(st.integers(1, 8))):
        stem = draw(st.sampled_from(stems))
        prompt = stem[: draw(st.integers(1, len(stem)))] + draw(st.lists(token, max_size=6))
        some.append(Job(
            prompt,
            draw(st.integers(0, 30)),
            draw(st.integers(0, 12)),
            abort=draw(st.none() | st.integers(0, 40)),
            nan_at=draw(st.none() | st.none() | st.integers(0, 4)),
            stop_ids=draw(st.sampled_from([frozenset(), frozenset(), frozenset({1})])),
            lockstep=draw(st.sampled_from([False, False, True])),
        ))  # fmt: skip
    size = draw(st.sampled_from([1, 4, 16]))
    longest = max(-(-(len(job.prompt) + job.max_new_tokens) // size) for job in some)
    return Case(some, size, longest + draw(st.integers(1, 2 + longest)), draw(st.integers(1, 6)),
                draw(st.sampled_from([1, 2, 5, 16, 200])), draw(st.sampled_from(list(Policy))), draw(st.booleans()),
                draw(st.integers(0, 1)), vocab)  # fmt: skip


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases())
def test_any_schedule_gives_each_request_its_solo_tokens(case: Case) -> None:
    simulate(case)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_many_schedules_and_everything_happens_in_them(page_size: int) -> None:
    """Each seed under one policy and lag; tests/slow has all of them."""
    runs: list[Run] = []
    for seed in range(50):
        policy, lag = (Policy.fcfs, Policy.lpm)[seed % 2], seed // 2 % 2
        fixed = {"page_size": page_size, "policy": policy, "lag": lag, "cached": seed % 5 > 0}
        runs.append(simulate(random_case(random.Random(f"{seed} {page_size}"), **fixed)))
    assert sum(run.scheduler.counters()["hit_tokens"] for run in runs) > 100
    assert sum(run.shared_in_step for run in runs) > 0
    assert sum(run.discarded for run in runs) > 0
    assert max(run.most_rows for run in runs) >= 5
    if page_size < 16:  # pages small against the requests: pools do run dry
        assert sum(run.scheduler.counters()["preemptions"] for run in runs) > 5
        assert sum(run.late for run in runs) > 0


def test_tight_pools_preempt_again_and_again() -> None:
    preemptions = 0
    for seed in range(30):
        rng = random.Random(seed)
        some = [Job([rng.randrange(50) for _ in range(rng.randrange(1, 6))], rng.randrange(20, 40)) for _ in range(6)]
        budget, policy = rng.choice([2, 9, 50]), rng.choice([Policy.fcfs, Policy.lpm])
        case = Case(some, 4, 13, 6, budget, policy, seed % 3 > 0, seed % 2, 50)
        preemptions += simulate(case).scheduler.counters()["preemptions"]
    assert preemptions > 100


# The first found an error: a page that others hold went below a foreign one. The others take a row with a new page out
# of the step, because an older prompt, admitted later by LPM, needs room.
@pytest.mark.parametrize(("seed", "budget"), [(1063, 3), (1053, 5), (1087, 3), (1907, 3)])
def test_cases_that_are_rarely_drawn(seed: int, budget: int) -> None:
    simulate(random_case(random.Random(seed), policy=Policy.lpm, cached=True, rows=6, budget=budget))


def test_same_events_give_the_same_steps() -> None:
    for seed in range(15):
        first, second = (simulate(random_case(random.Random(seed))) for _ in range(2))
        assert first.log == second.log and len(first.log) > 0


def test_the_oracle_sees_a_page_that_was_freed_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagePool, "retain", lambda self, pages: None)
    with pytest.raises((AssertionError, InvariantError)):
        for seed in range(20):
            simulate(random_case(random.Random(seed), cached=True))


def test_the_oracle_sees_a_stale_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checks of the books: the slots alone tell."""
    monkeypatch.setattr(simulation, "check_scheduler", lambda scheduler: None)
    monkeypatch.setattr(
        PrefixCache, "_path", lambda self, ids, n, salts, at=0: iter([(i,) for i in range(at, n // self.page_size)])
    )
    with pytest.raises(AssertionError, match="wrong slot"):
        for seed in range(20):
            simulate(random_case(random.Random(seed), cached=True, page_size=4))


# -- the doors --------------------------------------------------------------------------------------------------------


def test_refuses_what_could_never_fit() -> None:
    scheduler = make_scheduler(Case([], page_size=4, num_pages=4))
    fits, too_long = make_request(Case(jobs((8, 4))), 0), make_request(Case(jobs((8, 5))), 0)
    with pytest.raises(CapacityError, match="needs 4 pages.*max_new_tokens=5.*has 3"):
        scheduler.add(too_long)
    assert not scheduler.has_work
    scheduler.add(fits)
    finish_all(scheduler)
    assert fits.finish is not None and fits.num_output == 4


def test_refuses_a_rid_in_use_and_a_used_request() -> None:
    case = Case(jobs((3, 2)))
    scheduler, (request,) = start(case)
    with pytest.raises(InvalidRequestError, match="rid 'r0'"):
        scheduler.add(make_request(case, 0))
    finish_all(scheduler)
    with pytest.raises(InvalidRequestError, match="new"):
        scheduler.add(request)
    scheduler.add(make_request(case, 0))  # the rid is free again
    with pytest.raises(InvalidRequestError):
        scheduler.add(make_request(Case(jobs((0, 2), (0, 2))), 1))


def test_update_wants_every_step_once_in_order_with_all_rows() -> None:
    scheduler, _ = start(Case(jobs((3, 5), (3, 5))))
    first, second = planned(scheduler), planned(scheduler)
    with pytest.raises(InvariantError):
        land(scheduler, second)
    with pytest.raises(InvariantError):
        scheduler.update(first, [1], [-1.0])
    land(scheduler, first)
    with pytest.raises(InvariantError):
        land(scheduler, first)


def test_check_sees_a_lost_page_and_a_lost_request() -> None:
    def lose_page(s: Scheduler, r: Request) -> None:
        r.pages.pop()

    def lose_request(s: Scheduler, r: Request) -> None:
        del s._requests[r.rid]

    def steal_row(s: Scheduler, r: Request) -> None:
        r.row = 3

    for spoil in (lose_page, lose_request, steal_row):
        scheduler, (request,) = start(Case(jobs((9, 5))))
        planned(scheduler)
        spoil(scheduler, request)
        with pytest.raises(InvariantError):
            check_scheduler(scheduler)


# -- budget and order -------------------------------------------------------------------------------------------------


def test_decoding_rows_first_the_longest_in_front_then_running_prompts_then_new_ones() -> None:
    scheduler, _ = start(Case(jobs((2, 9), (10, 9), (3, 9), (5, 9)), budget=8))
    assert rows(scheduler, plan := planned(scheduler)) == [("r0", 0, 2, True), ("r1", 0, 6, False)]
    land(scheduler, plan)
    assert rows(scheduler, plan := planned(scheduler)) == [("r0", 2, 1, True), ("r1", 6, 4, True), ("r2", 0, 3, True)]
    land(scheduler, plan)
    assert rows(scheduler, plan := planned(scheduler)) == [
        ("r1", 10, 1, True), ("r0", 3, 1, True), ("r2", 3, 1, True), ("r3", 0, 5, True),
    ]  # fmt: skip
    assert plan.new_pages[-1][1] == 0 and plan.preempted == []


def test_a_small_budget_keeps_newcomers_waiting() -> None:
    scheduler, _ = start(Case(jobs((1, 3), (1, 3), (1, 3)), budget=2))
    land(scheduler, planned(scheduler))
    assert rows(scheduler, plan := planned(scheduler)) == [("r0", 1, 1, True), ("r1", 1, 1, True)]
    land(scheduler, plan)
    scheduler.abort("r0")
    assert rows(scheduler, planned(scheduler)) == [("r1", 2, 1, True), ("r2", 0, 1, True)]


def test_row_slots_are_the_lowest_free_ones_and_come_back() -> None:
    scheduler, requests = start(Case(jobs((2, 9), (2, 1), (2, 9), (2, 9)), rows=3, budget=64))
    plan = planned(scheduler)
    assert [r.row for r in requests] == [0, 1, 2, None]
    assert land(scheduler, plan) == ["r1"]
    planned(scheduler)
    assert [r.row for r in requests] == [0, None, 2, 1]


def test_page_tables_grow_when_a_page_is_full() -> None:
    scheduler, (request,) = start(Case(jobs((3, 9)), page_size=4))
    told = []
    while scheduler.has_work:
        plan = planned(scheduler)
        told.append([first for _, first, _, _ in plan.new_pages])
        land(scheduler, plan)
    assert told == [[0], [], [1], [], [], [], [2], [], []]


# -- prefix hits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize(("budget", "gap", "lag"), [(8192, 0, 0), (512, 0, 1), (700, 0, 0), (8192, 3, 1)])
def test_a_shared_prefix_is_computed_once(policy: Policy, budget: int, gap: int, lag: int) -> None:
    rng = random.Random(0)
    prefix = [rng.randrange(30000) for _ in range(1024)]
    some = [Job(prefix + [40000 + i] * 8, 2) for i in range(96)]
    case = Case(some, 16, 2000, 96, budget, policy, lag=lag)
    scheduler, requests = make_scheduler(case), [make_request(case, i) for i in range(96)]
    for i, request in enumerate(requests):
        scheduler.add(request)
        for _ in range(gap if i < 50 else 0):
            plan = planned(scheduler) if scheduler.has_work else None
            if plan is not None:
                land(scheduler, plan)
    finish_all(scheduler, lag)
    unique = 1024 + 96 * (8 + 2)
    assert 1024 + 96 * 8 < scheduler.num_computed_tokens <= 1.05 * unique
    assert sum(r.num_cached for r in requests) == scheduler.counters()["hit_tokens"] == 95 * 1024
    assert scheduler.counters()["preemptions"] == 0


def test_one_token_is_always_computed() -> None:
    case = Case([Job(list(range(8)), 2), Job(list(range(8)), 2), Job(list(range(9)), 2)], page_size=4, budget=64)
    scheduler, requests = start(case)
    assert rows(scheduler, planned(scheduler)) == [("r0", 0, 8, True), ("r1", 4, 4, True), ("r2", 8, 1, True)]
    assert [r.num_cached for r in requests] == [0, 4, 8]
    assert requests[1].pages[0] == requests[0].pages[0] and requests[2].pages[:2] == requests[0].pages


def test_outputs_are_hit_after_their_request_has_finished() -> None:
    case = Case([Job([0, 1, 2], 6), Job([0, 1, 2] + [7] * 5 + [9], 1)], page_size=4)
    scheduler, requests = make_scheduler(case), [make_request(case, i) for i in range(2)]
    scheduler.add(requests[0])
    finish_all(scheduler)
    assert requests[0].token_ids == [0, 1, 2] + [7] * 6
    scheduler.add(requests[1])
    assert rows(scheduler, planned(scheduler)) == [("r1", 8, 1, True)]


def test_without_a_cache_nothing_is_shared() -> None:
    scheduler, requests = start(Case([Job(list(range(8)), 2)] * 2, page_size=4, budget=64, cached=False))
    assert rows(scheduler, planned(scheduler)) == [("r0", 0, 8, True), ("r1", 0, 8, True)]
    finish_all_from = scheduler.counters()
    assert finish_all_from["hit_tokens"] == finish_all_from["cached_pages"] == 0


# -- policies ---------------------------------------------------------------------------------------------------------


def lpm_case(count: int) -> tuple[Scheduler, list[Request]]:
    """One request with a prefix of its own, then `count` that share a long cached one; one row, so one by one."""
    prefix = list(range(16))
    some = [Job([*prefix, 50], 1), Job([99] * 8, 1)] + [Job([*prefix, 60 + i], 1) for i in range(count)]
    case = Case(some, 4, 64, 1, 64, Policy.lpm)
    scheduler, requests = make_scheduler(case), [make_request(case, i) for i in range(len(some))]
    scheduler.add(requests[0])
    finish_all(scheduler)
    for request in requests[1:]:
        scheduler.add(request)
    return scheduler, requests


def order_of_admission(scheduler: Scheduler) -> list[str]:
    order = []
    while scheduler.has_work:
        plan = planned(scheduler)
        order += [new.rid for new in plan.new_rows]
        land(scheduler, plan)
    return order


def test_other_policies_admit_by_what_they_say() -> None:
    some = [Job([1] * 8, 3), Job([2] * 2, 1), Job([3] * 5, 9), Job([4] * 5, 3)] + [Job([5], 3) for _ in range(20)]
    order = {}
    for policy in (Policy.lof, Policy.shortest_prefill_first, Policy.random):
        scheduler, _ = start(Case(some, 4, 64, 1, 64, policy))
        order[policy] = [int(rid[1:]) for rid in order_of_admission(scheduler)]
    assert order[Policy.lof] == [2, 0, *range(3, 24), 1]
    assert order[Policy.shortest_prefill_first] == [*range(4, 24), 1, 2, 3, 0]
    drawn = order[Policy.random]
    assert sorted(drawn) == list(range(24)) != drawn and sum(a > b for a, b in itertools.pairwise(drawn)) > 5


def test_lpm_admits_the_longest_prefix_first_and_ties_by_arrival() -> None:
    scheduler, _ = lpm_case(3)
    assert order_of_admission(scheduler) == ["r2", "r3", "r4", "r1"]


def test_lpm_counts_what_would_be_hit() -> None:
    """Of a prompt that is cached as a whole the last page is computed again: its hit is no longer than its rival's."""
    case = Case([Job(list(range(8)), 1), Job([0, 1, 2, 3, 40, 41, 42, 43, 44], 1), Job(list(range(8)), 1)], rows=1,
                policy=Policy.lpm, vocab=50)  # fmt: skip
    scheduler, requests = make_scheduler(case), [make_request(case, i) for i in range(3)]
    scheduler.add(requests[0])
    land(scheduler, planned(scheduler))
    for request in requests[1:]:
        scheduler.add(request)
    assert [new.rid for new in planned(scheduler).new_rows] == ["r1"]


def test_lpm_goes_on_when_who_had_a_priority_has_gone() -> None:
    case = Case([Job(list(range(8)), 1), Job([40], 1), Job([41, 42], 1), Job([*range(8), 43], 1)], rows=1,
                policy=Policy.lpm, vocab=50)  # fmt: skip
    scheduler, requests = make_scheduler(case), [make_request(case, i) for i in range(4)]
    scheduler.add(requests[0])
    land(scheduler, planned(scheduler))
    requests[1].priority = 1
    scheduler.add(requests[1])
    scheduler.abort("r1")
    for request in requests[2:]:
        scheduler.add(request)
    assert [new.rid for new in planned(scheduler).new_rows] == ["r3"]


def test_fcfs_admits_by_arrival() -> None:
    scheduler, _ = start(Case([Job([5] * 9, 1), Job([6], 1), Job([5] * 9, 1)], rows=1))
    assert order_of_admission(scheduler) == ["r0", "r1", "r2"]


def test_lpm_starves_nobody() -> None:
    scheduler, _ = lpm_case(LPM_PATIENCE + LPM_WINDOW + 20)
    position = order_of_admission(scheduler).index("r1")
    assert 3 < position <= LPM_PATIENCE


def waiting_for_slots(count: int) -> tuple[Scheduler, list[Request]]:
    """One slot for adapters, which r0 has; r1 wants it, too; nobody else wants one."""
    pool = PagePool(100)
    scheduler = Scheduler(pool, None, page_size=4, max_running_requests=8, max_step_tokens=64, adapter_slots=1)
    requests = [make_request(Case(jobs(*[(4, 8)] * count)), i) for i in range(count)]
    requests[0].adapter, requests[1].adapter = Adapter("a", 0, None), Adapter("b", 1, None)
    for request in requests:
        scheduler.add(request)
    return scheduler, requests


def test_who_was_preempted_and_waits_for_a_slot_keeps_its_place() -> None:
    scheduler, requests = waiting_for_slots(4)
    land(scheduler, planned(scheduler))
    requests[1].num_preempted = 1  # as if the slot had been taken from it
    scheduler.retract()
    assert [request.rid for request in scheduler._waiting.requests()] == ["r0", "r1", "r2", "r3"]


def test_all_who_were_preempted_before_keep_their_places_before_another() -> None:
    """Of a queue, for the scheduler lets the earliest of them run on."""
    queue, (*again, new) = WaitingQueue(Policy.fcfs, None), waiting_for_slots(4)[1]
    queue.add(new)
    for request in again:
        request.num_preempted = 1
        queue.put_back(request)
    assert queue.requests() == [*again, new]


def test_in_one_step_no_more_overtake_who_waits_for_a_slot_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "LPM_PATIENCE", 2)
    scheduler, _ = waiting_for_slots(7)
    assert [request.rid for request in planned(scheduler).requests] == ["r0", "r2", "r3"]


def test_a_large_request_is_not_overtaken_for_ever_by_small_ones() -> None:
    """FCFS: when the head does not find its pages nobody goes in its place."""
    case = Case(jobs((4, 12), (40, 1), *[(4, 4)] * 30), page_size=4, num_pages=13, rows=8, budget=64)
    scheduler, requests = start(case)
    order = order_of_admission(scheduler)
    assert order[:2] == ["r0", "r1"] and len(order) == 32


# -- preemption -------------------------------------------------------------------------------------------------------


def test_a_newcomer_must_leave_a_reserve_and_then_nobody_is_preempted() -> None:
    case = Case(jobs((4, 8), (4, 8), (12, 4)), page_size=4, num_pages=7, budget=64, cached=False)
    scheduler, requests = start(case)
    plan = planned(scheduler)
    assert [r.rid for r in plan.requests] == ["r0", "r1"], "r2 needs 3 of the 4 pages left, and 2 are reserved"
    land(scheduler, plan)
    finish_all(scheduler)
    assert scheduler.counters()["preemptions"] == 0 and [r.num_output for r in requests] == [8, 8, 4]


def overfull(lag: int) -> tuple[Scheduler, list[Request], SchedulerOutput]:
    """Two rows that decode until the pool of 5 pages is dry, and the step in which the later one is preempted."""
    case = Case(jobs((4, 12), (4, 12), (8, 4)), page_size=4, num_pages=6, budget=64, cached=False, lag=lag)
    scheduler, requests = start(case)
    flights: list[SchedulerOutput] = []
    while True:
        plan = planned(scheduler)
        if plan.preempted:
            for flight in flights:
                land(scheduler, flight, 7)
            return scheduler, requests, plan
        flights.append(plan)
        if len(flights) > lag:
            land(scheduler, flights.pop(0), 7)


def test_the_earliest_goes_on_and_the_latest_gives_way() -> None:
    scheduler, requests, plan = overfull(0)
    assert plan.preempted == ["r1"] and [r.rid for r in plan.requests] == ["r0"]
    assert requests[1].status is Status.WAITING and requests[1].row is None and requests[1].num_preempted == 1
    land(scheduler, plan)
    assert order_of_admission(scheduler) == ["r1", "r2"], "the preempted request comes before the new one"
    assert [r.num_output for r in requests] == [12, 12, 4]


def test_a_row_that_is_preempted_in_the_step_that_gave_it_a_page_is_not_told() -> None:
    """A later arrival of a higher priority decodes while an earlier prompt is computed, which takes its pages."""
    case = Case(jobs((40, 4), (4, 8)), num_pages=32, budget=16, cached=False)
    scheduler, requests = make_scheduler(case), [make_request(case, i) for i in range(2)]
    requests[1].priority = 1
    for request in requests:
        scheduler.add(request)
    first = planned(scheduler)
    assert {request.rid: count for request, count in zip(first.requests, first.counts, strict=True)} == {
        "r0": 12,
        "r1": 4,
    }
    land(scheduler, first)
    assert scheduler.pool.allocate(scheduler.pool.num_available - 1)  # the one that is left r1 takes, and gives back
    second = scheduler.schedule()
    assert second is not None and second.preempted == ["r1"]
    assert rows(scheduler, second) == [("r0", 12, 8, False)] and [pages[0] for pages in second.new_pages] == [
        requests[0].row
    ]


def test_a_token_in_flight_of_a_preempted_row_counts() -> None:
    scheduler, requests, plan = overfull(1)
    assert plan.preempted == ["r1"] and requests[1].num_pending == 0
    computed = 4 + requests[1].num_output - 1  # all but the token that arrived after the preemption
    assert computed % 4 == 0 and requests[1].token_ids[-1] == 7
    land(scheduler, plan)
    finish_all(scheduler, 1)
    assert [r.num_output for r in requests] == [12, 12, 4]


def test_preempted_pages_stay_in_the_cache_and_are_hit_again() -> None:
    case = Case(jobs((4, 12), (4, 12)), page_size=4, num_pages=6, budget=64)
    scheduler, requests = start(case)
    finish_all(scheduler)
    assert requests[1].num_preempted == 1 and requests[1].num_cached == 0 and scheduler.counters()["hit_tokens"] > 0


def test_no_thrash() -> None:
    """Rows for all, pages for few: recomputing costs little of what is computed."""
    scheduler, requests = start(Case(jobs(*[(16, 48)] * 24), page_size=4, num_pages=65, rows=24, budget=64))
    finish_all(scheduler)
    needed = 24 * (16 + 47)
    assert scheduler.counters()["preemptions"] > 0 and scheduler.num_computed_tokens <= 1.5 * needed


def test_a_newcomer_is_admitted_by_evicting_but_never_by_preempting() -> None:
    case = Case(jobs((16, 1), (12, 2)), page_size=4, num_pages=6, budget=64)
    scheduler, requests = make_scheduler(case), [make_request(case, i) for i in range(2)]
    scheduler.add(requests[0])
    finish_all(scheduler)
    assert scheduler.counters()["cached_pages"] == 4
    scheduler.add(requests[1])
    planned(scheduler)
    assert scheduler.counters() | {"cached_pages": 0} == {
        "running": 1, "waiting": 0, "finished": 1, "pages": 5, "free_pages": 0, "used_pages": 3, "cached_pages": 0,
        "preemptions": 0, "hit_tokens": 0, "computed_tokens": 28, "drafts": 0, "correct_drafts": 0,
    }  # fmt: skip


# -- overlap ----------------------------------------------------------------------------------------------------------


def test_the_pending_token_is_planned_before_it_is_known() -> None:
    scheduler, (request,) = start(Case(jobs((3, 3))))
    first = planned(scheduler)
    assert request.num_pending == 1
    second = planned(scheduler)
    assert rows(scheduler, second) == [("r0", 3, 1, True)] and len(request.token_ids) == 3
    land(scheduler, first, 8)
    assert request.token_ids[3:] == [8] and request.num_pending == 1
    third = planned(scheduler)
    assert rows(scheduler, third) == [("r0", 4, 1, True)]
    assert scheduler.schedule() is None, "the last token is drawn in step 2: nothing more to compute"
    assert land(scheduler, second, 9) == [] and land(scheduler, third, 6) == ["r0"]
    assert request.token_ids[3:] == [8, 9, 6] and request.num_computed == 0 and not scheduler.has_work


def test_pages_of_wrong_drafts_let_in_who_waited_for_them() -> None:
    case = Case([Job([1, 2], 10), Job([3, 4, 0, 1, 2, 3], 2)], page_size=1, num_pages=14, cached=False, guess="wrong")
    scheduler, requests = make_scheduler(case), [make_request(case, i) for i in range(2)]
    tokens = solo(case.jobs[0], requests[0].seed, case.vocab)[0]
    scheduler.add(requests[0])
    scheduler.update(planned(scheduler), tokens[:1], [-1.0])
    plan = planned(scheduler)
    assert plan.drafts
    scheduler.add(requests[1])
    assert scheduler.schedule() is None  # the drafts hold its pages
    scheduler.update(plan, [tokens[1]] + [0] * (plan.num_draws - 1), [-1.0] * plan.num_draws)
    assert [new.rid for new in planned(scheduler).new_rows] == ["r1"]


def overlapped(case: Case, steps: int) -> tuple[Scheduler, list[Request], list[SchedulerOutput]]:
    """A scheduler, its requests, and the last of so many steps, which is in flight: each was planned ahead of the end
    of the one before."""
    scheduler, requests = start(case)
    flights = [planned(scheduler)]
    for _ in range(steps - 1):
        flights.append(planned(scheduler))
        land(scheduler, flights.pop(0))
    return scheduler, requests, flights


def test_waits_for_draining_rows_rather_than_preempting() -> None:
    """r0 needs a page in step 5, when r1's last token is in flight and its pages are about to come back."""
    case = Case(jobs((4, 8), (3, 5), (3, 9)), page_size=4, num_pages=7, budget=64, cached=False)
    scheduler, requests, flights = overlapped(case, 5)
    assert rows(scheduler, plan := planned(scheduler)) == [("r2", 7, 1, True)] and plan.preempted == []
    assert land(scheduler, flights.pop(0)) == ["r1"]
    assert rows(scheduler, planned(scheduler)) == [("r0", 8, 1, True), ("r2", 8, 1, True)]
    assert scheduler.counters()["preemptions"] == 0 and requests[0].num_pending == 1


def test_the_last_page_is_for_the_earlier_arrival_though_the_longer_row_comes_first() -> None:
    """r0 and r1 need a page in step 5, where one is free, and those of r2 are about to come back."""
    case = Case(jobs((4, 8), (8, 8), (3, 5)), page_size=4, num_pages=9, budget=64, cached=False)
    scheduler, _, flights = overlapped(case, 5)
    assert [request.rid for request in flights[0].requests] == ["r1", "r0", "r2"]
    assert rows(scheduler, plan := planned(scheduler)) == [("r0", 8, 1, True)] and plan.preempted == []


def test_a_row_that_drafts_have_made_the_longest_comes_first() -> None:
    case = Case(jobs((2, 20), (4, 20)), budget=64, cached=False)
    speculation = Speculation(lambda asks: [[7] * 4 if ask.request.rid == "r0" else [] for ask in asks], 4, 64, 100)
    scheduler, requests = make_scheduler(case), [make_request(case, i) for i in range(2)]
    scheduler.speculation = speculation
    for request in requests:
        scheduler.add(request)
    land(scheduler, planned(scheduler), 7)
    assert rows(scheduler, plan := planned(scheduler)) == [("r1", 4, 1, True), ("r0", 2, 5, True)]
    scheduler.update(plan, [7] * plan.num_draws, [-1.0] * plan.num_draws)
    assert [row[:2] for row in rows(scheduler, planned(scheduler))] == [("r0", 7), ("r1", 5)]


@pytest.mark.parametrize("lag", [0, 1])
def test_nothing_is_computed_beyond_the_length(lag: int) -> None:
    scheduler, requests = start(Case(jobs((5, 4), (3, 1), (7, 0)), cached=False))
    finish_all(scheduler, lag)
    assert scheduler.num_computed_tokens == (5 + 3) + 3 + 7


def test_the_token_after_a_stop_is_discarded() -> None:
    job = Job([1, 2, 3], 9, stop_ids=frozenset({5}))
    scheduler, (request,) = start(Case([job]))
    first, second = planned(scheduler), planned(scheduler)
    assert land(scheduler, first, 5) == ["r0"]
    assert request.finish == {"type": "stop", "matched": 5}
    assert request.status is Status.FINISHED and request.row is None and not request.pages
    assert land(scheduler, second, 5) == []
    assert request.token_ids == [1, 2, 3, 5] and request.logprobs == [-1.0] and scheduler.num_finished == 1


# -- how requests end -------------------------------------------------------------------------------------------------


def test_a_stop_token_at_the_last_position_is_a_stop() -> None:
    scheduler, (request,) = start(Case([Job([1], 1, stop_ids=frozenset({5}))]))
    land(scheduler, planned(scheduler), 5)
    assert request.finish is not None and request.finish["type"] == "stop"


@pytest.mark.parametrize("lag", [0, 1])
def test_zero_new_tokens_is_prefill_only(lag: int) -> None:
    scheduler, (request,) = start(Case([Job(list(range(10)), 0, stop_ids=frozenset({7}))], budget=4))
    assert finish_all(scheduler, lag) == 3
    assert request.finish == {"type": "length", "length": 0}
    assert request.token_ids == list(range(10)) and request.logprobs == []
    assert scheduler.counters()["cached_pages"] == 2


def test_a_row_with_nan_ends_alone_and_its_pages_are_never_hit() -> None:
    prompts = [list(range(9)), list(range(50, 59)), list(range(9))]
    scheduler, requests = start(Case([Job(p, 5) for p in prompts[:2]], budget=64))
    plan = planned(scheduler)
    finished = scheduler.update(plan, [1, 1], [math.nan, -1.0])
    check_scheduler(scheduler)
    assert finished == [requests[0]] and requests[0].finish is not None
    assert requests[0].finish["type"] == "abort" and "non-finite logits at position 9" in str(
        requests[0].finish["message"]
    )
    assert requests[0].token_ids == prompts[0] and requests[0].logprobs == []
    assert requests[1].finish is None and requests[1].num_output == 1
    assert scheduler.cache is not None and scheduler.cache.match_length(prompts[0], 9) == 0
    assert scheduler.cache.match_length(prompts[1], 9) == 8


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("state", ["waiting", "prompting", "decoding", "draining", "preempted"])
def test_abort_in_any_state_frees_everything_at_once(state: str, lag: int) -> None:
    if state == "preempted":
        scheduler, requests, plan = overfull(lag)
        request, flights = requests[1], [plan]
    else:
        case = Case(jobs((9, 2 if state == "draining" else 9)), rows=1, budget=4 if state == "prompting" else 64)
        scheduler, (request,) = start(case)
        flights = []
        for _ in range({"waiting": 0, "prompting": 1, "decoding": 1, "draining": 2}[state]):
            flights.append(planned(scheduler))
        if lag == 0 and flights and state != "draining":
            land(scheduler, flights.pop(0))
    tokens = list(request.token_ids)
    assert scheduler.abort(request.rid) is request and scheduler.abort(request.rid) is None
    check_scheduler(scheduler)
    assert request.finish == {"type": "abort", "message": "Aborted"}
    assert request.row is None and not request.pages and request.status is Status.FINISHED
    for flight in flights:
        land(scheduler, flight)
    assert request.token_ids == tokens
    finish_all(scheduler, lag)
    assert scheduler.counters()["used_pages"] == 0 and scheduler.schedule() is None


def test_abort_of_an_unknown_rid_is_none() -> None:
    scheduler, _ = start(Case(jobs((2, 2))))
    assert scheduler.abort("nobody") is None
    finish_all(scheduler)
    assert scheduler.abort("r0") is None


def test_counters_and_steps_are_plain_values() -> None:
    scheduler, requests = start(Case(jobs((8, 2), (6, 2)), rows=1, budget=64))
    plan = planned(scheduler)
    assert entry(scheduler, plan) == (0, (("r0", 0, 0, 8, True),), (("r0", 0, tuple(requests[0].pages)),), ())
    counters = scheduler.counters()
    assert (counters["running"], counters["waiting"], counters["used_pages"], counters["cached_pages"]) == (1, 1, 2, 2)
    assert counters["free_pages"] + counters["used_pages"] == counters["pages"] == 31


def test_nobody_is_asked_while_guesses_that_are_not_known_yet_are_in_flight() -> None:
    """By three rows a try does not pay any more; when one of them draws its last token it does."""
    guesses: dict[Request, list[int]] = {}
    gains = {"a": 0.5, "b": 0.0, "c": 0.5}

    def reveal() -> dict[Request, list[int]]:
        found = dict(guesses)
        guesses.clear()
        return found

    def propose(asks: Sequence[Ask]) -> list[Late]:
        reveal()  # what a step was not fed with, as `DraftModel` does
        for ask in asks:
            assert ask.drafting is not None
            ask.drafting.gain, ask.drafting.hope_from = gains[ask.request.rid], 1 << 30
        guesses.update({ask.request: [7] for ask in asks if ask.request.rid == "a"})
        return [Late([0] if ask.request in guesses else []) for ask in asks]

    pool = PagePool(64)
    speculation = Speculation(propose, 4, 64, 100, waits=True, hope=1.0, toll=0.4, reveal=reveal)
    scheduler = Scheduler(
        pool, None, page_size=4, max_running_requests=4, max_step_tokens=64, speculation=speculation
    )  # fmt: skip
    requests = [
        Request(rid, 3, [1, 2, 3], SamplingParams(), 0, n, frozenset()) for rid, n in (("a", 9), ("b", 3), ("c", 9))
    ]
    for request in requests:
        scheduler.add(request)
    first = scheduler.schedule()
    assert first is not None
    scheduler.update(first, [7] * 3, [0.0] * 3)
    guessed = scheduler.schedule()
    assert guessed is not None and guessed.guessed and [draft.index for draft in guessed.drafts] == [0]
    beside = scheduler.schedule()
    assert beside is not None and [request.rid for request in beside.requests] == ["b", "c"] and not beside.drafts
    scheduler.update(guessed, [7, 8, 9, 10], [0.0] * 4)
    assert requests[0].token_ids[3:] == [7, 7, 10]
    assert [request.rid for request in scheduler.update(beside, [8, 9], [0.0] * 2)] == ["b"]


def test_a_draw_that_failed_behind_a_right_draft_is_made_again() -> None:
    scheduler = Scheduler(
        PagePool(64), None, page_size=4, max_running_requests=4, max_step_tokens=64,
        speculation=Speculation(lambda asks: [[7]] * len(asks), 4, 64, 100),
    )  # fmt: skip
    request = Request("a", 3, [1, 2, 3], SamplingParams(), 0, 9, frozenset())
    scheduler.add(request)
    land(scheduler, planned(scheduler), 5)
    guessed = planned(scheduler)
    assert [list(draft) for _, draft in guessed.drafts] == [[7]]
    assert not scheduler.update(guessed, [7, -1], [0.0, math.nan])
    assert request.token_ids[3:] == [5, 7] and planned(scheduler).starts == [4]
