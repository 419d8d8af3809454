"""Sampling parameters: every value is either normalised or refused with the documented words."""

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fengine.core.parameter_kinds import CHECKS, NOT_BUILT
from fengine.core.request import Request, SamplingParams
from fengine.core.sampling_params import TOP_K_ALL
from fengine.core.scalars import check_ids, without_subclasses
from fengine.errors import InvalidRequestError, UnknownParameterError, UnsupportedFeatureError

RANGES = {
    "temperature": lambda x: x >= 0,
    "top_p": lambda x: 0 < x <= 1,
    "min_p": lambda x: 0 <= x <= 1,
    "frequency_penalty": lambda x: -2 <= x <= 2,
    "presence_penalty": lambda x: -2 <= x <= 2,
    "repetition_penalty": lambda x: 2**-126 <= x <= 2,  # of (0, 2] what float32 has as a normal number
}


@given(st.sampled_from(sorted(RANGES)), st.floats(allow_nan=True, allow_infinity=True))
def test_no_float_outside_its_range_gets_through(name: str, value: float) -> None:
    if math.isfinite(value) and RANGES[name](value):
        params = SamplingParams.of({name: value})
        assert all(math.isfinite(getattr(params, known)) for known in RANGES)
        assert params.temperature >= 1e-6
    else:
        with pytest.raises(InvalidRequestError, match=name):
            SamplingParams.of({name: value})


@given(st.integers())
def test_top_k_is_off_positive_or_refused(value: int) -> None:
    if value == -1 or value >= 1:
        assert 1 <= SamplingParams.of({"top_k": value}).top_k <= TOP_K_ALL
    else:
        with pytest.raises(InvalidRequestError, match="top_k must be -1"):
            SamplingParams.of({"top_k": value})


def test_defaults_and_normal_forms() -> None:
    assert SamplingParams.of(None) == SamplingParams.of({}) == SamplingParams()
    assert SamplingParams().max_new_tokens == 128 and SamplingParams().top_k == TOP_K_ALL
    for cold in (0, 0.0, -0.0, 1e-40, 9e-7):
        params = SamplingParams.of({"temperature": cold, "top_k": 7})
        assert params.top_k == 1 and params.temperature == 1.0
    params = SamplingParams.of({"stop": "x", "stop_token_ids": {5, 3, None}, "top_p": None, "max_new_tokens": None})
    assert params.stop == ("x",) and params.stop_token_ids == (3, 5) and params.top_p == 1.0
    assert params.max_new_tokens is None


def test_numpy_scalars_are_numbers() -> None:
    params = SamplingParams.of({"temperature": np.float32(0.5), "top_k": np.int64(4), "sampling_seed": np.int32(9)})
    assert params.temperature == 0.5 and params.top_k == 4 and params.sampling_seed == 9
    assert type(params.temperature) is float and type(params.top_k) is int


def test_what_goes_beyond_the_draw_in_its_normal_form() -> None:
    values = {
        "frequency_penalty": 1, "presence_penalty": np.float32(-0.5), "repetition_penalty": 2, "min_new_tokens": 3,
        "n": 4, "stop_regex": "a+", "no_stop_trim": True, "spaces_between_special_tokens": False,
        "stream_interval": np.int64(5),
        "logit_bias": {"9": 1, 4: -2.5}, "custom_params": {"a": (1, {"b": None})},
    }  # fmt: skip
    params = SamplingParams.of(values, vocab_size=10)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (1.0, -0.5, 2.0)
    assert (params.min_new_tokens, params.n, params.stream_interval) == (3, 4, 5)
    assert params.stop_regex == ("a+",) and params.no_stop_trim and not params.spaces_between_special_tokens
    assert params.logit_bias == ((4, -2.5), (9, 1.0)) and params.custom_params == {"a": [1, {"b": None}]}
    assert SamplingParams.of(params, vocab_size=10) == params
    with pytest.raises(InvalidRequestError, match=r"logit_bias must has keys in \[0, 8\], got 9"):
        SamplingParams.of(params, vocab_size=9)


@given(st.integers(-3, 40), st.one_of(st.none(), st.integers(0, 30)))
def test_the_minimum_is_within_the_maximum(least: int, most: int | None) -> None:
    if least >= 0 and (most is None or least <= most):
        params = SamplingParams.of({"min_new_tokens": least, "max_new_tokens": most})
        assert (params.min_new_tokens, params.max_new_tokens) == (least, most)
    else:
        with pytest.raises(InvalidRequestError, match=r"min_new_tokens must be in \[0, max_new_tokens\("):
            SamplingParams.of({"min_new_tokens": least, "max_new_tokens": most})


@pytest.mark.parametrize("name", sorted(NOT_BUILT))
def test_known_but_not_built_parameters_are_refused_by_name(name: str) -> None:
    for off in NOT_BUILT[name]:
        assert SamplingParams.of({name: off}) == SamplingParams()
    with pytest.raises(UnsupportedFeatureError, match=name):
        SamplingParams.of({name: 0.25})


