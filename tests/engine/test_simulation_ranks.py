"""Schedules of several ranks, which are late, stop, die, fail, differ, or hear commands twice or out of order."""

from collections.abc import Callable
from typing import Any

import pytest
from simulated_ranks import TOLD, ranks_plan_of
from simulated_run import violation

from fengine.engine.parallel.follower import Follower
from fengine.engine.parallel.ranks import Ranks

HEAR = Ranks._hear


@pytest.mark.parametrize("first", range(0, 30, 15))
def test_schedules_hold(first: int) -> None:
    """More of them in tests/slow."""
    wrong = {seed: found for seed in range(first, first + 15) if (found := violation(ranks_plan_of(seed)))}
    assert not wrong


@pytest.mark.parametrize(
    ("owner", "name", "fault", "kinds"),
    [
        (Ranks, "_hear", lambda self, rank, told: HEAR(self, rank, told) if "loaded" in told else None, {"differs"}),
        (Ranks, "_ended", lambda self, rank, how: None, {"dies", "silent"}),
        (Ranks, "_compare", lambda self, number, digest: None, {"differs"}),
        (Follower, "_next", lambda self: self.link.told.get()[1], {"twice"}),
    ],
)
def test_an_engine_that_does_not_look_is_found(
    owner: type, name: str, fault: Callable[..., Any], kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, fault)
    plans = [
        plan for seed in range(300) if (plan := ranks_plan_of(seed)).fault is not None and plan.fault.kind in kinds
    ]
    assert kinds <= TOLD.keys() and any(violation(plan) for plan in plans)
