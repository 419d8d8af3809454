"""Two thousand schedules of the whole engine; `scripts/simulate.py` runs as many as there is time for."""

import pytest

pytest.importorskip("greenlet")

from simulated_plan import plan_of
from simulated_run import violation


@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_schedules_hold(first: int) -> None:
    wrong = {seed: found for seed in range(first, first + 100) if (found := violation(plan_of(seed)))}
    assert not wrong
