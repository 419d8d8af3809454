"""More of the schedules of which tests/unit and tests/engine try some: other seeds, and each under every setting."""

import random
from dataclasses import replace

import pytest
from simulation import Case, Job, random_case, random_windows, simulate

from fengine.config import Policy

POLICIES = [Policy.fcfs, Policy.lpm]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lag", [0, 1])
def test_many_schedules(page_size: int, policy: Policy, lag: int) -> None:
    for seed in range(50):
        fixed = {"page_size": page_size, "policy": policy, "lag": lag, "cached": seed % 5 > 0}
        simulate(random_case(random.Random(f"{seed} {page_size}"), **fixed))


def test_tight_pools() -> None:
    preemptions = 0
    for seed in range(30, 90):
        rng = random.Random(seed)
        jobs = [Job([rng.randrange(50) for _ in range(rng.randrange(1, 6))], rng.randrange(20, 40)) for _ in range(6)]
        budget, policy = rng.choice([2, 9, 50]), rng.choice(POLICIES)
        case = Case(jobs, 4, 13, 6, budget, policy, seed % 3 > 0, seed % 2, 50)
        preemptions += simulate(case).scheduler.counters()["preemptions"]
    assert preemptions > 200


@pytest.mark.parametrize("guess", [None, "mixed"])
def test_windows(guess: str | None) -> None:
    for seed in range(150):
        rng = random.Random(f"{seed} {guess}")
        simulate(random_windows(rng, random_case(rng, guess=guess)))


@pytest.mark.parametrize("guess", ["right", "wrong", "mixed", "foreign", "long", "ngram"])
@pytest.mark.parametrize("lag", [0, 1])
def test_proposers(guess: str, lag: int) -> None:
    for seed in range(25):
        case = random_case(random.Random(f"{guess} {seed}"), guess=guess, lag=lag)
        simulate(case)
        simulate(replace(case, cached=not case.cached))


def test_same_events_give_the_same_steps() -> None:
    for seed in range(15, 40):
        first, second = (simulate(random_case(random.Random(seed))) for _ in range(2))
        assert first.log == second.log and len(first.log) > 0
