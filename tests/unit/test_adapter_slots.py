"""Slots of adapters under the scheduler: who gets one, who waits, and that nobody reads what is not there."""

import random

import pytest
from books import check_scheduler, check_slots
from hypothesis import given, settings
from hypothesis import strategies as st

from fengine.core.admission import LPM_PATIENCE
from fengine.core.kv_pages import PagePool
from fengine.core.lora_slots import AdapterSlots
from fengine.core.prefix_cache import PrefixCache
from fengine.core.request import Adapter, Request, SamplingParams
from fengine.core.scheduler import Scheduler
from fengine.core.scheduler_output import SchedulerOutput
from fengine.errors import InvariantError


def adapters(count: int, pinned: int = 0) -> list[Adapter]:
    return [Adapter(f"a{i}", i, None, i < pinned) for i in range(count)]


def request(i: int, adapter: Adapter | None, prompt: int = 5, new: int = 4) -> Request:
    ids = [i * 100 + j for j in range(prompt)]
    return Request(f"r{i}", prompt, ids, SamplingParams(), 0, new, frozenset(), adapter=adapter)


def scheduler(slots: int, rows: int = 8, pages: int = 200) -> Scheduler:
    pool = PagePool(pages)
    return Scheduler(
        pool, PrefixCache(pool, 4), page_size=4, max_running_requests=rows, max_step_tokens=64, adapter_slots=slots
    )


class Device:
    """What lies in the slots, in the order of the steps."""

    def __init__(self, slots: int) -> None:
        self.held: list[int | None] = [None] * slots
        self.slots: dict[int, int | None] = {}  # by row
        self.writes = 0

    def run(self, step: SchedulerOutput, requests: list[Request]) -> None:
        for slot, number in step.adapters:
            self.held[slot] = number
            self.writes += 1
        self.slots |= {new.slot: new.adapter_slot for new in step.new_rows}
        for row, one in zip(step.rows, requests, strict=True):
            slot = self.slots[row]
            assert slot == one.adapter_slot
            assert one.adapter is None or (slot is not None and self.held[slot] == one.adapter.number)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6), slots=st.integers(1, 4), rows=st.integers(1, 6), pages=st.integers(12, 60),
    lag=st.booleans(), pinned=st.booleans(),
)  # fmt: skip
def test_any_schedule_reads_the_right_adapters(
    seed: int, slots: int, rows: int, pages: int, lag: bool, pinned: bool
) -> None:
    """With overlap or without, preemptions and aborts included; everything finishes and the books balance."""
    draw, device = random.Random(seed), Device(slots)
    known = [*adapters(6, pinned=int(pinned and slots > 1)), None]
    jobs = [request(i, draw.choice(known), draw.randint(1, 9), draw.randint(1, 12)) for i in range(25)]
    under, flights, steps = scheduler(slots, rows, pages), [], 0
    while jobs or under.has_work:
        while jobs and draw.random() < 0.4:
            under.add(jobs.pop())
        if draw.random() < 0.05 and under._requests:
            under.abort(draw.choice(sorted(under._requests)))
        plan = under.schedule()
        if plan is not None:
            device.run(plan, plan.requests)
            flights.append(plan)
        while len(flights) > (lag and plan is not None):
            landed = flights.pop(0)
            under.update(landed, [1] * len(landed.rows), [-1.0] * len(landed.rows))
        check_scheduler(under)
        steps += 1
        assert steps < 3000
    assert under.counters()["used_pages"] == 0 and under._rows.num_running == 0


def test_a_resident_adapter_is_not_written_again_and_the_idle_longest_goes() -> None:
    slots, (a, b, c, d) = AdapterSlots(3), adapters(4)
    assert [slots.enter(x) for x in (a, b, c)] == [(0, True), (1, True), (2, True)]
    assert slots.enter(a) == (0, False) and not slots.fits(d) and slots.fits(a)
    for index in (1, 2, 0):
        slots.leave(index)
    assert slots.enter(b) == (1, False)  # a is still in use, b was idle
    assert slots.enter(d) == (2, True) and not slots.fits(c)
    with pytest.raises(InvariantError):
        slots.enter(c)
    check_slots(slots, [(0, a), (1, b), (2, d)])
    with pytest.raises(InvariantError):
        check_slots(slots, [(0, a), (1, b)])
    with pytest.raises(InvariantError):
        check_slots(slots, [(0, b), (1, b), (2, d)])


def test_who_finds_no_slot_is_overtaken_for_a_while_only() -> None:
    """One adapter keeps its only slot through steady arrivals; the other one comes to its turn all the same."""
    under, (a, b) = scheduler(1), adapters(2)
    under.add(request(0, a, new=50))
    under.add(request(1, b))
    served, i = [], 2
    while not served:
        for adapter in (a, None):
            under.add(request(i, adapter, new=3))
            i += 1
        plan = under.schedule()
        assert plan is not None
        served = [one.rid for one in plan.requests if one.adapter is b]
        under.update(plan, [1] * len(plan.rows), [-1.0] * len(plan.rows))
        check_scheduler(under)
        assert i < 1000
    assert LPM_PATIENCE < i


def test_the_slot_that_was_idle_for_longest_is_given_away() -> None:
    first, second, third = adapters(3)
    slots = AdapterSlots(2)
    index = {adapter.name: slots.enter(adapter)[0] for adapter in (first, second)}
    slots.leave(index["a1"])
    slots.leave(index["a0"])
    assert slots.enter(third) == (index["a1"], True)
