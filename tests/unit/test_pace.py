"""How much of a request a model guesses: what pays by its own tries, against an exact model of what tries bring."""

import random
from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fengine.core.request import Drafting, Request, SamplingParams
from fengine.core.scheduler_output import Drafts
from fengine.core.speculation import Ask, Speculation, gain_of, pays
from fengine.speculative.draft import DraftModel
from fengine.speculative.memo import Ahead, Chained, Memo, Try, tries_of
from fengine.speculative.pace import GROWTH, LONGEST, REST, WAIT, Cost, Pace
from fengine.speculative.proposers import EXPERTS, HOST, LEAST_GUESS, first_of, times_of

PRICE = 0.09


def played(chance: float, tokens: int, seed: int, price: float = PRICE, most: int = 5) -> tuple[float, int]:
    """(tokens for each step's time, guesses) of a request whose guesses are right with this chance."""
    pace, draw, known, cost, guesses = Pace(most, Cost(price)), random.Random(seed), 0, 0.0, 0
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
    assert played(0.0, 96, 0)[0] > 0.99  # nor in a short answer


@pytest.mark.parametrize("chance", [0.5, 0.6, 0.75, 0.9])
def test_what_can_be_guessed_is_nearly_as_fast_as_the_best_fixed_number(chance: float) -> None:
    def fixed(size: int) -> float:
        return (1 + sum(chance**k for k in range(1, size + 1))) / (1 + WAIT + PRICE * size)

    speeds = [played(chance, 2048, seed)[0] for seed in range(20)]
    assert sum(speeds) / len(speeds) > 0.92 * max(fixed(size) for size in range(1, 6))


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), max_size=12), st.integers(1, 5))
def test_a_pace_is_sure_where_a_try_in_vain_ends_in_another(tries: list[tuple[int, int]], tried: int) -> None:
    pace, known = Pace(5, Cost(PRICE, 0.1)), 0
    for count, right in tries:
        known = max(known, pace.resume_at) + 1  # not while it rests
        pace.learn(count, min(right, count), known)
    sure, known = pace.sure(tried), max(known, pace.resume_at) + 1
    pace.learn(tried, 0, known)
    assert sure == (pace.resume_at < known)


def test_who_is_not_tried_for_long_is_as_new_again() -> None:
    """Beside others a small gain does not pay for those that wait, and nobody would ever learn of a larger one."""
    ids = [1] * 24
    ask = Ask(0, Request("r", 20, ids, SamplingParams(), 0, 20, frozenset()), Drafting(last=(4, 0)), 0, 1, 5)
    memo, hope = Memo(Pace(5, Cost(PRICE))), Pace(5, Cost(PRICE)).gain
    memo.learn(ask, 0)
    again = 24 + 2 * REST + 4
    assert 0 < memo.pace.gain < 0.3 < hope and ask.drafting.rest_until < 0
    assert [gain_of(ask.drafting, n, hope) for n in (24, again - 1, again)] == [memo.pace.gain, memo.pace.gain, hope]
    ask.drafting.try_from = again + 9
    assert gain_of(ask.drafting, again, hope) == 0.0


def test_guesses_that_cost_nothing_are_made_always_and_dear_ones_never() -> None:
    pace = Pace(5, Cost(0.0))
    for known in range(50):
        pace.learn(5, 0, known)
    assert pace.size == 5 and not pace.resume_at and pace.gain > 0
    assert Pace(5, Cost(1.1)).size == 0 == Pace(5, Cost(1.1)).gain


def test_a_guess_of_a_small_model_costs_its_launches_on_a_gpu_and_its_bytes_on_a_cpu() -> None:
    """Llama-3.1-8B and a head of it: 0.24 of 4.2 ms on one H200; the box, 0.2 ms, and a head of two fifths of its
    bytes: there the host takes longer than three steps."""
    head, llama = (750_000_000, 1), (16_060_000_000, 32)
    assert times_of("cuda", head, llama) == pytest.approx((4.0, 0.24), rel=0.06)
    head, box = (3_300_000, 1), (8_300_000, 4)
    step, guess = times_of("cuda", head, box)
    assert (step, guess) == (pytest.approx(0.2, abs=0.04), pytest.approx(0.06, abs=0.01))
    assert Pace(7, Cost(guess / step, HOST / step)).size == 0 < Pace(7, Cost(guess / step)).size
    assert times_of("cpu", head, box) == (8_300_000, 3_300_000)


