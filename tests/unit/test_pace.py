"""How much of a request a model guesses: what pays by its own tries, against an exact model of what tries bring."""

import random

import pytest

from fengine.speculative.pace import LONGEST, REST, WAIT, Pace

PRICE = 0.09


def played(chance: float, tokens: int, seed: int, price: float = PRICE, most: int = 5) -> tuple[float, int]:
    """(tokens for each step's time, guesses) of a request whose guesses are right with this chance."""
    pace, draw, known, cost, guesses = Pace(most, price), random.Random(seed), 0, 0.0, 0
    while known < tokens:
        size = pace.size if known >= pace.resume_at else 0
        right = next((k for k in range(size) if draw.random() >= chance), size)
        cost += 1 + (WAIT + price * size if size else 0)
        guesses += size
        known += 1 + right
        if size:
            pace.learn(size, right, known)
    return known / cost, guesses


@pytest.mark.parametrize("chance", [0.0, 0.02, 0.1])
def test_what_nobody_can_guess_is_hardly_tried(chance: float) -> None:
    speeds = [played(chance, 256, seed)[0] for seed in range(50)]
    assert sum(speeds) / len(speeds) > 0.985 and min(speeds) > 0.96


@pytest.mark.parametrize("chance", [0.5, 0.6, 0.75, 0.9])
def test_what_can_be_guessed_is_nearly_as_fast_as_the_best_fixed_number(chance: float) -> None:
    def fixed(size: int) -> float:
        return (1 + sum(chance**k for k in range(1, size + 1))) / (1 + WAIT + PRICE * size)

    speeds = [played(chance, 2048, seed)[0] for seed in range(20)]
    assert sum(speeds) / len(speeds) > 0.92 * max(fixed(size) for size in range(1, 6))


def test_guesses_that_cost_nothing_are_made_always_and_dear_ones_never() -> None:
    pace = Pace(5, 0.0)
    for known in range(50):
        pace.learn(5, 0, known)
    assert pace.size == 5 and not pace.resume_at and pace.gain > 0
    assert Pace(5, 1.1).size == 0 == Pace(5, 1.1).gain


def test_rests_grow_up_to_a_limit_and_end_with_a_success() -> None:
    pace, known, rests = Pace(5, PRICE), 0, []
    while len(rests) < 9:
        known = max(known, pace.resume_at) + 1
        before = pace.rest
        pace.learn(pace.size, 0, known)
        if pace.rest != before or pace.resume_at > known:
            rests.append(pace.rest)
    assert rests[:3] == [REST, 2 * REST, 4 * REST] and rests[-1] == LONGEST
    assert pace.size == 2  # a try behind a rest is a short one
    pace.learn(2, 2, known + 600)
    assert pace.rest == 0 and pace.size > 2
