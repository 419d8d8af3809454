"""Whole-engine schedules: threads, clock and device are simulated, everything between them is real."""

import random
from collections import deque
from dataclasses import replace

import pytest

pytest.importorskip("greenlet")

from simulated_plan import Event, Job, Plan, Settings, plan_of
from simulated_run import shrunk, violation, world_of
from simulated_threads import Deadlock, Machine

from fengine.config import Policy
from fengine.core.scheduler import Scheduler
from fengine.core.scheduler_output import SchedulerOutput
from fengine.engine.output_processor import OutputProcessor


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_schedules_hold(first: int) -> None:
    """More of them in tests/slow, and in scripts/simulate.py."""
    wrong = {seed: found for seed in range(first, first + 20) if (found := violation(plan_of(seed)))}
    assert not wrong


def test_a_seed_decides_everything() -> None:
    def trace(seed: int) -> tuple[int, float, list[list[int]], list[object]]:
        world = world_of(plan_of(seed))
        world.run()
        states = [state for _, states, _ in world.calls for state in states]
        return (world.machine.turns, world.machine.clock, [state.request.token_ids for state in states],
                [(state.finished, state.output.finish, str(state.error)) for state in states])  # fmt: skip

    for seed in range(10):
        assert trace(seed) == trace(seed)


def test_a_planted_bug_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that takes the tokens of requests that have ended; one call and its abort show it."""
    update = Scheduler.update

    def late(self: Scheduler, output, tokens, logprobs, faults=None):  # type: ignore[no-untyped-def]
        requests = output.requests
        finished = update(self, output, tokens, logprobs, faults)
        for request, token in zip(requests, tokens, strict=False):
            if request.finish is not None and request not in finished:
                request.token_ids.append(token)
        return finished

    monkeypatch.setattr(Scheduler, "update", late)
    found = next(plan for seed in range(200) if violation(plan := plan_of(seed)))
    small = shrunk(found)
    assert violation(small) == violation(small) is not None
    assert len(small.events) <= min(3, len(found.events))


def test_callers_of_a_dead_loop_are_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("end", "fail"):
        monkeypatch.setattr(OutputProcessor, name, lambda requests, error: None)
    call = Event(0, 0.0, "call", (Job((1, 2, 3), 20, 0),), what=1)
    plan = Plan(1, Settings(), (call, Event(1, 0.005, "launch", what=1)))
    assert "Deadlock" in (violation(plan) or "")
    assert violation(plan.without({1})) is None


def test_guesses_that_are_asked_for_twice_before_they_are_known_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time drops what is in flight."""
    schedule = Scheduler.schedule

    def forgets(self: Scheduler) -> SchedulerOutput | None:
        known = [replace(before, guessed=False) for before in self._in_flight]
        before, self._in_flight = self._in_flight, deque(known)
        output = schedule(self)
        self._in_flight = deque([*before, output] if output is not None else before)
        return output

    monkeypatch.setattr(Scheduler, "schedule", forgets)
    assert any(violation(plan) for seed in range(400) if (plan := plan_of(seed)).settings.bare)


@pytest.mark.parametrize("policy", [Policy.lof, Policy.random, Policy.shortest_prefill_first])
def test_policies_that_plans_do_not_draw_hold(policy: Policy) -> None:
    for seed in range(20):  # tests/slow has more
        plan = plan_of(seed)
        assert violation(replace(plan, settings=replace(plan.settings, policy=policy))) is None, seed


def test_threads_that_wait_for_each_other_are_told() -> None:
    machine = Machine(random.Random(0), 0.5)
    with pytest.raises(Deadlock):
        machine.run(lambda: machine.system.queue().get(), 1.0)


def test_an_interleaving_changes_with_its_seed() -> None:
    turns = set()
    for seed in range(4):
        world = world_of(replace(plan_of(3), seed=seed))
        world.run()
        turns.add(world.machine.turns)
    assert len(turns) > 1