def test_mixtures_are_tried_too_and_again() -> None:
    pace = Pace(5, Cost(EXPERTS + LEAST_GUESS))
    assert pace.size == 1
    pace.learn(1, 0, 10)
    assert (pace.size, pace.resume_at) == (1, 10 + REST)
    pace.learn(1, 1, 50)
    assert pace.size > 1 and not pace.rest


def test_guesses_that_are_right_too_seldom_end_in_a_rest() -> None:
    pace = Pace(4, Cost(0.55))
    pace.learn(4, 1, 100)
    assert pace.size == 0 and pace.resume_at == 100 + REST


def test_rests_grow_up_to_a_limit_and_end_with_a_success() -> None:
    pace, known, rests = Pace(5, Cost(PRICE)), 0, []
    while len(rests) < 9:
        known = max(known, pace.resume_at) + 1
        before = pace.rest
        pace.learn(pace.size, 0, known)
        if pace.rest != before or pace.resume_at > known:
            rests.append(pace.rest)
    assert rests[:3] == [REST, GROWTH * REST, GROWTH**2 * REST] and rests[-1] == LONGEST
    assert pace.size == 1 and 0 < pace.gain <= WAIT  # a try behind a rest is a short one
    pace.learn(1, 1, known + 600)
    assert pace.rest == 0 and pace.size > 2


@pytest.mark.parametrize(("drawn", "done"), [([5, 6], 12), ([5, 8], 11), ([9], 10)])
def test_what_was_drawn_of_guesses_is_computed_already(drawn: list[int], done: int) -> None:
    """And it is told from when on to ask again: guesses that were wrong do not pay."""
    memo = Memo(Pace(5, Cost(0.9)), done=10, guesses=[5, 6, 7], known=10, room=16)
    ids = [1] * 10 + drawn + [3]
    drafting = Drafting(last=(3, 0))
    memo.learn(Ask(0, Request("r", 4, ids, SamplingParams(), 0, 20, frozenset()), drafting, 0, 1, 5), 0)
    assert (memo.done, memo.guesses, drafting.last) == (min(done, len(ids) - 1), [], None)
    assert drafting.rest_until == drafting.try_from == memo.pace.resume_at - 1 > len(ids) and drafting.gain == 0.0


def test_each_of_two_proposers_learns_of_its_own_tries() -> None:
    request, drafting = Request("r", 4, [1] * 12, SamplingParams(), 0, 20, frozenset()), Drafting()
    said: dict[str, list[int]] = {}
    seen: dict[str, list[tuple[int, int]]] = {"few": [], "model": []}

    def proposer(name: str, rest_until: int) -> Any:
        def propose(asks: Sequence[Ask]) -> list[list[int]]:
            for one in asks:
                seen[name].append((one.drafting.proposed, one.drafting.correct))
                one.drafting.rest_until = rest_until
            return [said.get(name, []) for _ in asks]

        return propose

    propose = first_of(proposer("few", 20), proposer("model", 30))
    for told, tried in (({"few": [5]}, (1, 1)), ({"model": [6, 7]}, (2, 0)), ({"few": [5]}, (1, 0)), ({}, None)):
        said.clear()
        said.update(told)
        assert propose([Ask(0, request, drafting, 0, 1, 5)]) == [next(iter(told.values()), [])]
        drafting.last = tried
    assert seen == {"few": [(0, 0), (1, 1), (1, 1), (2, 1)], "model": [(0, 0), (2, 0)]}
    assert drafting.rest_until == 20  # whoever rests less


def test_guesses_that_went_ahead_are_of_no_use_behind_another_step() -> None:
    asks = [Ask(0, Request("r", 4, [1] * 12, SamplingParams(), 0, 20, frozenset()), Drafting(), 0, 1, 5) for _ in "ab"]
    memos = [Memo(Pace(5, Cost(0.1)), next=12) for _ in asks]
    for ask, memo in zip(asks, memos, strict=True):
        ask.drafting.memo = memo
    ahead = Ahead(memos[::-1], 3, lambda: np.zeros((2, 3)))
    assert ahead.rows_of(asks) == [1, 0] and ahead.rows_of(asks[1:]) == [0] and ahead.rows_of([]) is None
    memos[1].next = 11
    assert ahead.rows_of(asks) is None and ahead.rows_of(asks[:1]) == [1]


