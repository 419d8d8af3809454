"""Two thousand schedules of the whole engine, and hundreds of its policies and ranks; `scripts/simulate.py` runs as
many as there is time for."""

from dataclasses import replace

import pytest

pytest.importorskip("greenlet")

from simulated_plan import plan_of
from simulated_ranks import ranks_plan_of
from simulated_run import violation

from fengine.config import Policy


@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_schedules_hold(first: int) -> None:
    wrong = {seed: found for seed in range(first, first + 100) if (found := violation(plan_of(seed)))}
    assert not wrong


@pytest.mark.parametrize("policy", [Policy.lof, Policy.random, Policy.shortest_prefill_first])
def test_policies_that_plans_do_not_draw_hold(policy: Policy) -> None:
    for seed in range(20, 200):
        plan = plan_of(seed)
        assert violation(replace(plan, settings=replace(plan.settings, policy=policy))) is None, seed


@pytest.mark.parametrize("first", range(50, 300, 50))
def test_schedules_of_ranks_hold(first: int) -> None:
    wrong = {seed: found for seed in range(first, first + 50) if (found := violation(ranks_plan_of(seed)))}
    assert not wrong
