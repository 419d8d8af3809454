"""Two thousand schedules of the whole engine, and hundreds of its policies and ranks; `scripts/simulate.py` runs as
many as there is time for."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("greenlet")

from simulated_plan import plan_of
from simulated_ranks import ranks_plan_of
from simulated_run import violation

from fengine.config import Policy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))
recording: Any = importlib.import_module("test_recording")


@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_schedules_hold(first: int) -> None:
    wrong = {seed: found for seed in range(first, first + 100) if (found := violation(plan_of(seed)))}
    assert not wrong


@pytest.mark.parametrize("policy", [Policy.lof, Policy.random, Policy.shortest_prefill_first])
def test_policies_that_plans_do_not_draw_hold(policy: Policy) -> None:
    for seed in range(20, 200):
        plan = plan_of(seed)
        assert violation(replace(plan, settings=replace(plan.settings, policy=policy))) is None, seed


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_schedules_of_ranks_hold(first: int) -> None:
    wrong = {seed: found for seed in range(first, first + 50) if (found := violation(ranks_plan_of(seed)))}
    assert not wrong


def test_recorded_schedules_are_scheduled_again_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording.check_replays(recording.SEEDS[30:], tmp_path, monkeypatch)