@pytest.mark.parametrize("behind", [0, 1])
def test_what_is_to_be_caught_up_with_has_room_whatever_of_a_try_is_right(behind: int) -> None:
    for tried, kept, room in product(range(1, 5), range(5), (8, 11, 99)):
        known = 10 - behind
        left = [known + right + 1 - min(known + min(right, kept), room) for right in range(tried + 1)]
        assert Try(10, tried, 0, 0, kept, room, 0).unseen(behind) == max(left)


def test_without_a_price_every_try_pays() -> None:
    pace = Pace(5, Cost(0.0))
    for known in range(2000):
        pace.learn(5, 0, known)
    assert (pace.size, pace.gain, pace.resume_at) == (5, 5.0, 0)


def test_a_draft_that_is_behind_knows_what_was_known_at_its_last_try() -> None:
    memo = Memo(Pace(5, Cost(0.9)), done=5, guesses=[5, 6, 7], known=10, room=16)
    memo.learn(
        Ask(0, Request("r", 4, [1] * 10 + [5, 6, 1], SamplingParams(), 0, 20, frozenset()), Drafting(), 0, 1, 5), 2
    )
    assert memo.done == 8


def test_guesses_go_on_behind_a_step_that_tries_all_rows_which_are_sure_to_be_tried_again() -> None:
    def changed(name: str) -> list[tuple[int, int, int]]:
        rows, drafts = [], [Drafts(0, [5, 6]), Drafts(2, [7])]
        for rid in "ac":
            params = SamplingParams(frequency_penalty=1.0) if name == "edited" and rid == "c" else SamplingParams()
            request = Request(rid, 4, [1] * 10, params, 0, 20, frozenset())
            memo = Memo(Pace(5, Cost(0.01)), guesses=[5, 6], known=10, room=16)
            rows.append((Ask(0, request, Drafting(memo=memo), 0, 1, 5), memo, True))
        ask, memo, _ = rows[1]
        memo.pace.rest = 24 * (name == "rests")  # and would again, if nothing is right
        ask.drafting.memo = None if name == "left its row" else memo
        requests = [ask.request for ask, *_ in rows]
        requests.insert(1, Request("b", 4, [1] * 6, SamplingParams(), 0, 20, frozenset()))
        output: Any = SimpleNamespace(requests=requests, rows=[0, 1, 2], drafts=drafts[: 1 + (name != "not tried")])
        tries = tries_of(Chained(rows, lambda: np.zeros(0)), output, 0)
        return [(each.tried, each.own, each.draws) for each in tries]

    assert changed("nothing") == [(2, 0, 3), (1, 2, 5)]
    assert not any(map(changed, ("edited", "rests", "left its row", "not tried")))


def test_what_tries_bring_is_summed_alike_by_every_python() -> None:
    """Ten tenths are one: added one after another, as Python 3.11 does, they are less."""
    toll, cost = 0.1 - 2**-56, Cost(0.1, toll=0.1 - 2**-56)
    rows: Any = SimpleNamespace(decoding=[SimpleNamespace(drafting=Drafting(gain=0.1), num_computed=0)] * 10)
    assert pays(rows, Speculation(lambda asks: [], 4, 64, 100, waits=True, toll=toll))
    ask: Any = SimpleNamespace(drafting=Drafting(gain=0.1, memo=Memo(Pace(4, cost))))
    model: Any = DraftModel.__new__(DraftModel)
    model.cost, model.scouts = cost, [SimpleNamespace(gain=0.1)] * 10
    model._hear([ask] * 10)
    assert model.scouts and ask.drafting.rest_until == 0
    tried: list[Any] = []
    model.chained = model.ahead = None
    model.head, model.hope = SimpleNamespace(behind=0), 0.1
    ask.request = SimpleNamespace(token_ids=[1])
    model._sizes, model._propose = lambda asks: tried.append(asks) or {}, lambda asks, most, ahead: []
    assert model([ask] * 10) == [[]] * 10 and tried