@pytest.mark.parametrize(
    ("key", "near"), [("temprature", "temperature"), ("max_tokens", "max_new_tokens"), ("topp", "top_p")]
)
def test_unknown_keys_name_the_nearest(key: str, near: str) -> None:
    with pytest.raises(UnknownParameterError, match=f"Did you mean '{near}'"):
        SamplingParams.of({key: 1})
    with pytest.raises(TypeError):  # as SGLang
        SamplingParams.of({key: 1})


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": True}, {"temperature": "1"}, {"temperature": b"1"}, {"temperature": [1]}, {"top_k": 1.5},
        {"max_new_tokens": "5"}, {"max_new_tokens": True}, {"ignore_eos": 1}, {"stop": 5}, {"stop": [5]},
        {"stop": [""]}, {"stop": "\ud800"}, {"stop": ["a", "b\udfff"]}, {"stop_regex": "a\ud800"},
        {"stop_token_ids": 5}, {"stop_token_ids": [1.5]}, {"stop_token_ids": [-1]}, {"sampling_seed": True},
        {"sampling_seed": -(2**63) - 1}, {"stop": "x" * 2000},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_types_are_refused(bad: dict) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(bad)).split("_")[0]):
        SamplingParams.of(bad)


def test_a_callers_dict_is_copied() -> None:
    values = {"stop": ["a"], "temperature": 0.5}
    params = SamplingParams.of(values)
    values["stop"].append("b")
    values["temperature"] = 2
    assert params.stop == ("a",) and params.temperature == 0.5


def test_stop_ids_beyond_the_vocabulary_end_nothing() -> None:
    assert SamplingParams.of({"stop_token_ids": [119690, 3]}, vocab_size=64).stop_token_ids == (3,)
    for bad in (-1, 2**31):
        with pytest.raises(InvalidRequestError, match="stop_token_ids must be in"):
            SamplingParams.of({"stop_token_ids": [bad]}, vocab_size=64)


ODD = [torch.tensor([1, 2]), torch.tensor(1.5), torch.tensor(True), np.array([1, 2]), np.bool_(True), 1j, [1], "1"]


@pytest.mark.parametrize("name", ["top_k", "max_new_tokens", "sampling_seed"])
def test_only_integers_are_integers(name: str) -> None:
    for value in ODD:
        with pytest.raises(InvalidRequestError, match=f"{name} must be an integer"):
            SamplingParams.of({name: value})
        with pytest.raises(InvalidRequestError, match="stop_token_ids"):
            SamplingParams.of({"stop_token_ids": [value]})
    assert getattr(SamplingParams.of({name: torch.tensor(7)}), name) == 7


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_only_numbers_are_numbers(name: str) -> None:
    for value in (*(v for v in ODD if v is not ODD[1]), 10**400, Decimal("sNaN")):
        with pytest.raises(InvalidRequestError, match=f"{name} must be a number"):
            SamplingParams.of({name: value})
    assert getattr(SamplingParams.of({name: torch.tensor(0.5)}), name) == 0.5


def test_a_temperature_stays_finite_in_float32() -> None:
    assert np.isfinite(np.float32(SamplingParams.of({"temperature": 1e300}).temperature))


def test_the_first_id_out_of_the_vocabulary_is_told() -> None:
    with pytest.raises(InvalidRequestError, match=r"input_ids\[2\] is 9, out.of.vocabulary"):
        check_ids([0, 8, 9, 10], 9)


def test_what_is_still_needed_of_a_prompt() -> None:
    def needs(params: SamplingParams, **read: int) -> tuple[int, int]:
        request = Request("r", 6, [1] * 6, params, 0, 1, frozenset())
        for name, value in read.items():
            setattr(request, name, value)
        return request.first_scored, request.first_needed

    scored = SamplingParams(logprob_start=2)
    assert [needs(scored, num_scored=n) for n in (0, 1, 3, 4)] == [(2, 2), (2, 2), (4, 4), (6, 6)]
    assert needs(SamplingParams(logprob_start=5)) == (5, 6)  # the only one needs no hidden state
    assert [needs(SamplingParams(pool="cls"), num_seen=n)[1] for n in (0, 1)] == [0, 6]
    assert [needs(SamplingParams(pool="mean"), num_seen=n)[1] for n in (0, 4)] == [0, 4]
    full = SamplingParams(hidden="full")  # of tokens that were computed, not of those that a first hit brought
    assert [needs(full, num_cached=3, num_seen=n, num_preempted=1)[1] for n in (0, 4)] == [3, 4]
    assert needs(full, num_cached=3)[1] == 6


class Text(str):
    pass


@pytest.mark.parametrize("made", [lambda part: {part: 1}, lambda part: {1: part}, lambda part: [part]])
def test_subclasses_are_replaced_as_deep_as_is_looked(made: Any) -> None:
    for depth, kind in ((198, str), (199, Text)):
        part: Any = Text("a")
        for _ in range(depth):
            part = (part,)
        found = without_subclasses(made((part,)), {})
        (part,) = found.values() if 1 in found else found
        for _ in range(depth + 1):
            (part,) = part
        assert type(part) is kind


def test_an_id_beyond_the_vocabulary_is_left_out() -> None:
    assert CHECKS["token ids"]("stop_token_ids", [9, 8, 7, 7], 8) == (7,)
